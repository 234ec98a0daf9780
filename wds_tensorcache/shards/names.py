"""Rules for the names of keys, members and caches (FORMAT.md 1). Also paths of a shard's indexes."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
from collections.abc import Callable, Container, Iterable
from functools import lru_cache
from typing import NamedTuple
from urllib.parse import unquote_to_bytes

from wds_tensorcache.errors import FormatError, InvalidKeyError

FIELD = "tensorcache"  # the field of a sample that holds the unnamed cache
APART = "; the members of a sample must follow each other, as `tar --sort=name` puts them"
SKELETON = "skel.pyd"
TENSORS = "safetensors"
SIDECAR_SUFFIX = ".index"
DALI_SUFFIX = ".idx"
MAX_MEMBER_NBYTES = 100
_CACHE_NAME = re.compile(r"[a-z0-9-][a-z0-9_-]*", re.ASCII)
_RESERVED = frozenset({"skel", "pyd", "safetensors"})
_DOTS, _DOTS_OF_BYTES = re.compile(r"\A(?:\./)+"), re.compile(rb"\A(?:\./)+")
_BLANK = re.compile(r"[\s\x00-\x1f\x7f-\x9f\ud800-\udfff]")
_SAFE_LENGTH = MAX_MEMBER_NBYTES - len("." + TENSORS)
_HASHED_LENGTH = 80  # the same in all versions: resumed builds and imports must find keys of earlier versions
_UNSAFE = re.compile(r"[^A-Za-z0-9_/-]|(?<![^/])/|/(?![^/])|^_(?=_)")
_EMPTY, _HASHED = "%empty", "%-"  # after `%`, escapes have two hexadecimal digits
_IS_HASHED = re.compile(f".*{_HASHED}[0-9a-f]{{40}}", re.DOTALL).fullmatch


# Nearly all keys match. `check_key` accepts each such key; if the cache is unnamed, `check_suffixes` accepts its members.
is_plain_key = re.compile(rf"(?!__)[A-Za-z0-9_-]{{1,{_SAFE_LENGTH}}}", re.ASCII).fullmatch


def check_key(key: object) -> None:
    """Raise InvalidKeyError if a key breaks a rule of FORMAT.md 1.2. Its length is not checked."""
    if not isinstance(key, str) or not key:
        remedy = "number the samples, for example '000017'"
        raise InvalidKeyError(f"__key__ is {key!r:.100}, expected a non-empty str; {remedy}")
    parts = key.split("/")
    blank = _BLANK.search(key)
    if blank is not None:
        problem = (
            f"contains {blank[0]!r}: white space and control characters break DALI's index; replace it, e.g. by '_'"
        )
    elif not key.isascii():
        problem = "is not ASCII: DALI without an index cannot tell such keys apart; number the samples"
    elif "." in parts[-1]:
        problem = "has a dot in its last part, where every reader would end the key; replace it, e.g. by '_'"
    elif not all(parts) or "." in parts or ".." in parts:
        problem = "is not a plain relative path: tar could extract it elsewhere; remove '.', '..' and empty parts"
    elif parts[0].startswith("__"):
        problem = "begins with '__': stock readers skip such members; choose another first character"
    else:
        return
    raise InvalidKeyError(f"key {key!r:.100} {problem}; tc.safe_key makes a key of any text")


class NamedKey(str):
    """A key from `safe_key` with a hash instead of a long name. Writers store `original`, the name, in the index."""

    __slots__ = ("original",)
    original: str

    def __new__(cls, key: str, original: str) -> NamedKey:
        named = super().__new__(cls, key)
        named.original = original
        return named

    def __getnewargs__(self) -> tuple[str, str]:  # type: ignore[override]
        return str(self), self.original


def safe_key(name: str) -> str:
    """Return a legal key for any text, such as a photo's path. Different texts get different keys.

    ASCII letters, digits, `-` and `_` stay as they are, and so does a `/` inside a path. All other characters are
    percent-encoded as UTF-8, as in a URL (RFC 3986). So is the first `_` of a name that begins with `__`.

    The key has at most 88 characters, so that the names of its two members have at most 100 bytes. A longer key is cut to its
    first 38 characters, followed by `%-` and the first 40 hexadecimal digits of the SHA-256 of `name`.

    Args:
        name: Any text, also empty or with lone surrogates, as `os.fsdecode` returns for file names that are not UTF-8.

    Returns:
        The key; `original_name` returns the text again. A key with a hash is a `str` that carries the text. If a sample in
        `ShardWriter` or `build` has this key, the index of the shard stores the text, and `cache.original_name` returns it.

    Raises:
        TypeError: `name` is not a str.
    """
    if not isinstance(name, str):
        raise TypeError(f"expected the name as a str, got a {type(name).__name__}")
    if is_plain_key(name):
        return name
    key = _UNSAFE.sub(_percent_encode, name) or _EMPTY
    return key if len(key) <= _SAFE_LENGTH else hashed_key(name)


def hashed_key(name: str) -> NamedKey:
    key, digest = _UNSAFE.sub(_percent_encode, name), hashlib.sha256(_as_bytes(name)).hexdigest()[:40]
    return NamedKey(key[: _HASHED_LENGTH - len(_HASHED + digest)] + _HASHED + digest, name)


def older_key(key: str) -> str | None:
    """Return the key from earlier versions of `safe_key` for the same name. None if it is equal or unknown."""
    # earlier versions hashed all names whose key would have more than 80 characters
    with contextlib.suppress(InvalidKeyError):
        if _HASHED_LENGTH < len(key) <= _SAFE_LENGTH:
            return str(hashed_key(original_name(key)))
    return None


def original_name(key: str) -> str:
    """Return the text from which `safe_key` made a key.

    Raises:
        InvalidKeyError: `safe_key` does not return such a key, or the key is a plain str that contains only a hash of the
            text. `cache.original_name` returns the text of such a key.
        TypeError: `key` is not a str.
    """
    if not isinstance(key, str):
        raise TypeError(f"expected the key as a str, got a {type(key).__name__}")
    if isinstance(key, NamedKey):
        return key.original
    if _IS_HASHED(key):
        problem = "contains only a hash of its name, which was too long for a key"
        raise InvalidKeyError(f"key {key!r:.100} {problem}; `original_name` of its cache may know the name")
    try:
        name = "" if key == _EMPTY else unquote_to_bytes(key).decode("utf-8", "surrogatepass")
    except UnicodeError:
        name = ""
    if safe_key(name) != key:
        raise InvalidKeyError(f"key {key!r:.100} was not made by tc.safe_key")
    return name


def is_safe_key(key: str) -> bool:
    """Return whether `safe_key` may have made this key."""
    try:
        check_key(key)
        if len(key) != _HASHED_LENGTH or not _IS_HASHED(key):
            original_name(key)
    except InvalidKeyError:
        return False
    return True


def _percent_encode(match: re.Match[str]) -> str:
    return "".join(f"%{byte:02X}" for byte in _as_bytes(match[0]))


def _as_bytes(name: str) -> bytes:
    return name.encode("utf-8", "surrogatepass")


def check_suffixes(key: str, suffixes: Iterable[str]) -> None:
    """Raise InvalidKeyError if a reader would misread a member name `KEY.SUFFIX`."""
    for suffix in suffixes:
        problem = None
        if suffix[:1] == "_":
            problem = "begins with '_': stock tools reserve such names for metadata; choose another first character"
        elif not suffix or not suffix.isascii() or "/" in suffix or _BLANK.search(suffix):
            problem = "is not an extension: it is empty, not ASCII, or has '/' or white space; expected one like 'json'"
        if problem is not None:
            raise InvalidKeyError(f"sample {key!r:.100}: {suffix!r:.100} {problem}")
        nbytes = len(f"{key}.{suffix}".encode())
        if nbytes > MAX_MEMBER_NBYTES:
            problem = f"has {nbytes} bytes: DALI without an index reads at most {MAX_MEMBER_NBYTES}"
            raise InvalidKeyError(f"member name {key!r:.100}.{suffix} {problem}; shorten the key, or use tc.safe_key")


def split_member(name: str) -> tuple[str, str] | None:
    """Split a member's name into key and suffix, if it has both."""
    # Hazard: a hostile name may begin with thousands of `./`; the time must not grow with their square.
    folder, slash, last = (_DOTS.sub("", name) if name[:2] == "./" else name).rpartition("/")
    stem, dot, suffix = last.partition(".")
    return (folder + slash + stem, suffix) if stem and dot else None


def strip_dots(name: bytes) -> bytes:
    """Remove each leading `./`, which `tar -c .` puts before names."""
    return _DOTS_OF_BYTES.sub(b"", name)


def suffix_after(key: bytes, name: bytes) -> bytes | None:
    """Return the suffix of member `name` if it belongs to sample `key`."""
    name = strip_dots(name)
    return name[len(key) + 1 :] if name.startswith(key + b".") else None


def cache_name(name: str) -> str:
    """Return `name` unchanged. Raise InvalidKeyError if it cannot be the name of a cache."""
    if not is_cache_name(name):
        raise InvalidKeyError(
            f"cache name {name!r:.100} must match [a-z0-9-][a-z0-9_-]* and not be one of {sorted(_RESERVED)}; "
            "use small letters, for example 'text'"
        )
    return name


def is_cache_name(name: str) -> bool:
    # webdataset makes suffixes lower case, DALI does not; stock writers skip fields that begin with `_`
    return name not in _RESERVED and _CACHE_NAME.fullmatch(name) is not None


def cache_of_field(field: str) -> str | None:
    """Return the cache's name, unchecked, in a field `NAME.tensorcache`. It is "" for `tensorcache`, None for other fields."""
    if field == FIELD:
        return ""
    return field[: -len(FIELD) - 1] if field.endswith("." + FIELD) else None


def is_reserved(field: str) -> bool:
    """Return whether a field name is reserved for skeletons or caches."""
    return field.lower().endswith((SKELETON, FIELD))


def member_suffix(name: str, suffix: str) -> str:
    """Return the suffix of a cache's member. `suffix` is SKELETON or TENSORS."""
    return f"{name}.{suffix}" if name else suffix


class Half(NamedTuple):
    """One of the two members of a cache."""

    name: str  # of the cache
    field: str  # of the cache in a sample
    is_skeleton: bool
    other: str  # suffix of the other half


@lru_cache(maxsize=256)  # samples share a few suffixes
def half_of(suffix: str) -> Half | None:
    """Return the `Half` with this lowercase suffix; None for other suffixes."""
    for half, other in ((SKELETON, TENSORS), (TENSORS, SKELETON)):
        if suffix.endswith(half):
            prefix = suffix[: -len(half)]
            if not prefix or (prefix[-1] == "." and is_cache_name(prefix[:-1])):
                return Half(prefix[:-1], prefix + FIELD, half == SKELETON, prefix + other)
    return None


def find_half(suffix: str, members: Container[str], is_bound: Callable[[], bool], hint: str = APART) -> Half | None:
    """Return the `Half` of a member. None if it belongs to no cache.

    `suffix` and the suffixes in `members`, all members of the sample, are in lowercase. `is_bound` returns whether the member,
    a safetensors file, declares that it belongs to a skeleton. Raises FormatError if the other half is missing.
    """
    half = half_of(suffix)
    if half is None or half.other in members:
        return half
    if not half.is_skeleton and not is_bound():
        return None
    raise FormatError(f"member {half.other!r} is missing, but {suffix!r} exists{hint}", kind="missing")


def sidecar_path(path: str) -> str:
    return path + SIDECAR_SUFFIX


def dali_index_path(path: str) -> str:
    """Return DALI's path for the index of the shard at `path`."""
    return os.path.splitext(path)[0] + DALI_SUFFIX
