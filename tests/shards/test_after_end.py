"""Bytes after the end of an archive: a shard whose scan does not account for all of it is never indexed or written again."""

from __future__ import annotations

import io
import shutil
import subprocess
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

import wds_tensorcache as tc
from tests.shards.damage import contents_of, erase, faults, members, write
from tests.shards.tars import BLOCK, FORMATS, build, build_with_tarfile, by_tarfile, by_tarfile_in


def assert_refused(path: Path, call: Callable[[], object] | None = None) -> tc.FormatError:
    """Return the error of `call`, by default of `write_index`, after which everything is as it was."""
    before = contents_of(path.parent)
    with pytest.raises(tc.FormatError, match=r"tc\.repair") as caught:
        call() if call is not None else tc.write_index(path)
    assert contents_of(path.parent) == before
    assert caught.value.kind == "trailing"
    assert str(path) in str(caught.value)
    return caught.value


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
    with tc.ShardWriter(path, manifest=False, dali_index=False) as writer:
        for number in range(3000):
            writer.write(f"{number:06d}", number)
    names = [f"z{number:02d}.json" for number in range(20)]
    for name in names:
        (tmp_path / name).write_text("1")
    nbytes = path.stat().st_size
    subprocess.run(["tar", "-rf", path, "-C", tmp_path, *names], check=True)
    assert path.stat().st_size == nbytes, "the index has room for them"
    before = by_tarfile_in(path)
    assert len(tc.write_index(path).keys) == 3020
    assert by_tarfile_in(path) == before
    assert tc.verify(path).num_samples == 3020
    Path(f"{path}.index").unlink()
    with tarfile.open(path) as archive:
        lost = archive.getmember("z05.json").offset
    erase(path, lost, lost + BLOCK)
    assert_refused(path)


# --- what verify and repair do with it ---

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


@pytest.mark.parametrize("behind", [b"x" * 3000, bytes(600) + b"x" * 3000], ids=["garbage", "zeros and garbage"])
def test_what_is_no_member_is_not_searched_twice(tmp_path: Path, behind: bytes) -> None:
    path = tmp_path / "x.tar"
    archive = build([("a.json", b"1")])
    path.write_bytes(archive + behind)
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
