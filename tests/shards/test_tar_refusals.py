"""A tar that breaks a rule is refused with the offset; any bytes give the members that `tarfile` finds, or such an error."""

from __future__ import annotations

import gzip
import io
import re
import tarfile
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

import wds_tensorcache as tc
from tests.shards import tars
from tests.shards.tars import LAST, UNUSUAL, build, by_tarfile, fix_checksums, of_samples, pax, raw_header, record, scan

pytestmark = pytest.mark.filterwarnings("ignore:.*links to other files are not followed")

GOOD = raw_header(b"a", b"0", b"1") + bytes(512)
SPARSE = record(b"GNU.sparse.major", b"1") + record(b"GNU.sparse.minor", b"0")
HUGE = raw_header(b"pax", b"x", b"%o" % (1 << 21)) + b"q" * (1 << 21)
IS_HUGE = "byte 0: the extended header has 2097152 bytes, expected at most 1048576"
IS_SPARSE = "a GNU sparse member, expected one without holes"
MALFORMED = [b"x", b"0 a=b\n", b"7 a=b\n", b"6 a-b\n", b"5 =b\n", b"-6 a=b\n", b"6 a=b\0", b"9" * 20 + b" a=b\n"]


def sized(size: bytes) -> bytes:
    return raw_header(b"a", b"0", size) + LAST


def with_record(key: bytes, value: bytes) -> bytes:
    return pax(record(key, value)) + GOOD + LAST


TOO_LARGE = GOOD + raw_header(b"b", b"0", b"1750") + bytes(999)
REFUSED: dict[str, tuple[bytes, str]] = {
    "nothing": (b"", "byte 0: the file is empty, expected a tar"),
    "gzip": (gzip.compress(GOOD + LAST), "byte 0: gzip: a compressed tar cannot be indexed; .*gunzip"),
    "text": (b"hello" * 200, "byte 0: bad checksum: .*; the file is not a tar"),
    "web page": (b" <!DOCTYPE html>" + b"x" * 999, ".* seems to be a web page, .*; check the url"),
    "pointer": (b"version https://git-lfs.github.com/spec/v1", ".* seems to be a pointer of Git LFS, .*git lfs pull"),
    "error of a store": (b"<Error><Code>AccessDenied" * 99, ".* seems to be XML, perhaps the error of an object store"),
    "zip": (b"PK\x03\x04" * 200, ".* seems to be a zip, .*tensorcache import"),
    "safetensors": (b"\x10" + bytes(7) + b'{"a":' * 200, r".* seems to be a \.safetensors file; `tensorcache import`"),
    "picture": (b"\x89PNG\r\n\x1a\n" * 99, r".* seems to be a picture, as \.png"),
    "JSON": (b'{"a": 1}' * 99, "byte 0: the file is not a tar, but seems to be JSON; pass a shard, or the folder"),
    "checksum": (GOOD + GOOD[:3] + b"x" + GOOD[4:] + LAST, "byte 1024: bad checksum: the bytes add up to 005325, the"),
    # the signed bytes add up to -1
    "signed checksum": (b"\x80\x80\xff".ljust(148, b"\0") + b"z" * 8 + bytes(356) + LAST, "byte 0: bad checksum"),
    "checksum is not a number": (GOOD + GOOD[:148] + b"\xfe2345678" + GOOD[156:] + LAST, "byte 1024: bad checksum"),
    "short": (b"abc", "byte 0: truncated: the file ends at byte 3, .*; the file is not a tar"),
    "ends after a member": (GOOD * 3, "byte 3072: truncated: the file ends at byte 3072, without an end"),
    "ends in padding": (GOOD * 3 + GOOD[:700], "byte 4096: truncated: the file ends at byte 3772"),
    "ends in content": (TOO_LARGE, "byte 1024: truncated, or a wrong size: b'b' has 1000 bytes from byte 1536 on, but"),
    "negative size": (sized(b"-7"), "byte 0: the size is b'-7.*', expected a non-neg"),
    "negative base 256": (sized(b"\xff" * 11 + b"\xfe"), "byte 0: the size is b'.*, expected a non-neg"),
    "size of 2^88": (sized(b"\x80" + b"\xff" * 11), f"byte 0: .* b'a' has {2**88 - 1} bytes"),
    "sparse": (raw_header(b"a", b"S", b"0") + LAST, f"byte 0: b'a' is {IS_SPARSE}"),
    "sparse, pax": (GOOD + pax(SPARSE) + GOOD + LAST, f"byte 1536: {IS_SPARSE}"),
    "large records": (HUGE + LAST, IS_HUGE),
    "records end the archive": (GOOD + pax(record(b"a", b"b")) + bytes(1024), "byte 2048: the archive ends after an"),
    "records end the file": (GOOD + pax(record(b"a", b"b")), "byte 2048: truncated: the file ends at byte 2048, with"),
    "global size": (pax(record(b"size", b"1"), kind=b"g") + GOOD + LAST, "byte 0: a global pax header declares one"),
    "pax size is negative": (with_record(b"size", b"-1"), "byte 512: the pax record of a size has .* b'-1'"),
    "pax size is long": (with_record(b"size", b"9" * 20), "byte 512: the pax record of a size has .* b'9+'"),
    "pax size beyond": (with_record(b"size", b"99999"), "byte 1024: truncated, .* b'a' has 99999 bytes"),
    "pax path is empty": (with_record(b"path", b"/"), "byte 512: the pax record of a path has .* b'/'"),
    "second record": (pax(record(b"a", b"b"), b"9 a=b\n") + GOOD + LAST, "byte 518: malformed pax record b'9 a=b"),
}
REFUSED |= {
    f"records {records!r}": (pax(records) + GOOD + LAST, f"byte 512: malformed pax record {re.escape(repr(records))}")
    for records in MALFORMED
}


@pytest.mark.parametrize(("archive", "message"), REFUSED.values(), ids=REFUSED)
def test_refusals(archive: bytes, message: str) -> None:
    with pytest.raises(tc.FormatError, match=rf"x\.tar: {message}"):
        scan(archive)


SOURCES = [
    build([(f"{i}.json", bytes([i]) * (70 * i)) for i in range(12)]),
    *[tars.build_with_tarfile(tars.ZOO[:10], format) for format in tars.FORMATS.values()],
    *[first + LAST for first in UNUSUAL.values()],
]


def assert_right_or_refused(archive: bytes) -> None:
    found, refusal = [], ""
    try:
        found = scan(archive)
    except tc.FormatError as error:
        refusal = str(error)
    if refusal:
        assert re.search(r"x\.tar: byte \d+: ", refusal)
        return
    for _, begin, nbytes in found:
        assert 0 <= begin <= begin + nbytes <= len(archive)
    try:
        expected = by_tarfile(io.BytesIO(archive))
    except (tarfile.TarError, ValueError, OverflowError):
        return  # it parses owner, mode and time too
    wanted = of_samples(expected)
    assert found[: len(wanted)] == wanted


@given(st.integers(0, len(SOURCES) - 1), st.data(), st.booleans())
def test_any_bytes_may_change(source: int, data: st.DataObject, checksums: bool) -> None:
    archive = bytearray(SOURCES[source])
    blocks = st.integers(0, len(archive) // 512 - 1).map(lambda block: 512 * block)
    places = st.integers(0, 511) | st.sampled_from([0, 99, 124, 135, 148, 156, 345, 510, 511]) | st.integers(0, 40)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(blocks) + data.draw(places)
        replacement = data.draw(st.binary(min_size=1, max_size=12) | st.sampled_from([*b"0157SLKxgX \xff\x80"]))
        replacement = bytes([replacement]) if isinstance(replacement, int) else replacement
        archive[at : at + len(replacement)] = replacement
    if checksums:  # which are the first guard
        archive = bytearray(fix_checksums(archive))
    if data.draw(st.booleans()):
        del archive[data.draw(st.integers(0, len(archive))) :]
    assert_right_or_refused(bytes(archive))


@given(st.lists(st.sampled_from([*UNUSUAL.values(), pax(SPARSE), bytes(512)]), max_size=6), st.binary(max_size=600))
def test_any_members_in_any_order(members: list[bytes], tail: bytes) -> None:
    assert_right_or_refused(b"".join(members) + tail)
    assert_right_or_refused(b"".join(members) + LAST)


@pytest.mark.parametrize(
    "content",
    [b"6 a=b\n" * 150_000, b"1" * 1_000_000, b"1 " * 500_000, b"=" * 1_000_000, b"1000000 " + b"a" * 999_992],
    ids=["records", "digits", "short", "no length", "no equals sign"],
)
def test_large_records_take_no_time(content: bytes) -> None:
    begin = time.process_time()
    assert_right_or_refused(pax(content) + LAST)
    assert time.process_time() - begin < 5
