"""Loops that are left early: with `on_early_exit="continue"`, the next loop goes on after the last batch.

Otherwise, `set_epoch` that drops the rest of an epoch says how many samples it leaves out, once, or that it discards a loaded
state.
"""

from __future__ import annotations

import json
from itertools import islice
from typing import Any

import pytest

import wds_tensorcache as tc
from tests.training.loaders import COMBINED, modes, only_numbers

KINDS: dict[str, Any] = {
    "Loader": (tc.Loader, {}),
    "Loader, no threads": (tc.Loader, {"num_threads": 0}),
    "torch_loader": (tc.torch_loader, {}),
    "torch_loader, workers": (tc.torch_loader, {"num_workers": 2, "prefetch_factor": 3, "persistent_workers": True}),
}


def make(cache: Any, kind: str = "Loader", batch_size: int = 4, **options: Any) -> Any:
    call, kind_options = KINDS[kind]
    options = {"shuffle": True, "collate": only_numbers, "on_early_exit": "continue", **kind_options, **options}
    return call(cache, batch_size, **options)


def take(loader: Any, count: int | None = None) -> list[Any]:
    """Leave a loop after `count` batches; return their epochs, steps and samples."""
    return [(info.epoch, info.step, batch) for batch, info in islice(loader.with_info(), count)]


def whole(cache: Any, num_epochs: int, **options: Any) -> list[Any]:
    loader = make(cache, on_early_exit="next_epoch", **options)
    return [batch for _ in range(num_epochs) for batch in take(loader)]


@pytest.mark.parametrize("kind", KINDS)
def test_loops_continue(cache: Any, kind: str) -> None:
    """Each sample of the epoch comes once before any is repeated; batches read ahead are not lost."""
    loader, expected = make(cache, kind), whole(cache, 4)  # 6 batches in an epoch
    batches: list[Any] = []
    for count in (4, 1, 4, 1):
        loader.set_epoch(len(batches))  # as trainers do for each loop
        batches += take(loader, count)
        assert loader.epoch == len(batches) // 6
        assert loader.num_batches_left == 6 - len(batches) % 6
        assert len(loader) == 6
    assert batches == expected[: len(batches)]
    again = make(cache, kind)
    again.load_state_dict(json.loads(json.dumps(loader.state_dict())))
    for each in (loader, again):
        assert take(each) == expected[10:16]  # a loop has as many batches as an epoch
    loader.close()
    assert take(loader, 2) + take(loader) == expected[16:24]
    loader.close()


@pytest.mark.parametrize("mode", ["all", "buckets", "weights", "mix", *COMBINED])
def test_every_mode_continues(cache: Any, more: Any, mode: str) -> None:
    options = {"batch_size": 4, "collate": only_numbers, **modes(cache, more)[mode]}
    loader, expected = tc.Loader(on_early_exit="continue", **options), tc.Loader(**options)
    batches = [batch for _ in range(8) for batch in take(loader, 3)]
    assert batches == list(islice((batch for _ in range(24) for batch in take(expected)), 24))


def test_another_batch_size_and_ranks_continue(cache: Any) -> None:
    loader = make(cache)
    seen = [i for _ in range(2) for _, _, batch in take(loader, 2) for i in batch]
    ranks = [make(cache, batch_size=1, rank=rank, world_size=2) for rank in range(2)]
    for rank in ranks:
        rank.load_state_dict(loader.state_dict())
        seen += [batch[0] for count in (2, 1) for _, _, batch in take(rank, count)]
    assert len(seen) == len(set(seen)) == 16 + 6


@pytest.mark.filterwarnings("ignore:Got pickle error:UserWarning")
@pytest.mark.parametrize("name", ["transform", "collate", "worker_init_fn"])
def test_a_lambda_for_spawned_workers_is_named(cache: Any, name: str) -> None:
    loader = tc.torch_loader(cache, 4, num_workers=1, multiprocessing_context="spawn", **{name: lambda *args: args[0]})
    with pytest.raises(TypeError, match=rf"^{name}= of torch_loader cannot be sent to worker processes"):
        next(iter(loader))


@pytest.mark.parametrize("kind", ["Loader", "torch_loader"])
def test_the_rest_of_an_epoch_is_named_once(cache: Any, kind: str) -> None:
    options: dict[str, Any] = {"on_early_exit": "next_epoch", "rank": 0}
    loader, again, ranked = (make(cache, kind, world_size=size, **options) for size in (1, 1, 2))
    take(loader, 2)
    take(ranked, 1)
    again.load_state_dict(loader.state_dict())
    for each in (loader, again, ranked):
        with pytest.warns(UserWarning, match=r"set_epoch\(1\) leaves out 15 of the 23 samples of epoch 0"):
            each.set_epoch(1)
    take(loader, 2)
    loader.set_epoch(2)  # as each epoch of a trainer that limits its batches: said already


@pytest.mark.parametrize("kind", ["Loader", "torch_loader"])
@pytest.mark.parametrize("last_batch", ["short", "drop"])
def test_nothing_is_left_out(cache: Any, kind: str, last_batch: str) -> None:
    """After a whole epoch, before the first batch, for the same epoch again, and where a state resumes."""
    loader = make(cache, kind, last_batch=last_batch, on_early_exit="next_epoch")
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


@pytest.mark.parametrize("kind", ["Loader", "torch_loader"])
def test_an_earlier_epoch_discards_a_loaded_state(cache: Any, kind: str) -> None:
    """As a loop over epochs that begins at 0 after a resume, in a script or in Lightning Fabric."""
    first, resumed = (make(cache, kind, on_early_exit="next_epoch") for _ in range(2))
    take(first, len(first) + 1)
    for count in (0, 2):  # at the end of epoch 0, and within epoch 1
        take(first, count)
        resumed.load_state_dict(first.state_dict())
        with pytest.warns(UserWarning, match=r"set_epoch\(0\) discards the loaded state, which resumes in epoch 1"):
            resumed.set_epoch(0)
        assert [info.epoch for _, info in resumed.with_info()] == [0] * len(first)
    resumed.set_epoch(0)  # no state was loaded since
