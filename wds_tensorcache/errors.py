"""Everything this package raises on purpose.

TensorCacheError
├── FormatError             (ValueError)            bytes that are not a sample, or halves of two samples
│   └── UnsafeSkeletonError (pickle.UnpicklingError) a skeleton asks for something that is never executed
├── EncodeError             (TypeError)             a Python value that the format cannot hold
├── BatchError              (ValueError)            samples that do not fit into one batch
├── StaleCacheError         (ValueError)            a cache was made otherwise than is expected
└── KeyRuleError            (ValueError)            a sample key or cache name that some reader of tar shards gets wrong
"""

from __future__ import annotations

import pickle
from typing import TypeVar

__all__ = [
    "BatchError",
    "EncodeError",
    "FormatError",
    "KeyRuleError",
    "StaleCacheError",
    "TensorCacheError",
    "UnsafeSkeletonError",
]

_Error = TypeVar("_Error", bound="TensorCacheError")


class TensorCacheError(Exception):
    """Base of every error this package raises on purpose."""

    def at(self: _Error, where: str) -> _Error:
        """Return the same error with `where` in front of its message, for callers that know shard and key."""
        error = type(self)(f"{where}: {self}")
        error.__dict__.update(self.__dict__)
        return error


class FormatError(TensorCacheError, ValueError):
    """The bytes break a rule of FORMAT.md, or the two members of a sample do not belong together."""


class UnsafeSkeletonError(FormatError, pickle.UnpicklingError):
    """A skeleton needs a callable, class or opcode that is outside the format; nothing of it was executed.

    Attributes:
        needs: `MODULE.NAME` of what it names, if that is not in `allow=`; None if anything else is wrong.
    """

    needs: str | None = None


class EncodeError(TensorCacheError, TypeError):
    """A value cannot be written; the message gives its path in the sample and the remedy."""


class BatchError(TensorCacheError, ValueError):
    """Samples of one batch differ where they must not; the message names the tensor and two keys."""


class StaleCacheError(TensorCacheError, ValueError):
    """A cache was made with another model, dtype, … than is expected; the message names the field and both values."""


class KeyRuleError(TensorCacheError, ValueError):
    """A sample key or cache name breaks one of FORMAT.md's rules for names; the message says which."""
