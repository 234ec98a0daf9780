"""Narrowing keeps every bit of every number, and happens exactly if that is possible."""

from __future__ import annotations

from pathlib import Path

import safetensors.torch
import torch

from tests.importers.folders import imported
from tests.same import assert_same, tensor_bytes

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def all_of(dtype: torch.dtype) -> torch.Tensor:
    """Return all 65,536 values of a dtype of 16 bits, as float32."""
    return torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(dtype).float()


def with_value(at: int, value: float) -> torch.Tensor:
    tensor = torch.ones(10_000)
    tensor[at] = value
    return tensor


def random_words(mask: int) -> torch.Tensor:
    words = torch.randint(-(1 << 31), 1 << 31, (5000,), generator=torch.Generator().manual_seed(0))
    return (words & mask).to(torch.int32).view(FP32)


HALVES = all_of(FP16)
CASES: dict[str, tuple[torch.Tensor, torch.dtype]] = {
    "all of bfloat16": (all_of(BF16), BF16),
    "all of float16": (HALVES[~HALVES.isnan()], FP16),
    "bits of bfloat16": (random_words(~0xFFFF), BF16),
    "any bits": (random_words(-1), FP32),
    **{f"half at {at}": (with_value(at, 1 + 2**-10), FP16) for at in (0, 4095, 4096, 9_999)},
    **{f"float at {at}": (with_value(at, 1 + 2**-20), FP32) for at in (0, 4095, 4096, 9_999)},
    "transposed": (torch.arange(12.0).reshape(3, 4).T.contiguous(), BF16),
    "a number": (torch.tensor(3.0), BF16),
    "empty": (torch.ones(0), FP32),
    "float64": (torch.ones(3, dtype=torch.float64), torch.float64),
    "int32": (torch.ones(3, dtype=torch.int32), torch.int32),
}


def test_every_bit_is_kept(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    safetensors.torch.save_file({name: tensor for name, (tensor, _) in CASES.items()}, tmp_path / "in/a.safetensors")
    narrowable = imported(tmp_path / "in", tmp_path / "wide")[1].nbytes_narrowable
    found, report = imported(tmp_path / "in", tmp_path / "out", narrow=True)
    for name, (tensor, dtype) in CASES.items():
        stored = found["a"][name]
        assert (name, stored.dtype, stored.shape) == (name, dtype, tensor.shape)
        assert tensor_bytes(stored.to(tensor.dtype)) == tensor_bytes(tensor), name
    saved = sum(tensor.nbytes // 2 for tensor, dtype in CASES.values() if dtype in (BF16, FP16))
    assert (report.nbytes_narrowed, report.nbytes_narrowable, narrowable) == (saved, 0, saved)
    assert report.fingerprint["narrow"] is True


def test_views(tmp_path: Path) -> None:
    tensors = {"rows": torch.ones(2, 3, 4)[:, ::2], "expanded": torch.ones(1).expand(5)}
    (tmp_path / "in").mkdir()
    torch.save(tensors, tmp_path / "in" / "a.pt")
    found, _ = imported(tmp_path / "in", tmp_path / "out", narrow=True)
    assert_same({name: tensor.bfloat16().contiguous() for name, tensor in tensors.items()}, found["a"])
