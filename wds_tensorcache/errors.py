"""Every error that this package raises on purpose.

TensorCacheError
├── FormatError             (ValueError)             bytes that break a rule of FORMAT.md
│   ├── MissingShardError   (FileNotFoundError)      a shard that a manifest or folder lists does not exist
│   ├── TarFormatError      (tarfile.ReadError)      a tar that is truncated, damaged or unsupported
│   └── UnsafeSkeletonError (pickle.UnpicklingError) a skeleton that names code outside the format
├── EncodeError             (TypeError)              a Python value that the format cannot hold
├── BatchError              (ValueError)             samples that do not fit into one batch
├── StaleCacheError         (ValueError)             a cache with another fingerprint than expected
└── InvalidKeyError         (ValueError)             a sample key or cache name that breaks a naming rule
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
    "InvalidKeyError",
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
    """Base of every error that this package raises on purpose."""

    def at(self: _Error, where: str) -> _Error:
        """Return the same error with `where`, for example the shard and the key, before its message."""
        error = type(self)(f"{where}: {self}")
        error.__dict__.update(self.__dict__)
        return error


Kind = Literal[
    "format",  # any other rule of FORMAT.md
    "truncated",  # the file or stream ends too soon, or is empty
    "compressed",  # a compressed tar where a plain one is needed, or a damaged compressed stream
    "checksum",  # the checksum of a tar header does not match
    "header",  # a tar header with an impossible size or name
    "extended-header",  # unreadable pax records, or an unreadable long name
    "sparse",  # a member with holes
    "zeros",  # zeros before the end of the archive
    "trailing",  # bytes after the end of the archive that are not an index
    "unreadable",  # the system cannot read the bytes
    "duplicate",  # a key or a member name occurs twice
    "missing",  # half of a sample, or a file that a manifest lists, does not exist
    "damaged",  # the bytes of a sample differ from those that were written
    "lost",  # an index lists a sample that the shard does not contain
    "index",  # an index, `.idx` or manifest that is damaged or does not match the shard
    "unsafe",  # a skeleton that names code outside the format
]
"""Kinds of FormatErrors, and of the faults that `verify` reports; code decides by these."""


class FormatError(TensorCacheError, ValueError):
    """Bytes that break a rule of FORMAT.md, or two members that do not belong together.

    Args:
        reason: Description of the fault, for people.
        offset: Position of the fault in the file or stream; None if unknown.
        kind: Kind of the fault, for code.

    Attributes:
        reason, offset, kind: The arguments; `at` keeps them.
        where: Place (shard, sample, …) that `at` added; None before.
    """

    kind: Kind = "format"

    def __init__(self, reason: str = "", *, offset: int | None = None, kind: Kind | None = None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.offset = offset
        self.where: str | None = None
        self.kind = kind or type(self).kind

    def at(self: _Format, where: str) -> _Format:
        """Return the same error with `where` before its message, unless the message begins with it."""
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
    """A shard does not exist, although a manifest lists it, a folder links to it, or it was opened before."""

    kind: Kind = "missing"
    errno = errno.ENOENT


class TarFormatError(FormatError, tarfile.ReadError):
    """A tar that is truncated, damaged or unsupported; code that catches tarfile's ReadError catches this one."""


class UnsafeSkeletonError(FormatError, pickle.UnpicklingError):
    """A skeleton that names a callable, class or opcode outside the format; the reader executed nothing.

    Attributes:
        needs: `MODULE.NAME` of the class or callable, if `allow=` lacks it; None for any other fault.
    """

    kind: Kind = "unsafe"
    needs: str | None = None


class EncodeError(TensorCacheError, TypeError):
    """A value that the format cannot represent; the message gives its path in the sample and the remedy."""


class BatchError(TensorCacheError, ValueError):
    """Samples of one batch that differ where they must not; the message names the tensor and two keys."""


class StaleCacheError(TensorCacheError, ValueError):
    """A cache with another fingerprint (model, dtype, …) than expected; the message names the field and both values."""


class InvalidKeyError(TensorCacheError, ValueError):
    """A sample key or cache name that breaks a naming rule of FORMAT.md; the message names the rule."""
