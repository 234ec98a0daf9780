"""Writes of Ray in one process: attempts of tasks, late tasks, writes at the same time, and builds that resume. No cluster."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import wds_tensorcache as tc

pytest.importorskip("ray", reason="ray is missing: pip install 'wds-tensorcache[ray]'")
from wds_tensorcache.ray.commit import Mode, commit, start_write
from wds_tensorcache.ray.write import write_part

pytestmark = [pytest.mark.long, pytest.mark.filterwarnings("ignore::DeprecationWarning:ray")]
MADE = {"made": "here"}


def begin(folder: Path, mode: Mode = "create", fingerprint: Any = MADE) -> Any:
    options = {"fingerprint": fingerprint, "fsync": False, "max_samples": 2, "allow": ()}
    return start_write(str(folder), mode, "__key__", options)


def blocks(numbers: Sequence[int]) -> list[Any]:
    return [tc.ray.ray_table([f"{i:03d}"], [{"x": torch.full((2,), i)}]) for i in numbers]


def write(job: Any, numbers: Sequence[int], task: int = 0) -> Any:
    return write_part(job, blocks(numbers), task)


def keys(folder: Path) -> list[str]:
    with tc.open(folder) as cache:
        for key in cache.keys():  # noqa: SIM118
            assert cache[key]["x"].tolist() == [int(key)] * 2
        return list(cache.keys())


def shards(folder: Path) -> int:
    return len(list(folder.glob("*.tar")))


def test_only_the_attempt_that_succeeded_is_listed(tmp_path: Path) -> None:
    with begin(tmp_path) as job:
        first, second = write(job, range(5)), write(job, range(5))
        assert shards(tmp_path) == 6
        with pytest.raises(FileNotFoundError):
            tc.open(tmp_path)  # an empty manifest hides the shards
        commit(job, second + write(job, range(5, 9), 1))
    assert keys(tmp_path) == [f"{i:03d}" for i in range(9)]
    assert shards(tmp_path) == 5
    assert not set(first) & set(os.listdir(tmp_path))


def test_a_late_task_leaves_nothing(tmp_path: Path) -> None:
    with begin(tmp_path) as job:
        commit(job, write(job, range(3)))
    before = sorted(os.listdir(tmp_path))
    with pytest.raises(RuntimeError, match="has ended"):
        write(job, range(3))

    def end_meanwhile() -> Any:
        yield from blocks(range(5))
        (tmp_path / f".ray-{other.id}.writing").unlink()

    with begin(tmp_path, "append") as other, pytest.raises(RuntimeError, match="has ended"):
        write_part(other, end_meanwhile(), 0)
    assert sorted(os.listdir(tmp_path)) == before


def test_two_writes_at_once(tmp_path: Path) -> None:
    with begin(tmp_path) as job:
        modes: list[Mode] = ["create", "overwrite", "build"]
        for mode in modes:
            with pytest.raises(FileExistsError, match="in progress"), begin(tmp_path, mode):
                pass
        part = write(job, range(4))
        with begin(tmp_path, "append") as other:
            commit(other, write(other, range(10, 14)))
        with pytest.raises(FileExistsError, match="meanwhile"):
            commit(job, part)
    assert keys(tmp_path) == ["010", "011", "012", "013"]
    assert shards(tmp_path) == 2
    with begin(tmp_path, "append") as job, begin(tmp_path, "append") as other:
        commit(other, write(other, [20, 21]))
        commit(job, write(job, [22]))
        with pytest.raises(tc.InvalidKeyError, match="020"):
            commit(other, write(other, [19, 20]))
    assert sorted(keys(tmp_path)) == ["010", "011", "012", "013", "020", "021", "022"]


def test_a_build_takes_what_killed_ones_have_finished(tmp_path: Path) -> None:
    """Their markers are files that no process has locked."""
    for numbers in (range(4), range(1, 6), range(6, 8)):
        with begin(tmp_path / "other", "append") as job:
            write(job, numbers)
            for path in (tmp_path / "other").glob("part-*"):
                (tmp_path / path.name).write_bytes(path.read_bytes())
            (tmp_path / f".ray-{job.id}.writing").touch()
    assert shards(tmp_path) > 4
    with begin(tmp_path, "build") as job:
        finished = keys(tmp_path)
        assert {"006", "007"} < set(finished) <= {f"{i:03d}" for i in range(8)}
        assert len(finished) == len(set(finished))
        rest = sorted({*range(10)} - {*map(int, finished)})
        with pytest.raises(ZeroDivisionError), begin(tmp_path, "append"):
            raise ZeroDivisionError
        commit(job, write(job, rest))
    assert sorted(keys(tmp_path)) == [f"{i:03d}" for i in range(10)]
    assert tc.verify(tmp_path).ok
    with pytest.raises(tc.StaleCacheError, match="made"), begin(tmp_path, "build", {"made": "there"}):
        pass
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_a_build_that_fails_keeps_what_is_finished(tmp_path: Path) -> None:
    def fail() -> Any:
        yield from blocks(range(5))
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), begin(tmp_path, "build") as job:
        write_part(job, fail(), 0)
    assert keys(tmp_path) == ["000", "001", "002", "003"]
