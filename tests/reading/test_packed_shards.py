"""Compressed tars in a folder of shards: readers leave them out and say so, writers of a new cache refuse."""

from __future__ import annotations

import gzip
import os
import re
import warnings
from pathlib import Path

import pytest
import torch

import wds_tensorcache as tc

WHY = " because only plain tars can be opened; "
GZIP = r"unpack \*\.tar\.gz with `gunzip`, or read \*\.tar\.gz as a stream: tc\.ResumablePipeline\('.*/\*\.tar\.gz'\)"
ONE = rf"1 compressed tar is left out \('a-000002\.tar\.gz'\){WHY}{GZIP}"


def write(folder: Path, *, manifest: bool = False) -> Path:
    """Write 30 samples into three shards, and compress the last."""
    with tc.ShardWriter(
        folder / "a-%06d.tar", max_samples=10, fsync=False, manifest=manifest, dali_index=False
    ) as sink:
        for i in range(30):
            sink.write(f"{i:03d}", torch.full((8,), i))
    if not manifest:
        pack(folder / "a-000002.tar")
    return folder


def pack(path: Path) -> None:
    path.with_name(f"{path.name}.gz").write_bytes(gzip.compress(path.read_bytes()))
    path.unlink()


def test_readers_warn(tmp_path: Path) -> None:
    folder = write(tmp_path / "a")
    with pytest.warns(UserWarning, match=ONE) as found, tc.open(folder) as cache:
        assert len(cache) == 20
    assert [warning.filename for warning in found] == [__file__]
    with pytest.warns(UserWarning, match=ONE) as found:
        assert len(list(tc.ResumablePipeline(str(folder), tc.decode()))) == 20
    assert len(found) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # the remedies
        assert len(list(tc.ResumablePipeline(f"{folder}/*.tar.gz"))) == 10
        assert len(list(tc.ResumablePipeline(f"{folder}/a-*"))) == 30
        packed = folder / "a-000002.tar.gz"
        (folder / "a-000002.tar").write_bytes(gzip.decompress(packed.read_bytes()))
        packed.unlink()
        assert len(tc.open(folder)) == 30
    for path in sorted(folder.glob("a-*.tar")):
        pack(path)
    names = r"3 compressed tars are left out \('a-000000\.tar\.gz', 'a-000001\.tar\.gz', 'a-000002\.tar\.gz'\)"
    for read in (tc.open, lambda source: tc.ResumablePipeline(str(source))):
        with pytest.raises(FileNotFoundError, match=rf"neither manifest\.json nor any \*\.tar; .*{names}"):
            read(folder)


@pytest.mark.parametrize(
    ("ending", "remedy"),
    [
        ("tar.bz2", r"`bunzip2`.*tc\.ResumablePipeline\('.*/\*\.tar\.bz2'\)"),
        ("TAR.XZ", r"`unxz`.*tc\.ResumablePipeline\('.*/\*\.TAR\.XZ'\)"),
        ("tar.zst", r"`unzstd`.*tc\.ResumablePipeline\(\['pipe:zstd -dc PATH', …\]\)"),
    ],
)
def test_only_compressed_tars(tmp_path: Path, ending: str, remedy: str) -> None:
    (tmp_path / f"a.{ending}").write_bytes(b"x")
    with pytest.raises(FileNotFoundError, match=f"1 compressed tar is left out .*{remedy}"):
        tc.open(tmp_path)


def test_a_folder_with_a_manifest(tmp_path: Path) -> None:
    folder = write(tmp_path / "a", manifest=True)
    for name in ("b.tgz", "c.tar.bz2", "d.tar.xz", "e.tar.zst", "f.TAR", ".g.tar.gz", "h.tar.idx", "tar.gz"):
        (folder / name).write_bytes(b"x")
    (folder / "folder.tgz").mkdir()
    other = r"1 other tar is left out \('f\.TAR'\) because the names of shards end in \.tar; rename them; "
    names = rf"{other}4 compressed tars are left out \('b\.tgz', 'c\.tar\.bz2', 'd\.tar\.xz', …\)"
    remedies = WHY + "; ".join(
        rf"unpack \*\.{ending} with `{unpacker}`, or .*{source}.*"
        for ending, unpacker, source in (
            ("tgz", "gunzip", "tgz"),
            (r"tar\.bz2", "bunzip2", "bz2"),
            (r"tar\.xz", "unxz", "xz"),
            (r"tar\.zst", "unzstd", "pipe:zstd -dc PATH"),
        )
    )
    with pytest.warns(UserWarning, match=names + remedies), tc.open(folder) as cache:
        assert len(cache) == 30
    (folder / "unlisted.tar").write_bytes((folder / "a-000000.tar").read_bytes())
    with pytest.warns(UserWarning, match=rf"does not list 1 of the shards .*{names}") as found, tc.open(folder):
        assert len(found) == 1


def test_a_manifest_may_list_them(tmp_path: Path) -> None:
    folder = write(tmp_path / "a", manifest=True)
    pack(folder / "a-000002.tar")
    manifest, nbytes = folder / "manifest.json", (folder / "a-000002.tar.gz").stat().st_size
    text = manifest.read_text().replace("a-000002.tar", "a-000002.tar.gz")
    manifest.write_text(re.sub(r'(tar\.gz", "nsamples": 10, "filesize": )\d+', rf"\g<1>{nbytes}", text))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(list(tc.ResumablePipeline(str(folder), tc.decode()))) == 30


def test_new_caches_from_it_are_refused(tmp_path: Path) -> None:
    folder = write(tmp_path / "a", manifest=True)
    (folder / "a-000002.tar.gz").write_bytes(b"x")
    with pytest.raises(tc.FormatError, match=ONE):
        tc.drop(folder, tmp_path / "out", ["000"])
    with pytest.warns(UserWarning, match=ONE), tc.open(folder) as cache, pytest.raises(tc.FormatError, match=ONE):
        tc.export_cache(cache, tmp_path / "out", "pt")
    assert not os.path.exists(tmp_path / "out")
