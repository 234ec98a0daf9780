"""Store float32 values as bfloat16 or float16 if that keeps every bit of every number."""

from __future__ import annotations

import torch

_PROBE = 4096  # elements to test first, since most tensors that cannot be narrowed differ early


def narrow(tensor: torch.Tensor) -> torch.Tensor:
    """Return a float32 tensor as bfloat16 or float16 if converting it back gives the same bits; bfloat16 is tried first.

    If neither keeps all bits, also those of NaN and of negative zero, or if `tensor` has another dtype, `tensor` is returned.

    Memory: newly allocated, or `tensor` itself.
    """
    if tensor.dtype != torch.float32 or tensor.layout != torch.strided or tensor.is_meta or not tensor.numel():
        return tensor
    bits = tensor.contiguous().view(torch.int32).flatten()
    # a bfloat16 is the upper half of a float32: testing and copying halves needs less memory traffic than `tensor.to`
    if _is_bfloat16(bits[:_PROBE]) and _is_bfloat16(bits):
        upper = bits.view(torch.int16)[1::2]
        return upper.contiguous().view(torch.bfloat16).reshape(tensor.shape)
    if _is_float16(bits[:_PROBE]) and _is_float16(bits):
        return tensor.to(torch.float16)
    return tensor


def _is_bfloat16(bits: torch.Tensor) -> bool:
    return not bool((bits.view(torch.int16)[::2]).any())


def _is_float16(bits: torch.Tensor) -> bool:
    return torch.equal(bits.view(torch.float32).to(torch.float16).to(torch.float32).view(torch.int32), bits)
