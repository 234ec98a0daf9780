"""A view of a view is what a list of the same samples is, however shards are cut; a range stays one, and costs nothing."""

from __future__ import annotations

import pickle
import random
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import wds_tensorcache as tc
from benchmarks.scenarios.many_shards import write_shards
from tests.hostile.pickles import little_memory

FORMS = ["%03d", "%d", "k%d/e", "shuffled-%d"]


def write(folder: str, sizes: list[int], rng: random.Random, form: str) -> list[dict[str, Any]]:
    """Write shards of these sizes; return what is known of the samples that have the cache "x"."""
    numbers = list(range(sum(sizes)))
    if form == FORMS[-1]:
        rng.shuffle(numbers)
    found: list[dict[str, Any]] = []
    done = iter(numbers)
    for shard, size in enumerate(sizes):
        with tc.ShardWriter(f"{folder}/{shard:03d}.tar", manifest=False, dali_index=False, fsync=False) as writer:
            for number in (next(done) for _ in range(size)):
                members: dict[str, Any] = {"json": number}
                if number % 5 or shard % 2:
                    width = 1 + number % 4
                    members["x.tensorcache"] = {"x": np.full(width, number), "n": number}
                    found.append({"key": form % number, "n": number, "width": width, "shard": shard})
                writer.write(form % number, **members)
    return found


parts = st.integers(-30, 30) | st.none()
slices = st.builds(slice, parts, parts, st.none() | st.integers(-4, 4).filter(bool))
steps = st.lists(slices | st.sampled_from(["shuffle", "filter", "some", "pickle", "keys"]), max_size=4)


@settings(max_examples=30)
@given(
    st.lists(st.integers(1, 7), min_size=1, max_size=6),
    steps,
    st.randoms(use_true_random=False),
    st.sampled_from(FORMS),
)
def test_a_list_of_the_same_samples(sizes: list[int], chain: list[Any], rng: random.Random, form: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        model = write(folder, sizes, rng, form)
        if not model:
            return
        with tc.open(folder, cache="x") as cache:
            view, expected = cache, model
            for step in chain:
                count = len(expected)
                if isinstance(step, slice):
                    view, expected = view[step], expected[step]
                elif step == "shuffle":
                    order = rng.sample(range(count), count)
                    view, expected = view[np.array(order, np.int64)], [expected[i] for i in order]
                elif step == "some" and count:
                    some = [rng.randrange(-count, count) for _ in range(5)]
                    view, expected = view[some], [expected[i] for i in some]
                elif step == "keys" and len({each["key"] for each in expected}) == count:
                    view, expected = view[[each["key"] for each in expected[::2]]], expected[::2]
                elif step == "filter":
                    view = view.filter(lambda entry: entry.shapes["x"][0] != 2)
                    expected = [each for each in expected if each["width"] != 2]
                elif step == "pickle":
                    view = pickle.loads(pickle.dumps(view))
            check(view, expected, model)


def check(view: Any, expected: list[dict[str, Any]], model: list[dict[str, Any]]) -> None:
    """Assert that a view is a list of the samples that are expected."""
    keys = [each["key"] for each in expected]
    assert len(view) == len(keys)
    assert list(view.keys()) == keys
    assert list(view.keys()[::-1]) == keys[::-1]
    assert [sample["n"] for sample in view] == [each["n"] for each in expected]
    for each in model:
        assert (each["key"] in view) == (each["key"] in keys)
        if each["key"] in keys:
            assert view[each["key"]]["n"] == each["n"]
    assert "no" not in view
    for number in (len(keys), -len(keys) - 1):
        with pytest.raises(IndexError, match=rf"index {number} out of range"):
            view[number]
    assert view.members == ({"json": len(keys)} if keys else {})
    schema = view.schema
    assert list(schema) == (["x"] if keys else [])
    if not keys:
        return
    widths = [each["width"] for each in expected]
    assert schema["x"].num_samples == len(keys)
    assert schema["x"].nbytes == 8 * sum(widths)
    assert schema["x"].shape == (min(widths) if len(set(widths)) == 1 else (min(widths), max(widths)),)
    numbers = [each["n"] for each in expected]
    batch, info = view.read_batch_with_info(range(len(keys)), collate="list")
    assert [int(row[0]) for row in batch["x"]] == numbers
    assert info.keys == keys
    assert [int(raw) for raw in view.read_members(range(len(keys)), "json")] == numbers
    buckets: dict[Any, list[int]] = {}
    for _, info in tc.Loader(view, 4, bucket_by="x", shuffle=False, num_threads=0).with_info():
        buckets.setdefault(info.source, []).extend(info.indices[~info.is_padding.numpy()].tolist())
    assert {shape: sorted(numbers) for shape, numbers in buckets.items()} == {
        (width,): [at for at, each in enumerate(widths) if each == width] for width in set(widths)
    }
    joined = tc.join({"a": view, "b": view[np.arange(len(keys))]})
    assert [sample["b"]["n"] for sample in joined] == [each["n"] for each in expected]
    if len(set(keys)) == len(keys):
        order = random.Random(0).sample(range(len(keys)), len(keys))
        joined = tc.join({"a": view, "b": view[order]})
        assert [(sample["a"]["n"], sample["b"]["n"]) for sample in joined] == [(each["n"],) * 2 for each in expected]
        with pytest.raises(KeyError, match="cache 0 with"):
            tc.join([view, view[:-1]])


# --- what it costs, at 40,000 samples in 40 shards ---

NUM_SHARDS, PER_SHARD = 40, 1000
COUNT = NUM_SHARDS * PER_SHARD


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("many") / "cache"
    write_shards(folder, NUM_SHARDS, PER_SHARD)
    return str(folder)


@pytest.fixture
def cache(many: str) -> Iterator[Any]:
    with tc.open(many) as opened:
        assert len(opened.members) == 0  # the indexes are read
        yield opened


@pytest.mark.parametrize(
    ("use", "nbytes"),
    [
        (lambda cache: cache.schema, 8 * COUNT // 2),
        (lambda cache: cache.members, 8 * COUNT // 2),
        (lambda cache: cache[: COUNT // 2], 10_000),
        (lambda cache: cache[::-2][5:][::3], 10_000),
        (lambda cache: cache[f"{COUNT - 1:08d}"], 64 << 10),
        (lambda cache: f"{COUNT:08d}" in cache, 64 << 10),
        (lambda cache: tc.join({"a": cache[::2], "b": cache[::2]}), 10_000),
        (lambda cache: sum(map(len, cache[::-1].keys())), 4 * COUNT),
    ],
    ids=["schema", "members", "slice", "slices", "key", "no key", "join", "keys back"],
)
def test_little_memory_for_a_range(cache: Any, use: Callable[[Any], Any], nbytes: int) -> None:
    use(cache)  # what is kept for good
    with little_memory(nbytes):
        use(cache)


def test_a_slice_of_slices_is_pickled_as_a_range(cache: Any) -> None:
    view = cache[::-2][10:][:-5:3]
    assert len(pickle.dumps(view)) < len(pickle.dumps(cache)) + 200
    with pickle.loads(pickle.dumps(view)) as copied:
        assert len(copied) == len(view)
        assert list(copied.keys()[:50]) == list(view.keys()[:50])
