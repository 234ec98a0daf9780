"""Narrowing keeps every bit of every number; trimming leaves out what a mask excludes, if padding can give it back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import wds_tensorcache as tc
from tests.importers.folders import imported, save
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
    save({name: tensor for name, (tensor, _) in CASES.items()}, tmp_path / "in" / "a.safetensors")
    narrowable = imported(tmp_path / "in", tmp_path / "wide")[1].nbytes_narrowable
    found, report = imported(tmp_path / "in", tmp_path / "out", narrow=True)
    for name, (tensor, dtype) in CASES.items():
        stored = found["a"][name]
        assert (name, stored.dtype, stored.shape) == (name, dtype, tensor.shape)
        assert tensor_bytes(stored.to(tensor.dtype)) == tensor_bytes(tensor), name
    saved = sum(tensor.nbytes // 2 for tensor, dtype in CASES.values() if dtype in (BF16, FP16))
    assert (report.nbytes_narrowed, report.nbytes_narrowable, narrowable) == (saved, 0, saved)
    assert report.fingerprint["narrow"] is True


def test_dtypes_that_a_batch_cannot_stack(tmp_path: Path) -> None:
    """The mask of an opaque image can be narrowed, other masks cannot."""
    for name, mask in {"opaque": torch.ones(4), "soft": torch.arange(4) / 7}.items():
        save({"latents": torch.ones(3), "mask": mask}, tmp_path / "in" / f"{name}.safetensors")
    assert imported(tmp_path / "in", tmp_path / "wide")[1].notes == []
    (note,) = imported(tmp_path / "in", tmp_path / "out", narrow=True)[1].notes
    assert "in 1 tensor, for example bfloat16 and float32 in 'mask'; import without --narrow" in note


def test_views(tmp_path: Path) -> None:
    """A tensor of one element is contiguous with any stride."""
    tensors = {"rows": torch.ones(2, 3, 4)[:, ::2], "expanded": torch.ones(1).expand(5)}
    save(tensors, tmp_path / "in" / "a.pt")
    found, _ = imported(tmp_path / "in", tmp_path / "views", narrow=True)
    assert_same({name: tensor.bfloat16().contiguous() for name, tensor in tensors.items()}, found["a"])
    torch.save({"one": torch.ones(4)[::2][:1], "mask": torch.zeros(4)[::2][:1]}, tmp_path / "in" / "a.pt")
    samples, _ = imported(tmp_path / "in", tmp_path / "out", narrow=True, trim={"one": "mask"}, drop_padding=True)
    assert samples["a"]["one"].shape == (0,)
    torch.save({"one": torch.zeros(4)[::2][:1], "mask": torch.zeros(4)[::2][:1]}, tmp_path / "in" / "a.pt")
    samples, _ = imported(tmp_path / "in", tmp_path / "zero", trim={"one": "mask"})
    assert samples["a"]["one"].shape == (0,)


MASKS = {"text.states": "text.mask"}


def sample(length: int = 3) -> dict[str, Any]:
    states = torch.randn(8, 4)
    states[length:] = 0
    return {"text": {"states": states, "mask": (torch.arange(8) < length).long()}, "latent": torch.ones(2)}


def trimmed(
    folder: Path, samples: dict[str, Any], masks: dict[str, str] = MASKS, drop_padding: bool = False
) -> tuple[dict[str, Any], Any]:
    for name, value in samples.items():
        save(value, folder / "in" / f"{name}.pt")
    return imported(folder / "in", folder / f"out {drop_padding}", trim=masks, drop_padding=drop_padding)


def test_rows_after_the_mask(tmp_path: Path) -> None:
    before = {str(length): sample(length=length) for length in (0, 1, 3, 8)}
    before["hole"] = sample(length=5)
    before["hole"]["text"]["mask"][1] = 0
    for dtype in (torch.bool, torch.uint16, torch.uint64, torch.int8, torch.float8_e4m3fn, torch.bfloat16):
        before[str(dtype)] = sample(length=5)
        before[str(dtype)]["text"]["mask"] = before[str(dtype)]["text"]["mask"].to(dtype)
    after, report = trimmed(tmp_path, before)
    lengths = {name: int(name) if name.isdigit() else 5 for name in before}
    for name, length in lengths.items():
        assert torch.equal(after[name]["text"]["states"], before[name]["text"]["states"][:length])
        assert after[name]["text"]["mask"].shape == (8,)
        assert torch.equal(after[name]["latent"], before[name]["latent"])
    assert report.nbytes_trimmed == sum(8 - length for length in lengths.values()) * 16
    with tc.open(tmp_path / "out False") as cache:  # padding gives the length back
        states_alone = cache.select(["text.states"])
        batch = states_alone.read_batch(list(range(len(before))), collate={"text.states": tc.pad(to=8)})
        keys = list(cache.keys())
    for key, states in zip(keys, batch["text"]["states"], strict=True):
        assert torch.equal(states, before[tc.original_name(key)]["text"]["states"])
    batch_of_one = {"states": torch.zeros(1, 6, 2), "mask": torch.tensor([[1, 1, 0, 0, 0, 0]])}
    after, _ = trimmed(tmp_path / "one", {"a": batch_of_one}, {"states": "mask"})
    assert after["a"]["states"].shape == (1, 2, 2)


@pytest.mark.parametrize("fill", [1.5, float("nan"), -0.0])
def test_padding_that_is_not_zero_is_refused(tmp_path: Path, fill: float) -> None:
    """`tc.pad` would not give it back, also not the negative zeros that `states * mask` makes."""
    before = sample()
    before["text"]["states"][7, 3] = fill
    with pytest.raises(tc.FormatError, match=r"5 rows of 'text.states' .* not zero"):
        trimmed(tmp_path, {"a": before})
    assert len(trimmed(tmp_path, {"a": before}, drop_padding=True)[0]["a"]["text"]["states"]) == 3


BOTH = torch.tensor([1, 0, 0])


@pytest.mark.parametrize(
    ("value", "masks", "message"),
    [
        (sample(), {"text.stats": "text.mask"}, "unknown tensor 'text.stats'.*'text.states'"),
        (sample(), {"text.states": "mask"}, "unknown tensor 'mask'.*'text.mask'"),
        (sample(), {"text.states": "latent"}, r"\[8, 4\], but its mask 'latent' is \[2\]"),
        ({"x": torch.ones(3), "y": BOTH, "z": BOTH}, {"y": "z"}, "'y' is the same tensor as 'z'"),
    ],
)
def test_wrong_names_and_shapes(tmp_path: Path, value: Any, masks: dict[str, str], message: str) -> None:
    with pytest.raises(tc.FormatError, match=message):
        trimmed(tmp_path, {"a": value}, masks, True)
