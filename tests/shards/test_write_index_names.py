"""Shards that `tc.write_index` gets by other names, and names that are taken: nothing is destroyed, and manifests stay true."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

import wds_tensorcache as tc
from tests.shards.damage import contents_of, write

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
