"""Headers that zeros have overwritten: members after them are found, and the end of an archive stays its end."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

import wds_tensorcache as tc
from tests.shards.damage import erase, faults, members, write
from tests.shards.tars import FORMATS, build, build_with_tarfile, by_tarfile, by_tarfile_in

ZEROS = "zeros before the end of the archive; no member could be read from byte"
BEHIND = "members from here on are after the end-of-archive marker"


@pytest.mark.parametrize("footer", [True, False])
def test_up_to_the_marker(tmp_path: Path, footer: bool) -> None:
    path = write(tmp_path / "a", 10, footer=footer, dali_index=False)
    begin, end = members(path)["009.json"][0], tc.write_index(path, dali_index=False).end
    erase(path, begin + 3, end)
    Path(f"{path}.index").unlink()
    report = tc.verify(path)
    # zeros up to the marker are a longer marker, unless an index says where it is
    assert [fault.what.startswith(ZEROS) for fault in report.faults if fault.key is None] == ([True] if footer else [])
    if footer:
        with pytest.raises(tc.FormatError, match="drop=False"):
            tc.repair(path, tmp_path / "never", drop=False)
    tc.repair(path, tmp_path / "out")
    assert tc.verify(tmp_path / "out").num_samples == 10  # the json of the last one is whole but for its bytes
    assert list(members(tmp_path / "out" / "000000.tar"))[-1] == "009.json"


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


def test_many_breaks(tmp_path: Path) -> None:
    path = tmp_path / "x.tar"
    path.write_bytes((build([("a.json", b"1")])[:1024] + bytes(512)) * 500)
    assert sum(what.startswith(ZEROS) for _, what in faults(path)) == 499
