"""Caches of datasets: each sample once, resumed after interruptions, and refused where an item has changed."""

from __future__ import annotations

import os
import select
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
from tests.children import finish, run_in_child, start
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
    options = {"fingerprint": MADE, "batch_size": 4, "max_samples": 5, "fsync": False} | options
    return tc.build(source, fn, out, **options)


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


def test_a_map_style_dataset(tmp_path: Path) -> None:
    cache = build(Numbers(), tmp_path / "numbered", num_workers=2)
    assert_doubled(cache, [f"{i:09d}" for i in range(COUNT)])
    assert cache.num_shards == 5
    assert cache.fingerprint == MADE
    assert_doubled(build(Numbers(), tmp_path / "keyed", keys=key), [f"n{i}" for i in range(COUNT)])
    names = [f"k{i}" for i in range(COUNT)]
    assert_doubled(build(Numbers(), tmp_path / "named", keys=names), names)
    for num_workers in (0, 2):
        fn, called = counted()
        cache = build(Numbers(keyed=True), tmp_path / "own", fn, num_workers=num_workers)
        assert_doubled(cache, [f"own{i}" for i in range(COUNT)])
    assert called == []


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
        (lambda items: double(items)[1:], "fn returned 3 rows, expected one row for each of 4 items"),
        (lambda items: {"x": torch.ones(1, 4)}, "fn returned 1 row at 'x', expected"),
        (lambda items: {"x": {"y": 5}}, "a int without rows at 'x.y'"),
        (lambda items: torch.tensor(1), "fn returned a Tensor"),
        (lambda items: None, "fn returned a NoneType"),
        (lambda items: {}, "fn returned a dict without rows, expected one row for each of 4 items"),
        (lambda items: (torch.ones(4, 2), torch.ones(4, 3)), "fn returned a tuple; return a dict of tensors"),
        (lambda items: {"x": tuple(torch.ones(2) for _ in items)}, "fn returned a tuple at 'x'; return"),
    ],
)
def test_not_one_row_for_each_item(tmp_path: Path, made: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build(Numbers(), tmp_path, made)


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
        names = {"writer": f"sample 'n{fails_at}'", "fn": f"from item {fails_at // 4 * 4} "}
        assert names.get(where, f"item {fails_at}") in told
    kept = fails_at if where == "writer" else fails_at // 4 * 4  # the batch is not complete
    assert len(tc.open(tmp_path / "x")) == kept if kept else os.listdir(tmp_path / "x") == []
    fn, called = counted(plain)
    cache = build(Numbers(), tmp_path / "x", fn, keys=key, digest=digest)
    assert called == list(range(kept // 4 * 4, COUNT))  # whole batches
    assert list(cache.keys()) == [f"n{i}" for i in range(COUNT)]
    assert [tc.realize(sample) for sample in cache] == [{"i": i} for i in range(COUNT)]
    assert tc.verify(tmp_path / "x").ok


def test_workers_end_with_a_killed_process(tmp_path: Path) -> None:
    """Also if they wait until what they have read is taken."""

    class Large(Numbers):
        def __getitem__(self, i: int) -> Any:
            return bytes(1 << 20)

    def fn(items: list[Any]) -> Any:
        os.write(writing, b"x")
        signal.pause()

    reading, writing = os.pipe()
    child = start(lambda: build(Large(), tmp_path, fn, num_workers=2))
    os.close(writing)
    assert os.read(reading, 1) == b"x"
    os.kill(child, signal.SIGKILL)
    assert finish([child]) == [-signal.SIGKILL]
    assert select.select([reading], [], [], 60)[0]  # no process has the other end any more
    assert os.read(reading, 1) == b""
    os.close(reading)


def test_workers_that_start_end_with_a_killed_process(tmp_path: Path) -> None:
    """A worker stops itself right after it is forked, and goes on when its parent has been killed."""

    def stop() -> None:
        os.write(writing, b"%d" % os.getpid())
        os.kill(os.getpid(), signal.SIGSTOP)

    def work() -> None:
        os.register_at_fork(after_in_child=stop)
        build(Numbers(), tmp_path, num_workers=1)

    reading, writing = os.pipe()
    child = start(work)
    os.close(writing)
    worker = int(os.read(reading, 20))
    while "(stopped)" not in Path(f"/proc/{worker}/status").read_text():
        time.sleep(0.01)
    os.kill(child, signal.SIGKILL)
    assert finish([child]) == [-signal.SIGKILL]
    os.kill(worker, signal.SIGCONT)
    assert select.select([reading], [], [], 60)[0]
    assert os.read(reading, 1) == b""
    os.close(reading)


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


def test_a_sample_without_its_cache_is_not_finished(tmp_path: Path) -> None:
    zeros, made = {"x": torch.zeros(3)}, {"model": 1}
    with tc.ShardWriter(tmp_path, fingerprint=made) as sink:
        sink.write("0", zeros)
        sink.write("1", txt=b"what remains of a sample")
    with pytest.raises(tc.FormatError, match=r"000000\.tar: sample '1' has lost its cache.*; delete the shard"):
        tc.build(range(2), lambda batch: [zeros] * len(batch), tmp_path, fingerprint=made, keys=["0", "1"])


@pytest.mark.parametrize("kind", ["map", "iterable"])
def test_progress(tmp_path: Path, kind: str) -> None:
    """It counts samples, also those that are finished, and of a source without a length; one thread calls it."""
    total = COUNT if kind == "map" else None
    for first in (0, 4):  # the second build finds all samples
        calls: list[tuple[int, int | None]] = []
        threads = set()

        def progress(done: int, total: int | None) -> None:
            calls.append((done, total))  # noqa: B023 called here
            threads.add(threading.get_ident())  # noqa: B023

        source = Numbers() if kind == "map" else iter([Numbers()[i] for i in range(COUNT)])
        build(source, tmp_path, progress=progress).close()
        assert (calls[0], calls[-1]) == ((0, total), (COUNT, total))
        assert (first, total) in calls
        assert [done for done, _ in calls] == sorted({done for done, _ in calls})
        assert threads == {threading.get_ident()}


def test_the_rate_after_a_resume(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Finished samples do not count for it: it is unknown until the first new sample."""
    build(list(range(20)), tmp_path, lambda items: [{"x": 1} for _ in items]).close()

    def resume() -> None:
        os.environ |= {"TQDM_MININTERVAL": "0", "TQDM_MINITERS": "0"}  # tqdm reads them when it is imported
        for name in [name for name in sys.modules if name.startswith("tqdm")]:
            del sys.modules[name]
        build(list(range(24)), tmp_path, lambda items: [{"x": 1} for _ in items], progress=True)

    assert run_in_child(resume) == 0
    err = capfd.readouterr().err
    (bar, *_) = [bar for bar in err.splitlines() if " 20/24 " in bar]
    assert "? samples/s" in bar
    assert " 24/24 " in err


def test_memory_that_fn_uses_again(tmp_path: Path) -> None:
    """Samples are written as `fn` returned them, even if it reuses its memory."""
    tensor, array, rows = torch.empty(4, 50_000), np.empty((4, 10_000), np.float32), [torch.empty(3) for _ in range(4)]
    raw = bytearray(1)

    def fn(items: list[int]) -> Any:
        for row, item in enumerate(items):
            tensor[row], array[row] = item, item
            rows[row].fill_(item)
        return {"x": tensor[: len(items)], "more": {"y": array[: len(items)], "z": rows[: len(items)]}}

    def samples(items: list[int]) -> Any:
        fn(items)
        raw[0] = items[0]
        return [{"x": tensor[row], "y": [array[row], {"z": (rows[row],)}], "raw": raw} for row in range(len(items))]

    nested = build(list(range(20)), tmp_path / "a", fn)
    listed = build(list(range(20)), tmp_path / "b", samples)
    for i in range(20):
        found = tc.realize(nested[i])
        assert (found["x"] == i).all()
        assert (found["more"]["y"] == i).all()
        assert (found["more"]["z"] == i).all()
        found = tc.realize(listed[i])
        assert found["raw"] == bytes([i // 4 * 4])
        assert (found["x"] == i).all()
        assert (found["y"][0] == i).all()
        assert (found["y"][1]["z"][0] == i).all()


def grouped(items: list[dict[str, Any]]) -> list[Any]:
    """Return samples that depend on the batch, as a model that pads does."""
    longest = max(other["value"] for other in items) % 100
    return [{"x": torch.full((longest + 1,), item["value"])} for item in items]


def broken_at(name: str, error: type[BaseException] | None) -> Any:
    """Return a function that raises an error at an item, or without one kills the process."""

    def fn(items: list[dict[str, Any]]) -> list[Any]:
        if any(item["name"] == name for item in items):
            if error is not None:
                raise error
            os.kill(os.getpid(), signal.SIGKILL)
        return grouped(items)

    return fn


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The cache of a build without an error; tests only read it."""
    folder = tmp_path_factory.mktemp("whole")
    build(Numbers(), folder, grouped).close()
    return folder


@pytest.mark.parametrize("fails_at", ["n6", "n11", "n17", "n22"])
@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt, SystemExit, None], ids=str)
@pytest.mark.parametrize("kind", [Numbers, lambda: iter(Numbers()[i] for i in range(COUNT))], ids=["map", "iterable"])
def test_batches_stay_the_same_ones(tmp_path: Path, whole: Path, kind: Any, fails_at: str, error: Any) -> None:
    """After an error or an interrupt, a shard is shorter; if the process was killed, the bytes stay, too."""
    if error is None:
        assert run_in_child(lambda: build(kind(), tmp_path / "x", broken_at(fails_at, None))) == -signal.SIGKILL
    else:
        with pytest.raises(error):
            build(kind(), tmp_path / "x", broken_at(fails_at, error))
        assert len(tc.open(tmp_path / "x")) == int(fails_at[1:]) // 4 * 4
        assert not [name for name in os.listdir(tmp_path / "x") if name.startswith(".")]
    with tc.open(whole) as expected, build(kind(), tmp_path / "x", grouped) as cache:
        assert list(cache.keys()) == list(expected.keys())
        for one, other in zip(expected, cache, strict=True):
            assert_same(tc.realize(one), tc.realize(other))
    if error is None:
        compare(tmp_path / "x", whole)


@pytest.mark.parametrize(
    ("source", "options", "error", "message"),
    [
        (torch.utils.data.DataLoader(Numbers()), {}, TypeError, "a DataLoader cannot be a dataset .* build makes"),
        ({"a": 1}, {}, TypeError, "a dict cannot be a dataset"),
        ("stock-{00..09}.tar", {}, TypeError, r"a str cannot be .*; pass tc.open\(…\) of shards, a list of their"),
        ([{"__key__": "a"}, {"value": 5}], {}, ValueError, "item '000000001' lacks a '__key__', unlike"),
        ([], {}, ValueError, "the source has no items.*check the path"),
        (iter(()), {}, ValueError, "the source has no items.*pass the dataset itself"),
        (iter([1]), {"keys": ["a"]}, ValueError, "a list of keys needs a map-style dataset"),
        (Numbers(), {"keys": [*map(str, range(22)), "a.b"]}, tc.InvalidKeyError, "'a.b' has a dot"),
        (Numbers(), {"keys": lambda item: item["value"]}, tc.InvalidKeyError, "__key__ is 0"),
        (Numbers(), {"digest": lambda item: None}, TypeError, "item 0, key '000000000': digest returned a NoneType"),
        (Numbers(), {"fingerprint": {"dtype": torch.int8}}, TypeError, r"fingerprint\['dtype'\] .* pass a str"),
        (Numbers(), {"keys": ["a"]}, ValueError, "1 keys for 23 items"),
        (Numbers(), {"keys": "__key__"}, ValueError, "keys='__key__', expected a list of keys, a function of an item"),
        (Numbers(), {"keys": set(map(str, range(COUNT)))}, TypeError, "keys= is a set, whose order is not"),
        (Numbers(), {"keys": ["a"] * COUNT}, ValueError, "two items have the key 'a'"),
        (Numbers(), {"keys": lambda item: "a"}, ValueError, "two items have the key 'a'"),
        (Numbers(), {"batch_size": 0}, ValueError, "batch_size=0"),
        (Numbers(), {"num_workers": -1}, ValueError, "num_workers=-1"),
        ((i for i in range(3)), {"num_workers": 2}, ValueError, "generator has no length"),
        (Numbers(), {"overwrite": True}, TypeError, "build has no argument 'overwrite'"),
        (Numbers(), {"on_error": "skip"}, ValueError, "^on_error='skip': expected 'raise' or 'record'$"),
        (Numbers(), {"check": "nan"}, ValueError, "^check='nan': expected None or 'finite'$"),
        (Numbers(), {"allow_failures": True}, ValueError, "pass on_error='record'"),
        (Numbers(), {"rank": 0, "world_size": 2, "footer": False}, ValueError, "ranks need the footers"),
        (Numbers(), {"rank": 2, "world_size": 2}, ValueError, r"rank=2 out of range \[0, 2\)"),
        (Numbers(), {"rank": 1}, ValueError, "pass both or neither"),
        (
            Numbers(),
            {"rank": 0, "world_size": 2, "out": "single.tar"},
            ValueError,
            "a pattern with a number such as %06d",
        ),
        (Numbers(), {"footer": False, "manifest": False}, ValueError, "the fingerprint needs one of the two"),
    ],
)
def test_bad_arguments(tmp_path: Path, source: Any, options: dict[str, Any], error: Any, message: str) -> None:
    def fn(items: list[Any]) -> Any:
        raise AssertionError("computed")

    with pytest.raises(error, match=message):
        build(source, tmp_path / options.pop("out", ""), fn, **options)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("columns", [["a"], "a"], ids=["frame", "series"])
def test_pandas(tmp_path: Path, columns: Any) -> None:
    """A shuffled Series finds items by label, and the keys of another one are in the new order."""
    shuffled = pytest.importorskip("pandas").DataFrame({"key": ["x", "y"], "a": [1, 2]}).iloc[::-1]
    with pytest.raises(TypeError, match=r"pass series\.tolist\(\), or frame"):
        build(shuffled[columns], tmp_path, keys=shuffled["key"])


def test_a_folder_of_other_shards(tmp_path: Path) -> None:
    build(Numbers(), tmp_path / "a-%d.tar").close()
    with pytest.raises(ValueError, match=r"contains a-0.tar, which does not match 'b-%d.tar'; pass a pattern"):
        build(Numbers(), tmp_path / "b-%d.tar")
    with pytest.raises(tc.StaleCacheError, match="write into another folder, or delete this one"):
        build(Numbers(), tmp_path / "a-%d.tar", fingerprint={"model": "triple"})
    (tmp_path / "a-0.tar").write_bytes((tmp_path / "a-0.tar").read_bytes()[:700])
    with pytest.raises(tc.FormatError, match=r"\(tc\.verify\) describes the damage, .*\(tc\.repair\) saves all other"):
        build(Numbers(), tmp_path / "a-%d.tar")


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
