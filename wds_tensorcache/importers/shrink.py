"""Smaller samples: narrower floats, and tensors without rows of padding."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch

from wds_tensorcache.codec.reference import component, join_path
from wds_tensorcache.codec.tree import rebuild
from wds_tensorcache.errors import FormatError, unknown_name

_PROBE = 4096  # elements to test first, since most tensors that cannot be narrowed differ early


def narrow(tensor: torch.Tensor) -> torch.Tensor:
    """Convert float32 to bfloat16, or else float16, if no bit is lost.

    NaN and negative zero must keep their bits, too. A tensor that cannot be narrowed is returned unchanged.

    Memory: newly allocated, or aliases `tensor`.
    """
    if tensor.dtype != torch.float32 or tensor.is_meta or not tensor.numel():
        return tensor
    bits = _flatten(tensor).view(torch.int32)
    # a bfloat16 is the upper half of a float32: testing and copying halves needs less memory traffic than `tensor.to`
    if _is_bfloat16(bits[:_PROBE]) and _is_bfloat16(bits):
        upper = bits.view(torch.int16)[1::2]
        return upper.contiguous().view(torch.bfloat16).reshape(tensor.shape)
    if _is_float16(bits[:_PROBE]) and _is_float16(bits):
        return tensor.to(torch.float16)
    return tensor


def _flatten(tensor: torch.Tensor) -> torch.Tensor:
    # a tensor of one element may be contiguous with any stride, which a view as another dtype refuses
    return tensor.contiguous().as_strided((tensor.numel(),), (1,))


def _is_bfloat16(bits: torch.Tensor) -> bool:
    return not bool((bits.view(torch.int16)[::2]).any())


def _is_float16(bits: torch.Tensor) -> bool:
    return torch.equal(bits.view(torch.float32).to(torch.float16).to(torch.float32).view(torch.int32), bits)


def trim(sample: Any, masks: dict[str, str], drop_padding: bool) -> tuple[Any, int]:
    """Cut tensors after the last row that their masks mark.

    A tensor `[N, …]` has a mask `[N]`. A tensor `[1, N, …]`, from a batch of one sample, may also have a mask `[1, N]`.

    Args:
        sample: Nested structure of tensors and small values, which is not changed.
        masks: Name of the mask of each tensor to trim; the mask keeps its length.
        drop_padding: Leave out rows even if they are not zero. The model must never use these rows.

    Returns:
        The sample with cut tensors, and the number of saved bytes.

    Raises:
        FormatError: The sample lacks a tensor or a mask, or contains the tensor twice. Or the lengths of a tensor and its mask
            differ. Or `drop_padding` is False, and rows after the mask are not zero.

    Memory: trimmed tensors are copies.
    """
    tensors = dict(_named(sample, ""))
    places = Counter(map(id, tensors.values()))
    cut: dict[int, torch.Tensor] = {}
    num_saved = 0
    for name, mask_name in masks.items():
        for needed in (name, mask_name):
            if not isinstance(tensors.get(needed), torch.Tensor):
                raise FormatError(f"trim: {unknown_name('tensor', needed, tensors)}")
        tensor, mask = tensors[name], tensors[mask_name]
        if places[id(tensor)] > 1:
            double = next(other for other in tensors if other != name and tensors[other] is tensor)
            raise FormatError(f"trim: {name!r} is the same tensor as {double!r}, which would also be cut")
        dim = 1 if tensor.ndim > 1 and mask.ndim > 1 and tensor.shape[0] == mask.shape[0] == 1 else 0
        if tensor.ndim <= dim or mask.ndim != dim + 1 or tensor.shape[dim] != mask.shape[dim]:
            raise FormatError(
                f"trim: tensor {name!r} is {list(tensor.shape)}, but its mask {mask_name!r} is {list(mask.shape)}; expected "
                "as many elements in the mask as the tensor has rows"
            )
        marked = mask.reshape(-1).to(torch.float64).nonzero()  # torch lacks `nonzero` of some dtypes
        length = int(marked[-1]) + 1 if len(marked) else 0
        kept, left_out = tensor.narrow(dim, 0, length), tensor.narrow(dim, length, tensor.shape[dim] - length)
        # all bits, because `tc.pad` would not restore negative zero
        if not drop_padding and _flatten(left_out).view(torch.uint8).any():
            raise FormatError(
                f"trim: the {left_out.shape[dim]} rows of {name!r} after the mask are not zero, so `tc.pad` would change them; "
                "--drop-padding (drop_padding=True) drops them, if the model never uses them"
            )
        cut[id(tensor)] = kept.clone()
        num_saved += left_out.numel() * left_out.itemsize
    return rebuild(sample, lambda leaf: cut.get(id(leaf), leaf)), num_saved


def _named(value: Any, name: str) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield name, value
    elif isinstance(value, (dict, list, tuple)):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for position, (key, item) in enumerate(items):
            yield from _named(item, join_path(name, component(key, position)))
