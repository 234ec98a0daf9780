"""Outputs of pipelines as tensors: page-locked memory, and copies of what DALI owns."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest
import torch

from dali_plugin.tensors import as_torch
from tests.dali.pipelines import dali

_CUDA_HOST = 3  # DLPack's type of page-locked memory


def page_locked(array: np.ndarray[Any, Any]) -> Any:
    """Return DALI's view of an array that was described to DALI as page-locked; so no GPU is needed."""
    capsule = array.__dlpack__()
    address = ctypes.pythonapi.PyCapsule_GetPointer
    address.restype, address.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    # of struct DLTensor: the pointer to the data, then the type of the device
    ctypes.c_int32.from_address(address(capsule, b"dltensor") + 8).value = _CUDA_HOST
    return dali.tensors.TensorCPU(capsule)


class Dense:
    """An output with one shape, as DALI's lists of tensors are."""

    def __init__(self, tensor: Any) -> None:
        self._tensor = tensor

    def is_dense_tensor(self) -> bool:
        return True

    def as_tensor(self) -> Any:
        return self._tensor


@pytest.mark.parametrize("copy", [False, True])
@pytest.mark.parametrize("dtype", ["f4", "u2", "i8", "f2"])
def test_page_locked_memory(dtype: str, copy: bool) -> None:
    """torch refuses DLPack's type of such memory; a CPU output that is also copied to a GPU has it."""
    array = np.arange(24).astype(dtype).reshape(4, 6)
    output = page_locked(array)
    assert int(output.__dlpack_device__()[0]) == _CUDA_HOST
    tensor = as_torch(Dense(output), copy)
    del output
    array[0, 0] = 7
    assert tensor.dtype == torch.from_numpy(array).dtype
    assert tensor[1:].tolist() == array[1:].tolist()
    assert tensor[0, 0].item() == (0 if copy else 7)
