"""Storages, the memory of tensors: a file of `torch.save` has a record with the bytes of each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, BinaryIO, TypeAlias

import numpy as np
import torch

from wds_tensorcache.codec.views import check_tensor
from wds_tensorcache.errors import FormatError

File: TypeAlias = "BinaryIO | memoryview"  # an open file, or its content
_ALIGNMENT = 16  # of memory in bytes, enough for every dtype


@dataclass(frozen=True, slots=True, eq=False)
class Storage:
    """The memory of tensors, as uint8 elements, and the dtype of those tensors that do not say theirs."""

    memory: Any  # or what the reader has in its place
    dtype: torch.dtype


def load_storage(file: File, record: range) -> torch.Tensor:
    """Return the bytes of a storage: a view of a `memoryview` if it is aligned, otherwise newly allocated."""
    if isinstance(file, memoryview) and len(record):
        array = np.frombuffer(file, np.uint8, len(record), record.start)
        if array.__array_interface__["data"][0] % _ALIGNMENT == 0:  # as torch has written it
            return torch.from_numpy(array)
    memory = torch.empty(len(record), dtype=torch.uint8, device="cpu")
    if isinstance(file, memoryview):
        memory.numpy()[:] = file[record.start : record.stop]
        return memory
    file.seek(record.start)
    if file.readinto(memory.numpy()) != len(record):  # type: ignore[attr-defined]
        raise FormatError("the file was cut short while it was read")
    return memory


def view_storage(memory: torch.Tensor, dtype: torch.dtype, offset: int, size: Any, stride: Any) -> torch.Tensor:
    """Return a tensor of a storage, whose bools are checked. The caller has checked that the tensor fits."""
    tensor = torch.empty(0, dtype=dtype, device="cpu")
    return check_tensor(tensor.set_(memory.untyped_storage(), offset, size, stride))
