"""For any tar by `tarfile` or GNU tar, our stage yields the same samples as webdataset's own stage."""

from __future__ import annotations

import io
import tarfile
from typing import Any

import pytest
import webdataset as wds
from hypothesis import given
from hypothesis import strategies as st
from webdataset.tariterators import group_by_keys, tar_file_expander

import wds_tensorcache as tc

FORMATS = {"ustar": tarfile.USTAR_FORMAT, "gnu": tarfile.GNU_FORMAT, "pax": tarfile.PAX_FORMAT}
TYPES = [
    tarfile.REGTYPE,
    tarfile.AREGTYPE,
    tarfile.CONTTYPE,
    tarfile.LNKTYPE,
    tarfile.SYMTYPE,
    tarfile.DIRTYPE,
    tarfile.CHRTYPE,
    tarfile.FIFOTYPE,
    b"A",
    b"D",
    b"V",
]


def samples(stage: Any, content: bytes, **options: Any) -> Any:
    """Return the samples as lists of items, and "error" at an error."""
    found: list[Any] = []
    try:
        for sample in stage(**options)([{"url": "x.tar", "stream": io.BytesIO(content)}]):
            found.append(list(sample.items()))
    except ValueError:
        found.append("error")
    return found


def stock(**options: Any) -> Any:
    """Return webdataset's own stage without the part that opens shards."""

    def stage(shards: Any) -> Any:
        handler = {key: value for key, value in options.items() if key == "handler"}
        return group_by_keys(tar_file_expander(shards, **options), **handler)

    return stage


def assert_as_webdataset(content: bytes) -> list[Any]:
    ours = samples(tc.tarfile_to_samples, content)
    assert ours == samples(stock, content)
    kept = samples(tc.tarfile_to_samples, content, handler=wds.ignore_and_continue)
    assert kept == samples(stock, content, handler=wds.ignore_and_continue)
    return ours


def tar_of(members: list[tuple[str, bytes, bytes]], kind: int, **options: Any) -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w", format=kind, **options) as tar:
        for name, type_, content in members:
            info = tarfile.TarInfo(name)
            info.type, info.size = type_, len(content)
            info.linkname = "0.txt" if type_ in (tarfile.LNKTYPE, tarfile.SYMTYPE) else ""
            tar.addfile(info, io.BytesIO(content))
    return stream.getvalue()


part = st.sampled_from(["0", "1", "a", "__x__", "__", "___", "__bad__", "é", "\udcff", " ", "\n", "#", "x" * 60, "-"])
suffix = st.sampled_from(
    ["txt", "TXT", "Json", "json.gz", "", "__bad__", "__BAD__", "a.b", "__key__", "x y", "é", "\n"]
)
names = st.builds(
    lambda folders, base, suffixes: "/".join([*folders, ".".join([base, *suffixes])]),
    st.lists(part, max_size=3),
    part | st.just(""),
    st.lists(suffix, max_size=2),
)
members = st.lists(st.tuples(names, st.sampled_from([tarfile.REGTYPE] * 6 + TYPES), st.binary(max_size=9)), max_size=9)


@given(members, st.sampled_from(sorted(FORMATS)))
def test_any_members(members: list[tuple[str, bytes, bytes]], kind: str) -> None:
    empty = (tarfile.LNKTYPE, tarfile.SYMTYPE, tarfile.DIRTYPE, tarfile.CHRTYPE, tarfile.FIFOTYPE)
    # tarfile reads a V7 file whose name ends in a slash as a folder
    whole = [(n, t, b"" if t in empty or (t == tarfile.AREGTYPE and n.endswith("/")) else raw) for n, t, raw in members]
    assert_as_webdataset(tar_of(whole, FORMATS[kind]))


def test_content_of_folders() -> None:
    """Read it as headers, like `tarfile`. If it is not a header, webdataset drops the rest of the shard silently."""

    def tar(content: bytes) -> bytes:
        members = [("a.txt", tarfile.REGTYPE, b"1"), ("d/", tarfile.DIRTYPE, content), ("b.txt", tarfile.REGTYPE, b"2")]
        return tar_of(members, tarfile.GNU_FORMAT)

    inner = tar_of([("z.txt", tarfile.REGTYPE, b"1")], tarfile.GNU_FORMAT)
    assert [dict(sample)["__key__"] for sample in assert_as_webdataset(tar(inner[:1024]))] == ["a", "z", "b"]
    with pytest.warns(UserWarning, match="after the end of the archive"):
        assert [dict(sample)["__key__"] for sample in assert_as_webdataset(tar(bytes(512)))] == ["a"]
    for content in (b"123", b"x" * 600):
        assert samples(tc.tarfile_to_samples, tar(content)) == ["error"]
        with pytest.raises(tc.TarFormatError, match=r"x\.tar: byte 1536: bad checksum"):
            list(tc.tarfile_to_samples()([{"url": "x.tar", "stream": io.BytesIO(tar(content))}]))


def test_bad_samples_are_left_out() -> None:
    def tar(*names: str) -> bytes:
        return tar_of([(name, tarfile.REGTYPE, b"" if "0" in name else b"1") for name in names], tarfile.PAX_FORMAT)

    for order in (["b.txt", "b.__bad__"], ["b.__bad__", "b.txt"], ["b.__BAD__"]):
        found = assert_as_webdataset(tar("a.txt", *order, "c.txt"))
        assert [sample[0] for sample in found] == [("__key__", "a"), ("__key__", "c")]
        assert len(assert_as_webdataset(tar(*order))) == 0
    assert len(assert_as_webdataset(tar("a.txt", "0.__bad__", "0.txt"))) == 2  # empty: not true
