"""Limits on the expansion of compressed streams, members, pickles and JSON."""

from __future__ import annotations

import operator

from wds_tensorcache.errors import FormatError

MAX_EXPANDED_NBYTES = 1 << 26
_MAX_RATIO = 64
# The objects of a pickle take up to 400 bytes for each of its bytes (FORMAT.md 2.6). Objects of JSON and MessagePack take
# up to 70, and gzip packs 1,000 of these bytes into one. So such members have lower limits: the option divided by the first
# number, or the compressed bytes times the second, whichever is larger.
_PICKLE, _JSON = (64, 8), (8, _MAX_RATIO)
_OBJECTS = {
    **dict.fromkeys(("pyd", "pkl", "pickle", "pth"), _PICKLE),
    **dict.fromkeys(("json", "jsn", "mp", "msg"), _JSON),
}


def check_option(max_expanded_nbytes: int) -> int:
    """Return `max_expanded_nbytes` as an int. Raise TypeError unless it is an integer, ValueError if it is negative."""
    nbytes = operator.index(max_expanded_nbytes)
    if nbytes < 0:
        raise ValueError(f"max_expanded_nbytes={nbytes}, expected 0 or more")
    return nbytes


def max_expanded(stored_nbytes: int, max_expanded_nbytes: int = MAX_EXPANDED_NBYTES) -> int:
    """Return the most bytes into which `stored_nbytes` compressed bytes may expand."""
    return max(max_expanded_nbytes, _MAX_RATIO * stored_nbytes)


def check_objects(name: str, nbytes: int, stored_nbytes: int, max_expanded_nbytes: int, functions: str) -> None:
    """Raise FormatError if a member is too long for its compressed bytes. Members that become objects have lower limits."""
    extension = name.rpartition(".")[2].lower()
    share, ratio = _OBJECTS.get(extension, (1, _MAX_RATIO))
    limit = max(max_expanded_nbytes // share, ratio * stored_nbytes)
    if nbytes > limit:
        problem = (
            f"a {extension!r:.20} of {nbytes:,} bytes in {stored_nbytes:,} compressed bytes, expected at most {limit:,}"
        )
        problem += ", because its objects could take many times as much memory"
        remedy = f"if you trust the shard, pass max_expanded_nbytes={nbytes * share} to {functions}"
        raise FormatError(f"{problem}; {remedy}")
