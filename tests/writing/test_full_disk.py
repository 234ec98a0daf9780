"""The system refuses to write, at any moment: the error that comes out is its own, and no temporary file is left."""

from __future__ import annotations

import errno
import itertools
import os
import resource
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import wds_tensorcache as tc
from tests.children import run_in_child
from tests.kills import compare
from tests.writing.test_build import COUNT, Numbers, build, digest, double

LIMITS = [0, 300, 3_000]  # of the bytes of each file


def fails(work: Callable[[], Any], full_from_start: int | None = None) -> bool:
    """Do it in a child, perhaps with a limit; return whether that raised the system's error."""

    def fill_and_work() -> None:
        if full_from_start is not None:
            fill(full_from_start)
        work()

    code = run_in_child(fill_and_work)
    assert code in (0, errno.EFBIG)
    return code != 0


def fill(limit: int) -> None:
    """Let no file of this process grow beyond a limit: as a disk that is full, or a quota."""
    sys.dont_write_bytecode = True  # the interpreter would cache a module that it imports cut short
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))


def full_at(at: int, limit: int) -> Callable[[list[dict[str, Any]]], list[Any]]:
    """Return a function of batches in whose call `at` the disk becomes full."""
    calls = itertools.count(1)

    def fn(items: list[dict[str, Any]]) -> list[Any]:
        if next(calls) == at:
            fill(limit)
        return double(items)

    return fn


def strays(folder: Path) -> list[str]:
    return [name for _, _, names in os.walk(folder) for name in names if name.endswith((".tmp", ".lock"))]


@pytest.mark.parametrize("limit", LIMITS)
def test_while_a_version_is_built(tmp_path: Path, limit: int) -> None:
    """The old version stays as it is, and the next call resumes."""
    source = Numbers((0, 7, 13), COUNT + 2)
    build(Numbers(), tmp_path / "v1", digest=digest).close()
    options: dict[str, Any] = {"digest": digest, "batch_size": 1, "max_samples": 2, "reuse": tmp_path / "v1"}
    build(source, tmp_path / "whole", **options).close()
    failed = 0
    for at in range(1, 6):
        folder = tmp_path / f"{at}"
        failed += fails(lambda: build(source, folder, full_at(at, limit), **options))  # noqa: B023
        assert not strays(tmp_path)
        assert not folder.exists()
        build(source, folder, **options).close()
        compare(folder, tmp_path / "whole")
    assert failed == 5
    assert tc.verify(tmp_path / "v1").ok
    assert sorted(os.listdir(tmp_path)) == sorted(["v1", "whole", *map(str, range(1, 6))])


@pytest.mark.parametrize("limit", LIMITS)
@pytest.mark.parametrize("at", [1, 3, 6])
def test_while_a_cache_is_built(tmp_path: Path, at: int, limit: int) -> None:
    build(Numbers(), tmp_path / "whole").close()
    assert fails(lambda: build(Numbers(), tmp_path / "x", full_at(at, limit)))
    assert not strays(tmp_path / "x")
    build(Numbers(), tmp_path / "x").close()
    compare(tmp_path / "x", tmp_path / "whole")


def test_the_error_names_the_file(tmp_path: Path) -> None:
    build(Numbers(), tmp_path, footer=False).close()

    def work() -> None:
        fill(10)
        with pytest.raises(OSError, match=r"\[Errno 27\] File too large: '.*/000000\.tar\.index'$"):
            tc.write_index(tmp_path / "000000.tar")

    assert run_in_child(work) == 0


@pytest.mark.parametrize("limit", [0, 10, 100, 300, 1_000, 3_000])
def test_everything_else(tmp_path: Path, limit: int) -> None:
    build(Numbers(), tmp_path / "x", footer=False).close()
    shard = tmp_path / "x" / "000000.tar"
    before = {name: (tmp_path / "x" / name).read_bytes() for name in os.listdir(tmp_path / "x")}
    calls: list[Callable[[], Any]] = [
        lambda: tc.write_index(shard),
        lambda: tc.repair(tmp_path / "x", tmp_path / "mended"),
        lambda: build(Numbers(count=COUNT + 9), tmp_path / "x", footer=False, keys="position"),
        lambda: build(Numbers(), tmp_path / "new"),
        lambda: tc.drop(tmp_path / "x", tmp_path / "less", ["000000007"]),
        lambda: tc.ShardWriter(tmp_path / "other" / "%d.tar", fsync=False),
    ]
    failed = 0
    for call in calls:
        failed += fails(call, limit)
        assert not strays(tmp_path)
        assert not list(tmp_path.glob(".mended.*"))
        if (tmp_path / "less").exists():
            assert len(tc.open(tmp_path / "less")) == COUNT - 1
        if (tmp_path / "mended").exists():
            assert limit >= 1_000
            assert len(tc.open(tmp_path / "mended")) == COUNT
    assert failed >= 2
    for name in before.keys() - {"manifest.json"}:
        assert (tmp_path / "x" / name).read_bytes() == before[name]
    assert len(tc.open(tmp_path / "x")) >= COUNT
