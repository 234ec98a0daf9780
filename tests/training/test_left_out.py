"""`set_epoch` that drops the rest of an epoch says how many samples it leaves out, once."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import wds_tensorcache as tc
from tests.reading.batches import write

COUNT = 23
MAKE: dict[str, Any] = {"Loader": tc.Loader, "torch_loader": tc.torch_loader}


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[Any]:
    with tc.open(write(tmp_path, [{"i": i} for i in range(COUNT)])) as opened:
        yield opened


def take(loader: Any, number: int) -> None:
    """Use some batches, and leave the epoch."""
    for seen, _ in enumerate(loader, 1):
        if seen == number:
            return


@pytest.mark.parametrize("kind", MAKE)
def test_the_rest_of_an_epoch_is_named_once(cache: Any, kind: str) -> None:
    loader = MAKE[kind](cache, 4, shuffle=True)
    take(loader, 2)
    with pytest.warns(UserWarning, match=r"set_epoch\(1\) leaves out 15 of the 23 samples of epoch 0"):
        loader.set_epoch(1)
    take(loader, 2)
    loader.set_epoch(2)  # as each epoch of a trainer that limits its batches: said already


def test_a_loaded_state_counts(cache: Any) -> None:
    loader, again = (tc.Loader(cache, 4, shuffle=True) for _ in range(2))
    take(loader, 5)
    again.load_state_dict(loader.state_dict())
    with pytest.warns(UserWarning, match=r"set_epoch\(1\) leaves out 3 of the 23 samples of epoch 0"):
        again.set_epoch(1)


def test_samples_of_all_ranks_count(cache: Any) -> None:
    loader = tc.Loader(cache, 4, shuffle=True, rank=1, world_size=2)
    take(loader, 1)
    with pytest.warns(UserWarning, match=r"leaves out 15 of the 23 samples of epoch 0"):
        loader.set_epoch(1)


@pytest.mark.parametrize("kind", MAKE)
@pytest.mark.parametrize("last_batch", ["short", "pad", "drop"])
def test_nothing_is_left_out(cache: Any, kind: str, last_batch: str) -> None:
    """After a whole epoch, before the first batch, for the same epoch again, and where a state resumes."""
    loader = MAKE[kind](cache, 4, shuffle=True, last_batch=last_batch)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loader.set_epoch(3)
        loader.set_epoch(0)
        for epoch in (0, 1, 5):
            loader.set_epoch(epoch)
            take(loader, len(loader) + 1)
        loader.set_epoch(0)  # validation: each pass is the same
        take(loader, 2)
        state = loader.state_dict()
        loader.set_epoch(0)  # Lightning's sanity check uses two batches of the epoch that follows
        loader.load_state_dict(state)
        loader.set_epoch(0)


def test_draws_leave_nothing_out(cache: Any) -> None:
    """With weights, samples are drawn; in a mix with weights, each cache continues after its last used sample."""
    for loader in (tc.Loader(cache, 4, weights=[1.0] * COUNT), tc.Loader(mix={"a": (cache, 1)}, batch_size=4)):
        take(loader, 2)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            loader.set_epoch(1)
