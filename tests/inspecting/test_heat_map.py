"""Planes of tensors are read, shrunk and colored as defined."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import wds_tensorcache as tc
from wds_tensorcache.codec.lazy import Lazy
from wds_tensorcache.inspecting import heat_map
from wds_tensorcache.inspecting.heat_map import NOT_FINITE, colors_of, levels_of, num_planes, read_plane, shrink


def _lazy(value: Any) -> Lazy:
    found: Lazy = tc.decode_sample(*tc.encode_sample({"x": value}))["x"]
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.float8_e5m2])
def test_planes(dtype: torch.dtype) -> None:
    tensor = torch.arange(2 * 3 * 4 * 5).reshape(2, 3, 4, 5).to(dtype)
    lazy = _lazy(tensor)
    assert num_planes(lazy) == 6
    for number, (i, j) in enumerate(itertools.product(range(2), range(3))):
        plane = read_plane(lazy, number)
        assert plane is not None
        assert np.array_equal(plane, tensor[i, j].double().numpy())
    assert read_plane(lazy, 6) is None


def test_other_shapes() -> None:
    row = read_plane(_lazy(torch.arange(5)))
    assert row is not None
    assert row.tolist() == [[0, 1, 2, 3, 4]]
    for value in (torch.tensor(1.0), torch.zeros(1), torch.zeros(0), torch.zeros(3, 0, 4), np.array(["a", "b"])):
        assert read_plane(_lazy(value)) is None
    absolute = read_plane(_lazy(torch.tensor([[3 + 4j, 0]])))
    assert absolute is not None
    assert absolute.tolist() == [[5, 0]]


def test_large_planes_are_sampled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(heat_map, "_MAX_NUMBERS", 1000)
    with tc.ShardWriter(tmp_path / "0.tar", fsync=False) as sink:
        sink.write("a", {"x": torch.arange(500.0).reshape(1, -1, 1).repeat(2, 1, 50)})
    with tc.open(tmp_path) as cache:
        plane = read_plane(cache["a"]["x"], 1)
    assert plane is not None
    assert plane.shape == (20, 50)
    assert (plane[0, 0], plane[-1, 0]) == (0, 499)


def test_shrink() -> None:
    plane = np.arange(24.0).reshape(4, 6)
    assert shrink(plane, 2, 3).tolist() == [[3.5, 5.5, 7.5], [15.5, 17.5, 19.5]]
    assert shrink(plane, 10, 10).tolist() == plane.tolist()
    uneven = shrink(np.arange(7.0).reshape(1, 7), 1, 3)
    assert uneven.tolist() == [[0.5, 2.5, 5.0]]
    plane[0, 0] = np.inf
    assert np.isnan(shrink(plane, 2, 3)).tolist() == [[True, False, False], [False, False, False]]


def test_levels_and_colors() -> None:
    levels = levels_of(np.array([[0.0, 1.0, 2.0, np.nan]]))
    assert levels[0, 0] == 0
    assert levels[0, 2] == 1
    assert np.isnan(levels[0, 3])
    colors = colors_of(levels)
    assert colors.dtype == np.uint8
    assert colors[0].tolist()[0] == [68, 1, 84]
    assert colors[0].tolist()[2:] == [[253, 231, 37], list(NOT_FINITE)]
    outlier = levels_of(np.append(np.arange(100.0), 1e9))
    assert 0.4 < outlier[50] < 0.6
    assert levels_of(np.full((2, 2), 3.0)).tolist() == [[0.5, 0.5], [0.5, 0.5]]
    assert np.isnan(levels_of(np.full((2, 2), np.nan))).all()
    huge = levels_of(np.array([[-1.7e308, 0, 1.7e308]]))
    assert np.isfinite(huge).all()
