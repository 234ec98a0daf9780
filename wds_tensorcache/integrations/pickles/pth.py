"""Decode files of `torch.save` without running their pickles."""

from __future__ import annotations

import pickletools
import struct
from typing import Any, BinaryIO

from wds_tensorcache.codec.skeleton.types import Allowed
from wds_tensorcache.errors import FormatError, TensorCacheError
from wds_tensorcache.integrations.pickles.pth_file import ZIP, read_pth_file
from wds_tensorcache.integrations.pickles.tensor_reader import TensorReader, unpickle_without_tensors
from wds_tensorcache.integrations.pickles.translate import translate

_REMEDY = "; if you trust the file, call torch.load in a handler: tc.decode(wds.handle_extension('pth', …))"
_LIMIT_REMEDY = "; if you trust the file, use tc.decode(max_expanded_nbytes=…)"


def load_pth(
    file: BinaryIO,
    limit: int,
    allow: Allowed,
    remedy: str = _REMEDY,
    limit_remedy: str = _LIMIT_REMEDY,
    reader_class: type[TensorReader] = TensorReader,
) -> Any:
    """Return the object in a file of `torch.save`, with all tensors on the CPU; `_metadata` of state dicts is dropped.

    Args:
        file: The open file, a zip from torch 1.6 or later.
        limit: Limit for the total bytes of all tensors; elements that tensors share count once per tensor.
        allow: As for `unpickle`.
        remedy, limit_remedy: Advice for users that trust the file, at the end of messages; the second one for `limit`.
        reader_class: Class of the reader.

    Raises:
        UnsafeSkeletonError: The file contains more than dense tensors, parameters, plain values and types of FORMAT.md.
        FormatError: The file is damaged, in a different format, or exceeds `limit`.

    Memory: newly allocated, one block for each storage; all tensors of a storage share its block.
    """
    return read_pth_file(file, remedy).decode(limit, allow, remedy, limit_remedy, reader_class)


def peek_pth(begin: bytes) -> Any:
    """Return the object in a file of `torch.save` with None in place of each tensor.

    Args:
        begin: First bytes of the file, with its whole pickle, which torch writes before the tensors.

    Raises:
        UnsafeSkeletonError: The file contains more than `load_pth` reads.
        FormatError: `begin` is damaged, or ends inside the pickle.
    """
    try:
        name_nbytes, extra_nbytes = struct.unpack_from("<HH", begin, 26)
        name, pickled = begin[30 : 30 + name_nbytes], begin[30 + name_nbytes + extra_nbytes :]
        if not begin.startswith(ZIP) or not name.endswith(b"/data.pkl"):
            raise FormatError("expected a file of torch.save, whose first record is its pickle")
        *_, (_, _, last) = pickletools.genops(pickled)
        body = translate(pickled[: (last or 0) + 1])
    except TensorCacheError:
        raise
    except Exception as exc:  # pickletools raises many kinds of exceptions
        raise FormatError(f"cannot be decoded: {exc!r:.300}") from exc
    return unpickle_without_tensors(body)
