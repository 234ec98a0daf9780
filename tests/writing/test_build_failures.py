"""Items that fail in `build`: each is listed once, tried again by each call, and never costs the sample of another item."""

from __future__ import annotations

import itertools
import json
import math
import os
import pickle
import re
import shutil
import weakref
from multiprocessing import active_children
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset

import wds_tensorcache as tc
from tests.children import finish, start
from tests.cli.command import json_of, run
from tests.kills import compare, is_killed, stop_at
from tests.writing.test_build import counted

COUNT = 23
BROKEN = (0, 6, 7, 11, 22)
OPTIONS: dict[str, Any] = {"fingerprint": {"model": 1}, "batch_size": 4, "max_samples": 5, "fsync": False}


class Texts(Dataset[dict[str, Any]]):
    """Files with one number each; a broken file contains a word."""

    def __init__(self, folder: Path, count: int = COUNT, broken: tuple[int, ...] = BROKEN) -> None:
        folder.mkdir(exist_ok=True)
        self.paths = [folder / f"n{i:04d}.txt" for i in range(count)]
        for i in range(count):
            self.write(i, "broken" if i in broken else str(i))

    def write(self, i: int, text: object) -> None:
        self.paths[i].write_text(str(text))

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, i: int) -> dict[str, Any]:
        return {"__key__": self.paths[i].stem, "value": int(self.paths[i].read_text())}


class Values(Dataset[int]):
    """Numbers; the ones that are replaced by words cannot be read."""

    def __init__(self) -> None:
        self.values: list[Any] = list(range(COUNT))

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, i: int) -> int:
        return int(self.values[i])


KEYED: dict[str, Any] = {"digest": str, "keys": [f"{i:09d}" for i in range(COUNT)]}


def double(items: list[Any]) -> Any:
    values = [item["value"] if isinstance(item, dict) else item for item in items]
    return {"x": torch.tensor([[2.0 * value] for value in values])}


def build(source: Any, out: Path, fn: Any = double, **options: Any) -> Any:
    return tc.build(source, fn, out, **{"on_error": "record"} | OPTIONS | options)


def build_broken(source: Any, out: Path, fn: Any = double, **options: Any) -> tc.BuildError:
    with pytest.raises(tc.BuildError) as caught:
        build(source, out, fn, **options)
    return caught.value


def listed(out: Path) -> list[dict[str, Any]]:
    """Return the failures in all files of a folder by their items, as `tensorcache ls --failed` does."""
    lines = [json.loads(line) for path in out.glob("failures*.jsonl") for line in path.read_text().splitlines()]
    return sorted(lines, key=lambda line: line["item"])


def items_of(records: list[dict[str, Any]]) -> list[int]:
    return [record["item"] for record in records]


def check(out: Path, values: dict[str, float]) -> None:
    """Assert that a cache contains one sample for each key, with twice the value, and is intact."""
    assert tc.verify(out).ok
    with tc.open(out) as cache:
        assert sorted(cache.keys()) == sorted(values)
        assert all(cache[key]["x"].load().item() == 2 * value for key, value in values.items())
    assert not [name for name in os.listdir(out) if name.endswith((".tmp", ".lock"))]


# In which step an item fails, and a word of the error's text
STEPS = {
    "read": "invalid literal",
    "key": "no key",
    "bad key": "has a dot",
    "digest": "no digest",
    "fn": "not this one",
    "None": "returned None",
    "count": "rows",
    "store": "sample 'n",
    "nan": "'x' has 1 values of 2 that are NaN or infinite",
}


# Workers read items; items of an iterable cannot be read again. An iterable that raises cannot go on.
KINDS = [*((step, "map") for step in STEPS), ("read", "workers"), ("digest", "iterable"), ("fn", "iterable")]


def test_the_frame_is_that_of_the_users_code(tmp_path: Path) -> None:
    """Not a line of a package, of the standard library, or of this package, if there is another one."""

    def fn(items: list[str]) -> Any:
        if "numpy" in items:
            np.stack([np.zeros(2), np.zeros(3)])
        if "json" in items:
            json.loads("{")
        return [object() for _ in items]

    build_broken(["numpy", "json", "neither"], tmp_path, fn, keys=str)
    frames = [record["frame"].partition(" in fn: ")[2] for record in listed(tmp_path)]
    assert frames == ["np.stack([np.zeros(2), np.zeros(3)])", 'json.loads("{")', ""]
    assert all(record["frame"] for record in listed(tmp_path))


@pytest.mark.parametrize("kind", ["dataset", "iterable", "copies", "keys"])
def test_items_that_were_changed_in_place_are_not_tried_again(tmp_path: Path, kind: str) -> None:
    class Held(Dataset[Any]):
        def __init__(self) -> None:
            self.tensors = [torch.tensor([float(i)]) for i in range(COUNT)]

        def __len__(self) -> int:
            return COUNT

        def __getitem__(self, i: int) -> Any:
            return self.tensors[i].clone() if kind == "copies" else self.tensors[i]

    def fn(items: list[torch.Tensor]) -> Any:
        is_broken = 6 in torch.stack(items)
        for item in items:
            item.mul_(2)
        if is_broken:
            raise ValueError("not this one")
        return {"x": torch.stack(items)}

    options = {"keys": [f"{i:09d}" for i in range(COUNT)]} if kind == "keys" else {}
    error = build_broken(iter(Held().tensors) if kind == "iterable" else Held(), tmp_path, fn, **options)
    failed = dict.fromkeys((4, 5, 6, 7), "in place, .*; copy what fn changes")
    if kind == "copies":
        failed = {6: "not this one"}
    assert items_of(listed(tmp_path)) == list(failed)
    for match, (_, text) in zip(failed.values(), error.failures, strict=True):
        assert re.search(match, text)
    check(tmp_path, {f"{i:09d}": i for i in range(COUNT) if i not in failed})


@pytest.mark.parametrize(("step", "kind"), KINDS)
def test_items_that_fail(tmp_path: Path, step: str, kind: str) -> None:
    broken = set(BROKEN)
    texts = Texts(tmp_path / "texts", broken=BROKEN if step == "read" else ())

    def key(item: dict[str, Any]) -> str:
        if step == "key" and item["value"] in broken:
            raise ValueError("no key")
        return item["__key__"] + ".x" * (step == "bad key" and item["value"] in broken)

    def digest(item: dict[str, Any]) -> str:
        if step == "digest" and item["value"] in broken:
            raise ValueError("no digest")
        return str(item["value"])

    def fn(items: list[dict[str, Any]]) -> Any:
        bad = [item["value"] in broken for item in items]
        if step == "fn" and any(bad):
            raise ValueError("not this one")
        if step == "count" and any(bad):
            return [{"x": 0}] * (len(items) + 1)
        values = [torch.tensor([2.0 * item["value"], 0]) for item in items]
        if step == "nan":
            values = [torch.tensor([float("nan"), 0]) if b else value for value, b in zip(values, bad, strict=True)]
        small = [object() if b and step == "store" else 1 for b in bad]
        samples: list[Any] = [{"x": x, "y": y} for x, y in zip(values, small, strict=True)]
        return [None if b and step == "None" else sample for sample, b in zip(samples, bad, strict=True)]

    def source() -> Any:
        return iter([texts[i] for i in range(COUNT)]) if kind == "iterable" else texts

    options: dict[str, Any] = {"keys": key, "digest": digest, "check": "finite", "num_workers": 2 * (kind == "workers")}
    for _ in range(2):  # the second call tries them again, with the same result
        error = build_broken(source(), tmp_path / "out", fn, **options)
        knows_key = step not in ("read", "key", "bad key", "digest")
        assert [key for key, _ in error.failures] == [f"n{i:04d}" if knows_key else None for i in BROKEN]
        pairs = zip(BROKEN, error.failures, strict=True)
        assert all(STEPS[step] in text and f"item {i}: " in text for i, (_, text) in pairs)
        assert all(word in str(error) for word in ("5 items failed", "failures.jsonl", "item 0", "allow_failures=True"))
        records = listed(tmp_path / "out")
        assert items_of(records) == list(BROKEN)
        assert all(STEPS[step] in record["text"] and "Error" in record["error"] for record in records)
        assert all(record["frame"] for record in records)
    good = [i for i in range(COUNT) if i not in broken]
    kept, broken = broken, set()
    tc.build([texts[i] for i in good], fn, tmp_path / "good", **OPTIONS | options | {"num_workers": 0}).close()
    broken = kept
    with pytest.warns(UserWarning, match=r"5 items failed, listed in .*failures.jsonl; the first is item 0(:| \(key )"):
        build(source(), tmp_path / "out", fn, allow_failures=True, **options).close()
    (tmp_path / "out" / "failures.jsonl").unlink()
    compare(tmp_path / "out", tmp_path / "good")  # samples, shards and indexes are those of the others alone

    broken = set()
    for i in BROKEN:
        texts.write(i, i)
    noted, called = counted(fn)
    build(source(), tmp_path / "out", noted, **options | {"on_error": "raise"}).close()
    assert sorted(called) == [*range(12), 20, 21, 22]  # the batches that lack a sample
    with tc.open(tmp_path / "out") as cache:
        assert sorted(cache.keys()) == [path.stem for path in texts.paths]
        assert [cache[f"n{i:04d}"]["x"].load()[0] for i in range(COUNT)] == [2 * i for i in range(COUNT)]


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:tc.build.* items? failed:UserWarning")
# a writer that was killed after it had named a shard has not listed it
@pytest.mark.filterwarnings("ignore:.*manifest.json does not list 1 of the shards:UserWarning")
def test_killed_at_every_step(tmp_path: Path) -> None:
    """Samples and list are always whole, and as without a kill. Failures are listed once, until the file is gone."""
    texts, out, whole = Texts(tmp_path / "texts"), tmp_path / "out", tmp_path / "whole"
    build(texts, whole, allow_failures=True).close()

    def work(step: int) -> None:
        stop_at(step)
        build(texts, out, allow_failures=True).close()

    for broken in (BROKEN, (7, 11), ()):
        for i in BROKEN:
            if i not in broken:
                texts.write(i, i)
        step = 0
        while is_killed(lambda: work(step)):  # noqa: B023 called here
            if out.exists():
                assert set(items_of(listed(out))) <= set(BROKEN)
            if (out / "manifest.json").exists():
                with tc.open(out) as cache:
                    assert all(cache[key]["x"].load().item() == 2 * int(key[1:]) for key in list(cache.keys()))
            step += 1
        assert step > 3
        if broken == BROKEN:
            compare(out, whole)
        assert items_of(listed(out)) == list(broken)
        check(out, {f"n{i:04d}": i for i in range(COUNT) if i not in broken})
    assert not list(out.glob("failures*"))


@pytest.mark.parametrize("worlds", [(3, 3), (3, 1), (3, 2, 4), (1, 3)], ids=str)
@pytest.mark.filterwarnings("ignore:tc.build.* items? failed:UserWarning")
def test_ranks(tmp_path: Path, worlds: tuple[int, ...]) -> None:
    """After calls with any numbers of ranks, each failure is listed once, and those of corrected items are gone."""
    texts, out = Texts(tmp_path / "texts"), tmp_path / "out"

    def work(rank: int, world_size: int) -> None:
        build(texts, out, rank=rank, world_size=world_size, allow_failures=True)

    broken = list(BROKEN)
    for world_size in worlds:
        assert finish([start(lambda r=r, w=world_size: work(r, w)) for r in range(world_size)]) == [0] * world_size
        assert items_of(listed(out)) == broken
        assert json_of("ls", out, "--failed") == listed(out)  # of the files of all ranks
        check(out, {f"n{i:04d}": i for i in range(COUNT) if i not in broken})
        texts.write(broken[0], broken[0])
        broken = broken[1:]
    for rank in range(2):
        for i in broken:
            texts.write(i, i)
        build(texts, out, rank=rank, world_size=2).close()
    assert not list(out.glob("failures*"))
    check(out, {f"n{i:04d}": i for i in range(COUNT)})


def test_positions_as_keys(tmp_path: Path) -> None:
    """Samples of items between others are added later; the comparison of the items still finds an inserted one."""
    values: list[Any] = list(range(COUNT))
    broken = [str(i) if i in BROKEN else i for i in values]  # two times a text is no number
    assert len(build_broken(broken, tmp_path).failures) == 5
    with pytest.raises(tc.StaleCacheError, match="item 1 is not the one"):
        build([9, *broken], tmp_path)
    assert len(listed(tmp_path)) == 5
    build([*values, 23], tmp_path).close()
    check(tmp_path, {f"{i:09d}": i for i in range(COUNT + 1)})
    assert listed(tmp_path) == []


def test_positions_of_items_with_keys(tmp_path: Path) -> None:
    error = build_broken(Texts(tmp_path / "texts"), tmp_path / "out", keys="position")
    assert [key for key, _ in error.failures] == [f"{i:09d}" for i in BROKEN]


def test_keys_that_look_like_positions(tmp_path: Path) -> None:
    """Although the first item cannot be read, no other item is taken for finished."""

    count = 300  # so many that not all finished items are read again

    class Reversed(Texts):
        def __getitem__(self, i: int) -> dict[str, Any]:
            return super().__getitem__(i) | {"__key__": f"{count - 1 - i:09d}"}

    def interrupted(items: list[dict[str, Any]]) -> Any:
        if items[-1]["value"] > 200:
            raise KeyboardInterrupt
        return double(items)

    texts, out = Reversed(tmp_path / "texts", count, broken=(0,)), tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        build(texts, out, interrupted)
    assert len(build_broken(texts, out).failures) == 1
    check(out, {f"{count - 1 - i:09d}": i for i in range(1, count)})


FIRST, MIDDLE, BATCH, ALL = (0,), (2,), (0, 1, 2, 3), tuple(range(12))


@pytest.mark.parametrize(
    ("kind", "has_key", "is_resumed", "broken"),
    [
        *itertools.product(["map"], [False, True], [False, True], [FIRST, MIDDLE, BATCH, ALL]),
        *itertools.product(["digest", "iterable"], [False, True], [True], [FIRST, BATCH]),
        ("workers", True, True, BATCH),
    ],
    ids=str,
)
def test_items_that_cannot_be_read_are_always_listed(
    tmp_path: Path, kind: str, has_key: bool, is_resumed: bool, broken: tuple[int, ...]
) -> None:
    """Also if the position of such an item is the key of a finished sample of another item."""
    count, half = 12, range(6)

    class Keyed(Texts):
        def __getitem__(self, i: int) -> dict[str, Any]:
            text = self.paths[i].read_text()
            item = {"value": text if kind == "iterable" else int(text)}
            return item | ({"__key__": f"{count - 1 - i:09d}"} if has_key else {})

    def fn(items: list[dict[str, Any]]) -> Any:
        return {"x": torch.tensor([[2.0 * int(item["value"])] for item in items])}

    def source() -> Any:
        return iter([texts[i] for i in range(count)]) if kind == "iterable" else texts

    texts, out = Keyed(tmp_path / "texts", count, tuple(half)), tmp_path / "out"
    options: dict[str, Any] = {"num_workers": 2 * (kind == "workers")}
    if kind in ("digest", "iterable"):
        options["digest"] = lambda item: str(int(item["value"]))
    if is_resumed:
        build_broken(source(), out, fn, **options)
    for i in range(count):
        texts.write(i, "broken" if i in broken else str(i))
    assert len(build_broken(source(), out, fn, **options).failures) == len(broken)
    assert items_of(listed(out)) == list(broken)
    finished = {*range(count)} - {*broken} | {i for i in range(count) if is_resumed and i not in half}
    if finished:
        check(out, {f"{count - 1 - i if has_key else i:09d}": i for i in finished})


def test_a_changed_item_that_fails_when_it_is_read_again(tmp_path: Path) -> None:
    """It does not count as an item that differs each time it is read."""

    class Once(Values):
        def __getitem__(self, i: int) -> int:
            value, self.values[i] = self.values[i], "cannot be read again"
            return int(value)

    build(Values(), tmp_path).close()
    source = Once()
    source.values[5] = 100
    with pytest.raises(tc.StaleCacheError, match="item 5 is not the one"):
        build(source, tmp_path)


def test_a_finished_item_that_cannot_be_read(tmp_path: Path) -> None:
    texts, out = Texts(tmp_path / "texts", broken=(2,)), tmp_path / "out"
    keys = [path.stem for path in texts.paths]
    build_broken(texts, out, keys=keys)
    texts.write(1, "broken")  # of the same batch
    assert [key for key, _ in build_broken(texts, out, keys=keys).failures] == ["n0002"]
    texts.write(2, 2)
    (out / "failures.jsonl").rename(out / ".failures.jsonl.0a1b2c3d.tmp")  # as if the first write had been killed
    build(texts, out, keys=keys).close()
    check(out, {f"n{i:04d}": i for i in range(COUNT)})


@pytest.mark.parametrize("by_position", [False, True])
def test_a_finished_item_that_cannot_be_compared(tmp_path: Path, by_position: bool) -> None:
    """Its sample stays, with one warning: the item may have changed."""
    source, options = Values(), {} if by_position else KEYED
    build(source, tmp_path / "out", **options).close()
    source.values[3] = source.values[9] = "broken"
    match = r"2 items with a sample in .*out' cannot be read.* the first is item 3 \(key '000000003'\): ValueError: "
    with pytest.warns(UserWarning, match=match) as caught:
        assert len(build(source, tmp_path / "out", **options)) == COUNT
    assert len(caught) == 1


def test_another_batch_size_on_ranks(tmp_path: Path) -> None:
    """If all items but the failed ones have samples, it does not matter which rank has made them."""
    texts, out = Texts(tmp_path / "texts", broken=(5,)), tmp_path / "out"
    num_failed = 0
    for batch_size in (1, COUNT):
        for rank in range(2):
            try:
                build(texts, out, rank=rank, world_size=2, batch_size=batch_size).close()
            except tc.BuildError as error:
                num_failed += len(error.failures)
    assert num_failed == 2
    check(out, {f"n{i:04d}": i for i in range(COUNT) if i != 5})


@pytest.mark.filterwarnings("ignore:tc.build.* items? failed:UserWarning")
def test_a_version(tmp_path: Path) -> None:
    """It is written only without failures, or where they are allowed; computed samples wait in the hidden folder."""
    texts = Texts(tmp_path / "texts", broken=())
    keys, new = [path.stem for path in texts.paths], COUNT - 1
    options = {"digest": lambda item: str(item["value"])}
    build([texts[i] for i in range(new)], tmp_path / "v1", **options).close()
    shutil.copytree(tmp_path / "v1", tmp_path / "copy")
    for i in range(5):
        texts.write(i, 100 + i)
    texts.write(6, "broken")  # has an old sample, which may not be reused

    def fn(items: list[dict[str, Any]]) -> Any:
        values = [item["value"] for item in items]
        return [{"x": torch.tensor([value * 2.0])} if value not in (103, 500) else None for value in values]

    old = {**options, "keys": keys, "reuse": tmp_path / "v1"}
    for rank in (0, 1):
        build(texts, tmp_path / "v2", fn, **old, rank=rank, world_size=2, allow_failures=True).close()
    texts.write(new, 500)  # fails now, and has a sample of its earlier value
    failed = ["n0003", "n0006", f"n{new:04d}"]
    assert [key for key, _ in build_broken(texts, tmp_path / "v2", fn, **old).failures] == failed
    assert not (tmp_path / "v2").exists()
    listed_in = re.escape(str(tmp_path / "v2" / "failures.jsonl"))
    with pytest.warns(UserWarning, match=f"3 items failed, listed in {listed_in}"):
        build(texts, tmp_path / "v2", fn, **old, allow_failures=True).close()
    values = {f"n{i:04d}": i + 100 * (i < 5) for i in range(COUNT) if i not in (3, 6, new)}
    check(tmp_path / "v2", values)
    assert items_of(listed(tmp_path / "v2")) == [3, 6, new]
    compare(tmp_path / "v1", tmp_path / "copy")
    texts.write(6, 6)
    with pytest.warns(UserWarning, match="3 items failed"):  # the same call opens it
        build(texts, tmp_path / "v2", fn, **old, allow_failures=True).close()
    error = build_broken(texts, tmp_path / "v2", fn, **old)
    assert "build a new version in another folder, with reuse=" in str(error)
    build(texts, tmp_path / "v3", **options, reuse=tmp_path / "v2").close()
    check(tmp_path / "v3", values | {"n0003": 103, "n0006": 6, f"n{new:04d}": 500})
    assert listed(tmp_path / "v3") == []


@pytest.mark.parametrize("by_position", [False, True])
@pytest.mark.filterwarnings("ignore:tc.build.* items? failed:UserWarning")
def test_a_version_of_an_item_that_can_no_longer_be_read(tmp_path: Path, by_position: bool) -> None:
    """A call has computed its sample, but the item may have changed again since then."""

    source, options = Values(), {} if by_position else KEYED
    build(source, tmp_path / "v1", **options).close()
    options = options | {"reuse": tmp_path / "v1"}
    source.values[3], source.values[9] = 103, "broken"
    assert [key for key, _ in build_broken(source, tmp_path / "v2", **options).failures] == ["000000009"]
    source.values[3], source.values[9] = "broken", 9
    assert [key for key, _ in build_broken(source, tmp_path / "v2", **options).failures] == ["000000003"]
    build(source, tmp_path / "v2", **options, allow_failures=True).close()
    check(tmp_path / "v2", {f"{i:09d}": i for i in range(COUNT) if i != 3})
    assert items_of(listed(tmp_path / "v2")) == [3]


def test_interrupts_are_no_failures(tmp_path: Path) -> None:
    """What was listed before stays listed, unless it has been corrected and tried again."""
    texts, out = Texts(tmp_path / "texts"), tmp_path / "out"
    build_broken(texts, out)
    texts.write(0, 0)
    texts.write(7, 7)

    def fn(items: list[dict[str, Any]]) -> Any:
        if any(item["value"] == 5 for item in items):
            raise KeyboardInterrupt
        return double(items)

    with pytest.raises(KeyboardInterrupt):
        build(texts, out, fn)
    assert items_of(listed(out)) == [6, 7, 11, 22]
    assert items_of(json_of("ls", out, "--failed", "--limit", 1)) == [6]
    lines = run("ls", out, "--failed", "--limit", 2).stdout.splitlines()
    assert len(lines) == 2
    assert all(word in lines[1] for word in ("item 7  ValueError: invalid literal", "in __getitem__: "))
    check(out, {f"n{i:04d}": i for i in range(COUNT) if i not in (6, 7, 11, 22)})


def test_errors_that_are_no_failures(tmp_path: Path) -> None:
    texts, out = Texts(tmp_path / "texts"), tmp_path / "out"
    with pytest.raises(ValueError, match="invalid literal"):  # the default
        build(texts, out, on_error="raise")
    with pytest.raises(ValueError, match="two items have the key 'n0001'"):
        build([texts[1], texts[2], texts[1]], out)
    build_broken(texts, out)
    with pytest.raises(tc.StaleCacheError, match="expected model=2"):
        build(texts, out, fingerprint={"model": 2})
    with pytest.raises(ZeroDivisionError):
        build(({"__key__": f"k{i}", "value": 1 // (3 - i)} for i in range(5)), tmp_path / "iterable")

    def fn(items: list[dict[str, Any]]) -> Any:
        (tmp_path / "taken" / "000000.tar").write_bytes(b"of another program")
        return double(items)

    with pytest.raises(FileExistsError, match=r"000000\.tar was created after this writer started"):
        build(texts, tmp_path / "taken", fn, batch_size=1)
    kept = items_of(listed(tmp_path / "taken"))
    assert kept[0] == 0  # found before the writer failed
    assert set(kept) <= set(BROKEN)


def test_items_of_a_batch_find_its_memory_free(tmp_path: Path) -> None:
    """A batch that is too large for the memory is computed one by one, without what it has allocated."""
    held: list[weakref.ref[torch.Tensor]] = []

    def fn(items: list[int]) -> Any:
        assert not [ref for ref in held if ref() is not None]
        memory = torch.empty(len(items))
        held.append(weakref.ref(memory))
        if len(items) > 1:
            raise torch.OutOfMemoryError(f"{len(memory)} are too many")
        return {"x": torch.tensor(items)}

    assert len(build(list(range(9)), tmp_path, fn)) == 9
    assert len(held) == 3 + 8


def fail() -> Any:
    raise ValueError("cannot be built again")


class Unsendable:
    """A value that a worker process cannot send, or the main process cannot receive."""

    def __init__(self, how: str) -> None:
        self.how = how

    def __reduce__(self) -> Any:
        if self.how == "receive":
            return fail, ()
        raise ValueError("cannot be taken apart")


@pytest.mark.parametrize("how", ["send", "receive", "error"])
def test_items_that_workers_cannot_send(tmp_path: Path, how: str) -> None:
    class LocalError(Exception):
        pass

    class Source(Dataset[Any]):
        def __len__(self) -> int:
            return COUNT

        def __getitem__(self, i: int) -> dict[str, Any]:
            if how == "error" and i in BROKEN:
                raise LocalError("no picture")
            return {"__key__": f"n{i:04d}", "value": i, "more": Unsendable(how) if i in BROKEN else torch.zeros(500)}

    word = {"send": "cannot be taken apart", "receive": "cannot be built again", "error": "no picture"}[how]
    error = build_broken(Source(), tmp_path / "record", num_workers=2)
    assert [key for key, _ in error.failures] == [None if how == "error" else f"n{i:04d}" for i in BROKEN]
    assert all(f"item {i}" in text and word in text for i, (_, text) in zip(BROKEN, error.failures, strict=True))
    check(tmp_path / "record", {f"n{i:04d}": i for i in range(COUNT) if i not in BROKEN})
    match = word if how == "error" else f"item 0: a worker process cannot send it: .*{word}.*num_workers=0"
    with pytest.raises((TypeError, AttributeError, pickle.PicklingError), match=match):
        build(Source(), tmp_path / "raise", num_workers=2, on_error="raise")
    assert not active_children()


def test_an_error_without_a_message(tmp_path: Path) -> None:
    class OddError(Exception):
        def __str__(self) -> str:
            raise ZeroDivisionError

    def fn(items: list[int]) -> Any:
        if 3 in items:
            raise OddError
        return {"x": torch.tensor(items)}

    ((key, text),) = build_broken(list(range(9)), tmp_path, fn).failures
    assert key == "000000003"
    assert "OddError: <" in text


def test_all_items_fail(tmp_path: Path) -> None:
    source = Texts(tmp_path / "texts", broken=tuple(range(COUNT)))
    assert len(build_broken(source, tmp_path / "out").failures) == COUNT
    with pytest.warns(UserWarning, match="23 items failed"):
        assert len(build(source, tmp_path / "out", allow_failures=True)) == 0
    assert os.listdir(tmp_path / "out") == ["failures.jsonl"]


@pytest.mark.parametrize(
    "line", ["{", "{}", '{"item": "1", "key": "a", "error": "", "text": "", "frame": ""}', "[" * 9000]
)
def test_a_damaged_list(tmp_path: Path, line: str) -> None:
    texts, out = Texts(tmp_path / "texts"), tmp_path / "out"
    build_broken(texts, out)
    with (out / "failures.jsonl").open("a") as file:
        file.write(f"\n{line}\n")  # blank lines are no damage
    with pytest.raises(tc.FormatError) as caught:  # its traceback must not keep a writer alive, which holds a lock
        build(texts, out)
    caught.match(r"failures\.jsonl: line 7 is not a failure of tc\.build; delete the file")
    assert "delete the file" in run("ls", out, "--failed", status=1).stderr
    assert run("ls", out).stdout.count("n0") == COUNT - 5
    (out / "failures.jsonl").unlink()
    assert len(build_broken(texts, out).failures) == 5


@pytest.mark.parametrize("make", [os.mkdir, os.mkfifo])
def test_no_list_but_its_name(tmp_path: Path, make: Any) -> None:
    make(tmp_path / "failures.jsonl")
    with pytest.raises(tc.FormatError, match=r"failures\.jsonl: expected a file.*; rename it"):
        build([1], tmp_path)
    assert "rename it" in run("ls", tmp_path, "--failed", status=1).stderr


def test_ls_failed_needs_a_folder(tmp_path: Path) -> None:
    assert "expected a folder" in run("ls", tmp_path / "none", "--failed", status=2).stderr
    assert run("ls", tmp_path, "--failed").stdout == ""


FLOATS = [
    name
    for name in ("float16", "bfloat16", "float32", "float64", "complex32", "complex64", "complex128")
    + ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu")
    if hasattr(torch, name)
]


@pytest.mark.parametrize("name", FLOATS)
def test_finite_of_every_dtype(tmp_path: Path, name: str) -> None:
    dtype = getattr(torch, name)
    ones = torch.ones(2, 3, dtype=torch.complex64 if dtype.is_complex else torch.float32)
    fine = ones.to(dtype, copy=True)
    ones[1, :2] = float("nan")
    bad = ones.to(dtype)

    def fn(items: list[Any]) -> Any:
        others = {"i": torch.arange(3), "b": torch.ones(2, dtype=torch.bool), "text": np.array(["nan"])}
        others |= {"empty": torch.empty(0, 3).to(dtype), "value": math.nan, "number": np.float32("nan")}
        return [others | {"a": {"b": [fine, bad if item == 2 else fine]}} for item in items]

    with pytest.raises(ValueError, match=r"sample '000000002': tensor 'a\.b\.1' has 2 values of 6 that are NaN"):
        build([0, 1, 2], tmp_path / "raise", fn, on_error="raise", check="finite")
    assert len(build_broken([0, 1, 2], tmp_path / "record", fn, check="finite").failures) == 1
    assert len(build([0, 1, 2], tmp_path / "off", fn)) == 3


def test_finite_arrays_and_lazy_tensors(tmp_path: Path) -> None:
    values = [{"x": np.array([1.0, np.inf if i == 1 else 0.0])} for i in range(1, 4)]
    with pytest.raises(ValueError, match="'x' has 1 values of 2"):
        build(values, tmp_path / "arrays", lambda items: items, check="finite", on_error="raise")
    cache = build(values, tmp_path / "all", lambda items: items)
    failures = build_broken(cache, tmp_path / "lazy", lambda items: items, check="finite").failures
    assert [key for key, _ in failures] == ["000000000"]
    texts = [{"t": np.array([["inf", "nan"][i]]), "when": np.array(["NaT"], "datetime64[s]")} for i in range(2)]
    assert len(build(texts, tmp_path / "texts", lambda items: items, check="finite")) == 2
