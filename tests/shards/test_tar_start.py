"""A stream of the rest of a tar, from the start of any member, returns the remaining members."""

from __future__ import annotations

import io
import tarfile

import pytest

import wds_tensorcache as tc
from wds_tensorcache.shards.tar_stream import TarStream


def tar_of(kind: int, *, pax_headers: dict[str, str] | None = None) -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w", format=kind, pax_headers=pax_headers) as tar:
        for i in range(12):
            info = tarfile.TarInfo(f"{'é' * (30 * (i % 3))}{'long/' * (20 * (i % 2))}{i}.txt")
            info.size = 700 * i
            tar.addfile(info, io.BytesIO(bytes([i]) * info.size))
            other = tarfile.TarInfo(f"other{i}")
            other.type, other.linkname = (tarfile.SYMTYPE, "0.txt") if i % 2 else (tarfile.DIRTYPE, "")
            tar.addfile(other)
    return stream.getvalue()


def members(content: bytes, begin: int = 0) -> list[tuple[str, bytes, int | None]]:
    stream = TarStream(io.BytesIO(content[begin:]), begin)
    return [(name, read(), stream.start) for name, read in stream]


@pytest.mark.parametrize("kind", [tarfile.PAX_FORMAT, tarfile.GNU_FORMAT])
def test_every_start(kind: int) -> None:
    content = tar_of(kind)
    whole = members(content)
    starts = [start for *_, start in whole]
    assert len(whole) == 12
    assert starts[0] == 0
    for at, start in enumerate(starts):
        assert start is not None
        assert members(content, start) == whole[at:]


def test_offsets_in_errors_count_from_the_beginning_of_the_tar() -> None:
    content = tar_of(tarfile.GNU_FORMAT)
    *_, start = members(content)[5]
    assert start
    with pytest.raises(tc.FormatError) as error:
        members(content[: start + 700], start)
    assert error.value.offset is not None
    assert error.value.offset >= start


def test_no_start_after_a_header_for_all_members() -> None:
    """A stream that begins later would not know it."""
    content = tar_of(tarfile.PAX_FORMAT, pax_headers={"path": "all.txt"})
    assert {start for *_, start in members(content)} == {None}
    # a comment changes nothing
    content = tar_of(tarfile.PAX_FORMAT, pax_headers={"comment": "all"})
    assert next(start for *_, start in members(content)) == 0
