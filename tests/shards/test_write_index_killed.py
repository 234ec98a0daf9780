"""`tc.write_index` killed at any of its calls, or on a full disk: the folder reads as before, or the error has the remedy."""

from __future__ import annotations

import os
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

import wds_tensorcache as tc
from tests.shards.damage import flip, write
from tests.writing.test_full_disk import fails, strays

pytestmark = pytest.mark.long

KEYS = [f"{i:03d}" for i in range(4)]
CALLS = frozenset("open write pwrite truncate ftruncate fsync replace remove unlink flush close __exit__".split())


def is_killed(path: Path, number: int) -> bool:
    """Index a shard in a child that kills itself before its call `number` that may change a file; return whether it did."""
    child = os.fork()
    if child == 0:
        left = number

        def look(_: Any, event: str, function: Any) -> None:
            nonlocal left
            if event == "c_call" and function.__name__ in CALLS:
                if not left:
                    os.kill(os.getpid(), signal.SIGKILL)
                left -= 1

        try:
            sys.setprofile(look)
            tc.write_index(path, footer=True)
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL


def prepare(folder: Path, before: str) -> Path:
    """Write two shards and a manifest that lists them; `before` is what the first one has as its index."""
    path = write(folder, 4, per_shard=2, footer=before == "damaged")
    if before == "damaged":
        flip(path, path.stat().st_size - 9)
    elif before == "sidecar":
        tc.write_index(path, dali_index=False)
    elif before == "padded":
        with path.open("ab") as file:
            file.write(bytes(50_000))
        tc.write_index(path, footer=False)
    return path


@pytest.mark.parametrize("before", ["nothing", "sidecar", "damaged", "padded"])
def test_killed_anywhere(tmp_path: Path, before: str) -> None:
    """A length that the manifest does not list lasts no longer than it takes to say so, not while the index is written."""
    name = prepare(tmp_path / "before", before).name
    readable, refused, number = 0, 0, 0
    while True:
        folder = shutil.copytree(tmp_path / "before", tmp_path / f"{number}")
        done = not is_killed(folder / name, number)
        try:
            with tc.open(folder) as cache:
                assert list(cache.keys()) == KEYS
                assert int(cache[1]["latent"][0, 0]) == 1
            readable += 1
        except tc.FormatError as exc:
            assert "(tc.write_index) again" in str(exc)  # noqa: PT017
            refused += 1
        tc.write_index(folder / name, footer=True)
        assert list(tc.open(folder).keys()) == KEYS
        assert tc.verify(folder).ok
        if done:
            break
        number += 1
    assert number > 15
    assert refused <= 6, f"{refused} of {number}"
    assert readable > 2 * refused


@pytest.mark.parametrize("before", ["nothing", "sidecar", "damaged"])
def test_a_full_disk(tmp_path: Path, before: str) -> None:
    path = prepare(tmp_path / "before", before)
    nbytes, failed = path.stat().st_size, 0
    for number, limit in enumerate((0, 100, 1_000, nbytes - 512, nbytes, nbytes + 1, nbytes + 512, nbytes + 1024)):
        folder = shutil.copytree(tmp_path / "before", tmp_path / f"{number}")
        failed += fails(lambda: tc.write_index(folder / path.name, footer=True), limit)  # noqa: B023
        assert list(tc.open(folder).keys()) == KEYS
        assert not strays(folder)
    assert failed > 2
