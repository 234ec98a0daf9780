"""The system refuses to write, at any moment: the error that comes out is its own, and no temporary file is left."""

from __future__ import annotations

import errno
import os
import resource
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import wds_tensorcache as tc
from tests.building.test_build import COUNT, Numbers, build, digest, double
from tests.building.test_switch import CHANGES, look, prepare
from tests.kills import compare

LIMITS = [0, 300, 3_000]  # of the bytes of each file


def fails(work: Callable[[], Any], full_from_start: int | None = None) -> bool:
    """Do it in a child, perhaps with a limit; return whether that raised the system's error."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            if full_from_start is not None:
                fill(full_from_start)
            work()
            status = 0
        except OSError as exc:
            status = exc.errno or 1
        finally:
            os._exit(status)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code in (0, errno.EFBIG)
    return code != 0


def fill(limit: int) -> None:
    """Let no file of this process grow beyond a limit: as a disk that is full, or a quota."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))


def strays(folder: Path) -> list[str]:
    return [name for _, _, names in os.walk(folder) for name in names if name.endswith((".tmp", ".lock"))]


@pytest.mark.parametrize("limit", LIMITS)
def test_while_samples_are_replaced(tmp_path: Path, limit: int) -> None:
    """Also when a shard is announced that replaces others."""
    source = CHANGES["some"]
    old, whole = prepare(tmp_path, source)
    failed = 0
    for at in range(1, 9):
        folder, called = shutil.copytree(old, tmp_path / f"{at}"), 0

        def fn(items: list[dict[str, Any]]) -> list[Any]:
            nonlocal called
            called += 1
            if called == at:  # noqa: B023 called here
                fill(limit)
            return double(items)

        failed += fails(lambda: build(source, folder, fn, digest=digest, batch_size=1))  # noqa: B023
        assert not strays(folder)
        assert look(folder, source) in (0, 2)
        build(source, folder, digest=digest).close()
        assert look(folder, source) == 2
    assert failed > 1
    assert look(whole, source) == 2


@pytest.mark.parametrize("limit", LIMITS)
@pytest.mark.parametrize("at", [1, 3, 6])
def test_while_a_cache_is_built(tmp_path: Path, at: int, limit: int) -> None:
    build(Numbers(), tmp_path / "whole").close()
    called = 0

    def fn(items: list[dict[str, Any]]) -> list[Any]:
        nonlocal called
        called += 1
        if called == at:
            fill(limit)
        return double(items)

    assert fails(lambda: build(Numbers(), tmp_path / "x", fn))
    assert not strays(tmp_path / "x")
    build(Numbers(), tmp_path / "x").close()
    compare(tmp_path / "x", tmp_path / "whole")


@pytest.mark.parametrize("limit", [0, 10, 100, 300, 1_000, 3_000])
def test_everything_else(tmp_path: Path, limit: int) -> None:
    build(Numbers(), tmp_path / "x", footer=False).close()
    shard = tmp_path / "x" / "000000.tar"
    before = {name: (tmp_path / "x" / name).read_bytes() for name in os.listdir(tmp_path / "x")}
    calls: list[Callable[[], Any]] = [
        lambda: tc.index(shard),
        lambda: tc.repair(tmp_path / "x", tmp_path / "mended"),
        lambda: build(Numbers(count=COUNT + 9), tmp_path / "x", footer=False),
        lambda: build(Numbers(), tmp_path / "new"),
        lambda: tc.ShardWriter(tmp_path / "other" / "%d.tar", fsync=False),
    ]
    failed = 0
    for call in calls:
        failed += fails(call, limit)
        assert not strays(tmp_path)
        if (tmp_path / "mended").exists():
            assert limit >= 1_000
            assert len(tc.open(tmp_path / "mended")) == COUNT
    assert failed >= 2
    after = {name: (tmp_path / "x" / name).read_bytes() for name in before}
    assert {name: raw for name, raw in after.items() if name != "manifest.json"} == {
        name: raw for name, raw in before.items() if name != "manifest.json"
    }
    assert len(tc.open(tmp_path / "x")) >= COUNT
