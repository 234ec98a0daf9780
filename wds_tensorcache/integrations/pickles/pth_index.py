"""Find the tensors in a file of `torch.save` without reading them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, BinaryIO

import torch

from wds_tensorcache.codec.views import check_tensor, view_tensor
from wds_tensorcache.integrations.pickles.pth_file import read_pth_file
from wds_tensorcache.integrations.pickles.storages import Storage
from wds_tensorcache.integrations.pickles.tensor_reader import TensorReader


@dataclass(frozen=True, slots=True, eq=False)
class TensorPart:
    """A tensor in a file of `torch.save`, not read yet.

    Attributes:
        dtype: Dtype of the tensor.
        begin, end: Range of bytes in the file that contains all its elements.
        size, stride: Shape and strides in elements; its first element is at `begin`.
    """

    dtype: torch.dtype
    begin: int
    end: int
    size: tuple[int, ...]
    stride: tuple[int, ...]

    def view(self, buffer: Any) -> torch.Tensor:
        """Return the tensor whose elements are in the writable `buffer`, the bytes `[begin, end)` of the file.

        Raises:
            FormatError: A bool is a byte other than 0 or 1.

        Memory: aliases `buffer` and keeps it alive, unless it has elements of other tensors.
        """
        flat = view_tensor(buffer, self.dtype, ((self.end - self.begin) // self.dtype.itemsize,))
        tensor = check_tensor(flat.as_strided(self.size, self.stride))
        # a small file can describe many tensors of few elements, each at both ends of a large storage
        return tensor.clone() if len(flat) > tensor.numel() else tensor


def index_pth(file: BinaryIO, limit: int, remedy: str) -> Any:
    """Return the object in a file of `torch.save` with a `TensorPart` in place of each tensor. No tensor is read.

    Args:
        file: The open file. Only its pickle, and the names and positions of its tensors, are read.
        limit, remedy: As for `load_pth`.

    Raises:
        UnsafeSkeletonError: The file contains more than `load_pth` reads, or a parameter.
        FormatError: The file is damaged, in a different format, or exceeds `limit`.
    """
    return read_pth_file(file, remedy).decode(limit, {}, remedy, remedy, _Indexer)


class _Indexer(TensorReader):
    """A reader that returns parts of the file in place of tensors. It reads no storage."""

    def load_memory(self, record: range) -> Any:
        return record

    def view_tensor(self, storage: Storage, dtype: torch.dtype, offset: int, size: Any, stride: Any, count: int) -> Any:
        begin = storage.memory.start + offset * dtype.itemsize if count else storage.memory.start
        return TensorPart(dtype, begin, begin + count * dtype.itemsize, tuple(size), tuple(stride))
