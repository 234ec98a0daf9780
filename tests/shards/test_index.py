"""Footer, sidecar and scan give the same index of every shard, in little memory; a damaged one gives way to the next."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
import webdataset as wds
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import wds_tensorcache as tc
from tests.conftest import diffusion_sample
from tests.reading.batches import write
from tests.same import assert_same
from tests.shards.damage import flip
from tests.shards.footers import body_of, put_footer
from tests.shards.tars import BLOCK, FORMATS, build

Samples = list[dict[str, Any]]


def contents(path: Path, names: Iterable[str] = ("",)) -> list[tuple[str, Any]]:
    """Return keys and samples of the caches of a shard."""
    pairs: list[tuple[str, Any]] = []
    for name in names:
        with tc.open(path, cache=name) as cache:
            pairs += zip(cache.keys(), map(tc.realize, cache), strict=True)
    return pairs


def assert_three_agree(path: Path) -> Any:
    """Assert that the indexes of the writer, of scans and of readers have the same bytes; return the index."""
    sidecar, whole = Path(f"{path}.index"), path.read_bytes()
    index = tc.write_index(path, dali_index=False)
    body = body_of(sidecar)
    if whole.endswith(b"tcindex1"):
        assert body_of(path) == body
        path.write_bytes(whole[: index.end + 2 * BLOCK])
        tc.write_index(path, dali_index=False)  # of a shard without an index
        assert body_of(sidecar) == body
    expected = contents(path, index.caches)
    sidecar.unlink()
    assert_same(contents(path, index.caches), expected)  # by a scan
    put_footer(path, body, index.end)
    assert_same(contents(path, index.caches), expected)
    assert tc.verify(path).ok
    return index


def several() -> Samples:
    return [
        {
            "__key__": f"d/{i}",
            **({"tensorcache": diffusion_sample(i)} if i % 3 else {}),
            **({"b.tensorcache": [torch.arange(i)], "a-1.tensorcache": i} if i % 2 else {}),
            **({"txt": f"{i}"} if i % 5 else {}),
            "x.json": {"label": i},
        }
        for i in range(20)
    ]


SAMPLES = {
    "several caches": several,
    "ragged": lambda: [
        {"__key__": f"{i:x}", "tensorcache": {"text": torch.randn(i + 1, i % 7), "n": np.arange(2**16 * (i == 9))}}
        for i in range(300)
    ],
    "longest names": lambda: [{"__key__": name * 88, "tensorcache": torch.arange(3)} for name in "ba"],
    "no cache": lambda: [{"__key__": "a", "txt": "b"}],
    "other structures": lambda: [
        {"__key__": str(i), "tensorcache": {str(i): torch.zeros((2,) * (i % 5))}} for i in range(40)
    ],
}


@pytest.mark.parametrize("make", SAMPLES.values(), ids=SAMPLES)
@pytest.mark.parametrize("how", ["ours", "webdataset, mtime=0", "webdataset"])
def test_three_sources(tmp_path: Path, make: Callable[[], Samples], how: str) -> None:
    path = tmp_path / "0.tar"
    samples = make()
    if how == "ours":
        encoder = wds.writer.make_encoder(True)
        with tc.ShardWriter(path, encoder=encoder, dali_index=False, manifest=False) as ours:
            for sample in samples:
                ours.write(sample["__key__"], **{k: v for k, v in sample.items() if k != "__key__"})
    else:
        mtime = {"mtime": 0} if "mtime" in how else {}
        with wds.ShardWriter(str(tmp_path / "%d.tar"), encoder=tc.encoder(), verbose=0, **mtime) as stock:
            for sample in samples:
                stock.write(sample)
    index = assert_three_agree(path)
    assert list(index.keys) == [sample["__key__"] for sample in samples]
    for name in index.caches:
        field = f"{name}.tensorcache" if name else "tensorcache"
        expected = [sample for sample in samples if field in sample]
        with tc.open(path, cache=name) as cache:
            assert list(cache.keys()) == [sample["__key__"] for sample in expected]
            for sample, stored in zip(expected, cache, strict=True):
                assert_same(sample[field], stored)


@pytest.mark.long
def test_many_layouts_and_forms(tmp_path: Path) -> None:
    """More layouts than a byte can number, and more forms than are remembered."""
    write(tmp_path / "x.tar", [[torch.zeros(i % 290, 2)] for i in range(300)], manifest=False)
    index = assert_three_agree(tmp_path / "x.tar")
    assert (len(index.layouts), index.caches[""].layout.dtype, len(index.layouts.forms)) == (290, np.uint16, 1)
    write(tmp_path / "y.tar", [{f"n{i % 1100}": torch.zeros(3)} for i in range(1150)], manifest=False)
    assert len(assert_three_agree(tmp_path / "y.tar").layouts.forms) == 1100
    assert all(list(sample) == [f"n{i % 1100}"] for i, sample in enumerate(tc.open(tmp_path / "y.tar")))


@pytest.mark.parametrize("format", FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize("key", ["a", "é/ü", "d" * 90 + "/" + "k" * 80, "A"])
def test_by_hand(tmp_path: Path, format: int, key: str) -> None:
    """Stock safetensors, skeletons without a preamble, in any order, in any tar, with names that we would not write."""
    if format == tarfile.USTAR_FORMAT and not key.isascii():
        key = "e/u"
    path = tmp_path / "x.tar"
    ours = tc.encode_sample({"x": torch.arange(3)})[0]
    skeleton = ours[:2] + ours[42:]  # without its preamble
    with tarfile.open(path, "w", format=format) as archive:
        for i in range(4):
            suffixes = ["safetensors", "skel.pyd"] if i % 2 else ["skel.pyd", "safetensors"]
            for suffix in suffixes:
                raw = skeleton if suffix == "skel.pyd" else safetensors.torch.save({"x": torch.arange(3) + i})
                entry = tarfile.TarInfo(f"{key}{i}.{suffix.upper() if key == 'A' else suffix}")
                entry.size = len(raw)
                archive.addfile(entry, io.BytesIO(raw))
    index = assert_three_agree(path)
    assert index.caches[""].digest.tolist() == [0] * 4
    for io_ in ("pread", "auto"):
        with tc.open(path, io=io_) as cache:
            assert cache.read_batch([3, 1])["x"].tolist() == [[3, 4, 5], [1, 2, 3]]
            assert [sample["x"].tolist() for sample in cache] == [[i, i + 1, i + 2] for i in range(4)]


@given(st.data())
@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
def test_any_samples(tmp_path: Path, data: st.DataObject) -> None:
    keys = data.draw(st.lists(st.text("abc/é0", min_size=1, max_size=5), unique=True, max_size=8))
    names = ["", "a", "b-1"]
    with tc.ShardWriter(tmp_path / "x.tar", overwrite=True, fsync=False) as sink:
        for key in keys:
            members: dict[str, Any] = {
                f"{name}.tensorcache" if name else "tensorcache": [torch.zeros(data.draw(st.integers(0, 3)))]
                for name in data.draw(st.lists(st.sampled_from(names), unique=True))
            }
            members |= dict.fromkeys(data.draw(st.lists(st.sampled_from(["jpg", "a.b", "txt"]), unique=True)), b"x")
            if members and key.isascii() and all(key.split("/")):
                sink.write(key, **members)
            else:
                with pytest.raises(tc.InvalidKeyError):
                    sink.write(key, **members)
    if (tmp_path / "x.tar").exists():
        assert_three_agree(tmp_path / "x.tar")


def test_memory(tmp_path: Path) -> None:
    samples = {f"{i:06d}": [torch.zeros(1)] for i in range(4_000)}
    write(tmp_path / "x.tar", samples, lambda i: {"cls": 0}, manifest=False)
    index = tc.write_index(tmp_path / "x.tar", dali_index=False)
    assert index.nbytes / 4_000 < 64 + 6
    cache = index.caches[""]
    assert sum(a.nbytes for a in (cache.skeleton_begin, cache.tensors_begin, cache.layout, cache.digest)) < 24 * 4_000


@pytest.mark.long
def test_an_index_too_long_for_readers_is_left_out(tmp_path: Path) -> None:
    names, tensor = [f"{i:04d}".ljust(900, "x") for i in range(75)], torch.ones(1)
    write(tmp_path / "x.tar", [{name: [tensor] * 1000} for name in names])  # a megabyte of further names for each
    with tc.open(tmp_path) as cache:
        assert [len(sample[name]) for name, sample in zip(names, cache, strict=True)] == [1000] * 75
    assert tc.verify(tmp_path).ok


@pytest.fixture
def shard(tmp_path: Path) -> Path:
    samples = [diffusion_sample(i) for i in range(4)]
    return Path(write(tmp_path / "x.tar", samples, lambda i: {"json": i}, manifest=False))


def test_a_damaged_footer_is_ignored(shard: Path) -> None:
    expected, content = contents(shard), shard.read_bytes()
    for at in [*range(len(content) - 40, len(content)), len(content) - 1000]:
        flip(shard, at)
        assert_same(contents(shard), expected)
        flip(shard, at)
    for tail in (b"x", bytes(512), content[-40:], content[-3000:]):
        shard.write_bytes(content + tail)
        assert_same(contents(shard), expected)


def test_a_stale_or_damaged_sidecar_is_ignored(shard: Path) -> None:
    expected, content = contents(shard), shard.read_bytes()
    index = tc.write_index(shard, dali_index=False)
    shard.write_bytes(content[: index.end + 1024])
    sidecar = Path(f"{shard}.index")  # it declares a longer shard
    for raw in (sidecar.read_bytes(), b"", b"x" * 10, sidecar.read_bytes()[:-1]):
        sidecar.write_bytes(raw)
        assert_same(contents(shard), expected)


def test_keys_that_dali_cannot_hold(tmp_path: Path) -> None:
    path = tmp_path / "x.tar"
    path.write_bytes(build([("a b.txt", b"")]))
    with pytest.raises(tc.InvalidKeyError, match="DALI's index cannot represent"):
        tc.write_index(path)
    assert list(tc.write_index(path, dali_index=False).keys) == ["a b"]
