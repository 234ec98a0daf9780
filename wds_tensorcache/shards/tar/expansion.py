"""Limits for what few bytes may become: compressed streams and members, holes of sparse members, objects of pickles."""

from __future__ import annotations

import operator

from wds_tensorcache.errors import FormatError

__all__ = ["MAX_EXPANDED_NBYTES", "check_option", "check_pickle", "max_expanded"]

MAX_EXPANDED_NBYTES = 1 << 26
_MAX_RATIO = 64
# Hazard: the objects of a pickle take up to 400 bytes for each of its bytes (FORMAT.md 2.6), and gzip packs 1,000 of these
# into one byte. So a pickle that was compressed has lower limits.
_PICKLE_SHARE, _MAX_PICKLE_RATIO = 64, 8


def check_option(max_expanded_nbytes: int) -> int:
    """Return the option as an int; raise ValueError if it is negative."""
    nbytes = operator.index(max_expanded_nbytes)
    if nbytes < 0:
        raise ValueError(f"max_expanded_nbytes={nbytes}, expected 0 or more")
    return nbytes


def max_expanded(stored_nbytes: int, max_expanded_nbytes: int) -> int:
    """Return how many bytes `stored_nbytes` bytes may become."""
    return max(max_expanded_nbytes, _MAX_RATIO * stored_nbytes)


def check_pickle(nbytes: int, stored_nbytes: int, max_expanded_nbytes: int, functions: str) -> None:
    """Raise FormatError if a skeleton or another pickle of `nbytes` bytes comes from too few stored bytes.

    The error says that `functions` have the option.
    """
    limit = max(max_expanded_nbytes // _PICKLE_SHARE, _MAX_PICKLE_RATIO * stored_nbytes)
    if nbytes > limit:
        raise FormatError(
            f"a pickle of {nbytes:,} bytes in {stored_nbytes:,} compressed bytes, expected at most {limit:,}, because its "
            f"objects could take 400 times as much memory; if you trust the shard, pass "
            f"max_expanded_nbytes={nbytes * _PICKLE_SHARE} to {functions}"
        )
