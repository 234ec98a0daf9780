"""Bytes after the end of an archive: a shard whose scan does not account for all of it is never indexed or written again."""

from __future__ import annotations

import io
import shutil
import subprocess
import tarfile
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
from tests.reading.batches import write as write_samples
from tests.remote.servers.http_server import HttpServer
from tests.shards.damage import contents_of, erase, faults, members, write
from tests.shards.tars import BLOCK, FORMATS, build, build_with_tarfile, by_tarfile, by_tarfile_in


def assert_refused(path: Path, call: Callable[[], object] | None = None, kind: str = "trailing") -> tc.FormatError:
    """Return the error of `call`, by default of `write_index`, after which everything is as it was."""
    before = contents_of(path.parent)
    with pytest.raises(tc.FormatError, match=r"tc\.repair") as caught:
        call() if call is not None else tc.write_index(path)
    assert contents_of(path.parent) == before
    assert caught.value.kind == kind
    assert str(path) in str(caught.value)
    return caught.value


def erase_from(path: Path, name: str) -> int:
    """Overwrite a member and all that follows with zeros; return the offset of its header."""
    begin = members(path)[name][0] - BLOCK
    erase(path, begin, path.stat().st_size)
    return begin


@pytest.mark.parametrize(
    "tail",
    [build([("z.json", b"1")]), bytes(8192) + build([("z.json", b"1")]), b"x", bytes(5000) + b"x", b"tcindex1"],
    ids=["a tar", "zeros and a tar", "a byte", "zeros and a byte", "a magic"],
)
@pytest.mark.parametrize("has_footer", [True, False])
def test_not_an_index(tmp_path: Path, tail: bytes, has_footer: bool) -> None:
    path = write(tmp_path, 2, footer=has_footer)
    path.write_bytes(path.read_bytes() + tail)
    assert_refused(path)


@pytest.mark.parametrize("zeros", [0, 512, 1024, 9000])
def test_zeros_are_accounted_for(tmp_path: Path, zeros: int) -> None:
    path = tmp_path / "a.tar"
    path.write_bytes(before := build([("a.json", b"1")])[: -2 * BLOCK] + bytes(BLOCK + zeros))
    for _ in range(2):  # the second time there is an index
        tc.write_index(path, dali_index=False)
        assert path.read_bytes() == before
        assert [fault.kind for fault in tc.verify(path).faults] == ["truncated"] * (not zeros)


@pytest.mark.parametrize("has_footer", [True, False])
def test_tools_refuse_a_shard_that_lost_a_header(tmp_path: Path, has_footer: bool) -> None:
    """`resume=True` would write the members after a lost header a second time."""
    path = write(tmp_path / "a", 5, footer=has_footer)
    begin = members(path)["002.skel.pyd"][0] - BLOCK
    if has_footer:  # zeros up to the trailer
        erase(path, begin, path.stat().st_size - 40)
    else:
        erase(path, begin, begin + BLOCK)
    assert_refused(path)
    assert_refused(path, lambda: tc.ShardWriter(tmp_path / "a" / "%06d.tar", footer=has_footer, resume=True))
    assert_refused(path, lambda: tc.drop(tmp_path / "a", tmp_path / "out", ["001"]))
    assert list(tmp_path.iterdir()) == [path.parent]
    tc.ShardWriter(tmp_path / "a" / "%06d.tar", overwrite=True).close()


@pytest.mark.skipif(shutil.which("tar") is None, reason="needs tar")
def test_members_over_a_stale_index(tmp_path: Path) -> None:
    """`tar -r` writes from the end of the archive on, over an index, whose trailer stays; one header among them is lost."""
    path = tmp_path / "a.tar"
    write_samples(path, {f"{number:06d}": number for number in range(2000)}, manifest=False, dali_index=False)
    names = [f"z{number:02d}.json" for number in range(20)]
    for name in names:
        (tmp_path / name).write_text("1")
    nbytes = path.stat().st_size
    subprocess.run(["tar", "-rf", path, "-C", tmp_path, *names], check=True)
    assert path.stat().st_size == nbytes, "the index has room for them"
    before = by_tarfile_in(path)
    assert len(tc.write_index(path).keys) == 2020
    assert by_tarfile_in(path) == before
    assert tc.verify(path).num_samples == 2020
    Path(f"{path}.index").unlink()
    with tarfile.open(path) as archive:
        lost = archive.getmember("z05.json").offset
    erase(path, lost, lost + BLOCK)
    assert_refused(path)


# --- zeros up to the end of the file: if the manifest lists the samples that they replaced, nothing leaves these out unnoticed


@pytest.mark.parametrize("has_footer", [True, False])
@pytest.mark.parametrize("num_left", [0, 5])
def test_zeros_up_to_the_end(tmp_path: Path, has_footer: bool, num_left: int) -> None:
    path = write(tmp_path / "a", 12, footer=has_footer)
    begin = erase_from(path, f"{num_left:03d}.skel.pyd")
    calls: list[Callable[[], object]] = [lambda: tc.write_index(path)]
    if num_left:
        calls += [
            lambda: tc.ShardWriter(tmp_path / "a" / "%06d.tar", footer=False, resume=True),
            lambda: tc.drop(path.parent, tmp_path / "out", ["001"]),
            lambda: tc.export_cache(tc.open(path), tmp_path / "out", "pt"),
        ]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # those of `open`
        for call in calls:
            error = assert_refused(path, call, "lost")
            assert isinstance(error, tc.TarFormatError)
            assert error.offset == begin
            assert f"zeros after {num_left} " in str(error)
    assert list(tmp_path.iterdir()) == [path.parent]
    assert not tc.verify(path.parent).ok
    with pytest.raises(tc.FormatError, match="but the manifest lists 12"):
        list(tc.open(path.parent))


def test_open_warns(tmp_path: Path) -> None:
    path = write(tmp_path, 12)
    begin = erase_from(path, "005.skel.pyd")
    match = rf"byte {begin}: zeros after 5 samples, although manifest\.json lists 12"
    with pytest.warns(UserWarning, match=match) as caught:
        assert len(tc.open(path)) == 5
    assert [warning.filename for warning in caught] == [__file__]


@pytest.mark.parametrize("count", [1, 20])
def test_a_manifest_of_another_file_is_not_believed(tmp_path: Path, count: int) -> None:
    """Written again, shorter or longer, by a writer that leaves the manifest as it is, and zeros up to a record of tar."""
    path = write(tmp_path / "a", 12, footer=False)
    other = write(tmp_path / "other", count, footer=False, dali_index=False, manifest=False)
    path.write_bytes(other.read_bytes() + bytes(2048))
    assert len(tc.open(path)) == count
    assert list(tc.write_index(path).keys) == [f"{i:03d}" for i in range(count)]


def test_a_wrong_count_is_corrected_where_no_member_can_be_lost(tmp_path: Path) -> None:
    path = write(tmp_path, 3)
    manifest = tmp_path / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"nsamples": 3', '"nsamples": 9'))
    tc.write_index(path)
    assert tc.verify(tmp_path).ok


ZEROS = "zeros before the end of the archive; no member could be read from byte"
BEHIND = "members from here on are after the end-of-archive marker"


def test_members_behind_the_marker(tmp_path: Path) -> None:
    one, other = build([("a.json", b"1"), ("b.json", b"2")]), build([("c.json", b"3")])
    path = tmp_path / "x.tar"
    path.write_bytes(one + other)
    assert by_tarfile(io.BytesIO(one + other)) == by_tarfile(io.BytesIO(one))
    found = faults(path)
    assert found[0] == (None, f"{BEHIND} at byte 2048: readers do not see them")
    with pytest.raises(tc.FormatError, match=f"drop=False .*; the first fault: .*{BEHIND}"):
        tc.repair(path, tmp_path / "out", drop=False)
    tc.repair(path, tmp_path / "out")
    assert [name for name, *_ in by_tarfile_in(tmp_path / "out" / "x.tar")] == ["a.json", "b.json"]
    path.write_bytes(one[:2560] + other)  # one block of zeros is not a marker
    assert faults(path) == [(None, f"{ZEROS} 2048 to 2560")]
    tc.repair(path, tmp_path / "again")
    assert [name for name, *_ in by_tarfile_in(tmp_path / "again" / "x.tar")] == ["a.json", "b.json", "c.json"]


@pytest.mark.parametrize("tail", [b"x" * 3000, bytes(600) + b"x" * 3000], ids=["garbage", "zeros and garbage"])
def test_bytes_after_the_end_are_not_searched_twice(tmp_path: Path, tail: bytes) -> None:
    path = tmp_path / "x.tar"
    archive = build([("a.json", b"1")])
    path.write_bytes(archive + tail)
    assert [what[:44] for _, what in faults(path)] == ["the bytes after the end-of-archive marker ar"]
    tc.repair(path, tmp_path / "out", drop=False)
    assert [name for name, *_ in by_tarfile_in(tmp_path / "out" / "x.tar")] == ["a.json"]


@pytest.mark.parametrize("format", ["gnu", "pax"])
def test_an_extended_header_is_lost(tmp_path: Path, format: str) -> None:
    """The member after it has another name then: it is lost, too."""
    long = "d" * 60 + "/" + "é" * 60 + ".json"
    content = build_with_tarfile([("a.json", b"1"), (long, b"2"), ("c.json", b"3")], FORMATS[format])
    path = tmp_path / "x.tar"
    path.write_bytes(content)
    assert content[1024 + 156 : 1024 + 157] in (b"x", b"L")
    erase(path, 1024, 1536)
    tc.repair(path, tmp_path / "out")
    assert [name for name, *_ in by_tarfile_in(tmp_path / "out" / "x.tar")] == ["a.json", "c.json"]


# --- `cat a.tar b.tar > c.tar`: readers stop at the end of the first tar, and the other samples never go unnoticed ---

HIDDEN = r"byte {}: a tar header after the end of the archive at byte 6144.*tensorcache merge`"


def write_part(folder: Path, name: str, numbers: range, *, footer: bool) -> Path:
    samples = {f"{i:03d}": {"x": torch.full((3,), i)} for i in numbers}
    return Path(write_samples(folder / f"{name}.tar", samples, footer=footer, manifest=False, dali_index=False))


@pytest.fixture(params=[True, False], ids=["footers", "no footers"])
def shard(request: Any, tmp_path: Path) -> Path:
    """The path of a file of two shards, with the footers of the parameter."""
    folder, options = tmp_path / "parts", {"footer": request.param}
    parts = [write_part(folder, "a", range(3), **options), write_part(folder, "b", range(3, 6), **options)]
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
        "build of a cache": lambda path: tc.build(tc.open(path), lambda items: items, out, fingerprint={}),
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


@pytest.mark.parametrize("shard", [True], indirect=True, ids=["footers"])
def test_urls(shard: Path, tmp_path: Path) -> None:
    with HttpServer() as server:
        url = server.put("c.tar", shard.read_bytes())
        for _ in range(2):  # an incomplete index is not kept on disk
            with pytest.warns(UserWarning, match=HIDDEN.format(hidden(shard))):
                assert len(tc.open(url, keep_indexes=tmp_path / "kept")) == 3
        with pytest.raises(tc.FormatError, match=rf"a tar header follows at byte {hidden(shard)};"):
            tc.write_index(url, index_folder=tmp_path / "indexes")
        assert not (tmp_path / "indexes").exists()
        with pytest.warns(UserWarning, match=HIDDEN.format(hidden(shard))):
            assert len(list(tc.ResumablePipeline([url], tc.decode()))) == 3


@pytest.mark.skipif(shutil.which("tar") is None, reason="needs tar")
@pytest.mark.parametrize("footer", [False, True])
def test_other_bytes_after_the_end(tmp_path: Path, footer: bool) -> None:
    """Padding to 10,240 bytes, `tar -A`, `tar -r`, and the index of a later version hide no member: no warning."""
    a, b = write_part(tmp_path, "a", range(3), footer=footer), write_part(tmp_path, "b", range(3, 6), footer=footer)
    padded, joined, added, later = (tmp_path / f"{name}.tar" for name in ("padded", "joined", "added", "later"))
    padded.write_bytes(a.read_bytes()[:6144] + bytes(10_240 - 6144))
    for path in (joined, added):
        shutil.copy(a, path)
    subprocess.run(["tar", "-Af", joined, b], check=True)
    (tmp_path / "003.json").write_text("1")
    subprocess.run(["tar", "-rf", added, "-C", tmp_path, "003.json"], check=True)
    later.write_bytes(a.read_bytes().replace(b"tcindex1", b"tcindex2"))
    for path, count in ((padded, 3), (joined, 6), (added, 3), (later, 3)):
        assert len(tc.open(path)) == count
        assert len(list(tc.ResumablePipeline([path]))) == tc.verify(path).num_samples == count + (path is added)
