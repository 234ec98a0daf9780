"""`tc.write_index`: shards by other names, names that are taken, and kills: nothing is destroyed, and manifests stay true."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import wds_tensorcache as tc
from tests.children import run_in_child
from tests.shards.damage import contents_of, flip, write
from tests.writing.test_full_disk import strays

KEYS = [f"{i:03d}" for i in range(4)]


def relist(folder: Path, old: str, new: str) -> None:
    """Let the manifest list a shard by another name."""
    path = folder / "manifest.json"
    path.write_text(path.read_text().replace(f'"{old}"', json.dumps(new)))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """The path of a shard without any index, in a folder of its own."""
    return write(tmp_path / "x", footer=False, dali_index=False)


@pytest.mark.parametrize("url", ["000000.tar", "./000000.tar", "link.tar"])
def test_spellings_in_the_manifest(path: Path, url: str) -> None:
    path.with_name("link.tar").symlink_to(path)
    relist(path.parent, path.name, url)
    tc.write_index(path)
    assert list(tc.open(path.parent).keys()) == KEYS
    assert len(json.loads(path.with_name("manifest.json").read_text())["shardlist"]) == 1


@pytest.mark.parametrize("name", ["link.tar", "000000.tar"])
def test_by_a_link_in_another_folder(path: Path, tmp_path: Path, name: str) -> None:
    """Manifests of both folders list the shard."""
    (tmp_path / "y").mkdir()
    (tmp_path / "y" / name).symlink_to("../x/000000.tar")
    shutil.copy(path.with_name("manifest.json"), tmp_path / "y")
    relist(tmp_path / "y", path.name, name)
    tc.write_index(path, dali_index=False)
    tc.write_index(tmp_path / "y" / name)
    for folder in ("x", "y"):
        assert list(tc.open(tmp_path / folder).keys()) == KEYS
        assert tc.verify(tmp_path / folder).ok


@pytest.mark.parametrize("taken", ["000000.tar.index", "000000.idx"])
def test_folders_in_the_way(path: Path, taken: str) -> None:
    path.with_name(taken).mkdir()
    (path.with_name(taken) / "mine").write_bytes(b"1")
    before = contents_of(path.parent)
    with pytest.raises(FileExistsError, match=rf"{taken} is not a file.*move it"):
        tc.write_index(path)
    with pytest.raises(FileExistsError, match=r"000000\.idx is not a file|000000\.tar exists"):
        write(path.parent, footer=False)
    assert contents_of(path.parent) == before


@pytest.mark.parametrize(("shard", "other"), [("a", "a.idx"), ("a", "a.index"), ("x.idx", "x.idx"), ("b.tar", "b.idx")])
def test_shards_in_the_way(path: Path, tmp_path: Path, shard: str, other: str) -> None:
    for name in {shard, other}:
        shutil.copy(path, tmp_path / name)
    before = contents_of(tmp_path)
    with pytest.raises(FileExistsError, match=rf"{other} is a tar.*rename"):
        tc.write_index(tmp_path / shard)
    assert contents_of(tmp_path) == before
    # without DALI's index, nothing else has its name
    if other.endswith(".idx"):
        tc.write_index(tmp_path / shard, dali_index=False)
        assert list(tc.open(tmp_path / shard).keys()) == KEYS
        assert contents_of(tmp_path).keys() == before.keys() | {f"{shard}.index"}


@pytest.mark.parametrize(("other", "overwrite"), [("a0.idx", False), ("a0.idx", True), ("a0.index", True)])
def test_writers_beside_shards_of_such_names(path: Path, tmp_path: Path, other: str, overwrite: bool) -> None:
    for name in [other, "a0"] if overwrite else [other]:
        shutil.copy(path, tmp_path / name)
    before = contents_of(tmp_path)
    with (
        pytest.raises(FileExistsError, match=rf"{other} is a tar"),
        tc.ShardWriter(tmp_path / "a%d", fsync=False, overwrite=overwrite, manifest=False) as sink,
    ):
        sink.write("0", {"x": 1})
    assert contents_of(tmp_path) == before


# --- killed at any call ---

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
    elif before == "deleted":  # the manifest has the digest of an index that no longer exists
        tc.write_index(path, dali_index=False)
        Path(f"{path}.index").unlink()
        manifest = folder / "manifest.json"
        manifest.write_text(re.sub('"index": "[0-9a-f]+"', f'"index": "{0:016x}"', manifest.read_text()))
    elif before == "sidecar":
        tc.write_index(path, dali_index=False)
    elif before == "stale":
        other = write(folder.parent / "other", 3, footer=False, manifest=False)
        tc.write_index(other, dali_index=False)
        other.with_name(f"{other.name}.index").rename(f"{path}.index")
    return path


@pytest.mark.long
@pytest.mark.parametrize("before", ["nothing", "sidecar", "damaged", "deleted", "stale"])
def test_killed_anywhere(tmp_path: Path, before: str) -> None:
    name = prepare(tmp_path / "before", before).name
    number, done = 0, False
    while not done:
        folder = shutil.copytree(tmp_path / "before", tmp_path / f"{number}")
        done = not is_killed(lambda: tc.write_index(folder / name), number)  # noqa: B023
        for is_indexed in (False, True):
            if is_indexed:
                tc.write_index(folder / name)
            with tc.open(folder) as cache:
                assert list(cache.keys()) == KEYS
                assert int(cache[1]["latent"][0, 0]) == 1
        assert tc.verify(folder).ok or before == "damaged"
        assert not strays(folder)
        number += 1
    assert number > 10


@pytest.mark.long
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
