"""Trimming leaves out what a mask excludes, if padding can give it back, and refuses otherwise."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import wds_tensorcache as tc
from wds_tensorcache.importers.trim import trim


def sample(fill: float = 0.0, length: int = 3, rows: int = 8) -> dict[str, Any]:
    states = torch.randn(rows, 4)
    states[length:] = fill
    return {"text": {"states": states, "mask": (torch.arange(rows) < length).long()}, "latent": torch.ones(2)}


MASKS = {"text.states": "text.mask"}


@pytest.mark.parametrize("length", [0, 1, 3, 8])
def test_rows_after_the_mask(length: int) -> None:
    before = sample(0.0, length)
    after, saved = trim(before, MASKS, False)
    assert torch.equal(after["text"]["states"], before["text"]["states"][:length])
    assert after["text"]["mask"] is not None
    assert saved == (8 - length) * 16
    assert after["latent"] is before["latent"]
    assert len(before["text"]["states"]) == 8


def test_holes_in_the_mask_stay() -> None:
    before = sample(length=5)
    before["text"]["mask"][1] = 0
    assert len(trim(before, MASKS, False)[0]["text"]["states"]) == 5


def test_a_batch_of_one() -> None:
    before = {"states": torch.zeros(1, 6, 2), "mask": torch.tensor([[1, 1, 0, 0, 0, 0]])}
    after, _ = trim(before, {"states": "mask"}, False)
    assert after["states"].shape == (1, 2, 2)


@pytest.mark.parametrize("fill", [1.5, float("nan"), -0.0])
@pytest.mark.parametrize("everywhere", [False, True])
def test_padding_that_is_not_zero_is_refused(fill: float, everywhere: bool) -> None:
    """`tc.pad` would not give it back, also not the negative zeros that `states * mask` makes."""
    before = sample(fill if everywhere else 0.0)
    before["text"]["states"][7, 3] = fill
    with pytest.raises(tc.FormatError, match=r"5 rows of 'text.states' .* not zero"):
        trim(before, MASKS, False)
    assert len(trim(before, MASKS, True)[0]["text"]["states"]) == 3


@pytest.mark.parametrize(
    ("masks", "message"),
    [
        ({"text.stats": "text.mask"}, "unknown tensor 'text.stats'.*'text.states'"),
        ({"text.states": "mask"}, "unknown tensor 'mask'.*'text.mask'"),
        ({"text.states": "latent"}, r"\[8, 4\], but its mask 'latent' is \[2\]"),
        ({"text.mask": "text.states"}, "but its mask"),
    ],
)
def test_wrong_names_and_shapes(masks: dict[str, str], message: str) -> None:
    with pytest.raises(tc.FormatError, match=message):
        trim(sample(), masks, False)


def test_padding_gives_the_length_back(tmp_path: Any) -> None:
    samples = [sample(length=length) for length in (2, 5, 3)]
    with tc.ShardWriter(tmp_path) as sink:
        for number, each in enumerate(samples):
            sink.write(str(number), trim(each, MASKS, False)[0])
    with tc.open(tmp_path) as cache:
        batch = cache.read_batch([0, 1, 2], collate={"text.states": tc.pad(to=8)})
    for states, each in zip(batch["text"]["states"], samples, strict=True):
        assert torch.equal(states, each["text"]["states"])


def test_a_tensor_with_two_names_is_refused() -> None:
    before = sample(length=5)
    before["also"] = before["text"]["states"]
    with pytest.raises(tc.FormatError, match="'text.states' is the same tensor as 'also'"):
        trim(before, MASKS, False)
    with pytest.raises(tc.FormatError, match="is the same tensor"):
        trim({"x": torch.ones(3), "y": (both := torch.tensor([1, 0, 0])), "z": both}, {"y": "z"}, True)


@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.uint16, torch.uint64, torch.int8, torch.float8_e4m3fn, torch.bfloat16]
)
def test_dtypes_of_masks(dtype: torch.dtype) -> None:
    before = sample(length=5)
    before["text"]["mask"] = before["text"]["mask"].to(dtype)
    assert len(trim(before, MASKS, False)[0]["text"]["states"]) == 5
