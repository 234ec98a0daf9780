"""Caches of datasets: each sample once, resumed after interruptions, and refused where an item has changed."""

from __future__ import annotations

import os
import random
import signal
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


def test_what_a_model_returns(tmp_path: Path) -> None:
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
def test_what_is_not_one_for_each(tmp_path: Path, made: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build(Numbers(), tmp_path, made)


def test_called_again(tmp_path: Path) -> None:
    build(Numbers(), tmp_path / "x", keys=[f"{i}" for i in range(COUNT)])
    fn, called = counted()
    source = Numbers()
    build(source, tmp_path / "x", fn, keys=[f"{i}" for i in range(COUNT)])
    assert (called, source.num_read) == ([], 0)  # what is there is not even read


@pytest.mark.parametrize("fails_at", [0, 4, 9, 22])
@pytest.mark.parametrize("where", ["fn", "source", "writer"])
def test_broken_off(tmp_path: Path, fails_at: int, where: str) -> None:
    def broken(items: list[Any]) -> Any:
        values = [item["value"] for item in items]
        if where == "fn" and fails_at in values:
            raise ZeroDivisionError("of the model")
        return [object() if where == "writer" and value == fails_at else {"i": value} for value in values]

    def items() -> Iterator[Any]:
        for i in range(COUNT):
            if where == "source" and i == fails_at:
                raise ZeroDivisionError("of the source")
            yield Numbers()[i]

    whole = build(Numbers(), tmp_path / "whole", lambda items: [{"i": item["value"]} for item in items], keys=key)
    whole.close()
    with pytest.raises(tc.EncodeError if where == "writer" else ZeroDivisionError):
        build(items(), tmp_path / "x", broken, keys=key)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("tensorcache-build")]
    finished = {name for name in os.listdir(tmp_path / "x") if name.endswith(".tar")}
    assert finished <= {f"{i:06d}.tar" for i in range(5)}
    fn, called = counted(lambda items: [{"i": item["value"]} for item in items])
    build(Numbers(), tmp_path / "x", fn, keys=key).close()
    assert called == list(range(5 * len(finished) // 4 * 4, COUNT))  # whole batches
    compare(tmp_path / "x", tmp_path / "whole")


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
    """Nothing is computed after the first of them; without `digest=`, nothing tells."""
    build(Numbers(), tmp_path, digest=digest).close()
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    fn, called = counted()
    with pytest.raises(tc.StaleCacheError, match=rf"^{len(changed)} of 30 items have changed .*reuse='{tmp_path}'"):
        build(Numbers(changed, 30), tmp_path, fn, digest=digest)
    assert called == []
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before
    build(Numbers(changed), tmp_path, fn).close()
    assert called == []


def test_samples_without_a_digest_have_changed(tmp_path: Path) -> None:
    build(Numbers(), tmp_path / "x").close()
    with pytest.raises(tc.StaleCacheError, match="23 of 23 items have changed"):
        build(Numbers(), tmp_path / "x", digest=digest)


def test_what_was_made_otherwise(tmp_path: Path) -> None:
    build(Numbers(), tmp_path).close()
    with pytest.raises(tc.StaleCacheError, match="expected revision=2, but the cache was made with 1"):
        build(Numbers(), tmp_path, fingerprint=MADE | {"revision": 2})


def test_what_is_refused(tmp_path: Path) -> None:
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


def test_a_sample_without_its_cache_is_not_finished(tmp_path: Path) -> None:
    made = {"model": 1}
    with tc.ShardWriter(tmp_path, fingerprint=made) as sink:
        sink.write("0", {"x": torch.zeros(3)})
        sink.write("1", txt=b"what remains of a sample")
    with pytest.raises(tc.FormatError, match=r"000000\.tar: sample '1' has lost its cache.*; delete the shard"):
        tc.build(
            range(2), lambda batch: [{"x": torch.zeros(3)} for _ in batch], tmp_path, fingerprint=made, keys=["0", "1"]
        )
