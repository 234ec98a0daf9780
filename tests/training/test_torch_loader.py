"""`torch_loader`: the batches and states of `Loader`, whatever the number of workers, and resumed at every step."""

from __future__ import annotations

import copy
import itertools
import os
import pickle
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

import wds_tensorcache as tc
from tests.reading.batches import write
from tests.training.loaders import COUNT, keys, modes, only_numbers, saved

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")  # more workers than cores
KINDS = [(0, False), (2, True), (3, False)]


def workers(num_workers: int, persistent: bool) -> dict[str, Any]:
    return {"num_workers": num_workers, "persistent_workers": persistent}


def plain(batch: Any) -> Any:
    """Return a batch of lists; workers send values beside tensors as lists."""
    return {name: [each.tolist() if isinstance(each, torch.Tensor) else each for each in batch[name]] for name in batch}


@pytest.mark.parametrize(
    ("num_workers", "persistent", "mode"),
    [(*kind, mode) for kind in KINDS for mode in ("all", "mix+weights+buckets")]
    + [(*kind, mode) for kind in KINDS[:2] for mode in ("blocks", "buckets", "mix+buckets", "weights")],
)
def test_batches_and_states_are_those_of_a_loader(
    cache: Any, more: Any, mode: str, num_workers: int, persistent: bool
) -> None:
    options: dict[str, Any] = {"batch_size": 4, "collate": "list", **modes(cache, more)[mode]}
    loader, made = tc.Loader(**options), tc.torch_loader(**options, **workers(num_workers, persistent))
    assert isinstance(made, DataLoader)
    assert len(made) == len(loader)
    for epoch in range(2):
        for (batch, info), (expected, record) in zip(made.with_info(), loader.with_info(), strict=True):
            assert plain(batch) == plain(expected)
            assert info == record
            assert info.epoch == epoch
            assert info.cache is record.cache
            assert saved(made) == saved(loader)
            assert made.num_batches_left == loader.num_batches_left


@pytest.mark.parametrize(("mode", "kind"), [("mix", KINDS[0]), ("mix", KINDS[1]), ("all", KINDS[2])])
def test_loops_that_are_left(cache: Any, more: Any, mode: str, kind: tuple[int, bool]) -> None:
    """A new loop, and a copy, begin the next epoch; a state continues its epoch; `close` ends a loop."""
    options: dict[str, Any] = {"batch_size": 2, "collate": only_numbers, **modes(cache, more)[mode]}
    loader, made = tc.Loader(**options), tc.torch_loader(**options, **workers(*kind))
    for taken in (1, 3):
        for each in (loader, made):
            assert len(list(itertools.islice(each, taken))) == taken
        assert saved(made) == saved(loader)
        assert keys(made) == keys(loader)
    iter(made)  # begins nothing
    iterator = iter(made)
    first = next(iterator)
    state = made.state_dict()
    for duplicate in (pickle.loads(pickle.dumps(made)), copy.deepcopy(made)):
        assert saved(duplicate) == saved(made)
        assert {info.epoch for _, info in duplicate.with_info()} == {made.epoch + 1}
    rest = list(iterator)
    made.load_state_dict(state)
    iter(made)
    assert list(made) == rest
    assert list(loader) == [first, *rest]
    iterator = iter(made)
    next(iterator)
    made.close()
    assert list(iterator) == []
    assert made.state_dict()["position"]["step"] == loader.state_dict()["position"]["step"] + 1
    made.close()
    assert len(list(made)) == len(made)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_epochs_that_are_set(cache: Any, num_workers: int) -> None:
    options: dict[str, Any] = {"shuffle": True, "collate": "list"}
    loader = tc.Loader(cache, 4, **options)
    whole = [keys(loader) for _ in range(4)]
    made, again = (tc.torch_loader(cache, 4, num_workers=num_workers, **options) for _ in range(2))
    for epoch in (2, 0):
        made.set_epoch(epoch)
        assert keys(made) == whole[epoch]
    made.batch_sampler.set_epoch(3)  # as Lightning does
    assert len(list(itertools.islice(made, 2))) == 2
    state = made.state_dict()
    again.load_state_dict(state)
    again.set_epoch(3)
    assert keys(again) == whole[3][2:]
    iterator = iter(made)
    next(iterator)
    made.set_epoch(1)
    assert list(iterator) == []
    assert keys(made) == whole[1]
    # as Lightning does, after `iter` and before the first batch
    for each in (loader, made):
        begun = iter(each.with_info())
        each.sampler.set_epoch(2)
        assert [info.keys for _, info in begun] == whole[2]
        begun = iter(each.with_info())
        each.load_state_dict(state)
        assert [info.keys for _, info in begun] == whole[3][2:]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_weights_that_change(cache: Any, num_workers: int) -> None:
    """From the first step that no worker was asked for; a state has the new weights at once."""
    rows = np.eye(COUNT)
    made = tc.torch_loader(cache, 1, num_workers=num_workers, weights=rows[1], collate="list")
    iterator, at = iter(made.with_info()), 3 if num_workers == 0 else 7
    seen = [next(iterator)[1].indices.item() for _ in range(3)]
    assert made.set_weights(rows[7]) == at
    again = tc.Loader(cache, 1, weights=rows[1], collate="list")
    again.load_state_dict(saved(made))
    assert [info.indices.item() for _, info in again.with_info()] == [7] * (COUNT - 3)
    assert seen + [info.indices.item() for _, info in iterator] == [1] * at + [7] * (COUNT - at)


def set_number(worker: int) -> None:
    os.environ["NUMBER"] = str(worker)


def worker_of(samples: list[Any]) -> tuple[int, str]:
    return os.getpid(), os.environ["NUMBER"]


@pytest.mark.parametrize(
    ("context", "persistent"), [("fork", False), ("fork", True), pytest.param("spawn", True, marks=pytest.mark.long)]
)
def test_workers_persist(cache: Any, context: str, persistent: bool) -> None:
    """Through epochs, abandoned loops and loaded states, until `close`."""
    options = workers(2, persistent) | {"multiprocessing_context": context, "timeout": 60, "worker_init_fn": set_number}
    made = tc.torch_loader(cache, 4, collate=worker_of, **options)
    pids = [set(made), {next(iter(made))}]
    made.load_state_dict(made.state_dict())
    pids.append(set(made))
    assert {number for _, number in pids[0]} == {"0", "1"}
    before = {pid for pid, _ in set.union(*pids)} | {os.getpid()}
    assert len(before) == 1 + (2 if persistent else 5)
    made.close()
    assert before.isdisjoint(pid for pid, _ in made)


def in_the_worker(samples: list[Any]) -> Any:
    if any(sample["i"] == 17 for sample in samples):
        raise ZeroDivisionError("of the user")
    return [sample["i"] for sample in samples]


def killed(samples: list[Any]) -> Any:
    if any(sample["i"] == 17 for sample in samples) and torch.utils.data.get_worker_info() is not None:
        os.kill(os.getpid(), signal.SIGKILL)
    return [sample["i"] for sample in samples]


@pytest.mark.parametrize(
    ("persistent", "collate", "error", "message"),
    [
        (False, in_the_worker, ZeroDivisionError, "of the user"),
        (True, in_the_worker, ZeroDivisionError, "of the user"),
        (True, killed, RuntimeError, "exited unexpectedly|killed by signal"),
    ],
)
def test_errors_lose_no_sample(cache: Any, persistent: bool, collate: Any, error: Any, message: str) -> None:
    """The position stays that of the last batch given, and the next iteration has new workers where they died."""
    made = tc.torch_loader(cache, 4, **workers(2, persistent), collate=collate)
    seen: list[int] = []
    with pytest.raises(error, match=message):
        seen.extend(i for batch in made for i in batch)
    assert seen == list(range(len(seen)))
    assert made.state_dict()["position"]["used"] == len(seen) <= 16
    again = tc.torch_loader(cache, 4, num_workers=1, collate="list")
    again.load_state_dict(made.state_dict())
    assert seen + [i for batch in again for i in batch["i"]] == list(range(COUNT))
    with pytest.raises(error, match=message):  # of the next epoch
        list(made)


def test_wrong_options_are_refused(cache: Any) -> None:
    for options, message in (
        ({"timeout": 5}, "timeout=5 applies only to worker processes"),
        ({"num_workers": 2, "prefetch_factor": 0}, "prefetch_factor=0, expected at least 1"),
        ({"collate": "stacked"}, "stacked"),
    ):
        with pytest.raises(ValueError, match=message):
            tc.torch_loader(**({"cache": cache, "batch_size": 4} | options))
    made = tc.torch_loader(cache, 4)
    with pytest.raises(TypeError, match="expected a StepDataset"):
        type(made)(cache)
    for wrong in (DataLoader(made.dataset, sampler=range(2)), DataLoader(made.dataset, batch_size=None, sampler=[3])):
        with pytest.raises(TypeError, match="a StepDataset is indexed by a Step"):
            next(iter(wrong))
    # another data loader over the same sampler has the state
    made = tc.torch_loader(cache, 4, collate="list")
    next(iter(DataLoader(made.dataset, batch_size=None, sampler=made.batch_sampler, collate_fn=list)))
    with pytest.raises(RuntimeError, match="another data loader iterates over this loader's sampler"):
        made.state_dict()
    made.set_epoch(3)
    assert made.state_dict()["position"]["epoch"] == 3


class Exhausted:
    """A collate function with a bug: it takes an item of an iterator that has none."""

    def __call__(self, samples: list[Any]) -> Any:
        return next(iter([])) if any(int(sample["i"]) == 9 for sample in samples) else len(samples)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_function_that_raises_stop_iteration_ends_no_epoch(cache: Any, num_workers: int) -> None:
    collate = Exhausted()
    made = tc.torch_loader(cache, 4, collate=collate, num_workers=num_workers)
    sampler = tc.StepSampler(cache, 4)
    plainly = DataLoader(tc.StepDataset(sampler, collate=collate), None, sampler=sampler, num_workers=num_workers)
    for loader in (made, tc.Loader(cache, 4, collate=collate), plainly):
        with pytest.raises(RuntimeError, match=r"raised StopIteration for the samples \[8, 9, 10, 11\]"):
            list(loader)
    assert made.epoch == 0


def test_a_dataset_with_alternatives_can_be_pickled_after_its_use(tmp_path: Path) -> None:
    """`spawn` pickles it at the start of each epoch, and `info.choices` uses the alternatives."""
    samples = [{"a": torch.tensor([i]), "b": torch.tensor([10 + i])} for i in range(4)]
    sampler = tc.StepSampler(tc.open(write(tmp_path, samples)), 4, seed=1)
    dataset = tc.StepDataset(sampler, choose={"x": ["a", "b"]})
    (step,) = sampler
    batch = dataset[step]
    assert torch.equal(pickle.loads(pickle.dumps(dataset))[step]["x"], batch["x"])
