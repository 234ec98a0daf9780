"""Workers of torch's loaders: the loader's own sequence, whatever their number, and resumed at every step."""

from __future__ import annotations

import copy
import gc
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

import wds_tensorcache as tc
from tests.loading.loaders import COUNT, modes

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")  # more workers than cores


def keys(batches: Any) -> list[list[str]]:
    return [info.keys for _, info in batches]


@pytest.mark.parametrize("mode", ["all", "buckets", "mix", "weights"])
@pytest.mark.parametrize(
    ("num_workers", "persistent"), [(0, False), *((count, each) for count in (1, 2, 3) for each in (False, True))]
)
def test_workers_give_the_sequence_of_one_process(
    cache: Any, more: Any, mode: str, num_workers: int, persistent: bool
) -> None:
    options: dict[str, Any] = {"batch_size": 4, "collate": "list", **modes(cache, more)[mode]}
    loader = tc.Loader(**options)
    expected = [keys(loader) for _ in range(3)]
    dataset = tc.IterableCache(**options)
    made = DataLoader(dataset, batch_size=None, num_workers=num_workers, persistent_workers=persistent)
    assert len(made) == len(loader)
    for epoch in range(3):
        batches = list(made)
        assert keys(batches) == expected[epoch]
        for batch, info in batches:
            assert [[i] * (1 + i % 3) for i in batch["i"]] == [y.tolist() for y in batch["y"]]
            assert batch["i"] == list(map(int, info.keys))
    if not persistent:
        dataset.set_epoch(1)
        if mode != "mix":
            assert keys(made) == expected[1]


def note(setup: tc.WorkerSetup) -> None:
    assert isinstance(setup.dataset, tc.IterableCache)
    Path(f"{setup.worker} of {setup.num_workers}").write_text(f"{setup.rank} {setup.world_size} {setup.seed}")


def test_spawned_workers_are_set_up(cache: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    options: dict[str, Any] = {"batch_size": 4, "collate": "list", "rank": 1, "world_size": 2, "seed": 5}
    dataset = tc.IterableCache(cache, setup=note, **options)
    made = DataLoader(dataset, batch_size=None, num_workers=2, multiprocessing_context="spawn")
    assert keys(made) == keys(tc.Loader(cache, **options))
    assert Path("0 of 2").read_text() == "1 2 22"
    assert Path("1 of 2").read_text() == "1 2 23"


def test_maps_of_samples_and_batches(cache: Any) -> None:
    """`TensorCache` itself is a map-style dataset, whose `__getitems__` torch calls with a batch's numbers."""
    made = DataLoader(
        cache, batch_size=4, num_workers=2, collate_fn=lambda samples: [sample["i"] for sample in samples]
    )
    assert [i for batch in made for i in batch] == list(range(COUNT))


@pytest.mark.parametrize("given", [False, True])
def test_epochs_that_torch_seeds_alike(cache: Any, given: bool) -> None:
    loader = tc.Loader(cache, 4, collate="list")
    dataset = tc.IterableCache(cache, 4, collate="list")
    for epoch in range(3):
        torch.manual_seed(0)
        if given:
            dataset.set_epoch(epoch)
        assert keys(DataLoader(dataset, batch_size=None, num_workers=2)) == keys(loader)


@pytest.mark.parametrize("mode", ["all", "mix"])
@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("persistent", [False, True])
def test_epochs_that_were_left(cache: Any, more: Any, mode: str, num_workers: int, persistent: bool) -> None:
    options: dict[str, Any] = {"batch_size": 2, "collate": "list", **modes(cache, more)[mode]}
    made = DataLoader(
        tc.IterableCache(**options),
        batch_size=None,
        num_workers=num_workers,
        persistent_workers=persistent and num_workers > 0,
    )
    for epoch in (0, 2):
        assert next(iter(made))[1].epoch == epoch
        infos = [info for _, info in made]
        assert {info.epoch for info in infos} == {epoch + 1}
        steps = [info.step for info in infos]
        assert steps == list(range(steps[0], steps[0] + len(made)))
        if mode == "all":
            assert sorted({key for info in infos for key in info.keys}) == sorted(cache.keys())


def epochs(dataset: Any, num_workers: int, count: int = 1) -> list[list[list[str]]]:
    return [keys(DataLoader(dataset, batch_size=None, num_workers=num_workers)) for _ in range(count)]


def test_workers_and_this_process_in_turn(cache: Any) -> None:
    loader = tc.Loader(cache, 4, collate="list")
    expected = [keys(loader) for _ in range(10)]
    dataset = tc.IterableCache(cache, 4, collate="list")
    dataset.state_dict()
    assert epochs(dataset, 0) == expected[:1]
    assert epochs(dataset, 2, 2) == expected[1:3]
    assert epochs(dataset, 0) == expected[3:4]
    assert dataset.state_dict()["position"]["epoch"] == 4
    assert epochs(dataset, 3) == expected[4:5]
    next(iter(dataset))  # leaves an epoch
    assert epochs(dataset, 1) == expected[6:7]
    dataset.set_epoch(8)
    assert dataset.state_dict()["position"]["epoch"] == 8
    assert epochs(dataset, 2, 2) == expected[8:]


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda dataset: pickle.loads(pickle.dumps(dataset))])
def test_copies_have_epochs_of_their_own(cache: Any, copied: Any) -> None:
    loader = tc.Loader(cache, 4, collate="list")
    expected = [keys(loader) for _ in range(3)]
    dataset = tc.IterableCache(cache, 4, collate="list")
    other = copied(dataset)
    assert epochs(other, 2, 3) == expected
    assert epochs(dataset, 2, 3) == expected


@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_a_state_that_this_process_loads(cache: Any, context: str) -> None:
    """For plain `DataLoader`, whose workers begin where the dataset stands; the weights are those of the state."""
    for options in ({}, {"weights": [1.0] * COUNT}):
        first = tc.Loader(cache, 4, collate="list", **options)
        for _, info in first:
            if info.step == 2:
                break
        if options:
            first.set_weights([float(i == 7) for i in range(COUNT)])
        dataset = tc.IterableCache(cache, 4, collate="list", **options)
        dataset.load_state_dict(first.state_dict())
        rest = tc.Loader(cache, 4, collate="list", **options)
        rest.load_state_dict(first.state_dict())
        made = DataLoader(dataset, batch_size=None, num_workers=2, multiprocessing_context=context)
        for _ in range(2):
            assert keys(made) == keys(rest)


def test_the_state_that_workers_have(cache: Any) -> None:
    dataset = tc.IterableCache(cache, 4, collate="list")
    next(iter(DataLoader(dataset, batch_size=None, num_workers=2)))
    with pytest.raises(RuntimeError, match="the workers have the state"):
        dataset.state_dict()
    dataset.set_epoch(3)
    assert dataset.state_dict()["position"]["epoch"] == 3


def test_batches_from_workers_are_light(cache: Any) -> None:
    made = DataLoader(tc.IterableCache(cache, 4, collate="list"), batch_size=None, num_workers=1)
    infos = [info for _, info in made]
    files = len(os.listdir("/proc/self/fd"))
    for info in infos:
        assert info.cache is None
        assert info.keys == [f"{number:03d}" for number in info.numbers]
        assert info.is_padding.dtype == torch.bool
    assert len(os.listdir("/proc/self/fd")) == files
    assert len(pickle.dumps(infos[0])) < 1000


def test_shared_memory_is_given_back(cache: Any) -> None:
    def held() -> tuple[int, int, list[str]]:
        """Return how many files in shared memory this process has open and mapped, and which are called after it."""
        maps = Path("/proc/self/maps").read_text().count("/dev/shm/")
        links = [os.readlink(link) for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
        names = [name for name in os.listdir("/dev/shm") if f"_{os.getpid()}_" in name]
        return maps, sum(link.startswith("/dev/shm/") for link in links), names

    gc.collect()
    before = held()
    dataset = tc.IterableCache(cache, 4, collate="list")
    epochs(dataset, 2, 3)
    assert held() != before
    next(iter(DataLoader(dataset, batch_size=None, num_workers=2)))
    del dataset
    gc.collect()
    assert held() == before
