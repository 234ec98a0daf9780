"""The exception classes, and functions that format names and counts in messages.

TensorCacheError
├── FormatError             (ValueError)             bytes that break a rule of FORMAT.md, or have changed
│   ├── MissingShardError   (FileNotFoundError)      a shard (a tar) that does not exist
│   ├── TarFormatError      (tarfile.ReadError)      a tar that is truncated, damaged or unsupported
│   └── UnsafeSkeletonError (pickle.UnpicklingError) a skeleton outside the safe subset of pickle
├── EncodeError             (TypeError)              a Python value that the format cannot represent
├── BatchError              (ValueError)             samples that cannot form one batch
├── BuildError              (RuntimeError)           items that failed in a call of `build`
├── RemoteError             (OSError)                a request to a server or an object store that failed
├── StaleCacheError         (ValueError)             a cache whose fingerprint differs from the expected fingerprint
└── InvalidKeyError         (ValueError)             a key or name that breaks a naming rule, or a repeated key
"""

from __future__ import annotations

import difflib
import errno
import pickle
import tarfile
from collections.abc import Collection
from itertools import islice
from typing import Literal, TypeVar

_Error = TypeVar("_Error", bound="TensorCacheError")
_Format = TypeVar("_Format", bound="FormatError")


class TensorCacheError(Exception):
    """Base of the other exceptions in this module. Most wrong arguments raise builtin errors, for example TypeError."""

    def at(self: _Error, where: str) -> _Error:
        """Return a copy whose message begins with `where`, such as a shard."""
        error = type(self)(f"{where}: {self}")
        error.__dict__.update(self.__dict__)
        return error


Kind = Literal[
    "format",  # a broken rule of FORMAT.md that no other kind covers
    "truncated",  # the file or stream ends too soon, or is empty
    "compressed",  # a compressed tar where a plain one is needed, or a damaged compressed stream
    "checksum",  # the checksum of a tar header does not match
    "header",  # a tar header with an impossible size or name
    "extended-header",  # unreadable pax records, or an unreadable long name
    "sparse",  # a member of a GNU sparse file, whose holes are not stored
    "zeros",  # a block of zeros where the archive should continue
    "trailing",  # bytes after the end of the archive that are not an index
    "unreadable",  # the operating system cannot read the bytes
    "duplicate",  # a key or a member name occurs twice
    "missing",  # one of the two members of a sample's cache, or a shard, does not exist
    "damaged",  # the bytes of a sample differ from the written bytes
    "lost",  # an index or manifest lists samples that the shard does not contain
    "index",  # an index, `.idx` or manifest that is damaged or does not match the shard
    "unsafe",  # a skeleton that names code outside the format
]
"""Kinds of FormatError, and of the faults that `verify` reports. Code should compare kinds, never messages."""


class FormatError(TensorCacheError, ValueError):
    """Bytes that break a rule of FORMAT.md, or have changed.

    Examples are a damaged sample, an index that does not match its shard, and a shard that changed after it was opened.

    Args:
        reason: Description of the fault.
        offset: Byte offset of the fault in the file or stream; None if unknown.
        kind: Kind of the fault; None selects the default of the class.

    Attributes:
        reason, offset, kind: The arguments of the constructor; `at` copies them.
        where: Place of the fault (shard, sample, …), from the calls of `at`; None if `at` was not called.
    """

    kind: Kind = "format"

    def __init__(self, reason: str = "", *, offset: int | None = None, kind: Kind | None = None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.offset = offset
        self.where: str | None = None
        self.kind = kind or type(self).kind

    def at(self: _Format, where: str) -> _Format:
        """Return a copy whose message begins with `where`, never twice."""
        error = type(self)(self.reason)
        error.__dict__.update(self.__dict__)
        place, where = self.where, str(where)  # a concealed url equals no plain text
        if place is None or not (place == where or place.startswith(f"{where}: ")):
            error.where = where if place is None else f"{where}: {place}"
        return error

    def __str__(self) -> str:
        parts = (self.where, None if self.offset is None else f"byte {self.offset}", self.reason)
        return ": ".join(part for part in parts if part is not None)


class MissingShardError(FormatError, FileNotFoundError):
    """A missing shard. A manifest lists it, a folder has a link to it, it was opened before, or it has a url."""

    kind: Kind = "missing"
    errno = errno.ENOENT


class TarFormatError(FormatError, tarfile.ReadError):
    """A tar that is truncated, damaged or unsupported. `except tarfile.ReadError` also catches this error."""


class UnsafeSkeletonError(FormatError, pickle.UnpicklingError):
    """A skeleton (a sample's pickle) outside the subset of FORMAT.md 2.4.

    For example, the skeleton needs an unknown class. The reader has not run the code outside the subset.

    Attributes:
        needs: `MODULE.NAME` of a class or callable that is neither in the format nor in `allow=`; None for other faults.
    """

    kind: Kind = "unsafe"
    needs: str | None = None


class EncodeError(TensorCacheError, TypeError):
    """A sample that cannot be encoded or exported.

    The message names the path of the value or the member, unless the whole sample exceeds a limit.
    """


class BatchError(TensorCacheError, ValueError):
    """Samples or caches that cannot form one batch. The message names what differs or is missing."""


class BuildError(TensorCacheError, RuntimeError):
    """Items that failed in `build(…, on_error="record")`. All other items are written.

    Attributes:
        failures: Key and text of each failure, in the order of the items. The key is None if it depends on the item, and
            the item could not be read. The text contains the number of the item, the exception, and the last line of the
            caller's code in its traceback.
    """

    failures: tuple[tuple[str | None, str], ...] = ()


class RemoteError(TensorCacheError, OSError):
    """A request to a server or an object store that failed.

    If the fault may be temporary, the request was repeated several times first. The message contains the url without
    credentials, and the range if the request named a range.

    Attributes:
        url: The object, without user name, password and query; None if unknown.
        begin, end: The bytes `[begin, end)` that were requested; None if the request named no range.
        status: Status of the HTTP response; None if there was none, or if it is unknown.
    """

    url: str | None = None
    begin: int | None = None
    end: int | None = None
    status: int | None = None


class StaleCacheError(TensorCacheError, ValueError):
    """A cache with an unexpected fingerprint (model, dtype, …), or changed items.

    The message says what differs.
    """


class InvalidKeyError(TensorCacheError, ValueError):
    """A key or name that breaks a rule, or a repeated key.

    FORMAT.md has the rules for keys, cache names and names of members. The message names the rule.
    """


def add_note(exc: BaseException, note: str) -> None:
    """Add a note to an exception whose type must stay. It has no effect before Python 3.11."""
    if hasattr(exc, "add_note"):
        exc.add_note(note)


def plain(text: object) -> str:
    """Replace characters that `str.isprintable` refuses by escapes such as `\\x1b`."""
    # hazard: control characters, line breaks and marks of direction could reorder or overwrite the text of a terminal
    text = str(text)
    return text if text.isprintable() else "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)


def format_count(count: int, noun: str) -> str:
    """Return a count and its noun as text: `1 sample`, `1,200 samples`."""
    return f"{count:,} {noun}{'s' * (count != 1)}"


NUM_COMPARED = 1000
_NUM_LISTED, _NUM_CHARS, _MIN_RATIO = 8, 80, 0.5


def list_names(names: Collection[object], wanted: object = "", count: int | None = None) -> str:
    """Return names as text for a message: `'latent', 'text' and 3 more`.

    `count` is the number of all names. Names similar to `wanted` come first: names with the same last part of a path, then the
    most similar names. Equally similar names keep their order. Only the first 1,000 names are considered. At most 8 names are
    listed, each with at most 80 characters.
    """
    texts = {str(name)[:_NUM_CHARS]: name for name in islice(names, NUM_COMPARED)}
    matcher, scores = difflib.SequenceMatcher(b=str(wanted)[:_NUM_CHARS]), dict[str, float]()
    last = str(wanted).rpartition("/")[2]
    for text in texts:
        matcher.set_seq1(text)
        if last and text.rpartition("/")[2] == last:
            scores[text] = 1 + matcher.ratio()
        elif matcher.real_quick_ratio() >= _MIN_RATIO and matcher.quick_ratio() >= _MIN_RATIO:
            scores[text] = matcher.ratio()
    # not difflib.get_close_matches, which puts the last of equally similar names first
    near = sorted((text for text in scores if scores[text] >= _MIN_RATIO), key=scores.__getitem__, reverse=True)
    listed = list(dict.fromkeys([*near, *texts]))[:_NUM_LISTED]
    num_more = (len(names) if count is None else count) - len(listed)
    text = ", ".join(f"{texts[name]!r:.{_NUM_CHARS}}" for name in listed) or "none"
    return f"{text} and {num_more:,} more" if num_more else text


def unknown_name(noun: str, wanted: object, names: Collection[object]) -> str:
    """Return the message for an unknown name: `unknown tensor 'laten'; there are 'latent', 'text'`."""
    return f"unknown {noun} {wanted!r:.100}; there are {list_names(names, wanted)}"
