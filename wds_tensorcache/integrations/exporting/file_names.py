"""Names of exported files: safe on every system, distinct, and never outside the folder."""

from __future__ import annotations

import hashlib
import re
import unicodedata
from collections.abc import Iterable
from itertools import chain, count

from wds_tensorcache.errors import EncodeError

_MAX_PART_NBYTES = 200  # of a part of a path; file systems allow 255 bytes, with suffix and temporary name
_MAX_SUFFIX_NBYTES = 30
_MAX_PATH_NBYTES = 1000
# names that Windows reserves, characters that it refuses or that a terminal obeys, hidden names, `.` and `..`
_UNSAFE_PART = re.compile(
    r"(?i)(con|prn|aux|nul|conin\$|conout\$|com[0-9\xb9\xb2\xb3]|lpt[0-9\xb9\xb2\xb3])(\..*)?|.*[ .]|\.+.*|"
    r".*[<>:\"/\\|?*\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff].*",
    re.DOTALL,
)


class FileNames:
    """Names of files for the samples of a cache. No two of them are one name for a file system that ignores case.

    Args:
        reserved: Name of a file that no sample may have.
    """

    def __init__(self, reserved: str) -> None:
        self._files = {_folded(reserved)}
        self._folders: set[str] = set()

    def name_of(self, key: str, original: str, suffixes: Iterable[str]) -> tuple[str, bool]:
        """Return a relative path for the files of a sample, without suffix, and whether it differs from the original name.

        Raises:
            EncodeError: A file with one of the suffixes would not be safe.
        """
        for suffix in suffixes:
            if len(suffix.encode("utf-8", "replace")) > _MAX_SUFFIX_NBYTES or _UNSAFE_PART.fullmatch(f"x.{suffix}"):
                raise EncodeError(f"sample {key!r:.100}: member {suffix!r:.100} cannot be the end of a file's name")
        safe = (
            key if is_safe(key) else "sample-" + hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()[:32]
        )
        for name in chain([original, safe], (f"{safe}-{number}" for number in count(2))):
            if is_safe(name) and self._claim(name, suffixes):
                return name, name != original
        raise AssertionError("there is always one more number")

    def _claim(self, name: str, suffixes: Iterable[str]) -> bool:
        """Claim the names of a sample's files, unless one of them is in use, also as a folder."""
        files = {_folded(f"{name}.{suffix}") for suffix in suffixes}
        parts = _folded(name).split("/")
        folders = {"/".join(parts[:end]) for end in range(1, len(parts))}
        if files & self._files or files & self._folders or folders & self._files:
            return False
        self._files |= files
        self._folders |= folders
        return True


def _folded(name: str) -> str:
    """Return a form that is equal for two names if some file system treats them as one name."""
    return unicodedata.normalize("NFC", unicodedata.normalize("NFC", name).casefold())


def is_safe(name: str) -> bool:
    """Return whether a relative path names a file in its folder, on every system."""
    raw = name.encode("utf-8", "surrogatepass")
    parts = raw.split(b"/")
    return (
        len(raw) <= _MAX_PATH_NBYTES
        and all(0 < len(part) <= _MAX_PART_NBYTES for part in parts)
        and not any(map(_UNSAFE_PART.fullmatch, name.split("/")))
    )
