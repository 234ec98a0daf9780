"""A view of a view is what a list of the same samples is, however shards are cut; a range stays one, and costs nothing."""

from __future__ import annotations

import itertools
import pickle
import random
import tempfile
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import wds_tensorcache as tc
from benchmarks import sparse

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
                members: dict[str, Any] = {"json": number} if number % 3 else {}
                if number % 5 or shard % 2:
                    width = 1 + number % 4
                    members["x.tensorcache"] = {"x": np.full(width, number), "n": number}
                    found.append({"key": form % number, "n": number, "width": width, "shard": shard})
                writer.write(form % number, **({"json": number} | members))
    return found


parts = st.integers(-30, 30) | st.none()
slices = st.builds(slice, parts, parts, st.none() | st.integers(-4, 4).filter(bool))
steps = st.lists(slices | st.sampled_from(["shuffle", "filter", "some", "pickle", "keys"]), max_size=4)


@settings(max_examples=60)
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
    assert [int(row[0]) for row in view.read_batch(range(len(keys)), collate="list")["x"]] == [e["n"] for e in expected]
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


def test_keys_of_a_whole_shard_in_another_order(tmp_path: Path) -> None:
    with tc.ShardWriter(tmp_path / "0.tar") as writer:
        for number in range(4):
            writer.write(f"k{number}", number)
    with tc.open(tmp_path) as cache:
        for order in itertools.permutations(range(4)):
            assert list(cache[list(order)].keys()) == [f"k{number}" for number in order]
        assert list(cache[[0, 1, 1, 3]].keys()) == ["k0", "k1", "k1", "k3"]


# --- what it costs, at 40,000 samples in 40 shards ---

NUM_SHARDS, PER_SHARD = 40, 1000
COUNT = NUM_SHARDS * PER_SHARD


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("many") / "cache"
    sparse.write_shards(folder, NUM_SHARDS, PER_SHARD)
    return str(folder)


@pytest.fixture
def cache(many: str) -> Iterator[Any]:
    with tc.open(many) as opened:
        assert len(opened.members) == 0  # the indexes are read
        yield opened


class Counted(np.ndarray[Any, Any]):
    """An array that counts the elements of arrays that are computed with, of itself and all that comes of it."""

    touched = 0

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **options: Any) -> Any:
        return _counted(getattr(ufunc, method), inputs, options)

    def __array_function__(self, function: Any, types: Any, args: Any, kwargs: Any) -> Any:
        return _counted(function, args, kwargs)


def _counted(function: Callable[..., Any], args: Any, options: Any) -> Any:
    plain, options = _convert(args, np.ndarray), _convert(options, np.ndarray)
    Counted.touched += max((value.size for value in plain if isinstance(value, np.ndarray)), default=0)
    return _convert(function(*plain, **options), Counted)


def _convert(value: Any, kind: type[np.ndarray[Any, Any]]) -> Any:
    if isinstance(value, (tuple, list)):
        return type(value)(_convert(item, kind) for item in value)
    if isinstance(value, dict):
        return {name: _convert(item, kind) for name, item in value.items()}
    return value.view(kind) if isinstance(value, np.ndarray) else value


@pytest.mark.parametrize(
    ("use", "limit"),
    [
        (lambda view: view.schema, 24),
        (lambda view: view.select("x"), 24),
        (lambda view: view.members, 24),
        (lambda view: tc.Loader(view, bucket_by="x", num_threads=0), 24),
        (lambda view: [view[sparse.key_of(number)] for number in range(400)], 40),
    ],
    ids=["schema", "select", "members", "buckets", "keys"],
)
def test_samples_are_not_looked_at_once_for_each_shard_or_key(cache: Any, use: Any, limit: int) -> None:
    view = tc.TensorCache(cache._store, np.random.default_rng(0).permutation(COUNT).view(Counted))
    Counted.touched = 0
    use(view)
    assert Counted.touched <= limit * COUNT


@pytest.mark.parametrize(
    ("use", "nbytes"),
    [
        (lambda cache: cache.schema, 8 * COUNT // 2),
        (lambda cache: cache.members, 8 * COUNT // 2),
        (lambda cache: cache[: COUNT // 2], 10_000),
        (lambda cache: cache[::-2][5:][::3], 10_000),
        (lambda cache: cache[sparse.key_of(COUNT - 1)], 64 << 10),
        (lambda cache: sparse.key_of(COUNT) in cache, 64 << 10),
        (lambda cache: tc.join({"a": cache[::2], "b": cache[::2]}), 10_000),
        (lambda cache: sum(map(len, cache[::-1].keys())), 4 * COUNT),
    ],
    ids=["schema", "members", "slice", "slices", "key", "no key", "join", "keys back"],
)
def test_little_memory_for_a_range(cache: Any, use: Callable[[Any], Any], nbytes: int) -> None:
    use(cache)  # what is kept for good
    tracemalloc.start()
    try:
        use(cache)
        assert tracemalloc.get_traced_memory()[1] < nbytes
    finally:
        tracemalloc.stop()


def test_a_join_of_other_shards_with_the_same_keys_holds_no_keys(cache: Any, many: str) -> None:
    with tc.open(many) as other:
        assert other.members == {}
        join = tc.join  # imports its module
        tracemalloc.start()
        try:
            join({"a": cache, "b": other})
            assert tracemalloc.get_traced_memory()[1] < 4 * COUNT
        finally:
            tracemalloc.stop()


def test_a_slice_of_slices_is_pickled_as_a_range(cache: Any) -> None:
    view = cache[::-2][10:][:-5:3]
    assert len(pickle.dumps(view)) < len(pickle.dumps(cache)) + 200
    with pickle.loads(pickle.dumps(view)) as copied:
        assert len(copied) == len(view)
        assert list(copied.keys()[:50]) == list(view.keys()[:50])


def test_shards_with_holes_are_shards(tmp_path: Path) -> None:
    """Samples of shards that the benchmark makes are those that `ShardWriter` writes."""
    sparse.write_shards(tmp_path / "cache", 3, 20)
    assert sorted(sparse.numbers_read(60)) == list(range(60))
    assert tc.verify(tmp_path / "cache").ok
    with tc.ShardWriter(tmp_path / "%06d.tar", max_samples=20, fsync=False) as writer:
        for number in range(60):
            writer.write(sparse.key_of(number), sparse.sample_of(number))
    for path in tmp_path.glob("*.tar"):
        assert path.read_bytes() == (tmp_path / "cache" / path.name).read_bytes()
