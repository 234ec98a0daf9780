"""The rules that keep names of members readable by every reader, each with the reader that needs it (FORMAT.md 1)."""

from __future__ import annotations

import re
from collections.abc import Iterable

from wds_tensorcache.errors import KeyRuleError

__all__ = [
    "APART",
    "FIELD",
    "SKELETON",
    "TENSORS",
    "cache_name",
    "check_key",
    "check_suffixes",
    "is_cache_name",
    "is_plain_key",
    "member_suffix",
    "split_member",
]

FIELD = "tensorcache"  # what a cache is called in a sample
APART = "; the members of a sample must follow each other, as `tar --sort=name` puts them"  # behind what is missing
SKELETON = "skel.pyd"
TENSORS = "safetensors"
MAX_MEMBER_NBYTES = 100
_CACHE_NAME = re.compile(r"[a-z0-9-][a-z0-9_-]*", re.ASCII)
_RESERVED = frozenset({"skel", "pyd", "safetensors"})
_KEY_AND_SUFFIX = re.compile(r"((?:.*/)?[^./][^./]*)\.([^/]*)", re.DOTALL)  # as webdataset splits names
_BLANK = re.compile(r"[\s\x00-\x1f\x7f-\x9f\ud800-\udfff]")


# The keys of nearly all samples: `check_key` and, for one cache without a name, `check_suffixes` have nothing against them.
is_plain_key = re.compile(r"(?!__)[A-Za-z0-9_-]{1,80}", re.ASCII).fullmatch


def check_key(key: object) -> None:
    """Raise KeyRuleError unless `key` is read back as itself by every reader of tar shards."""
    if not isinstance(key, str) or not key:
        raise KeyRuleError(
            f"__key__ is {key!r:.100}, expected a non-empty str; number the samples, for example '000017'"
        )
    parts = key.split("/")
    blank = _BLANK.search(key)
    if blank is not None:
        what = f"has {blank[0]!r} in it: white space and controls break DALI's index; replace it, e.g. by '_'"
    elif not key.isascii():
        what = "is not ASCII: DALI without an index takes such keys for one another; number the samples"
    elif "." in parts[-1]:
        what = "has a dot in its last part: every reader ends the key there; replace it, e.g. by '_'"
    elif not all(parts) or "." in parts or ".." in parts:
        what = "is not a plain relative path: extracting it would leave its folder; leave out '.', '..' and empty parts"
    elif parts[0].startswith("__"):
        what = "begins with '__': stock readers skip such members; begin it otherwise"
    else:
        return
    raise KeyRuleError(f"key {key!r:.100} {what}")


def check_suffixes(key: str, suffixes: Iterable[str]) -> None:
    """Raise KeyRuleError if a member `KEY.SUFFIX` has a name that some reader gets wrong."""
    for suffix in suffixes:
        what = None
        if suffix[:1] == "_":
            what = "begins with '_': stock tools keep such names for themselves; begin it otherwise"
        elif not suffix or not suffix.isascii() or "/" in suffix or _BLANK.search(suffix):
            what = "is no extension: it is empty, or has '/' or blanks; expected one as 'json'"
        if what is not None:
            raise KeyRuleError(f"sample {key!r:.100}: {suffix!r:.100} {what}")
        nbytes = len(f"{key}.{suffix}".encode())
        if nbytes > MAX_MEMBER_NBYTES:
            raise KeyRuleError(
                f"member name {key!r:.100}.{suffix} has {nbytes} bytes: "
                f"DALI without an index reads at most {MAX_MEMBER_NBYTES}; shorten the key"
            )


def member_suffix(name: str, suffix: str) -> str:
    """Return the suffix of a member of the cache `name`."""
    return f"{name}.{suffix}" if name else suffix


def split_member(name: str) -> tuple[str, str] | None:
    """Return key and suffix of a member; None if it is of no sample."""
    match = _KEY_AND_SUFFIX.fullmatch(name)
    return None if match is None else (match[1], match[2])


def cache_name(name: str) -> str:
    """Return `name` if a sample's cache may be called so.

    Raises:
        KeyRuleError: It has other characters than `a-z0-9_-` (webdataset lowercases suffixes, DALI does not), it begins with
            `_` (stock writers skip such fields), or it is
            one of the words that the members' own suffixes consist of.
    """
    if not _CACHE_NAME.fullmatch(name) or name in _RESERVED:
        raise KeyRuleError(
            f"cache name {name!r:.100} must match [a-z0-9-][a-z0-9_-]* and not be one of {sorted(_RESERVED)}; "
            "use small letters, for example 'text'"
        )
    return name


def is_cache_name(name: str) -> bool:
    """Return whether `name` may be a cache's."""
    return name not in _RESERVED and _CACHE_NAME.fullmatch(name) is not None
