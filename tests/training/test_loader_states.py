"""States of loaders: damaged states, and those of another loader, are refused and change nothing."""

from __future__ import annotations

import base64
import json
import tracemalloc
import zlib
from typing import Any

import numpy as np
import pytest
import torch

import wds_tensorcache as tc
from tests.training.loaders import COUNT, modes

POSITIONS: list[dict[str, Any]] = [
    {"counts": [1, 2]},
    {"counts": []},
    {"counts": None},
    {"counts": "ab"},
    {"counts": [4.0]},
    {"counts": [3]},
    {"used": 8},
    {"used": -4},
    {"used": True},
    {"used": 1 << 70, "counts": [1 << 70]},
    {"epoch": -1},
    {"epoch": "1"},
    {"epoch": 10**30},
    {"epoch": 1 << 61},
    {"step": 10**30},
    {"began": 5},
    {"began": None},
    {"more": 1},
]


@pytest.fixture
def state(cache: Any) -> dict[str, Any]:
    loader = tc.Loader(cache, 4, collate="list")
    next(iter(loader))
    found: dict[str, Any] = json.loads(json.dumps(loader.state_dict()))
    return found


@pytest.mark.parametrize("changed", POSITIONS, ids=str)
def test_places_that_there_are_not(cache: Any, state: dict[str, Any], changed: dict[str, Any]) -> None:
    loader = tc.Loader(cache, 4, collate="list")
    before = loader.state_dict()
    with pytest.raises(ValueError, match="a position that this loader cannot have"):
        loader.load_state_dict(state | {"position": state["position"] | changed})
    assert loader.state_dict() == before


def test_what_is_no_state(cache: Any, state: dict[str, Any]) -> None:
    loader = tc.Loader(cache, 4, collate="list")
    for wrong in (None, [], {}, "state", state | {"version": 3}):
        with pytest.raises(ValueError, match="state of version 2"):
            loader.load_state_dict(wrong)  # type: ignore[arg-type]
    with pytest.raises(
        ValueError, match=r"version 1.*finish the epoch with that release.*call set_epoch to begin an epoch anew"
    ):
        loader.load_state_dict(state | {"version": 1})
    for name in ("dataset", "settings", "position", "weights"):
        with pytest.raises(ValueError, match=f"is damaged: it lacks {name}"):
            loader.load_state_dict({key: value for key, value in state.items() if key != name})
    for weights in (5, [], {"caches": None, "samples": {}}):
        with pytest.raises(ValueError, match="the state has weights, unlike this loader"):
            loader.load_state_dict(state | {"weights": weights})
    with pytest.raises(ValueError, match="a position that"):
        loader.load_state_dict(state | {"position": 3})


def packed(values: Any) -> str:
    return base64.b64encode(zlib.compress(np.array(values, "<f8").tobytes())).decode()


@pytest.mark.parametrize(
    "samples",
    [
        None,
        {},
        {"0": 5},
        {"0": "!"},
        {"0": "AAAA"},
        {"0": packed([-1.0] * COUNT)},
        {"0": packed([0.0] * COUNT)},
        {"0": packed([float("nan")] * COUNT)},
        {"0": packed([1.0])},
        {"1": packed([1.0] * COUNT)},
        {"0": packed(np.ones(10_000_000))},  # 80 MB in a state of 78 KB
    ],
    ids=lambda samples: f"{samples!r:.30}",
)
def test_weights_that_are_none(cache: Any, samples: Any) -> None:
    loader = tc.Loader(cache, 4, weights=np.arange(COUNT), collate="list")
    state = loader.state_dict()
    tracemalloc.start()
    with pytest.raises(ValueError, match="the state has no"):
        loader.load_state_dict(state | {"weights": {"caches": None, "samples": samples}})
    assert tracemalloc.get_traced_memory()[1] < 1_000_000
    tracemalloc.stop()
    with pytest.raises(ValueError, match="the state has no weights"):
        loader.load_state_dict(state | {"weights": None})
    assert loader.state_dict() == state


def test_a_state_that_is_refused_ends_no_iteration(cache: Any, more: Any) -> None:
    for mode in ("all", "mix", "weights"):
        loader = tc.Loader(batch_size=2, **modes(cache, more)[mode], collate="list")
        iterator = iter(loader)
        next(iterator)
        with pytest.raises(ValueError, match="a position that"):
            loader.load_state_dict(loader.state_dict() | {"position": None})
        assert len(list(iterator)) == len(loader) - 1


@pytest.mark.parametrize(
    ("mode", "last_batch"),
    [("buckets", last) for last in ("short", "pad", "drop", "wrap")] + [("repeats", "drop"), ("mix+buckets", "short")],
)
def test_batches_that_are_left(cache: Any, more: Any, mode: str, last_batch: str) -> None:
    """From every state, a loader with steps of any size returns as many batches as it says, and then a whole epoch."""
    options: dict[str, Any] = modes(cache, more)[mode] | {"last_batch": last_batch, "collate": "list", "num_threads": 0}
    first = tc.Loader(batch_size=2, **options)
    assert first.num_batches_left == len(first)
    for count, _ in enumerate(first, 1):
        assert first.num_batches_left == len(first) - count % len(first)
        for batch_size in (1, 2, 3):
            ranks = [tc.Loader(batch_size=batch_size, rank=rank, world_size=2, **options) for rank in range(2)]
            for loader in ranks:
                loader.load_state_dict(first.state_dict())
                left = loader.num_batches_left
                assert 0 < left <= len(loader)
                assert len(list(loader)) == left
                assert loader.num_batches_left == len(loader)
            assert ranks[0].state_dict() == ranks[1].state_dict()


@pytest.mark.parametrize("number", [np.int64(3), torch.tensor(3), 3])
def test_epochs_that_are_numbers_of_others(cache: Any, number: Any) -> None:
    loader = tc.Loader(cache, 4, collate="list")
    loader.set_epoch(number)
    assert json.loads(json.dumps(loader.state_dict()))["position"]["epoch"] == 3
    assert {info.epoch for _, info in loader.with_info()} == {3}
    for wrong, error in (
        (-1, ValueError),
        (1 << 31, ValueError),
        (1 << 62, ValueError),
        (float("nan"), TypeError),
        ("1", TypeError),
    ):
        with pytest.raises(error):
            loader.set_epoch(wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "options",
    [{"repeats": 1 << 30}, {"repeats": 1 << 30, "bucket_by": "y"}, {"shuffle": "blocks", "window": 3}],
    ids=str,
)
def test_the_last_epoch(cache: Any, options: dict[str, Any]) -> None:
    """It can be read, saved and resumed, also with the most passes that an epoch can have."""
    loader, resumed = (tc.Loader(cache, 4, collate="list", **options) for _ in range(2))
    loader.set_epoch((1 << 31) - 1)
    given = iter(loader.with_info())
    _, info = next(given)
    assert (len(info.keys), info.epoch) == (4, (1 << 31) - 1)
    resumed.load_state_dict(json.loads(json.dumps(loader.state_dict())))
    if "repeats" not in options:
        assert len(list(given)) == len(loader) - 1
        resumed.load_state_dict(json.loads(json.dumps(loader.state_dict())))
        assert resumed.epoch == 1 << 31
    assert len(next(iter(resumed))["i"]) == 4


@pytest.mark.parametrize("settings", [None, 5, [], "seed"])
def test_settings_that_are_none(cache: Any, settings: Any) -> None:
    loader = tc.Loader(cache, 4, collate="list")
    with pytest.raises(ValueError, match="state"):
        loader.load_state_dict(loader.state_dict() | {"settings": settings})
