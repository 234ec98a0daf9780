"""`set_epoch` that drops the rest of an epoch says how many samples it leaves out, once, or that it discards a loaded state."""

from __future__ import annotations

from itertools import islice
from typing import Any

import pytest

import wds_tensorcache as tc

MAKE: dict[str, Any] = {"Loader": tc.Loader, "torch_loader": tc.torch_loader}


def take(loader: Any, count: int) -> None:
    """Use some batches, and leave the epoch."""
    list(islice(loader, count))


@pytest.mark.parametrize("kind", MAKE)
def test_the_rest_of_an_epoch_is_named_once(cache: Any, kind: str) -> None:
    options: dict[str, Any] = {"shuffle": True, "collate": "list"}
    loader, again, ranked = (MAKE[kind](cache, 4, **options, rank=0, world_size=size) for size in (1, 1, 2))
    take(loader, 2)
    take(ranked, 1)
    again.load_state_dict(loader.state_dict())
    for each in (loader, again, ranked):
        with pytest.warns(UserWarning, match=r"set_epoch\(1\) leaves out 15 of the 23 samples of epoch 0"):
            each.set_epoch(1)
    take(loader, 2)
    loader.set_epoch(2)  # as each epoch of a trainer that limits its batches: said already


@pytest.mark.parametrize("kind", MAKE)
@pytest.mark.parametrize("last_batch", ["short", "drop"])
def test_nothing_is_left_out(cache: Any, kind: str, last_batch: str) -> None:
    """After a whole epoch, before the first batch, for the same epoch again, and where a state resumes."""
    loader = MAKE[kind](cache, 4, shuffle=True, last_batch=last_batch, collate="list")
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


@pytest.mark.parametrize("kind", MAKE)
def test_an_earlier_epoch_discards_a_loaded_state(cache: Any, kind: str) -> None:
    """As a loop over epochs that begins at 0 after a resume, in a script or in Lightning Fabric."""
    first, resumed = (MAKE[kind](cache, 4, shuffle=True, collate="list") for _ in range(2))
    take(first, len(first) + 1)
    for count in (0, 2):  # at the end of epoch 0, and within epoch 1
        take(first, count)
        resumed.load_state_dict(first.state_dict())
        with pytest.warns(UserWarning, match=r"set_epoch\(0\) discards the loaded state, which resumes in epoch 1"):
            resumed.set_epoch(0)
        assert [info.epoch for _, info in resumed.with_info()] == [0] * len(first)
    resumed.set_epoch(0)  # no state was loaded since
