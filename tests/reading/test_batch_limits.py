"""No batch holds more dimensions than numpy has, or more bytes than memory; errors say what to do instead."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import wds_tensorcache as tc
from tests.reading.batches import assert_all_same, write

ARRAY_NDIM = 64  # numpy has no more dimensions
MOST = (1,) * ARRAY_NDIM
COLLATES = ["stack", "pad"]


@pytest.mark.parametrize("collate", COLLATES)
def test_as_many_dimensions_as_there_can_be(tmp_path: Path, collate: str) -> None:
    samples = [
        {
            "ok": torch.tensor(i),
            "a": [np.full(MOST, i, "i4")],
            "less": np.full(MOST[1:], i, "f8"),
            "t": torch.full(MOST[1:], float(i)),
        }
        for i in range(3)
    ]
    with tc.open(write(tmp_path, samples)) as cache:
        message = rf"tensor 'a\.0' of sample '002' cannot be stacked: .*{ARRAY_NDIM} dimensions.*'list'"
        for device in (None, "meta"):
            with pytest.raises(tc.BatchError, match=message):
                cache.read_batch([2, 0], device, collate=collate)
        assert_all_same(samples, cache.read_batch(range(3), collate=list))
        listed = cache.read_batch([2, 1], collate="list")
        assert [array.item() for array in listed["a"][0]] == [2, 1]
        batch = cache.select(["ok", "less", "t"]).read_batch([2, 0], collate=collate)
        for name in ("ok", "less", "t"):
            assert batch[name].shape == (2, *samples[0][name].shape)  # type: ignore[attr-defined]
            assert batch[name].reshape(-1).tolist() == [2, 0]
        tensors = cache.read_tensors([2, 1], collate="auto")
        assert tensors["ok"].tolist() == [2, 1]
        assert [array.shape for array in tensors["a.0"]] == [MOST, MOST]
        with pytest.raises(tc.BatchError, match="dimensions"):
            cache.read_tensors([2, 1])


@pytest.mark.parametrize("kind", ["tensor", "ndarray"])
def test_empty_ones_whose_other_sizes_are_huge(tmp_path: Path, kind: str) -> None:
    """Nothing is in them, but torch and numpy multiply the sizes for their strides."""
    row = torch.empty(1 << 29, 0, 1 << 29, dtype=torch.uint8)
    with tc.open(write(tmp_path, [{"x": row if kind == "tensor" else row.numpy()}] * 40)) as cache:
        assert cache.read_batch([0, 1])["x"].shape == (2, 1 << 29, 0, 1 << 29)
        assert cache.read_batch([0], collate=list)[0]["x"].shape == (1 << 29, 0, 1 << 29)
        numbers = list(range(40))
        for collate in COLLATES:
            with pytest.raises(tc.BatchError, match=r"tensor 'x' of sample '000' cannot be stacked: .*bytes"):
                cache.read_batch(numbers, collate=collate)
        assert len(cache.read_batch(numbers, collate="list")["x"]) == 40
        assert len(cache.read_tensors(numbers, collate="auto")["x"]) == 40


@pytest.mark.parametrize("kind", ["tensor", "ndarray"])
@pytest.mark.parametrize(
    ("names", "length", "word"), [("x", 1 << 56, "memory"), ("x", 1 << 61, "bytes"), ("xyzuvw", 1 << 57, "memory")]
)
def test_padding_that_is_huge(tmp_path: Path, kind: str, names: str, length: int, word: str) -> None:
    """The last is more than 2^63 bytes in all."""
    rows = [torch.ones(2), torch.ones(1)]
    samples = [dict.fromkeys(names, row if kind == "tensor" else row.numpy()) for row in rows]
    with tc.open(write(tmp_path, samples)) as cache:
        with pytest.raises(tc.BatchError, match=word):
            cache.read_batch([0, 1] * 4, collate=tc.pad(to=length))
        assert cache.read_batch([0, 1], collate="pad")["x"].tolist() == [[1, 1], [1, 0]]
