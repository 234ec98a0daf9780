"""Bytes after the end of an archive: a shard whose scan does not account for all of it is never indexed or written again."""

from __future__ import annotations

import shutil
import subprocess
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

import wds_tensorcache as tc
from tests.shards.damage import contents_of, erase, flip, members, write
from tests.shards.tars import BLOCK, build, by_tarfile_in


def assert_refused(path: Path, call: Callable[[], object] | None = None) -> tc.FormatError:
    """Return the error of `call`, by default of `write_index`, after which everything is as it was."""
    before = contents_of(path.parent)
    with pytest.raises(tc.FormatError, match=r"tc\.repair") as caught:
        call() if call is not None else tc.write_index(path)
    assert contents_of(path.parent) == before
    assert caught.value.kind == "trailing"
    assert str(path) in str(caught.value)
    return caught.value


def test_zeros_up_to_the_end(tmp_path: Path) -> None:
    """Nothing but zeros is left: an index knows that there was more."""
    path = write(tmp_path, 3, footer=False, dali_index=False, manifest=False)
    tc.write_index(path, dali_index=False)
    begin = members(path)["001.skel.pyd"][0] - BLOCK
    erase(path, begin, path.stat().st_size)
    assert assert_refused(path).offset == begin


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


def test_an_index_that_is_damaged_or_stale_is_replaced(tmp_path: Path) -> None:
    path = write(tmp_path, 3, dali_index=False, manifest=False)
    whole = path.read_bytes()
    end = tc.write_index(path, dali_index=False).end
    flip(path, len(whole) - 100)
    assert len(tc.write_index(path, dali_index=False).keys) == 3
    more = build([("z.json", b"1")])
    path.write_bytes(whole[:end] + more + whole[end + len(more) :])
    assert len(tc.write_index(path, dali_index=False).keys) == 4


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
