"""Shards that `tc.write_index` gets by other names, and names that are taken: nothing is destroyed, and manifests stay true."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

import wds_tensorcache as tc
from tests.shards.damage import write

KEYS = [f"{i:03d}" for i in range(4)]


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def relist(folder: Path, old: str, new: str) -> None:
    """Let the manifest list a shard by another name."""
    path = folder / "manifest.json"
    document = json.loads(path.read_text().replace(f'"{old}"', json.dumps(new)))
    path.write_text(json.dumps(document))


@pytest.mark.parametrize("url", ["000000.tar", "./000000.tar", "link.tar"])
def test_spellings_in_the_manifest(tmp_path: Path, url: str) -> None:
    path = write(tmp_path / "x", footer=False)
    (tmp_path / "x" / "link.tar").symlink_to(path)
    relist(tmp_path / "x", path.name, url)
    tc.write_index(path)
    assert list(tc.open(tmp_path / "x").keys()) == KEYS
    entries = json.loads((tmp_path / "x" / "manifest.json").read_text())
    assert len(entries["shardlist"]) == 1


@pytest.mark.parametrize("name", ["link.tar", "000000.tar"])
def test_by_a_link_in_another_folder(tmp_path: Path, name: str) -> None:
    """Manifests of both folders list the shard."""
    path = write(tmp_path / "x", footer=False)
    (tmp_path / "y").mkdir()
    (tmp_path / "y" / name).symlink_to("../x/000000.tar")
    shutil.copy(tmp_path / "x" / "manifest.json", tmp_path / "y")
    relist(tmp_path / "y", path.name, name)
    tc.write_index(path, dali_index=False)
    tc.write_index(tmp_path / "y" / name)
    for folder in ("x", "y"):
        assert list(tc.open(tmp_path / folder).keys()) == KEYS
        assert tc.verify(tmp_path / folder).ok


@pytest.mark.parametrize("taken", ["000000.tar.index", "000000.idx"])
def test_folders_in_the_way(tmp_path: Path, taken: str) -> None:
    path = write(tmp_path, footer=False, dali_index=False)
    (tmp_path / taken).mkdir()
    (tmp_path / taken / "mine").write_bytes(b"1")
    before = contents(tmp_path)
    with pytest.raises(FileExistsError, match=rf"{taken} is not a file.*move it"):
        tc.write_index(path)
    assert contents(tmp_path) == before
    with pytest.raises(FileExistsError, match=r"000000\.idx is not a file|000000\.tar exists"):
        write(tmp_path, footer=False)
    assert contents(tmp_path) == before


@pytest.mark.parametrize(("shard", "other"), [("a", "a.idx"), ("a", "a.index"), ("x.idx", "x.idx"), ("b.tar", "b.idx")])
def test_shards_in_the_way(tmp_path: Path, shard: str, other: str) -> None:
    path = write(tmp_path / "x", footer=False)
    for name in {shard, other}:
        shutil.copy(path, tmp_path / name)
    shutil.rmtree(tmp_path / "x")
    before = contents(tmp_path)
    with pytest.raises(FileExistsError, match=rf"{other} is a tar.*rename"):
        tc.write_index(tmp_path / shard)
    assert contents(tmp_path) == before


def test_a_shard_called_like_an_index(tmp_path: Path) -> None:
    """Without DALI's index, nothing has its name."""
    shutil.copy(write(tmp_path / "x", footer=False), tmp_path / "x.idx")
    tc.write_index(tmp_path / "x.idx", dali_index=False)
    assert list(tc.open(tmp_path / "x.idx").keys()) == KEYS
    assert sorted(os.listdir(tmp_path)) == ["x", "x.idx", "x.idx.index"]


@pytest.mark.parametrize("name", ["000000.tar.index", "000000.idx"])
def test_versions_of_shards_of_such_names(tmp_path: Path, name: str) -> None:
    write(tmp_path / "x", per_shard=2, dali_index=False)
    (tmp_path / "x" / "000001.tar").rename(tmp_path / "x" / name)
    relist(tmp_path / "x", "000001.tar", name)
    assert list(tc.open(tmp_path / "x").keys()) == KEYS
    before = contents(tmp_path)
    with pytest.raises(FileExistsError, match=rf"{name} is a tar.*rename"):
        tc.drop(tmp_path / "x", tmp_path / "y", [KEYS[0]])
    assert contents(tmp_path) == before
    assert os.listdir(tmp_path) == ["x"]


@pytest.mark.parametrize("overwrite", [True, False])
@pytest.mark.parametrize("other", ["a0.idx", "a0.index"])
def test_writers_beside_shards_of_such_names(tmp_path: Path, other: str, overwrite: bool) -> None:
    path = write(tmp_path / "x", footer=False, dali_index=False)
    shutil.copy(path, tmp_path / other)
    if overwrite:
        shutil.copy(path, tmp_path / "a0")
    elif other == "a0.index":
        return
    shutil.rmtree(tmp_path / "x")
    before = contents(tmp_path)
    with (
        pytest.raises(FileExistsError, match=rf"{other} is a tar"),
        tc.ShardWriter(tmp_path / "a%d", fsync=False, overwrite=overwrite, manifest=False) as sink,
    ):
        sink.write("0", {"x": 1})
    assert contents(tmp_path) == before
