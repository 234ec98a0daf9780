"""Versions that several ranks build: each sample is reused or computed once, and one version appears when all have finished."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import wds_tensorcache as tc
import wds_tensorcache.writing.build as build_module
from tests.children import finish, start
from tests.writing.test_build import COUNT, MADE, build, counted, double
from tests.writing.test_versions import (
    GENERATIONS,
    Broken,
    broken_at,
    by_key,
    check,
    contents,
    digest,
    is_killed,
    items,
    make,
    numbered,
    stop_at,
)
from wds_tensorcache.storage import locks
from wds_tensorcache.writing.build_items import Items


def make_rank(values: dict[str, int], out: Path, rank: int, world_size: int, fn: Any = double, **options: Any) -> int:
    """Return the number of samples in the cache that the rank gets."""
    source = options.pop("source", None) or items(values)
    with build(source, out, fn, **{"digest": digest, "rank": rank, "world_size": world_size} | options) as cache:
        return len(cache)


def make_all(values: dict[str, int], out: Path, world_size: int, fn: Any = double, **options: Any) -> list[int]:
    return [make_rank(values, out, rank, world_size, fn, **options) for rank in range(world_size)]


def check_version(out: Path, values: dict[str, int], old: Path, has_locks: bool = True) -> None:
    """Assert that a version has the samples of these values, with those of the old cache in their old order.

    Without locks, temporary folders of killed processes cannot be told from those that are being written, so they remain.
    """
    with tc.open(out) as cache, tc.open(old) as before:
        order = list(cache.keys())
        kept = [key for key in list(before.keys()) if key in values]
    assert order[: len(kept)] == kept
    assert sorted(order) == sorted(values)
    check(out, values, order)
    strays = list(out.parent.glob(f".{out.name}.*"))
    assert not [path for path in strays if has_locks or path.suffix != ".tmp"]


@pytest.mark.parametrize("world_size", [2, 3, 5])
@pytest.mark.parametrize("kind", ["map", "workers", "iterable"])
def test_one_rank_after_another(tmp_path: Path, world_size: int, kind: str) -> None:
    before = tmp_path / "0"
    make(numbered(), before)
    for generation, values in enumerate(GENERATIONS[:3], 1):
        out, (fn, called) = tmp_path / f"{generation}", counted()
        lengths = []
        for rank in range(world_size):
            assert not out.exists()
            source = iter(items(values)) if kind == "iterable" else None
            options = {"source": source, "num_workers": int(kind == "workers"), "reuse": before}
            lengths.append(make_rank(values, out, rank, world_size, fn, **options))
        assert lengths == [0] * (world_size - 1) + [len(values)]
        old, single = by_key(before), tmp_path / f"single{generation}"
        make(values, single, reuse=before)
        stale = [key for key in values if by_key(single)[key] != old.get(key)]
        assert sorted(called) == sorted(values[key] for key in stale)
        check_version(out, values, before)
        assert by_key(out) == {key: by_key(single)[key] for key in by_key(out)}
        for path in before.glob("*.tar"):  # the same shards are linked
            same = single / path.name, out / path.name
            assert len({each.exists() and os.path.samefile(path, each) for each in same}) == 1
        before = out
    fn, called = counted()
    assert make_all(values, before, world_size, fn, reuse=tmp_path / "nowhere") == [len(values)] * world_size
    assert called == []


def try_all(values: dict[str, int], out: Path, world_size: int, computed: Counter[int], **options: Any) -> None:
    """Call all ranks; each fails after its first batch."""
    for rank in range(world_size):
        fn, called = broken_at(1)
        with contextlib.suppress(Broken):
            make_rank(values, out, rank, world_size, fn, **options)
        computed.update(called)


@pytest.mark.parametrize("worlds", [(1, 3), (4, 3), (3, 1), (4, 3, 2, 5), (2, 3, 4)], ids=str)
def test_another_world_size(tmp_path: Path, worlds: tuple[int, ...]) -> None:
    """After an error on each rank, nothing is computed again, except items that have changed. Their newest sample counts."""
    options: Any = {"reuse": tmp_path / "0", "batch_size": 2}
    make(numbered(), tmp_path / "0")
    values = numbered(40, **{f"k{i:03d}": 100 + i for i in range(0, COUNT, 2)})
    computed: Counter[int] = Counter()
    num_changed = 0
    for number, world_size in enumerate(worlds[:-1]):
        try_all(values, tmp_path / "1", world_size, computed, **options)
        for key in [key for key, value in values.items() if computed[value]][::3]:
            values[key] += 1000 * (number + 1)
            num_changed += 1
        assert not (tmp_path / "1").exists()
    fn, called = counted()
    make_all(values, tmp_path / "1", worlds[-1], fn, **options)
    computed.update(called)
    assert max(computed.values()) == 1
    assert computed.total() == (COUNT + 1) // 2 + 40 - COUNT + num_changed
    assert num_changed
    check_version(tmp_path / "1", values, tmp_path / "0")


def test_one_rank_is_killed(tmp_path: Path) -> None:
    """It costs its unfinished shard, and no sample of another rank."""
    make(numbered(), tmp_path / "0")
    values = {key: value + 100 for key, value in numbered(40).items()}
    mine = [
        item.key for batch in Items(items(values), None, None, 2, 0, 0, 2).batches(lambda key: False) for item in batch
    ]
    options: Any = {"reuse": tmp_path / "0", "batch_size": 2}
    folder = tmp_path / ".1.building"

    def killed(batch: list[Any]) -> Any:
        if batch[0]["value"] == values[mine[8]]:  # in the fifth batch; max_samples is 5
            while not list(folder.glob("*r0of2-*.idx")):
                time.sleep(0.001)
            os.kill(os.getpid(), signal.SIGKILL)
        return double(batch)

    assert make_rank(values, tmp_path / "1", 1, 2, **options) == 0
    assert finish([start(lambda: make_rank(values, tmp_path / "1", 0, 2, killed, **options))]) == [-signal.SIGKILL]
    fn, called = counted()
    assert make_rank(values, tmp_path / "1", 0, 2, fn, **options) == 40
    assert called == [values[key] for key in mine[4:]]  # the batch of the fifth sample is computed whole
    check_version(tmp_path / "1", values, tmp_path / "0")


def slow(batch: list[Any]) -> Any:
    time.sleep(0.003)
    return double(batch)


def start_all(values: dict[str, int], out: Path, world_size: int, **options: Any) -> list[int]:
    return [
        start(lambda rank=rank: make_rank(values, out, rank, world_size, slow, **options)) for rank in range(world_size)
    ]


@pytest.mark.parametrize("has_locks", [True, False], ids=["locks", "no-locks"])
@pytest.mark.long
def test_killed_at_random(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_locks: bool) -> None:
    """Real processes that begin at once, really killed; other numbers of them resume, at last until the version is there."""
    if not has_locks:
        monkeypatch.setattr(locks, "fcntl", None)  # as on a file system without locks
    chance, num_killed = random.Random(3), 0
    before = tmp_path / "0"
    make(numbered(), before)
    kept = contents(before)
    for generation, (values, worlds) in enumerate(
        zip(GENERATIONS[:3], ((4, 3, 2), (2, 4, 3), (3, 2, 4)), strict=True), 1
    ):
        out = tmp_path / f"{generation}"
        options: Any = {"reuse": before, "max_samples": 3, "batch_size": 2}
        for world_size in worlds:
            children = start_all(values, out, world_size, **options)
            for child in chance.sample(children, len(children)):
                time.sleep(chance.uniform(0, 0.05))
                os.kill(child, signal.SIGKILL)
            codes = finish(children)
            assert {0, -signal.SIGKILL} >= set(codes)
            num_killed += sum(code != 0 for code in codes)
            assert contents(before) == kept
            if out.exists():
                assert tc.verify(out).num_samples == len(values)
        world_size = chance.choice([2, 3, 4])
        codes = finish(start_all(values, out, world_size, **options))  # all at once: one of them ends last
        assert codes == [0] * world_size
        check_version(out, values, before, has_locks)
        before, kept = out, contents(out)
    assert num_killed


def test_the_last_rank_killed_at_every_step(tmp_path: Path) -> None:
    """The version is absent or complete; called again, the ranks compute nothing again."""
    make(numbered(), tmp_path / "0")
    values, options = GENERATIONS[0], {"reuse": tmp_path / "0", "max_samples": 3}
    make_all(values, tmp_path / "whole", 2, **options)
    whole, folder = contents(tmp_path / "whole"), tmp_path / "x" / ".1.building"
    out, step, num_both = tmp_path / "x" / "1", 0, 0

    def prepare() -> None:
        shutil.rmtree(tmp_path / "x", ignore_errors=True)
        make_rank(values, out, 0, 2, **options)
        with contextlib.suppress(Broken):  # everything is computed, but the version is not written
            make_rank(values, out, 1, 2, broken_at(0)[0], **options)
        assert folder.exists()

    while True:
        prepare()
        if not is_killed(lambda: (stop_at(step), make_rank(values, out, 1, 2, **options))):  # noqa: B023 called here
            break
        assert not out.exists() or contents(out) == whole
        num_both += out.exists()
        assert make_all(values, out, 2, **options)[-1] == len(values)
        assert contents(out) == whole
        assert os.listdir(tmp_path / "x") == ["1"]
        step += 3
    assert step > 30
    assert num_both
    assert contents(out) == whole


def test_the_version_appears_while_a_call_begins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A call that has seen no version opens the one that another process has written since."""
    make(numbered(), tmp_path / "0")
    values, out = numbered(30), tmp_path / "1"
    load, (fn, called) = build_module._load_checked, counted()

    def build_meanwhile(*arguments: Any) -> Any:
        monkeypatch.setattr(build_module, "_load_checked", load)
        make(values, out, reuse=tmp_path / "0")
        return load(*arguments)

    monkeypatch.setattr(build_module, "_load_checked", build_meanwhile)
    assert make_rank(values, out, 0, 2, fn, reuse=tmp_path / "0") == len(values)
    assert called == []
    check_version(out, values, tmp_path / "0")


def test_ranks_with_different_items(tmp_path: Path) -> None:
    make(numbered(), tmp_path / "0")
    values, out = numbered(30), tmp_path / "1"
    shuffled = dict(random.Random(0).sample(list(values.items()), 30))
    make_rank(values, out, 0, 2, reuse=tmp_path / "0")
    with pytest.raises(
        ValueError, match="items of the ranks are not in the same order; mend that, and call build on all"
    ):
        make_rank(shuffled, out, 1, 2, reuse=tmp_path / "0")
    assert make_rank(values, out, 0, 2, reuse=tmp_path / "0") == 0
    with pytest.raises(ValueError, match="rank 0 has 30 items in all, and this rank has 31"):
        make_rank(numbered(31), out, 1, 2, reuse=tmp_path / "0")
    assert not out.exists()
    make_all(shuffled, out, 2, reuse=tmp_path / "0")
    check_version(out, values, tmp_path / "0")


def test_earlier_calls_for_another_version(tmp_path: Path) -> None:
    """A rank does not go by what another rank has found with another fingerprint, or with another cache to reuse."""
    values, out = numbered(30), tmp_path / "1"
    make(numbered(), tmp_path / "0")
    make(numbered(k003=4), tmp_path / "other")
    other = MADE | {"revision": 2}
    make(numbered(), tmp_path / "newer", fingerprint=other)
    make_rank(values, out, 0, 2, reuse=tmp_path / "0")
    assert make_rank(values, out, 1, 2, reuse=tmp_path / "newer", fingerprint=other) == 0
    assert make_rank(values, out, 0, 2, reuse=tmp_path / "0") == 0  # the shards of the other fingerprint are deleted
    assert make_rank(values, out, 1, 2, reuse=tmp_path / "other") == 0
    assert not out.exists()
    make_rank(values, out, 0, 2, reuse=tmp_path / "other")
    check_version(out, values, tmp_path / "other")


def test_items_that_change_before_the_last_rank_ends(tmp_path: Path) -> None:
    """A rank that is called again counts as unfinished, until it has seen the change."""
    make(numbered(), tmp_path / "0")
    values, out = numbered(30), tmp_path / "1"
    make_rank(values, out, 0, 2, reuse=tmp_path / "0", batch_size=1)
    mine = [
        item.key for batch in Items(items(values), None, None, 1, 0, 0, 2).batches(lambda key: False) for item in batch
    ]
    values |= {mine[0]: 500, mine[-1]: 600}

    def meanwhile(batch: list[Any]) -> Any:
        assert make_rank(values, out, 1, 2, reuse=tmp_path / "0", batch_size=1) == 0
        return double(batch)

    make_rank(values, out, 0, 2, meanwhile, reuse=tmp_path / "0", batch_size=1)
    check_version(out, values, tmp_path / "0")


def test_a_version_of_other_items(tmp_path: Path) -> None:
    """Each rank checks its own items, and the number of all."""
    make(numbered(), tmp_path / "0")
    values, out = numbered(30), tmp_path / "1"
    make_all(values, out, 2, reuse=tmp_path / "0")
    found = []
    for rank in range(2):
        try:
            make_rank(values | {"k007": 7000}, out, rank, 2, reuse=tmp_path / "0")
        except tc.StaleCacheError as exc:
            found.append(str(exc))
        with pytest.raises(tc.StaleCacheError, match="and 1 samples have no item"):
            make_rank(numbered(29), out, rank, 2, reuse=tmp_path / "0")
    assert len(found) == 1
    assert "1 of " in found[0]
    with pytest.raises(ValueError, match="the source has no items"):
        make_rank({}, tmp_path / "2", 0, 2, reuse=tmp_path / "0")
    assert sorted(os.listdir(tmp_path)) == ["0", "1"]


@pytest.mark.parametrize("others", [1, 2, 4])
def test_two_world_sizes_at_once_are_refused(tmp_path: Path, others: int) -> None:
    make(numbered(), tmp_path / "0")
    values, out = numbered(60), tmp_path / "1"
    read, write = os.pipe()

    def waiting(batch: list[Any]) -> Any:
        os.write(write, b".")
        time.sleep(60)

    child = start(lambda: make_rank(values, out, 0, 3, waiting, reuse=tmp_path / "0"))
    try:
        assert os.read(read, 1) == b"."
        for rank, world_size in [(rank, others) for rank in range(others)] + [(0, 3)]:
            with pytest.raises(FileExistsError, match=rf"process {child} .* is writing"):
                make_rank(values, out, rank, world_size, reuse=tmp_path / "0")
        for rank in (1, 2):
            assert make_rank(values, out, rank, 3, reuse=tmp_path / "0") == 0
    finally:
        os.kill(child, signal.SIGKILL)
        finish([child])
        os.close(read)
        os.close(write)
    assert make_rank(values, out, 0, 3, reuse=tmp_path / "0") == 60
    check_version(out, values, tmp_path / "0")


PARTS = {
    "empty": b"",
    "cut": b'{"version": "',
    "null": b"null",
    "not ASCII": b"\xff",
    "nested": b"[" * 100_000,
    "a field less": b'{"version": "x", "keys": [], "old": {}}',
    "number as text": b'{"version": "x", "num_items": "20", "keys": [], "old": {}}',
    "keys as text": b'{"version": "x", "num_items": 20, "keys": "abc", "old": {}}',
}


@pytest.mark.parametrize("content", PARTS.values(), ids=PARTS)
def test_a_damaged_part(tmp_path: Path, content: bytes) -> None:
    """Its rank counts as not finished."""
    make(numbered(), tmp_path / "0")
    values, options = GENERATIONS[0], {"reuse": tmp_path / "0"}
    assert make_rank(values, tmp_path / "1", 0, 2, **options) == 0
    (part,) = (tmp_path / ".1.building").glob("r0of2.json")
    part.write_bytes(content)
    assert make_rank(values, tmp_path / "1", 1, 2, **options) == 0
    assert make_rank(values, tmp_path / "1", 0, 2, **options) == len(values)
    check_version(tmp_path / "1", values, tmp_path / "0")


def test_a_part_that_lacks_a_key(tmp_path: Path) -> None:
    """The version is refused, not made without the sample."""
    make(numbered(), tmp_path / "0")
    values, options = GENERATIONS[0], {"reuse": tmp_path / "0"}
    make_rank(values, tmp_path / "1", 0, 2, **options)
    (part,) = (tmp_path / ".1.building").glob("r0of2.json")
    found = json.loads(part.read_text())
    found["keys"].pop()
    part.write_text(json.dumps(found))
    with pytest.raises(ValueError, match=rf"the ranks have {len(values) - 1} items, of {len(values)}"):
        make_rank(values, tmp_path / "1", 1, 2, **options)
    assert not (tmp_path / "1").exists()
    assert make_all(values, tmp_path / "1", 2, **options)[-1] == len(values)
