"""`cat a.tar b.tar > c.tar`: readers stop at the end of the first tar, and the other samples never go without a word."""

from __future__ import annotations

import io
import shutil
import subprocess
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import webdataset as wds

import wds_tensorcache as tc
from tests.cli.command import run
from tests.remote.servers.http_server import HttpServer
from tests.shards.damage import contents_of
from tests.shards.tars import build_with_tarfile

HIDDEN = r"byte {}: a tar header after the end of the archive at byte 6144.*tensorcache merge`"


def write(folder: Path, name: str, numbers: range, *, footer: bool) -> Path:
    path = folder / f"{name}.tar"
    with tc.ShardWriter(path, footer=footer, manifest=False, dali_index=False, fsync=False) as sink:
        for i in numbers:
            sink.write(f"{i:03d}", {"x": torch.full((3,), i)})
    return path


@pytest.fixture(params=[(True, True), (False, False)], ids=["footers", "no footers"])
def shard(request: Any, tmp_path: Path) -> Path:
    """The path of a file of two shards, with the footers of the parameter."""
    first, second = request.param
    parts = [write(tmp_path / "parts", "a", range(3), footer=first)]
    parts.append(write(tmp_path / "parts", "b", range(3, 6), footer=second))
    path = tmp_path / "c" / "c.tar"
    path.parent.mkdir()
    path.write_bytes(b"".join(part.read_bytes() for part in parts))
    return path


def hidden(path: Path) -> int:
    return (path.parent.parent / "parts" / "a.tar").stat().st_size


def test_readers_warn(shard: Path) -> None:
    with pytest.warns(UserWarning, match=r"c\.tar: " + HIDDEN.format(hidden(shard))) as caught:
        cache = tc.open(shard)
    assert [warning.filename for warning in caught] == [__file__]
    assert list(cache.keys()) == ["000", "001", "002"]
    stages = wds.SimpleShardList([str(shard)]), tc.tarfile_to_samples(), tc.decode()
    for stream in (tc.ResumablePipeline([shard], tc.decode()), wds.DataPipeline(*stages)):
        with pytest.warns(UserWarning, match=r"c\.tar: " + HIDDEN.format(hidden(shard))):
            assert len(list(stream)) == 3
    assert [(fault.kind, fault.offset) for fault in tc.verify(shard).faults][:1] == [("trailing", hidden(shard))]


def copies(out: Path) -> dict[str, Callable[[Path], object]]:
    return {
        "index": tc.write_index,
        "reshard": lambda path: tc.reshard(path, out),
        "merge": lambda path: tc.merge([path], out),
        "drop": lambda path: tc.drop(path.parent, out, ["000"]),
        "export npz": lambda path: tc.export_cache(tc.open(path), out, "npz"),
        "export a join": lambda path: tc.export_cache(tc.join([tc.open(path)]), out, "npz"),
        "build": lambda path: tc.build(range(3), lambda items: items, out, reuse=path.parent, fingerprint={}),
        "resume": lambda path: tc.ShardWriter(path, resume=True),
    }


@pytest.mark.filterwarnings("ignore:.*a tar header after the end:UserWarning")
@pytest.mark.parametrize("how", copies(Path()))
def test_copies_are_refused(shard: Path, tmp_path: Path, how: str) -> None:
    before = contents_of(tmp_path)
    with pytest.raises(tc.FormatError, match=r"c\.tar: byte .* a tar header .*; if tars were concatenated") as caught:
        copies(tmp_path / "out")[how](shard)
    assert f"byte {hidden(shard)}" in str(caught.value)
    assert caught.value.kind == "trailing"
    assert contents_of(tmp_path) == before


def array_tar(number: int) -> bytes:
    content = io.BytesIO()
    np.save(content, np.full(3, number))
    return build_with_tarfile([(f"{number}.npy", content.getvalue())])


def test_import_refuses(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "c.tar").write_bytes(array_tar(0) + array_tar(1))
    ended = run("import", tmp_path / "in", tmp_path / "out", status=1)
    assert "c.tar: byte 10240: a tar header after the end of the archive at byte 1024" in ended.stderr
    assert not (tmp_path / "out").exists()
    ended = run("import", tmp_path / "in", tmp_path / "out", "--on-error", "skip", status=1)
    assert "skipped c.tar: byte 10240" in ended.stderr
    assert list(tc.open(tmp_path / "out").keys()) == ["0"]


@pytest.mark.parametrize("shard", [(True, True)], indirect=True, ids=["footers"])
def test_urls(shard: Path, tmp_path: Path) -> None:
    with HttpServer() as server:
        url = server.put("c.tar", shard.read_bytes())
        for _ in range(2):  # an incomplete index is not kept on disk
            with pytest.warns(UserWarning, match=HIDDEN.format(hidden(shard))):
                assert len(tc.open(url, keep_indexes=tmp_path / "kept")) == 3
        with pytest.raises(tc.FormatError, match=r"byte \d+: a tar header after the end"):
            tc.write_index(url, index_folder=tmp_path / "indexes")
        assert not (tmp_path / "indexes").exists()
        with pytest.warns(UserWarning, match=HIDDEN.format(hidden(shard))):
            assert len(list(tc.ResumablePipeline([url], tc.decode()))) == 3


@pytest.mark.skipif(shutil.which("tar") is None, reason="needs tar")
@pytest.mark.parametrize("footer", [False, True])
def test_other_bytes_after_the_end(tmp_path: Path, footer: bool) -> None:
    """Padding to 10,240 bytes, `tar -A`, `tar -r`, and the index of a later version hide no member: no warning."""
    a, b = write(tmp_path, "a", range(3), footer=footer), write(tmp_path, "b", range(3, 6), footer=footer)
    padded, joined, added, later = (tmp_path / f"{name}.tar" for name in ("padded", "joined", "added", "later"))
    padded.write_bytes(a.read_bytes()[:6144] + bytes(10_240 - 6144))
    for path in (joined, added):
        shutil.copy(a, path)
    subprocess.run(["tar", "-Af", joined, b], check=True)
    (tmp_path / "003.json").write_text("1")
    subprocess.run(["tar", "-rf", added, "-C", tmp_path, "003.json"], check=True)
    later.write_bytes(a.read_bytes().replace(b"tcindex1", b"tcindex2"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for path, count in ((padded, 3), (joined, 6), (added, 3), (later, 3)):
            assert len(tc.open(path)) == count
            assert len(list(tc.ResumablePipeline([path]))) == tc.verify(path).num_samples == count + (path is added)
