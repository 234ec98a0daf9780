"""`tc.write_index` and overwriting killed at any call: the folder reads as before, or has no old parts."""

from __future__ import annotations

import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import wds_tensorcache as tc
from tests.children import run_in_child
from tests.shards.damage import flip, write
from tests.writing.test_full_disk import strays

pytestmark = pytest.mark.long

KEYS = [f"{i:03d}" for i in range(4)]
CALLS = frozenset("open write pwrite truncate ftruncate fsync replace remove unlink flush close __exit__".split())


def is_killed(act: Callable[[], object], number: int) -> bool:
    """Act in a child that kills itself before its call `number` that may change a file; return whether it did."""
    left = number

    def look(_: Any, event: str, function: Any) -> None:
        nonlocal left
        if event == "c_call" and function.__name__ in CALLS:
            if not left:
                os.kill(os.getpid(), signal.SIGKILL)
            left -= 1

    def work() -> None:
        sys.setprofile(look)
        act()

    code = run_in_child(work)
    assert code in (0, -signal.SIGKILL)
    return code != 0


def prepare(folder: Path, before: str) -> Path:
    """Write two shards and a manifest that lists them; `before` is what the first one has as its index."""
    path = write(folder, 4, per_shard=2, footer=before == "damaged")
    if before == "damaged":
        flip(path, path.stat().st_size - 9)
    elif before == "sidecar":
        tc.write_index(path, dali_index=False)
    elif before == "stale":
        other = write(folder.parent / "other", 3, footer=False, manifest=False)
        tc.write_index(other, dali_index=False)
        other.with_name(f"{other.name}.index").rename(f"{path}.index")
    return path


@pytest.mark.parametrize("before", ["nothing", "sidecar", "damaged", "stale"])
def test_killed_anywhere(tmp_path: Path, before: str) -> None:
    name = prepare(tmp_path / "before", before).name
    number, done = 0, False
    while not done:
        folder = shutil.copytree(tmp_path / "before", tmp_path / f"{number}")
        done = not is_killed(lambda: tc.write_index(folder / name), number)  # noqa: B023
        for _ in range(2):
            with tc.open(folder) as cache:
                assert list(cache.keys()) == KEYS
                assert int(cache[1]["latent"][0, 0]) == 1
            tc.write_index(folder / name)
        assert tc.verify(folder).ok or before == "damaged"
        assert not strays(folder)
        number += 1
    assert number > 10


def test_overwriting_is_killed_anywhere(tmp_path: Path) -> None:
    """No index stays without its shard, which a later shard of this name would get."""
    name = prepare(tmp_path / "before", "sidecar").name
    number, done = 0, False
    while not done:
        folder = shutil.copytree(tmp_path / "before", tmp_path / f"{number}")
        done = not is_killed(lambda: tc.ShardWriter(folder, overwrite=True, fsync=False).close(), number)  # noqa: B023
        shards = {path.stem for path in folder.glob("*.tar")}
        assert {path.name.split(".")[0] for path in folder.iterdir() if path.suffix in (".idx", ".index")} <= shards
        with tc.ShardWriter(folder, overwrite=True, fsync=False) as writer:
            writer.write("a", {"x": 1})
        assert sorted(os.listdir(folder)) == [name.replace(".tar", ".idx"), name, "manifest.json"]
        number += 1
    assert number > 5
