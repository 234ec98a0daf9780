"""Workers of torch's loaders: the loader's own sequence, whatever their number, and resumed at every step."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

import wds_tensorcache as tc

COUNT = 23
pytestmark = [
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),  # more workers than cores
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning"),  # torchdata looks at all of torch
]


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[Any]:
    with tc.ShardWriter(tmp_path / "%d.tar", max_samples=5, fsync=False) as sink:
        for i in range(COUNT):
            sink.write(f"{i:03d}", {"x": torch.full((1 + i % 3,), i), "i": i})
    with tc.open(tmp_path) as opened:
        yield opened


def keys(batches: Any) -> list[list[str]]:
    return [info.keys for _, info in batches]


def modes(cache: Any) -> dict[str, dict[str, Any]]:
    return {
        "all": {"cache": cache},
        "buckets": {"cache": cache, "bucket_by": "x"},
        "mix": {"mix": {"a": (cache, 0.5), "b": (cache[3:9], 0.5)}},
        "weights": {"cache": cache, "weights": np.arange(COUNT)},
    }


@pytest.mark.parametrize("mode", ["all", "buckets", "mix", "weights"])
@pytest.mark.parametrize("num_workers", [0, 1, 2, 3])
@pytest.mark.parametrize("persistent", [False, True])
def test_workers_give_the_sequence_of_one_process(cache: Any, mode: str, num_workers: int, persistent: bool) -> None:
    if persistent and not num_workers:
        return
    options: dict[str, Any] = {"batch_size": 4, "collate": "list", **modes(cache)[mode]}
    loader = tc.Loader(**options)
    expected = [keys(loader) for _ in range(3)]
    dataset = tc.IterableCache(**options)
    made = DataLoader(dataset, batch_size=None, num_workers=num_workers, persistent_workers=persistent)
    assert len(made) == len(loader)
    for epoch in range(3):
        batches = list(made)
        assert keys(batches) == expected[epoch]
        for batch, info in batches:
            assert [torch.full((1 + i % 3,), i).tolist() for i in batch["i"]] == [x.tolist() for x in batch["x"]]
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


@pytest.mark.parametrize("mode", ["all", "buckets", "mix"])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_stateful_data_loader(cache: Any, mode: str, num_workers: int) -> None:
    def begun() -> Any:
        options: dict[str, Any] = {"batch_size": 5, "collate": "list", **modes(cache)[mode]}
        return StatefulDataLoader(tc.IterableCache(**options), batch_size=None, num_workers=num_workers)

    made, states = begun(), []
    whole = []
    for batch in made:
        whole.append(batch[1].keys)
        states.append(copy.deepcopy(made.state_dict()))
    for number, state in enumerate(states[:-1]):
        again = begun()
        again.load_state_dict(pickle.loads(pickle.dumps(state)))
        assert keys(again) == whole[number + 1 :]


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
def test_epochs_that_workers_left(cache: Any, mode: str) -> None:
    options: dict[str, Any] = {"batch_size": 2, "collate": "list", **modes(cache)[mode]}
    made = DataLoader(tc.IterableCache(**options), batch_size=None, num_workers=2, persistent_workers=True)
    for _ in range(2):
        for taken, _ in enumerate(made):
            if taken == 1:
                break
        steps = [info.step for _, info in made]
        assert steps == list(range(steps[0], steps[0] + len(made)))
