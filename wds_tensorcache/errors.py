"""Everything this package raises on purpose.

TensorCacheError
├── FormatError             (ValueError)            bytes that are not a sample, or halves of two samples
│   ├── MissingShardError   (FileNotFoundError)     a shard that a manifest or folder has, or had, is not there
│   ├── TarFormatError      (tarfile.ReadError)     a tar that is cut short, damaged, or of a kind that is not read
│   └── UnsafeSkeletonError (pickle.UnpicklingError) a skeleton asks for something that is never executed
├── EncodeError             (TypeError)             a Python value that the format cannot hold
├── BatchError              (ValueError)            samples that do not fit into one batch
├── StaleCacheError         (ValueError)            a cache was made otherwise than is expected
└── KeyRuleError            (ValueError)            a sample key or cache name that some reader of tar shards gets wrong
"""

from __future__ import annotations

import errno
import pickle
import tarfile
from typing import Literal, TypeVar

__all__ = [
    "BatchError",
    "EncodeError",
    "FormatError",
    "KeyRuleError",
    "Kind",
    "MissingShardError",
    "StaleCacheError",
    "TarFormatError",
    "TensorCacheError",
    "UnsafeSkeletonError",
]

_Error = TypeVar("_Error", bound="TensorCacheError")
_Format = TypeVar("_Format", bound="FormatError")


class TensorCacheError(Exception):
    """Base of every error this package raises on purpose."""

    def at(self: _Error, where: str) -> _Error:
        """Return the same error with `where` in front of its message, for callers that know shard and key."""
        error = type(self)(f"{where}: {self}")
        error.__dict__.update(self.__dict__)
        return error


Kind = Literal[
    "format",  # any other rule of FORMAT.md
    "truncated",  # the file or stream ends too soon, or is empty
    "compressed",  # a compressed tar where a plain one is needed, or a damaged compressed stream
    "checksum",  # a tar header whose bytes do not add up
    "header",  # a tar header with a size or name that cannot be
    "extended-header",  # pax records or a long name that cannot be read
    "sparse",  # a member with holes
    "zeros",  # zeros before the end of the archive
    "trailing",  # bytes after the end of the archive that are not an index
    "unreadable",  # the system cannot read the bytes
    "duplicate",  # one key or member name twice
    "missing",  # half of a sample, or a file that a manifest lists, is not there
    "damaged",  # the bytes of a sample are not those that were written
    "lost",  # a sample that an index lists and the shard does not have
    "index",  # an index, `.idx` or manifest that is damaged, or does not agree with the shard
    "unsafe",  # a skeleton that asks for something that is never executed
]
"""Kinds of FormatErrors, and of Faults in the report of `verify`, for code to decide by."""


class FormatError(TensorCacheError, ValueError):
    """The bytes break a rule of FORMAT.md, or the two members of a sample do not belong together.

    Args:
        reason: What is wrong, for people.
        offset: Byte of the file or stream where it is, None if that is not known.
        kind: What is wrong, for code.

    Attributes:
        reason, offset, kind: As the arguments; `at` keeps them.
        where: Shard, sample, … that `at` added; None if it was not called.
    """

    kind: Kind = "format"

    def __init__(self, reason: str = "", *, offset: int | None = None, kind: Kind | None = None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.offset = offset
        self.where: str | None = None
        if kind is not None:
            self.kind = kind

    def at(self: _Format, where: str) -> _Format:
        """Return the same error with `where` before its message, unless it is there; reason, offset and kind stay the same."""
        error = type(self)(self.reason)
        error.__dict__.update(self.__dict__)
        known = self.where
        if known is None or not (known == where or known.startswith(f"{where}: ")):
            error.where = where if known is None else f"{where}: {known}"
        return error

    def __str__(self) -> str:
        parts = (self.where, None if self.offset is None else f"byte {self.offset}", self.reason)
        return ": ".join(part for part in parts if part is not None)


class MissingShardError(FormatError, FileNotFoundError):
    """A shard that a manifest lists, that a folder has as a link, or that was there when the cache was opened, is not there."""

    kind: Kind = "missing"

    def __init__(self, reason: str = "", *, offset: int | None = None, kind: Kind | None = None) -> None:
        super().__init__(reason, offset=offset, kind=kind)
        self.errno = errno.ENOENT


class TarFormatError(FormatError, tarfile.ReadError):
    """A tar is cut short, damaged, or of a kind that is not read; pipelines that catch tarfile's error catch this one."""


class UnsafeSkeletonError(FormatError, pickle.UnpicklingError):
    """A skeleton needs a callable, class or opcode that is outside the format; nothing of it was executed.

    Attributes:
        needs: `MODULE.NAME` of what it names, if that is not in `allow=`; None if anything else is wrong.
    """

    kind: Kind = "unsafe"
    needs: str | None = None


class EncodeError(TensorCacheError, TypeError):
    """A value cannot be written; the message gives its path in the sample and the remedy."""


class BatchError(TensorCacheError, ValueError):
    """Samples of one batch differ where they must not; the message names the tensor and two keys."""


class StaleCacheError(TensorCacheError, ValueError):
    """A cache was made with another model, dtype, … than is expected; the message names the field and both values."""


class KeyRuleError(TensorCacheError, ValueError):
    """A sample key or cache name breaks one of FORMAT.md's rules for names; the message says which."""
