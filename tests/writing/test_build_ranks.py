"""Builds on several ranks: each item once, whichever ranks are killed, and whatever the world size is afterwards."""

from __future__ import annotations

import json
import os
import signal
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import wds_tensorcache as tc
from tests.children import finish, start
from tests.same import assert_same
from tests.writing.test_build import COUNT, MADE, Numbers, build, counted, digest, double, key


def build_rank(out: Path, rank: int, world_size: int, fn: Any = double, **options: Any) -> Any:
    source = options.pop("source", None) or Numbers()
    return build(source, out, fn, rank=rank, world_size=world_size, **{"keys": key, "batch_size": 2} | options)


def own_items(folder: Path, rank: int, world_size: int, count: int = COUNT, batch_size: int = 2) -> list[int]:
    """Return the numbers of the items that a rank computes, in its order."""
    called: list[int] = []

    def fn(items: list[int]) -> list[Any]:
        called.extend(items)
        return [{"x": 1} for _ in items]

    options: dict[str, Any] = {"rank": rank, "world_size": world_size, "batch_size": batch_size, "max_samples": count}
    build(range(count), folder / f"own{rank}of{world_size}", fn, **options).close()
    return called


def check(out: Path, count: int = COUNT) -> None:
    """Assert that a cache has each item once, as a build on one process makes it, and that it is intact."""
    report = tc.verify(out)
    assert report.ok, str(report)
    with tc.open(out, expect=MADE) as cache:
        assert sorted(cache.keys()) == sorted(f"n{i}" for i in range(count))
        for i in range(count):
            assert_same(double([Numbers()[i]])[0], tc.realize(cache[f"n{i}"]))
    suffixes = {name.partition(".")[2] for name in os.listdir(out)}
    assert suffixes == {"tar", "idx", "json"}  # no locks, nothing temporary


@pytest.mark.parametrize(("count", "batch_size", "world_size"), [(1, 1, 3), (23, 2, 5), (70, 3, 9), (40, 5, 2)])
def test_each_batch_has_one_rank(tmp_path: Path, count: int, batch_size: int, world_size: int) -> None:
    """The batches are those of one process, and each `world_size` of them have different ranks."""
    owners: dict[int, int] = {}
    for rank in range(world_size):
        items = own_items(tmp_path, rank, world_size, count, batch_size)
        batches = {item // batch_size for item in items}
        assert sorted(items) == [item for item in range(count) if item // batch_size in batches]
        assert not owners.keys() & batches
        owners |= dict.fromkeys(batches, rank)
    ranks = [owners[batch] for batch in range(len(owners))]
    assert len(ranks) == -(-count // batch_size)
    for begin in range(0, len(ranks), world_size):
        group = ranks[begin : begin + world_size]
        assert len(set(group)) == len(group)


@pytest.mark.parametrize(
    ("world_size", "kind"), [(2, "map"), (3, "map"), (5, "map"), (3, "workers"), (2, "iterable"), (5, "iterable")]
)
def test_one_rank_after_another(tmp_path: Path, world_size: int, kind: str) -> None:
    """Each reads and computes its part; the last one's cache is whole, and one process finds nothing to compute."""
    fn, called = counted()
    num_read = []
    for rank in range(world_size):
        source = Numbers()
        options = {"source": iter([source[i] for i in range(COUNT)]) if kind == "iterable" else source}
        source.num_read = 0
        cache = build_rank(tmp_path, rank, world_size, fn, num_workers=int(kind == "workers"), digest=digest, **options)
        num_read.append(source.num_read)
        assert len(cache) == len(called)
        cache.close()
    assert sorted(called) == list(range(COUNT))
    if kind == "map":
        assert sum(num_read) == COUNT
    check(tmp_path)
    names = {name[:6] for name in os.listdir(tmp_path) if name.endswith(".tar")}
    assert names == {f"r{rank}of{world_size}-" for rank in range(world_size)}
    fn, called = counted()
    for world in {1, 3, world_size}:
        for rank in range(world):
            build_rank(tmp_path, rank, world, fn, digest=digest).close()
    assert called == []
    check(tmp_path)


@pytest.mark.parametrize("worlds", [(1, 3), (4, 3), (3, 4), (2, 1), (4, 3, 2, 5)], ids=str)
def test_another_world_size(tmp_path: Path, worlds: tuple[int, ...]) -> None:
    """After an error on each rank, nothing that was computed before it is computed again."""
    computed: Counter[int] = Counter()

    for world_size in worlds[:-1]:
        for rank in range(world_size):

            def until_it_fails(items: list[Any]) -> Any:
                if until_it_fails.left == 0:  # type: ignore[attr-defined]
                    raise ZeroDivisionError
                until_it_fails.left -= 1  # type: ignore[attr-defined]
                computed.update(item["value"] for item in items)
                return double(items)

            until_it_fails.left = 1  # type: ignore[attr-defined]
            try:
                build_rank(tmp_path, rank, world_size, until_it_fails).close()
            except ZeroDivisionError:
                pass
            assert len(tc.open(tmp_path)) == computed.total()
    for rank in range(worlds[-1]):
        fn, called = counted()
        build_rank(tmp_path, rank, worlds[-1], fn).close()
        computed.update(called)
    assert set(computed) == set(range(COUNT))
    assert max(computed.values()) == 1
    check(tmp_path)


@pytest.mark.parametrize("worlds", [(4, 3, 2), (2, 4, 3)], ids=str)
def test_killed_ranks(tmp_path: Path, worlds: tuple[int, ...]) -> None:
    """Real processes at once, each killed in its second batch; other numbers of them resume, at last to the end."""

    def start_ranks(world_size: int, is_killed: bool) -> list[int]:
        def work(rank: int) -> None:
            num_calls = 0

            def fn(items: list[Any]) -> Any:
                nonlocal num_calls
                num_calls += 1
                if is_killed and num_calls == 3:
                    os.kill(os.getpid(), signal.SIGKILL)
                return double(items)

            build_rank(tmp_path, rank, world_size, fn, max_samples=2)

        return [start(lambda rank=rank: work(rank)) for rank in range(world_size)]

    finished: dict[str, bytes] = {}
    for world_size in worlds[:-1]:
        assert -signal.SIGKILL in finish(start_ranks(world_size, True))
        there = {path.name: path.read_bytes() for path in tmp_path.glob("*.tar")}
        assert finished.items() <= there.items()  # what was finished stays
        finished = there
    assert finish(start_ranks(worlds[-1], False)) == [0] * worlds[-1]
    check(tmp_path)


@pytest.mark.parametrize("others", [1, 2, 4])
def test_two_world_sizes_at_once_are_refused(tmp_path: Path, others: int) -> None:
    """They would compute the same items; so would two processes of one rank."""
    read, write = os.pipe()

    def waiting(items: list[Any]) -> Any:
        os.write(write, b".")
        time.sleep(60)

    child = start(lambda: build_rank(tmp_path, 0, 3, waiting))
    try:
        assert os.read(read, 1) == b"."
        for rank in range(others):
            with pytest.raises(FileExistsError, match=r"is writing .*/r0of3-%06d\.tar"):
                build_rank(tmp_path, rank, others)
        with pytest.raises(FileExistsError, match="is writing"):
            build_rank(tmp_path, 0, 3)
        for rank in (1, 2):
            build_rank(tmp_path, rank, 3).close()
    finally:
        os.kill(child, signal.SIGKILL)
        finish([child])
        os.close(read)
        os.close(write)
    build_rank(tmp_path, 0, 3).close()
    check(tmp_path)


def test_temporary_files_of_killed_ranks(tmp_path: Path) -> None:
    """Those of another world size are deleted; those of another rank may be in use."""
    gone = [".r3of4-000001.tar.0a.tmp", ".r3of4-000001.idx.0a.tmp", ".000000.tar.1b.tmp", ".r0of3-000007.tar.1b.tmp"]
    kept = [".r1of3-000000.tar.2c.tmp", ".r2of3-000000.idx.2c.tmp", ".x-r3of4-000001.tar.0a.tmp"]
    for name in (*gone, *kept):
        (tmp_path / name).touch()
    build_rank(tmp_path, 0, 3).close()
    assert sorted(name for name in os.listdir(tmp_path) if name.endswith(".tmp")) == sorted(kept)


def test_a_shard_that_was_deleted(tmp_path: Path) -> None:
    """Whichever rank wrote it: its samples are computed again."""
    for rank in range(3):
        build_rank(tmp_path, rank, 3).close()
    lost = set(tc.open(tmp_path / "r2of3-000000.tar").keys())
    (tmp_path / "r2of3-000000.tar").unlink()
    (tmp_path / "r2of3-000000.idx").unlink()
    fn, called = counted()
    with pytest.warns(UserWarning, match=r"r2of3-000000\.tar no longer exists; removed"):
        build_rank(tmp_path, 0, 2, fn).close()
    build_rank(tmp_path, 1, 2, fn).close()
    assert lost <= {f"n{value}" for value in called}
    check(tmp_path)


def test_ranks_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    build(Numbers(), tmp_path / "a", keys=key).close()
    assert (tmp_path / "a" / "r1of2-000000.tar").exists()
    build(Numbers(), tmp_path / "b", keys=key, rank=0, world_size=1).close()
    assert len(tc.open(tmp_path / "b" / "00000*.tar")) == COUNT


def test_ranks_without_items(tmp_path: Path) -> None:
    """They return a cache without samples, as long as no rank has finished a shard."""
    out = tmp_path / "x"
    (owner,) = (rank for rank in range(3) if own_items(tmp_path, rank, 3, count=2))
    for kind in (lambda: Numbers(count=2), lambda: iter([Numbers()[0], Numbers()[1]])):
        for rank in {0, 1, 2} - {owner}:
            cache = build_rank(out, rank, 3, source=kind())
            assert (len(cache), list(cache.keys()), list(cache), cache.num_shards) == (0, [], [], 0)
            assert (cache.fingerprint, cache.schema) == (MADE, {})
            assert "0 samples" in repr(cache)
    assert len(build_rank(out, owner, 3, source=Numbers(count=2))) == 2
    check(out, count=2)
    for source in ([], iter([])):
        with pytest.raises(ValueError, match="the source has no items"):
            build(source, tmp_path / "none", rank=1, world_size=3)


@pytest.mark.parametrize("kind", [list, iter])
def test_ranks_without_items_and_keys_like_positions(tmp_path: Path, kind: Any) -> None:
    items = [{"__key__": f"{number:09d}", "x": number} for number in (0, 7)]
    for rank in range(3):
        for _ in range(2):
            build(kind(items), tmp_path / "out", lambda batch: batch, rank=rank, world_size=3, batch_size=2).close()
    with tc.open(tmp_path / "out") as cache:
        assert list(cache.keys()) == ["000000000", "000000007"]


def test_entries_that_another_rank_overwrote(tmp_path: Path) -> None:
    """As on a file system without locks: the rank that ends last lists what all have finished."""
    build_rank(tmp_path, 0, 3).close()

    def overwriting(items: list[Any]) -> Any:
        manifest = tmp_path / "manifest.json"
        content = json.loads(manifest.read_text())
        names = ("r0of3-000000.tar", "r1of3-000000.tar")
        content["shardlist"] = [entry for entry in content["shardlist"] if entry["url"] not in names]
        (tmp_path / "other.json").write_text(json.dumps(content))
        os.replace(tmp_path / "other.json", manifest)
        return double(items)

    build_rank(tmp_path, 1, 3, overwriting).close()
    assert len(tc.open(tmp_path)) == len(tc.open(tmp_path / "r[01]of3-*.tar"))
    build_rank(tmp_path, 2, 3, overwriting).close()
    check(tmp_path)
