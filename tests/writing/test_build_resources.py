"""Builds: the memory that they keep, batches that are interrupted, and arguments that are refused at once."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import wds_tensorcache as tc
from tests.children import run_in_child
from tests.kills import compare
from tests.same import assert_same
from tests.shards.damage import members
from tests.writing.test_build import COUNT, Numbers, build, counted, digest, double, key


class Color(Enum):
    """A class that samples contain."""

    RED = 1
    GREEN = 2
    BLUE = 3


def test_memory_that_fn_uses_again(tmp_path: Path) -> None:
    """Samples are written as `fn` returned them, even if it reuses its memory."""
    tensor, array, rows = torch.empty(4, 200_000), np.empty((4, 50_000), np.float32), [torch.empty(3) for _ in range(4)]
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

    nested = build(list(range(40)), tmp_path / "a", fn)
    listed = build(list(range(40)), tmp_path / "b", samples)
    for i in range(40):
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


def broken_at(name: str, stop: Callable[[], None]) -> Any:
    def fn(items: list[dict[str, Any]]) -> list[Any]:
        if any(item["name"] == name for item in items):
            stop()
        return grouped(items)

    return fn


def stop_with(error: type[BaseException]) -> None:
    raise error


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("fails_at", ["n6", "n11", "n17", "n22"])
@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt, SystemExit, None], ids=str)
@pytest.mark.parametrize("kind", [Numbers, lambda: iter(Numbers()[i] for i in range(COUNT))], ids=["map", "iterable"])
def test_batches_stay_the_same_ones(
    tmp_path: Path, kind: Any, fails_at: str, error: type[BaseException] | None
) -> None:
    """After an error or an interrupt, a shard is shorter; if the process was killed, the bytes stay, too."""
    whole = build(Numbers(), tmp_path / "whole", grouped)
    if error is None:
        assert run_in_child(lambda: build(kind(), tmp_path / "x", broken_at(fails_at, kill))) == -signal.SIGKILL
    else:
        with pytest.raises(error):
            build(kind(), tmp_path / "x", broken_at(fails_at, partial(stop_with, error)))
        assert len(tc.open(tmp_path / "x")) == int(fails_at[1:]) // 4 * 4
    cache = build(kind(), tmp_path / "x", grouped)
    assert list(cache.keys()) == list(whole.keys())
    for one, other in zip(whole, cache, strict=True):
        assert_same(tc.realize(one), tc.realize(other))
    whole.close()
    cache.close()
    if error is None:
        compare(tmp_path / "x", tmp_path / "whole")


def test_own_keys_that_look_like_numbers(tmp_path: Path) -> None:
    def items(numbers: Any) -> list[dict[str, Any]]:
        return [{"__key__": f"{number:09d}", "value": number} for number in numbers]

    build(items(range(10)), tmp_path).close()
    fn, called = counted()
    cache = build(items([0, *range(100, 109)]), tmp_path, fn)
    assert called == [0, *range(100, 109)]  # the first batch whole
    assert len(cache) == 19
    gaps = [number for number in range(40) if number % 7 != 5]
    for _ in range(2):
        assert len(build(items(gaps), tmp_path / "gaps")) == len(gaps)
    mixed = [*items(range(5)), {"value": 5}]
    with pytest.raises(ValueError, match="item '000000005' lacks a '__key__', unlike"):
        build(mixed, tmp_path / "mixed")


def test_the_first_error_is_raised(tmp_path: Path) -> None:
    """Of the thread that writes, too."""
    written = threading.Event()

    def encoder(members: dict[str, Any]) -> dict[str, Any]:
        try:
            raise OSError("the disk is gone")
        finally:
            written.set()

    def fn(items: list[dict[str, Any]]) -> list[Any]:
        if items[0]["value"]:
            written.wait(10)
            raise RuntimeError("the device is lost")
        return double(items)

    with pytest.raises(OSError, match="the disk is gone"):
        build(Numbers(), tmp_path, fn, digest=digest, encoder=encoder)


def test_a_shard_that_was_deleted(tmp_path: Path) -> None:
    build(Numbers(), tmp_path).close()
    (tmp_path / "000001.tar").unlink()
    fn, called = counted()
    with pytest.warns(UserWarning, match=r"000001\.tar no longer exists; removed from the manifest"):
        cache = build(Numbers(), tmp_path, fn)
    assert called == list(range(4, 12))
    assert sorted(cache.keys()) == [f"{i:09d}" for i in range(COUNT)]
    assert tc.verify(tmp_path).ok


def test_classes(tmp_path: Path) -> None:
    cache = build(range(3), tmp_path, lambda items: [{"c": Color(i + 1)} for i in items], allow=[Color])
    assert cache[2]["c"] is Color.BLUE


def test_an_error_counts_finished_samples(tmp_path: Path) -> None:
    def broken(items: list[dict[str, Any]]) -> list[Any]:
        if any(item["value"] == 17 for item in items):
            raise ZeroDivisionError
        return double(items)

    with pytest.raises(ZeroDivisionError) as caught:
        build(Numbers(), tmp_path, broken)
    if sys.version_info >= (3, 11):
        assert caught.value.__notes__ == [
            "tc.build: fn was called with a batch of 4, from item 16 (key '000000016') to item 19 (key '000000019')",
            f"tc.build: finished shards stay in {str(tmp_path)!r}, with 16 samples of this call; call it again to resume",
        ]


class Endless(torch.utils.data.IterableDataset[int]):
    """Has a length, and no `[i]`."""

    def __len__(self) -> int:
        return 6

    def __iter__(self) -> Iterator[int]:
        return iter(range(6))


def test_an_iterable_with_a_length(tmp_path: Path) -> None:
    assert list(build(Endless(), tmp_path, lambda items: [{"i": i} for i in items]).keys()) == [
        f"{i:09d}" for i in range(6)
    ]


@pytest.mark.parametrize(
    ("source", "options", "error", "message"),
    [
        (torch.utils.data.DataLoader(Numbers()), {}, TypeError, "its dataset, since build makes batches"),
        ({"a": 1}, {}, TypeError, "a dict cannot be a dataset"),
        (7, {}, TypeError, "a int has neither"),
        ([], {}, ValueError, "the source has no items"),
        (iter(()), {}, ValueError, "the source has no items"),
        (iter([1]), {"keys": ["a"]}, ValueError, "a list of keys needs a map-style dataset"),
        (Numbers(), {"keys": list(range(COUNT))}, tc.InvalidKeyError, "__key__ is 0, expected a non-empty str"),
        (Numbers(), {"keys": [*map(str, range(22)), "a.b"]}, tc.InvalidKeyError, "'a.b' has a dot"),
        (Numbers(), {"keys": lambda item: item["value"]}, tc.InvalidKeyError, "__key__ is 0"),
        (Numbers(), {"digest": lambda item: None}, TypeError, "item 0, key '000000000': digest returned a NoneType"),
        (Numbers(), {"digest": lambda item: b"x"}, TypeError, "digest returned a bytes"),
        (Numbers(), {"fingerprint": None}, TypeError, "expected a dict with str keys"),
        (
            Numbers(),
            {"fingerprint": {"a": 1, "dtype": torch.bfloat16}},
            TypeError,
            r"fingerprint\['dtype'\] .* pass a str, for example 'torch.bfloat16'",
        ),
        (Numbers(), {"fingerprint": {"a": float("nan")}}, ValueError, r"fingerprint\['a'\]"),
        (Numbers(), {"overwrite": True}, TypeError, "does not accept overwrite="),
        (Numbers(), {"footer": False, "manifest": False}, ValueError, "the fingerprint needs one of the two"),
    ],
)
def test_bad_arguments(
    tmp_path: Path, source: Any, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    def fn(items: list[Any]) -> Any:
        raise AssertionError("computed")

    with pytest.raises(error, match=message):
        build(source, tmp_path, fn, **options)


def test_a_folder_of_other_shards(tmp_path: Path) -> None:
    build(Numbers(), tmp_path / "a-%d.tar").close()
    with pytest.raises(ValueError, match=r"contains a-0.tar, which does not match 'b-%d.tar'; pass a pattern"):
        build(Numbers(), tmp_path / "b-%d.tar")
    with pytest.raises(tc.StaleCacheError, match="build into another folder, or delete this one"):
        build(Numbers(), tmp_path / "a-%d.tar", fingerprint={"model": "triple"})
    (tmp_path / "a-0.tar").write_bytes((tmp_path / "a-0.tar").read_bytes()[:700])
    with pytest.raises(tc.FormatError, match=r"\(tc\.verify\) describes the damage, .*\(tc\.repair\) saves all other"):
        build(Numbers(), tmp_path / "a-%d.tar")


def test_a_repaired_cache_is_completed(tmp_path: Path) -> None:
    build(Numbers(), tmp_path / "x", keys=key).close()
    with (tmp_path / "x" / "000002.tar").open("r+b") as file:
        file.truncate(3000)
    assert not tc.repair(tmp_path / "x", tmp_path / "mended").ok
    fn, called = counted()
    cache = build(Numbers(), tmp_path / "mended", fn, keys=key)
    assert set(called) >= set(range(12, 15))
    assert set(called) <= set(range(8, 16))
    assert sorted(cache.keys()) == sorted(f"n{i}" for i in range(COUNT))
    assert tc.verify(tmp_path / "mended").ok


def test_damage_inside_of_a_finished_shard(tmp_path: Path) -> None:
    """`verify` sees a lost header, an index reads past it, and samples that `repair` leaves out are computed again."""

    def make(folder: Path, count: int) -> tc.TensorCache:
        def work(items: list[int]) -> list[Any]:
            return [{"x": torch.full((300,), item)} for item in items]

        return tc.build(range(count), work, folder, fingerprint={}, max_samples=5, fsync=False)

    make(tmp_path / "x", 10).close()
    path = tmp_path / "x" / "000000.tar"
    begin, _ = members(path)["000000002.skel.pyd"]
    content = bytearray(path.read_bytes())
    content[begin - 512 : begin] = bytes(512)
    path.write_bytes(content)
    with make(tmp_path / "x", 12) as cache:
        assert len(cache) == 12
        assert cache[2]["x"][0].item() == 2
    assert [fault.shard for fault in tc.verify(tmp_path / "x").faults][:1] == [str(path)]
    tc.repair(tmp_path / "x", tmp_path / "mended")
    with make(tmp_path / "mended", 12) as cache:
        assert sorted(cache[key]["x"][0].item() for key in list(cache.keys())) == list(range(12))
