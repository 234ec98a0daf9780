"""Caches of datasets: each sample once, resumed after interruptions, and refused where an item has changed."""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset

import wds_tensorcache as tc
from tests.children import run_in_child
from tests.kills import compare
from tests.same import assert_same

COUNT = 23
MADE = {"model": "double", "revision": 1}


class Numbers(Dataset[dict[str, Any]]):
    """Items whose inputs may change."""

    def __init__(self, changed: tuple[int, ...] = (), count: int = COUNT, keyed: bool = False) -> None:
        self.changed, self.count, self.keyed = changed, count, keyed
        self.num_read = 0

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, i: int) -> dict[str, Any]:
        self.num_read += 1
        own = {"__key__": f"own{i}"} if self.keyed else {}
        return {"name": f"n{i}", "value": i + 100 * (i in self.changed)} | own


def double(items: list[dict[str, Any]]) -> list[Any]:
    return [{"x": torch.full((300,), 2 * item["value"]).bfloat16(), "of": item["value"]} for item in items]


def build(source: Any, out: Path, fn: Any = double, **options: Any) -> Any:
    return tc.build(
        source, fn, out, **{"fingerprint": MADE, "batch_size": 4, "max_samples": 5, "fsync": False} | options
    )


def counted(fn: Any = double) -> tuple[Any, list[int]]:
    """Return a function like `fn`, and what it has been called with."""
    called: list[int] = []

    def count(items: list[dict[str, Any]]) -> Any:
        called.extend(item["value"] for item in items)
        return fn(items)

    return count, called


def key(item: dict[str, Any]) -> str:
    return str(item["name"])


def digest(item: dict[str, Any]) -> str:
    return f"v{item['value']}"


def assert_doubled(cache: Any, keys: list[str], changed: tuple[int, ...] = ()) -> None:
    assert list(cache.keys()) == keys
    for i, name in enumerate(keys):
        assert_same(double([Numbers(changed)[i]])[0], tc.realize(cache[name]))


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_map_style_dataset(tmp_path: Path, num_workers: int) -> None:
    cache = build(Numbers(), tmp_path / "numbered", num_workers=num_workers)
    assert_doubled(cache, [f"{i:09d}" for i in range(COUNT)])
    assert cache.num_shards == 5
    assert cache.fingerprint == MADE
    assert_doubled(
        build(Numbers(), tmp_path / "keyed", keys=key, num_workers=num_workers), [f"n{i}" for i in range(COUNT)]
    )
    names = [f"k{i}" for i in range(COUNT)]
    assert_doubled(build(Numbers(), tmp_path / "named", keys=names, num_workers=num_workers), names)
    own = [f"own{i}" for i in range(COUNT)]
    for _ in range(2):
        fn, called = counted()
        assert_doubled(build(Numbers(keyed=True), tmp_path / "own", fn, num_workers=num_workers), own)
    assert called == []


def test_an_iterable(tmp_path: Path) -> None:
    items = [Numbers(keyed=True)[i] for i in range(COUNT)]
    assert_doubled(build(iter(items), tmp_path / "a"), [f"own{i}" for i in range(COUNT)])
    plain = build(iter(range(5)), tmp_path / "b", lambda batch: [{"i": i} for i in batch])
    assert list(plain.keys()) == [f"{i:09d}" for i in range(5)]


def test_another_cache(tmp_path: Path) -> None:
    first = build(Numbers(), tmp_path / "a", keys=key)
    second = build(first, tmp_path / "b", lambda batch: [{"x": sample["x"] + 1} for sample in batch])
    assert list(second.keys()) == list(first.keys())
    assert second["n3"]["x"].load()[0] == 7


def test_batches_are_cut_into_samples(tmp_path: Path) -> None:
    """A batch is cut into samples, whose bytes are their own rows alone."""

    def model(items: list[Any]) -> Any:
        values = torch.tensor([item["value"] for item in items])
        texts = [f"text {item['value']}" for item in items]
        return {"x": values[:, None].expand(-1, 5).float(), "more": {"text": texts, "y": values.numpy()}}

    cache = build(Numbers(), tmp_path, model)
    for i in range(COUNT):
        expected = {"x": torch.full((5,), float(i)), "more": {"text": f"text {i}", "y": np.int64(i)}}
        assert_same(expected, tc.realize(cache[i]))
    tensors = build(Numbers(), tmp_path / "tensors", lambda items: torch.tensor([[item["value"]] for item in items]))
    assert tc.realize(tensors[7]).tolist() == [7]


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (lambda items: double(items)[1:], "has 3 rows, expected one row for each of 4 items"),
        (lambda items: {"x": torch.ones(3, 4)}, r"\['x'\] has 3 rows"),
        (lambda items: {"x": {"y": 5}}, r"\['x'\]\['y'\] is a int"),
        (lambda items: torch.tensor(1), "is a Tensor"),
        (lambda items: None, "is a NoneType"),
        (lambda items: (torch.ones(4, 2), torch.ones(4, 3)), "is a tuple; return a dict of tensors"),
        (lambda items: {"x": tuple(torch.ones(2) for _ in items)}, r"\['x'\] is a tuple"),
    ],
)
def test_not_one_row_for_each_item(tmp_path: Path, made: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build(Numbers(), tmp_path, made)


def test_called_again(tmp_path: Path) -> None:
    build(Numbers(), tmp_path / "x", keys=[f"{i}" for i in range(COUNT)])
    fn, called = counted()
    source = Numbers()
    build(source, tmp_path / "x", fn, keys=[f"{i}" for i in range(COUNT)])
    assert (called, source.num_read) == ([], 0)  # what is there is not even read


@pytest.mark.parametrize("fails_at", [0, 4, 9, 22])
@pytest.mark.parametrize("where", ["fn", "source", "key", "digest", "writer"])
def test_an_item_that_fails(tmp_path: Path, fails_at: int, where: str) -> None:
    """It costs no sample that was computed before it, and the error names it."""

    def fail_in(place: str, value: int) -> None:
        if where == place and value == fails_at:
            raise ZeroDivisionError

    def broken(items: list[Any]) -> Any:
        for item in items:
            fail_in("fn", item["value"])
        return [object() if where == "writer" and item["value"] == fails_at else plain([item])[0] for item in items]

    def plain(items: list[Any]) -> Any:
        return [{"i": item["value"]} for item in items]

    def items() -> Iterator[Any]:
        for i in range(COUNT):
            fail_in("source", i)
            yield Numbers()[i]

    def failing_key(item: dict[str, Any]) -> str:
        return "no.key" if where == "key" and item["value"] == fails_at else key(item)

    def failing_digest(item: dict[str, Any]) -> str:
        fail_in("digest", item["value"])
        return digest(item)

    error = {"key": tc.InvalidKeyError, "writer": tc.EncodeError}.get(where, ZeroDivisionError)
    with pytest.raises(error) as caught:
        build(items(), tmp_path / "x", broken, keys=failing_key, digest=failing_digest)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("tensorcache-build")]
    told = str(caught.value) + "".join(getattr(caught.value, "__notes__", []))
    if where in ("key", "writer") or sys.version_info >= (3, 11):
        assert {"writer": f"sample 'n{fails_at}'", "fn": f"from item {fails_at // 4 * 4} "}.get(
            where, f"item {fails_at}"
        ) in told
    kept = fails_at if where == "writer" else fails_at // 4 * 4  # the batch is not complete
    assert len(tc.open(tmp_path / "x")) == kept if kept else os.listdir(tmp_path / "x") == []
    fn, called = counted(plain)
    cache = build(Numbers(), tmp_path / "x", fn, keys=key, digest=digest)
    assert called == list(range(kept // 4 * 4, COUNT))  # whole batches
    assert list(cache.keys()) == [f"n{i}" for i in range(COUNT)]
    assert [tc.realize(sample) for sample in cache] == [{"i": i} for i in range(COUNT)]
    assert tc.verify(tmp_path / "x").ok


def test_an_item_that_fails_in_a_worker(tmp_path: Path) -> None:
    class Failing(Numbers):
        def __getitem__(self, i: int) -> dict[str, Any]:
            if i == 17:
                raise ZeroDivisionError
            return super().__getitem__(i)

    def work() -> None:
        with pytest.raises(ZeroDivisionError) as caught:
            build(Failing(), tmp_path, num_workers=2)
        if sys.version_info >= (3, 11):
            assert "item 17 of the source" in str(caught.value)
        os._exit(0)  # torch waits ten seconds for workers whose loader is collected before its end

    assert run_in_child(work) == 0
    assert len(tc.open(tmp_path)) == 16


def test_an_item_that_fails_where_the_shard_does_too(tmp_path: Path) -> None:
    """The item's error is raised, and says what was lost."""

    def fails(items: list[Any]) -> Any:
        if items[0]["value"] == 20:  # the first batches are written by now
            (tmp_path / "000000.tar").write_bytes(b"of another program")
            raise ZeroDivisionError
        return double(items)

    with pytest.raises(ZeroDivisionError) as caught:
        build(Numbers(), tmp_path, fails, max_samples=100)
    if sys.version_info >= (3, 11):
        assert "of the unfinished shard are lost: " in caught.value.__notes__[1]
        assert "000000.tar was created after this writer started" in caught.value.__notes__[1]
    assert os.listdir(tmp_path) == ["000000.tar"]


# a writer that was killed after it had named a shard has not listed it
@pytest.mark.filterwarnings("ignore:.*manifest.json does not list 1 of the shards:UserWarning")
def test_killed(tmp_path: Path) -> None:
    """Real processes, really killed: in the end all is as if nothing had been."""
    build(Numbers(), tmp_path / "whole", digest=digest).close()
    chance = random.Random(1)
    for _ in range(30):

        def work() -> None:
            build(Numbers(), tmp_path / "x", lambda items: (time.sleep(0.005), double(items))[1], digest=digest)

        assert run_in_child(work, chance.uniform(0, 0.06)) in (0, -signal.SIGKILL)
        if (tmp_path / "x" / "manifest.json").exists():
            with tc.open(tmp_path / "x", expect=MADE) as cache:
                assert_doubled(cache, [f"{i:09d}" for i in range(len(cache))])
    build(Numbers(), tmp_path / "x", digest=digest).close()
    compare(tmp_path / "x", tmp_path / "whole")


@pytest.mark.parametrize("changed", [(0,), (22,), (0, 1, 2, 3, 4), (7, 13), tuple(range(COUNT))], ids=str)
def test_items_that_changed_are_refused(tmp_path: Path, changed: tuple[int, ...]) -> None:
    """Nothing is computed after the first of them; without `digest=`, the samples have no other digest."""
    build(Numbers(), tmp_path, digest=digest).close()
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    fn, called = counted()
    with pytest.raises(tc.StaleCacheError, match=rf"^{len(changed)} of 30 items have changed .*reuse='{tmp_path}'"):
        build(Numbers(changed, 30), tmp_path, fn, digest=digest)
    assert called == []
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before
    with pytest.warns(UserWarning, match=r"items 0, 1, 2, … \(23 of 23 compared\) .*written without digests"):
        build(Numbers(changed), tmp_path, fn).close()
    assert called == []


def test_samples_without_a_digest_have_changed(tmp_path: Path) -> None:
    build(Numbers(), tmp_path / "x").close()
    with pytest.raises(tc.StaleCacheError, match="23 of 23 items have changed"):
        build(Numbers(), tmp_path / "x", digest=digest)


def test_another_fingerprint(tmp_path: Path) -> None:
    build(Numbers(), tmp_path).close()
    with pytest.raises(tc.StaleCacheError, match="expected revision=2, but the cache was made with 1"):
        build(Numbers(), tmp_path, fingerprint=MADE | {"revision": 2})


def test_bad_arguments(tmp_path: Path) -> None:
    for options, error, message in (
        ({"keys": ["a"]}, ValueError, "1 keys for 23 items"),
        ({"keys": ["a"] * COUNT}, ValueError, "two items have the key 'a'"),
        ({"batch_size": 0}, ValueError, "batch_size=0"),
        ({"num_workers": -1}, ValueError, "num_workers=-1"),
        ({"keys": lambda item: f"no.{item['value']}"}, tc.InvalidKeyError, "a dot in its last part"),
        ({"fingerprint": {"x": object()}}, TypeError, "JSON"),
    ):
        with pytest.raises(error, match=message):
            build(Numbers(), tmp_path, **options)
    with pytest.raises(ValueError, match="generator has no length"):
        build((i for i in range(3)), tmp_path, num_workers=2)


def test_one_batch_of_any_size(tmp_path: Path) -> None:
    for number, source in enumerate((Numbers(), (Numbers()[i] for i in range(COUNT)))):
        with build(source, tmp_path / str(number), batch_size=1 << 70) as cache:
            assert len(cache) == COUNT


def test_writing_goes_on_behind_the_model(tmp_path: Path) -> None:
    """While a batch is computed, another thread writes the one before."""
    threads: set[str] = set()

    def encoder(members: dict[str, Any]) -> dict[str, Any]:
        threads.add(threading.current_thread().name)
        return {name: value.encode() for name, value in members.items()}

    build(Numbers(), tmp_path, digest=digest, encoder=encoder)
    assert threads == {"tensorcache-build_0"}


def test_progress(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    build(Numbers(), tmp_path, progress=True)
    assert "23/23" in capsys.readouterr().err
    build(Numbers(), tmp_path, progress=True)
    assert "23/23" in capsys.readouterr().err
    build(Numbers(count=3), tmp_path / "quiet", progress=False)
    assert not capsys.readouterr().err


class Calls(list[tuple[int, Any]]):
    """A function for `progress=` that records its calls, all of which must come from one thread."""

    def __init__(self) -> None:
        self.thread = threading.get_ident()

    def __call__(self, done: int, total: int | None) -> None:
        assert threading.get_ident() == self.thread
        self.append((done, total))

    def check(self, first: int, count: int, total: int | None = COUNT) -> None:
        """Assert that the calls begin with `first` samples, end with `count`, and never go back or repeat."""
        assert self[0] == (0, total)
        assert first in [done for done, _ in self]
        assert self[-1] == (count, total)
        assert self == sorted(set(self), key=lambda call: call[0])
        assert {each for _, each in self} == {total}


def test_progress_is_a_function(tmp_path: Path) -> None:
    """It counts samples, also those that are finished, and of a source without a length."""
    calls = Calls()
    build(Numbers(), tmp_path / "a", progress=calls).close()
    calls.check(0, COUNT)
    assert len(calls) > 3  # also during the build
    calls = Calls()
    build(Numbers(), tmp_path / "a", progress=calls).close()
    calls.check(4, COUNT)
    calls = Calls()
    source = [Numbers()[i] for i in range(COUNT)]
    build(iter(source), tmp_path / "b", progress=calls).close()
    calls.check(0, COUNT, None)


@pytest.mark.parametrize("changed", [(), (20,), (0, 1, 2, 3, 4, 5)], ids=str)
def test_progress_of_a_version(tmp_path: Path, changed: tuple[int, ...]) -> None:
    build(Numbers(), tmp_path / "a", digest=digest, keys=key).close()
    for _ in range(2):  # the second call finds the version complete
        calls = Calls()
        source = Numbers(changed)
        build(source, tmp_path / "b", digest=digest, keys=key, reuse=tmp_path / "a", progress=calls).close()
        calls.check(0, COUNT)
        assert len(calls) > 3


def test_an_error_of_progress_keeps_the_samples(tmp_path: Path) -> None:
    def fail(done: int, total: int | None) -> None:
        if done >= 8:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        build(Numbers(), tmp_path, progress=fail)
    fn, called = counted()
    build(Numbers(), tmp_path, fn).close()
    assert len(called) <= COUNT - 8  # two batches were written, and perhaps those that were computed meanwhile
    assert len(tc.open(tmp_path)) == COUNT


def test_a_sample_without_its_cache_is_not_finished(tmp_path: Path) -> None:
    made = {"model": 1}
    with tc.ShardWriter(tmp_path, fingerprint=made) as sink:
        sink.write("0", {"x": torch.zeros(3)})
        sink.write("1", txt=b"what remains of a sample")
    with pytest.raises(tc.FormatError, match=r"000000\.tar: sample '1' has lost its cache.*; delete the shard"):
        tc.build(
            range(2), lambda batch: [{"x": torch.zeros(3)} for _ in batch], tmp_path, fingerprint=made, keys=["0", "1"]
        )
