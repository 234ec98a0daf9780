"""Batches, views, joins and loaders of a SharedDataset equal those of shards with the same samples."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import wds_tensorcache as tc
from tests.reading.batches import write
from tests.same import assert_same

COUNT = 30


class Nested:
    """Tensors of equal and of differing shapes. With 20,000 values, a hit aliases shared memory; with 20, it copies."""

    def __init__(self, num_values: int = 20_000) -> None:
        self.num_values = num_values

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {
            "large": torch.arange(self.num_values, dtype=torch.float32) + index,
            "inner": [{"bf16": torch.full((3, 2), index).bfloat16(), "array": np.arange(4) * index}, f"text {index}"],
            "tokens": torch.arange(1 + index % 7) + index,
            "flag": torch.tensor([index % 2 == 0]),
            "label": index,
        }


@pytest.fixture
def nested(request: pytest.FixtureRequest) -> Nested:
    return Nested(getattr(request, "param", 20_000))


LARGE_AND_SMALL = pytest.mark.parametrize("nested", [20_000, 20], ids=["large", "small"], indirect=True)


@pytest.fixture
def shared(tmp_path: Path, nested: Nested) -> Iterator[tc.SharedDataset]:
    with tc.SharedDataset(nested, "batches", directory=tmp_path) as opened:
        yield opened


@pytest.fixture
def stored(tmp_path: Path, nested: Nested) -> Iterator[tc.TensorCache]:
    write(tmp_path / "shards" / "%03d.tar", {str(index): nested[index] for index in range(COUNT)}, max_samples=11)
    with tc.open(tmp_path / "shards") as cache:
        yield cache


def _plain(batch: Any) -> Any:
    """Return a batch with lists in place of lazily decoded columns (`Leaves`)."""
    if isinstance(batch, dict):
        return {key: _plain(value) for key, value in batch.items()}
    if isinstance(batch, list):
        return [_plain(value) for value in batch]
    return batch.tolist() if type(batch).__name__ == "Leaves" else batch


@LARGE_AND_SMALL
@pytest.mark.parametrize(
    "collate", [{"tokens": "list"}, {"tokens": "pad"}, {"*": "list"}, {"tokens": tc.pad(to=9, value=5)}]
)
def test_batches_equal_those_of_shards(shared: tc.SharedDataset, stored: tc.TensorCache, collate: Any) -> None:
    for indices in ([0, 29, 7, 7, 15], list(range(COUNT)), [3]):
        expected = stored.read_batch([str(index) for index in indices], collate=collate)
        for _ in range(2):
            assert_same(_plain(expected), _plain(shared.read_batch(indices, collate=collate)))
    assert shared.stats().misses == COUNT


@LARGE_AND_SMALL
def test_views_keys_read_tensors_and_nest_equal_those_of_shards(
    shared: tc.SharedDataset, stored: tc.TensorCache
) -> None:
    keys = [str(index) for index in range(COUNT)]
    ordered = stored[keys]
    assert list(shared.keys()) == keys
    for view, expected in (
        (shared[5:20:3], ordered[5:20:3]),
        (shared.select("inner.*"), ordered.select("inner.*")),
        (shared.select(["large", "flag"])[[4, 2]], ordered.select(["large", "flag"])[[4, 2]]),
        (
            shared.filter(lambda entry: entry.shapes["tokens"] == (3,)),
            ordered.filter(lambda e: e.shapes["tokens"] == (3,)),
        ),
    ):
        assert list(view.keys()) == list(expected.keys())
        samples = [tc.realize(sample) for sample in expected]
        assert_same(samples, list(view))
        assert_same(samples[1::-1], view.__getitems__([1, 0]))
        assert_same(
            _plain(expected.read_batch([1, 0], collate="list")), _plain(view.read_batch([1, 0], collate="list"))
        )
    tensors = shared.read_tensors([3, 4], collate="auto")
    assert_same(stored.read_tensors(["3", "4"], collate="auto"), tensors)
    assert_same(
        _plain(ordered.nest([3, 4], {"large": tensors["large"]})),
        _plain(shared.nest([3, 4], {"large": tensors["large"]})),
    )
    assert shared["12"]["label"] == 12
    repeated = shared[[5, 3, 0, 3]]
    assert [repeated.index(key) for key in ("5", "3", "0")] == [0, 1, 2]
    assert [key in shared for key in ("12", "012", "30", "-1", "x", 12)] == [True] + 5 * [False]
    with pytest.raises(KeyError, match="indices"):
        shared["x"]


def test_the_schema_covers_the_samples_in_shared_memory(shared: tc.SharedDataset, stored: tc.TensorCache) -> None:
    assert shared.schema["tokens"].num_samples == 1
    list(shared)
    assert shared.schema == stored.schema
    assert "30 samples" in repr(shared)


def test_errors_of_a_batch_name_samples(shared: tc.SharedDataset) -> None:
    with pytest.raises(tc.BatchError, match="'tokens' is .* in sample '3'.* in '4'"):
        shared.read_batch([3, 4])
    with pytest.raises(IndexError):
        shared.read_batch([COUNT])
    with pytest.raises(ValueError, match="at least one sample"):
        shared.read_batch([])


def test_a_loader_loads_each_sample_once_and_resumes(shared: tc.SharedDataset) -> None:
    loader = tc.Loader(shared, 4, shuffle=True, seed=3, collate={"tokens": "pad"})
    assert sorted(label for batch in loader for label in batch["label"]) == list(range(COUNT))
    seen: list[int] = []
    for number, batch in enumerate(loader):
        seen += batch["label"]
        if number == 2:
            state = loader.state_dict()
            break
    again = tc.Loader(shared, 4, shuffle=True, seed=3, collate={"tokens": "pad"})
    again.load_state_dict(state)
    seen += [label for batch in again for label in batch["label"]]
    assert sorted(seen) == list(range(COUNT))
    assert shared.stats().misses == COUNT


def test_a_torch_loader_with_buckets_and_a_loader_with_blocks(shared: tc.SharedDataset) -> None:
    loader = tc.torch_loader(shared, 5, num_workers=2, shuffle=True, bucket_by="tokens")
    batches = list(loader)
    blocks = tc.Loader(shared, 4, shuffle="blocks", collate={"tokens": "list"})
    assert sorted(label for batch in blocks for label in batch["label"]) == list(range(COUNT))
    assert sorted(label for batch in batches for label in batch["label"]) == list(range(COUNT))
    assert all(len({label % 7 for label in batch["label"]}) == 1 for batch in batches)


def test_a_shared_dataset_is_joined_by_key(nested: Nested, shared: tc.SharedDataset, stored: tc.TensorCache) -> None:
    joined = tc.join({"shared": shared, "stored": stored})
    for index in (0, 17):
        assert_same(nested[index], joined[str(index)]["shared"])
        assert joined[str(index)]["stored"]["label"] == index
    batch = joined.read_batch(["4", "11"], collate={"*.tokens": "list"})
    assert torch.equal(batch["shared"]["large"], batch["stored"]["large"])
