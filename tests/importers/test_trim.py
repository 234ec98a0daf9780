"""Trimming leaves out what a mask excludes, if padding can give it back, and refuses otherwise."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import wds_tensorcache as tc
from tests.importers.folders import imported

MASKS = {"text.states": "text.mask"}


def sample(fill: float = 0.0, length: int = 3, rows: int = 8) -> dict[str, Any]:
    states = torch.randn(rows, 4)
    states[length:] = fill
    return {"text": {"states": states, "mask": (torch.arange(rows) < length).long()}, "latent": torch.ones(2)}


def trimmed(
    folder: Path, samples: dict[str, Any], masks: dict[str, str] = MASKS, drop_padding: bool = False
) -> tuple[dict[str, Any], Any]:
    (folder / "in").mkdir(exist_ok=True)
    for name, value in samples.items():
        torch.save(value, folder / "in" / f"{name}.pt")
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


def test_a_batch_of_one(tmp_path: Path) -> None:
    before = {"states": torch.zeros(1, 6, 2), "mask": torch.tensor([[1, 1, 0, 0, 0, 0]])}
    after, _ = trimmed(tmp_path, {"a": before}, {"states": "mask"})
    assert after["a"]["states"].shape == (1, 2, 2)


@pytest.mark.parametrize("fill", [1.5, float("nan"), -0.0])
@pytest.mark.parametrize("everywhere", [False, True])
def test_padding_that_is_not_zero_is_refused(tmp_path: Path, fill: float, everywhere: bool) -> None:
    """`tc.pad` would not give it back, also not the negative zeros that `states * mask` makes."""
    before = sample(fill if everywhere else 0.0)
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
        (sample(), {"text.mask": "text.states"}, "but its mask"),
        ({"x": torch.ones(3), "y": BOTH, "z": BOTH}, {"y": "z"}, "'y' is the same tensor as 'z'"),
    ],
)
def test_wrong_names_and_shapes(tmp_path: Path, value: Any, masks: dict[str, str], message: str) -> None:
    with pytest.raises(tc.FormatError, match=message):
        trimmed(tmp_path, {"a": value}, masks, True)
