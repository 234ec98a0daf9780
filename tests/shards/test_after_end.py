"""Bytes after the end of an archive: a shard whose scan does not account for all of it is never cut or written again."""

from __future__ import annotations

import shutil
import subprocess
import tarfile
from pathlib import Path

import pytest

import wds_tensorcache as tc
from tests.shards.damage import flip, members, sample, write
from tests.shards.tars import BLOCK, build, by_tarfile_in


def erase_header(path: Path, name: str) -> None:
    begin, _ = members(path)[name]
    content = bytearray(path.read_bytes())
    content[begin - BLOCK : begin] = bytes(BLOCK)
    path.write_bytes(content)


def refused(path: Path) -> tc.FormatError:
    """Return the error of `index`, after which everything is as it was."""
    before = {file.name: file.read_bytes() for file in path.parent.iterdir()}
    with pytest.raises(tc.FormatError, match=r"tc\.repair") as caught:
        tc.write_index(path)
    assert {file.name: file.read_bytes() for file in path.parent.iterdir()} == before
    assert caught.value.kind == "trailing"
    assert str(path) in str(caught.value)
    return caught.value


@pytest.mark.parametrize("beside", ["nothing", "index", "footer"])
@pytest.mark.parametrize("name", ["002.skel.pyd", "019.jpg", "000.skel.pyd"])
def test_a_header_was_lost(tmp_path: Path, name: str, beside: str) -> None:
    path = write(tmp_path / "a", 20, footer=beside == "footer", dali_index=False, manifest=False)
    if beside == "index":
        tc.write_index(path, dali_index=False)
    begin, _ = members(path)[name]
    erase_header(path, name)
    assert refused(path).offset in (begin - BLOCK, begin)
    tc.repair(path, tmp_path / "out")
    lost = {"002.skel.pyd": "002", "000.skel.pyd": "000"}.get(name) if beside == "nothing" else None
    assert list(tc.open(tmp_path / "out").keys()) == [f"{i:03d}" for i in range(20) if f"{i:03d}" != lost]


def test_zeros_up_to_the_end(tmp_path: Path) -> None:
    """Nothing but zeros is left: an index knows that there was more."""
    path = write(tmp_path, 3, footer=False, dali_index=False, manifest=False)
    tc.write_index(path, dali_index=False)
    begin = members(path)["001.skel.pyd"][0] - BLOCK
    content = path.read_bytes()
    path.write_bytes(content[:begin] + bytes(len(content) - begin))
    assert refused(path).offset == begin


@pytest.mark.parametrize(
    "behind",
    [build([("z.json", b"1")]), bytes(8192) + build([("z.json", b"1")]), b"x", bytes(5000) + b"x", b"tcindex1"],
    ids=["a tar", "zeros and a tar", "a byte", "zeros and a byte", "a magic"],
)
def test_not_an_index(tmp_path: Path, behind: bytes) -> None:
    for number, before in enumerate((build([("a.json", b"1")]), write(tmp_path / "x", 2).read_bytes())):
        path = tmp_path / f"{number}" / "a.tar"
        path.parent.mkdir()
        path.write_bytes(before + behind)
        refused(path)


@pytest.mark.parametrize("zeros", [0, 512, 1024, 9000])
def test_zeros_are_accounted_for(tmp_path: Path, zeros: int) -> None:
    path = tmp_path / "a.tar"
    archive = build([("a.json", b"1")])[:-1024]
    path.write_bytes(archive + bytes(BLOCK + zeros))
    for _ in range(2):  # the second time there is an index
        tc.write_index(path, dali_index=False)
        assert path.read_bytes() == archive + bytes(BLOCK + zeros)
        assert [fault.kind for fault in tc.verify(path).faults] == ["truncated"] * (not zeros)


def test_an_index_that_is_damaged_or_stale_is_replaced(tmp_path: Path) -> None:
    path = write(tmp_path, 3, dali_index=False, manifest=False)
    whole = path.read_bytes()
    end = tc.write_index(path, dali_index=False).end
    flip(path, len(whole) - 100)
    assert len(tc.write_index(path, dali_index=False).keys) == 3
    more = build([("z.json", b"1")])
    path.write_bytes(whole[:end] + more + whole[end + len(more) :])
    assert len(tc.write_index(path, dali_index=False).keys) == 4


@pytest.mark.skipif(shutil.which("tar") is None, reason="needs tar")
def test_after_tar(tmp_path: Path) -> None:
    path = write(tmp_path / "a", 3, dali_index=False, manifest=False)
    (tmp_path / "z.json").write_bytes(b"1")
    subprocess.run(["tar", "-rf", path, "z.json"], check=True, cwd=tmp_path)
    before = by_tarfile_in(path)
    tc.write_index(path)
    assert by_tarfile_in(path) == before
    assert tc.verify(path).num_samples == 4


@pytest.mark.parametrize("how", ["header", "tar"])
def test_writers_that_go_on(tmp_path: Path, how: str) -> None:
    """`resume=True` would write the members after a lost header a second time."""
    with tc.ShardWriter(tmp_path / "%d.tar", footer=False, fsync=False) as sink:
        for i in range(5):
            sink.write(f"{i}", sample(i))
    path = tmp_path / "0.tar"
    if how == "header":
        erase_header(path, "2.skel.pyd")
    else:
        path.write_bytes(path.read_bytes() + build([("z.json", b"1")]))
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    with pytest.raises(tc.FormatError, match=r"0\.tar: byte \d+: .*tc\.repair\) saves all other"):
        tc.ShardWriter(tmp_path / "%d.tar", footer=False, fsync=False, resume=True)
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before
    tc.ShardWriter(tmp_path / "%d.tar", footer=False, overwrite=True).close()


@pytest.mark.parametrize("how", ["header", "tar", "zeros"])
def test_samples_leave_no_shard_that_has_more(tmp_path: Path, how: str) -> None:
    path = write(tmp_path / "a", 5, dali_index=False, manifest=False)
    if how == "tar":
        path.write_bytes(path.read_bytes() + build([("z.json", b"1")]))
    else:
        erase_header(path, "002.skel.pyd")
    if how == "zeros":
        begin = members(path)["001.jpg"][1]
        content = path.read_bytes()
        path.write_bytes(content[:begin] + bytes(len(content) - begin - 40) + content[-40:])
    before = path.read_bytes()
    with pytest.raises(tc.FormatError, match=r"000000\.tar: "):
        tc.drop(tmp_path / "a", tmp_path / "out", ["001"])
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path.parent]


def test_members_over_a_stale_index_are_not_cut(tmp_path: Path) -> None:
    """`tar -r` writes from the end of the archive on, over an index, whose trailer stays; one header among them is lost."""
    path = tmp_path / "a.tar"
    with tc.ShardWriter(path, manifest=False, dali_index=False) as writer:
        for number in range(3000):
            writer.write(f"{number:06d}", number)
    for number in range(20):
        (tmp_path / f"z{number:02d}.json").write_text(str(number))
    names = [f"z{number:02d}.json" for number in range(20)]
    nbytes = path.stat().st_size
    subprocess.run(["tar", "-rf", path, "-C", tmp_path, *names], check=True)
    assert path.stat().st_size == nbytes, "the index has room for them"
    with tarfile.open(path) as archive:
        lost = archive.getmember("z05.json").offset
    with open(path, "r+b") as file:
        file.seek(lost)
        file.write(bytes(512))
    before = path.read_bytes()
    with pytest.raises(tc.TarFormatError, match=r"tc\.repair"):
        tc.write_index(path)
    assert path.read_bytes() == before
