"""The epoch of each iteration: the same for all of its workers, in any order in which they begin, and without gaps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import webdataset as wds
from torch.utils.data import DataLoader

import wds_tensorcache as tc


@pytest.fixture(scope="module")
def urls(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    tmp_path = tmp_path_factory.mktemp("epochs")
    for shard in range(6):
        with wds.TarWriter(str(tmp_path / f"{shard}.tar"), encoder=tc.encoder()) as sink:
            for i in range(3):
                sink.write({"__key__": f"{shard}-{i}", "tensorcache": torch.full((2,), i)})
    return [str(tmp_path / f"{shard}.tar") for shard in range(6)]


def keys(stream: Any, num_workers: int, **options: Any) -> list[str]:
    return [sample["__key__"] for sample in DataLoader(stream, batch_size=None, num_workers=num_workers, **options)]


_ORDERS: dict[tuple[int, int], list[str]] = {}


def order(urls: list[str], epoch: int, num_workers: int) -> list[str]:
    """Return the keys of an epoch as a fresh pipeline yields them, which is found out once."""
    if (epoch, num_workers) not in _ORDERS:
        stream = tc.ResumablePipeline(urls)
        stream.set_epoch(epoch)
        _ORDERS[epoch, num_workers] = keys(stream, num_workers)
    return _ORDERS[epoch, num_workers]


@pytest.mark.parametrize(("context", "counts"), [("fork", (2, 1, 0, 2)), ("spawn", (0, 1, 0))])
def test_the_number_of_workers_may_change(urls: list[str], context: str, counts: tuple[int, ...]) -> None:
    stream = tc.ResumablePipeline(urls)
    for epoch, num_workers in enumerate(counts):
        options = {"multiprocessing_context": context} if num_workers else {}
        assert keys(stream, num_workers, **options) == order(urls, epoch, num_workers)


def test_an_abandoned_iteration_ends_its_epoch(urls: list[str]) -> None:
    stream = tc.ResumablePipeline(urls)
    made = DataLoader(stream, batch_size=None, num_workers=2)
    for _ in range(3):
        next(iter(made))
    assert keys(stream, 2) == order(urls, 3, 2)


def test_two_iterations_at_once_have_two_epochs(urls: list[str]) -> None:
    made = DataLoader(tc.ResumablePipeline(urls), batch_size=None, num_workers=2)
    both = list(zip(made, made, strict=True))
    found = [[samples[at]["__key__"] for samples in both] for at in (0, 1)]
    assert sorted(found) == sorted([order(urls, 0, 2), order(urls, 1, 2)])


def test_persistent_workers_agree_on_many_epochs(urls: list[str]) -> None:
    """Two orders in one epoch would repeat samples; there are more epochs than the workers remember."""
    made = DataLoader(tc.ResumablePipeline(urls), batch_size=None, num_workers=2, persistent_workers=True)
    epochs = [[sample["__key__"] for sample in made] for _ in range(70)]
    assert {tuple(sorted(epoch)) for epoch in epochs} == {tuple(sorted(epochs[0]))}
    assert len(set(epochs[0])) == len(epochs[0]) == 18
    assert [epochs[0], epochs[69]] == [order(urls, 0, 2), order(urls, 69, 2)]


@pytest.mark.parametrize("persistent", [False, True])
def test_set_epoch_reaches_workers(urls: list[str], persistent: bool) -> None:
    stream = tc.ResumablePipeline(urls)
    made = DataLoader(stream, batch_size=None, num_workers=2, persistent_workers=persistent)
    for epoch in (4, 1, 1, 0):
        stream.set_epoch(epoch)
        assert [sample["__key__"] for sample in made] == order(urls, epoch, 2)
    assert [sample["__key__"] for sample in made] == order(urls, 1, 2)


def begin_at_5(number: int) -> None:
    info = torch.utils.data.get_worker_info()
    assert info is not None
    info.dataset.set_epoch(5)  # type: ignore[attr-defined]


def test_set_epoch_in_a_worker(urls: list[str]) -> None:
    assert keys(tc.ResumablePipeline(urls), 2, worker_init_fn=begin_at_5) == order(urls, 5, 2)
