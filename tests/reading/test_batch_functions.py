"""`collate=function` gets whole samples of any structures; and no batch changes the state of the process."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import webdataset as wds

import wds_tensorcache as tc
from tests.reading.batches import assert_all_same, write

X = torch.arange(3)


DIFFERENT: dict[str, list[Any]] = {
    "of several shapes": [{"x": torch.ones(2), "y": np.array(["a"]), "i": 0}, {"x": torch.ones(3).double()}, [X], None],
    "of several dtypes": [
        {"x": torch.ones(4, dtype=torch.bool)},
        {"x": torch.full((4,), 5, dtype=torch.uint8)},
        {"x": np.full(3, 7, np.int8)},
        {"x": torch.zeros(2, 2)},  # aligned, although 11 bytes come before it
        {"x": torch.tensor([1 + 2j, 3], dtype=torch.complex128)},
    ],
    "some in sets": [{"s": [{X}], "t": {X}}, {"x": X}],
    **{
        str(dtype): [{"x": X}, {"x": X, "m": torch.ones(5).to(dtype)}, {"x": X, "m": torch.ones(2).to(dtype)}]
        for dtype in (torch.uint8, torch.bool, torch.float8_e4m3fn)
    },
}


@pytest.mark.parametrize("samples", DIFFERENT.values(), ids=DIFFERENT)
def test_samples_that_differ(tmp_path: Path, samples: list[Any]) -> None:
    with tc.open(write(tmp_path, samples)) as cache:
        for numbers in (list(range(len(samples))), [1, 0], [1, 1]):
            read = cache.read_batch(numbers, collate=list)
            assert_all_same([samples[i] for i in numbers], read)
            tensors = [sample.get("x") for sample in read if isinstance(sample, dict)]
            assert not any(x.data_ptr() % x.itemsize for x in tensors if isinstance(x, torch.Tensor))
        assert cache.read_batch([0, 1], collate=len) == 2


def test_skeletons_that_the_index_could_not_read(tmp_path: Path) -> None:
    @dataclass
    class Point:
        x: int = 1

    Point.__qualname__ = "Point"
    kinds = [torch.ones(3, dtype=torch.complex128), torch.ones(3, 2, dtype=torch.float64)]
    path = str(tmp_path / "0.tar")
    with wds.TarWriter(path, encoder=tc.encoder(allow=[Point])) as sink:
        for i, x in enumerate([kinds[0], kinds[1], kinds[0]]):
            sink.write({"__key__": str(i), "tensorcache": {"x": x, "o": Point(i)}})
    with tc.open(path, allow=[Point]) as cache:
        assert cache.read_batch([0, 2])["x"].dtype == torch.complex128
        for numbers in ([0, 1], [1, 0], [1, 2]):
            with pytest.raises(tc.BatchError, match="tensor 'x' (is|differs)"):
                cache.read_batch(numbers)
        assert cache.read_batch([1])["x"].shape == (1, 3, 2)
        assert list(cache.schema) == ["x"]
