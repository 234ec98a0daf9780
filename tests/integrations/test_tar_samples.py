"""Our stage yields webdataset's samples, and never mixes a truncated shard with the next one."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import os
import pickle
import tarfile
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import webdataset as wds
from hypothesis import given
from hypothesis import strategies as st
from webdataset.tariterators import group_by_keys, tar_file_expander

import wds_tensorcache as tc
from tests.shards.tars import FORMATS, build_with_tarfile, special


def read(*urls: Any, **options: Any) -> list[dict[str, Any]]:
    return list(tc.tarfile_to_samples(**options)({"url": str(url)} for url in urls))


def stock(*urls: Any, **options: Any) -> list[dict[str, Any]]:
    """Return the samples of webdataset's stage for each shard alone: older releases merge samples of the same key."""
    return [sample for url in urls for sample in wds.tarfile_to_samples(**options)([{"url": str(url)}])]


def write(path: Path, name: str, count: int = 3, text: str = "") -> Path:
    with wds.TarWriter(str(path), encoder=tc.encoder()) as sink:
        for i in range(count):
            nested = {"x": torch.full((40 * i + 1,), i), "of": name}
            sink.write({"__key__": f"{i:03d}", "tensorcache": nested, "json": {"of": name}, "txt": name + text})
    return path


def tar_of(members: list[tuple[str, bytes, bytes]], kind: int) -> bytes:
    """Return a tar of members with names, types and contents."""
    links = dict.fromkeys((tarfile.LNKTYPE, tarfile.SYMTYPE), "0.txt")
    infos = [special(name, type_, linkname=links.get(type_, ""))[0] for name, type_, _ in members]
    return build_with_tarfile([(info, content) for info, (*_, content) in zip(infos, members, strict=True)], kind)


@pytest.fixture
def shards(tmp_path: Path) -> list[Path]:
    return [write(tmp_path / f"{name}.tar", name) for name in "ab"]


def test_samples_are_webdatasets_own(shards: list[Path]) -> None:
    assert read(*shards) == stock(*shards)
    assert [list(sample) for sample in read(*shards)] == [list(sample) for sample in stock(*shards)]
    for options in (
        {"select_files": lambda name: name.endswith("n")},
        {"rename_files": lambda name: name.replace("00", "x/y.z")},
        {"select_files": lambda name: False},
    ):
        assert read(*shards, **options) == stock(*shards, **options)
    urls = [f"file:{shards[0]}", f"pipe:cat {shards[1]}"]
    ours, theirs = ([{**sample, "__url__": None} for sample in part] for part in (read(*urls), stock(*shards)))
    assert ours == theirs
    pipeline = wds.DataPipeline(wds.SimpleShardList(list(map(str, shards))), tc.tarfile_to_samples(), tc.decode())
    assert [sample["tensorcache"]["of"] for sample in pipeline] == list("aaabbb")
    pickle.loads(pickle.dumps(tc.tarfile_to_samples()))


@pytest.mark.parametrize("compress", [gzip.compress, bz2.compress, lzma.compress])
def test_compressed(shards: list[Path], tmp_path: Path, compress: Any) -> None:
    path = tmp_path / "c.tar"
    content = compress(shards[0].read_bytes())
    path.write_bytes(content)
    assert read(path) == stock(path)
    for length in range(0, len(content), 37):
        path.write_bytes(content[:length])
        with pytest.raises(tc.FormatError, match=r"c\.tar: .*byte \d+"):
            read(path)
    if compress is not gzip.compress:
        return  # the others ignore garbage after the end
    path.write_bytes(content + b"garbage")
    samples = tc.tarfile_to_samples()([{"url": str(path)}])
    assert [next(samples)["__key__"] for _ in range(3)] == ["000", "001", "002"]
    with pytest.raises(tc.FormatError):
        next(samples)


def of(sample: dict[str, Any]) -> set[str]:
    """Return the names of the shards whose bytes a sample contains."""
    found = {sample["__url__"][-5]}
    found |= {sample["txt"].decode()[:1]} if "txt" in sample else set()
    found |= {json.loads(sample["json"])["of"]} if "json" in sample else set()
    return found


def test_truncated_shards_never_mix(shards: list[Path], tmp_path: Path) -> None:
    """Cut inside and at the boundary of every member, with a shard of the same keys after it."""
    whole = shards[0].read_bytes()
    with tarfile.open(shards[0]) as tar:
        members = [(info.offset, info.offset_data, info.size) for info in tar]
    complete = read(shards[0])
    cuts = {0, 1}
    for begin, data, size in members:
        cuts |= {begin, begin + 1, begin + 511, data, data + size // 2, data + size, data + size + -size % 512}
    ends = [begin for (begin, *_), number in zip(members, range(len(members)), strict=True) if number % 4 == 0]
    cut = tmp_path / "c.tar"
    for length in sorted(cuts):
        cut.write_bytes(whole[:length])
        with pytest.raises(tc.FormatError, match=r"c\.tar: byte \d+"):
            read(cut, shards[1])
        seen = read(cut, shards[1], handler=wds.ignore_and_continue)
        assert all(of(sample) <= {"c", "a"} or of(sample) == {"b"} for sample in seen)
        first = [sample for sample in seen if sample["__url__"] == str(cut)]
        assert [{**sample, "__url__": str(shards[0])} for sample in first] == complete[: len(first)]
        # samples followed by another sample's header
        assert len(first) == max(0, sum(begin + 512 <= length for begin in ends) - 1)
        assert seen[len(first) :] == read(shards[1])
        assert read(cut, shards[1], handler=wds.ignore_and_stop) == first


@pytest.mark.parametrize("suffix", ["__key__", "__url__", "__local_path__", "__URL__"])
@pytest.mark.parametrize("at", [0, 1])
def test_members_with_reserved_names(tmp_path: Path, suffix: str, at: int) -> None:
    path = tmp_path / "a.tar"
    path.write_bytes(build_with_tarfile([(name, b"1") for name in ["a.txt"] * at + [f"a.{suffix}", "a.json"]]))
    with pytest.raises(tc.FormatError, match="a name that webdataset reserves"):
        list(tc.tarfile_to_samples()([{"url": str(path)}]))
    expected = {"__key__": "a", "__url__": str(path), "json": b"1"} | ({"txt": b"1"} if at else {})
    assert list(tc.tarfile_to_samples(handler=wds.ignore_and_continue)([{"url": str(path)}])) == [expected]


def test_files_are_closed(shards: list[Path]) -> None:
    before = len(os.listdir("/proc/self/fd"))
    stage = tc.tarfile_to_samples()
    begun = stage({"url": str(path)} for path in shards)
    next(begun)
    assert len(os.listdir("/proc/self/fd")) == before + 1
    begun.close()
    assert len(os.listdir("/proc/self/fd")) == before


class Dribble(io.RawIOBase):
    """A stream whose reads return fewer bytes than requested."""

    def __init__(self, content: bytes, sizes: list[int]) -> None:
        self._stream, self._sizes, self._at = io.BytesIO(content), sizes, 0

    def read(self, nbytes: int = -1) -> bytes:
        self._at += 1
        return self._stream.read(min(nbytes, self._sizes[self._at % len(self._sizes)]))


@given(st.lists(st.integers(1, 3000), min_size=1, max_size=5), st.booleans())
def test_short_reads(sizes: list[int], is_compressed: bool) -> None:
    raw = build_with_tarfile([(f"{i}.bin", bytes([i]) * (i * 700)) for i in range(5)])
    raw = gzip.compress(raw) if is_compressed else raw
    stage = tc.tarfile_to_samples(select_files=lambda name: name != "3.bin")
    found = {sample["__key__"]: sample["bin"] for sample in stage([{"url": "x", "stream": Dribble(raw, sizes)}])}
    assert found == {f"{i}": bytes([i]) * (i * 700) for i in (0, 1, 2, 4)}


def test_handlers_of_members(tmp_path: Path) -> None:
    paths = [tmp_path / "0.tar", tmp_path / "1.tar"]
    for path, names in zip(paths, (["a.x", "a.y", "a.x", "b.x", "c.x"], ["d.x"]), strict=True):
        path.write_bytes(build_with_tarfile([(name, b"") for name in names]))
    assert [sample["__key__"] for sample in read(*paths, handler=wds.ignore_and_continue)] == ["a", "b", "c", "d"]
    assert read(*paths, handler=wds.ignore_and_stop) == []

    def rename(name: str) -> str:
        return {"a.x": "a.x", "a.y": "a.y", "b.x": "b.x", "d.x": "d.x"}[name]

    found = read(*paths, handler=wds.ignore_and_continue, rename_files=rename)
    assert [sample["__key__"] for sample in found] == ["a", "b", "d"]
    with pytest.raises(KeyError):
        read(paths[1], rename_files=lambda name: {}[name])
    with pytest.raises(tc.FormatError, match=r"0\.tar: sample 'a' has two members 'x'"):
        read(paths[0])
    missing = tmp_path / "missing.tar"
    with pytest.raises(FileNotFoundError):
        read(missing)
    assert len(read(missing, paths[1], handler=wds.ignore_and_continue)) == 1


def test_abandoned_pipes_are_killed(shards: list[Path]) -> None:
    samples = tc.tarfile_to_samples()([{"url": f"pipe:cat {shards[0]}; sleep 100"}])
    next(samples)
    began = time.monotonic()
    samples.close()
    assert time.monotonic() - began < 50


# --- any tar by `tarfile`: the samples of webdataset's own stage ---

EMPTY = [tarfile.LNKTYPE, tarfile.SYMTYPE, tarfile.DIRTYPE, tarfile.CHRTYPE, tarfile.FIFOTYPE]
TYPES = [tarfile.REGTYPE, tarfile.AREGTYPE, tarfile.CONTTYPE, *EMPTY, b"A", b"D", b"V"]


def samples(stage: Any, content: bytes, **options: Any) -> Any:
    """Return the samples as lists of items, and "error" at an error."""
    found: list[Any] = []
    try:
        for sample in stage(**options)([{"url": "x.tar", "stream": io.BytesIO(content)}]):
            found.append(list(sample.items()))
    except ValueError:
        found.append("error")
    return found


def stock_stage(**options: Any) -> Any:
    """Return webdataset's own stage without the part that opens shards."""

    def stage(shards: Any) -> Any:
        handler = {key: value for key, value in options.items() if key == "handler"}
        return group_by_keys(tar_file_expander(shards, **options), **handler)

    return stage


def is_visible(name: str) -> bool:
    return not name.rpartition("/")[2].startswith(".")


def assert_as_webdataset(content: bytes) -> list[Any]:
    ours = samples(tc.tarfile_to_samples, content)
    assert ours == samples(stock_stage, content, select_files=is_visible)
    kept = samples(tc.tarfile_to_samples, content, handler=wds.ignore_and_continue)
    assert kept == samples(stock_stage, content, handler=wds.ignore_and_continue, select_files=is_visible)
    return ours


part = st.sampled_from(["0", "1", "a", "__x__", "__", "___", "__bad__", "é", "\udcff", " ", "\n", "#", "x" * 60, "-"])
suffix = st.sampled_from([*"txt TXT Json json.gz __bad__ __BAD__ a.b __key__ é".split(), "", "x y", "\n"])
names = st.builds(
    lambda folders, base, suffixes: "/".join([*folders, ".".join([base, *suffixes])]),
    st.lists(part, max_size=3),
    part | st.just(""),
    st.lists(suffix, max_size=2),
)
members = st.lists(st.tuples(names, st.sampled_from([tarfile.REGTYPE] * 6 + TYPES), st.binary(max_size=9)), max_size=9)


@given(members, st.sampled_from(sorted(FORMATS)))
def test_any_members(members: list[tuple[str, bytes, bytes]], kind: str) -> None:
    # tarfile reads a V7 file whose name ends in a slash as a folder
    whole = [(n, t, b"" if t in EMPTY or (t == tarfile.AREGTYPE and n.endswith("/")) else raw) for n, t, raw in members]
    assert_as_webdataset(tar_of(whole, FORMATS[kind]))


@pytest.mark.parametrize("folder", ["", "./", "a/", "./a/", "a.b/"])
def test_hidden_files_belong_to_no_sample(tmp_path: Path, folder: str) -> None:
    """macOS writes `._NAME` before each file, also between the two members of a cache."""
    halves = zip(("skel.pyd", "safetensors"), tc.encode_sample({"x": torch.arange(3)}), strict=True)
    members = [(f"{folder}.DS_Store", b"")]
    for suffix, content in halves:
        members += [(f"{folder}._1.{suffix}", b""), (f"{folder}1.{suffix}", content)]
    path = tmp_path / "a.tar"
    path.write_bytes(build_with_tarfile(members))
    with tc.open(path) as cache:
        assert [sample["__key__"] for sample in map(tc.decode(), read(path))] == list(cache.keys())
    assert len(cache) == 1


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
        return build_with_tarfile([(name, b"" if "0" in name else b"1") for name in names])

    for order in (["b.txt", "b.__bad__"], ["b.__bad__", "b.txt"], ["b.__BAD__"]):
        found = assert_as_webdataset(tar("a.txt", *order, "c.txt"))
        assert [sample[0] for sample in found] == [("__key__", "a"), ("__key__", "c")]
    assert len(assert_as_webdataset(tar("a.txt", "0.__bad__", "0.txt"))) == 2  # empty: not true
