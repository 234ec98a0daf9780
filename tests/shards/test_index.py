"""Footer, sidecar and scan say the same of every shard, and say it in little memory."""

from __future__ import annotations

import io
import os
import tarfile
from collections.abc import Callable
from dataclasses import replace
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
from tests.same import assert_same
from tests.shards.forged_index import index_of
from wds_tensorcache.codec.binding import PREAMBLE_NBYTES
from wds_tensorcache.shards.footer import TRAILER_NBYTES, build_footer, parse_index, read_footer
from wds_tensorcache.shards.index import ShardIndex
from wds_tensorcache.shards.load_index import load_index
from wds_tensorcache.shards.manifest import ShardEntry, write_manifest
from wds_tensorcache.storage.files import ShardFile

Samples = list[dict[str, Any]]


def assert_three_agree(path: Path) -> ShardIndex:
    """Assert that footer, sidecar and scan are one index, down to the dtypes; return it."""
    found = index_of(path)
    expected = build_footer(found, 1 << 20)
    sidecar = Path(f"{path}.index")
    before = path.read_bytes()
    assert build_footer(tc.write_index(path), 1 << 20) == expected
    parsed = parse_index(sidecar.read_bytes(), len(before))
    assert parsed is not None
    assert build_footer(parsed, 1 << 20) == expected
    assert path.read_bytes() == before
    after = before[: found.end] + bytes(1024) + build_footer(found)
    path.write_bytes(after)
    assert len(after) % 512 == 0
    footer = read_footer(ShardFile(str(path)).read, len(after))
    assert footer is not None
    assert build_footer(footer, 1 << 20) == expected
    assert build_footer(load_index(ShardFile(str(path))), 1 << 20) == expected
    with tarfile.open(path) as archive:
        assert len(archive.getmembers()) >= len(found.keys)
    return footer


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


def ragged() -> Samples:
    return [
        {"__key__": f"{i:x}", "tensorcache": {"text": torch.randn(i + 1, i % 7), "n": np.arange(2**16 * (i == 9))}}
        for i in range(300)
    ]


def long_names() -> Samples:
    return [{"__key__": name * (100 - len(".safetensors")), "tensorcache": torch.arange(3)} for name in "ba"]


SAMPLES = {
    "several caches": several,
    "ragged": ragged,
    "longest names": long_names,
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
        with tc.ShardWriter(path, encoder=encoder, dali_index=False) as ours:
            for sample in samples:
                ours.write(sample["__key__"], **{k: v for k, v in sample.items() if k != "__key__"})
        written = read_footer(ShardFile(str(path)).read, path.stat().st_size)
        assert written is not None
        assert build_footer(written, 1 << 20) == build_footer(index_of(path), 1 << 20)
    else:
        mtime = {"mtime": 0} if "mtime" in how else {}
        with wds.ShardWriter(str(tmp_path / "%d.tar"), encoder=tc.encoder(), verbose=0, **mtime) as stock:
            for sample in samples:
                stock.write(sample)
    index = assert_three_agree(path)
    assert list(index.keys) == [sample["__key__"] for sample in samples]
    for name in index.caches:
        field = f"{name}.tensorcache" if name else "tensorcache"
        cache = tc.open(path, cache=name)
        expected = [sample for sample in samples if field in sample]
        assert list(cache.keys()) == [sample["__key__"] for sample in expected]
        for sample, found in zip(expected, cache, strict=True):
            assert_same(sample[field], found)
        cache.close()


def test_more_layouts_than_a_byte_numbers(tmp_path: Path) -> None:
    with tc.ShardWriter(tmp_path / "x.tar") as sink:
        for i in range(300):
            sink.write(str(i), [torch.zeros(i % 290, 2)])
    index = assert_three_agree(tmp_path / "x.tar")
    assert (len(index.layouts), index.caches[""].layout.dtype, len(index.layouts.forms)) == (290, np.uint16, 1)


def test_more_forms_than_are_remembered(tmp_path: Path) -> None:
    with tc.ShardWriter(tmp_path / "x.tar") as sink:
        for i in range(3000):
            sink.write(str(i), {f"n{i % 1500}": torch.zeros(3)})
    index = assert_three_agree(tmp_path / "x.tar")
    assert len(index.layouts.forms) == 1500
    for i in range(3000):
        (entry,) = index.layouts[index.caches[""].layout[i]].form.entries
        assert entry[0] == f"n{i % 1500}"


@pytest.mark.parametrize(
    "format", [tarfile.PAX_FORMAT, tarfile.GNU_FORMAT, tarfile.USTAR_FORMAT], ids=["pax", "gnu", "ustar"]
)
@pytest.mark.parametrize(
    ("key", "capitals"), [("a", False), ("é/ü", False), ("d" * 90 + "/" + "k" * 80, False), ("A", True)]
)
def test_by_hand(tmp_path: Path, format: int, key: str, capitals: bool) -> None:
    """Stock safetensors, skeletons without a preamble, in any order, in any tar, with names that we would not write."""
    if format == tarfile.USTAR_FORMAT and not key.isascii():
        key = "e/u"
    path = tmp_path / "x.tar"
    ours = tc.encode_sample({"x": torch.arange(3)})[0]
    skeleton = ours[:2] + ours[PREAMBLE_NBYTES:]
    with tarfile.open(path, "w", format=format) as archive:
        for i in range(4):
            suffixes = ["safetensors", "skel.pyd"] if i % 2 else ["skel.pyd", "safetensors"]
            for suffix in suffixes:
                raw = skeleton if suffix == "skel.pyd" else safetensors.torch.save({"x": torch.arange(3) + i})
                entry = tarfile.TarInfo(f"{key}{i}.{suffix.upper() if capitals else suffix}")
                entry.size = len(raw)
                archive.addfile(entry, io.BytesIO(raw))
    index = assert_three_agree(path)
    assert index.caches[""].digest.tolist() == [0] * 4
    for io_ in ("pread", "auto"):
        with tc.open(path, io=io_) as cache:
            assert cache.read_batch([3, 1])["x"].tolist() == [[3, 4, 5], [1, 2, 3]]
            assert [sample["x"].tolist() for sample in cache] == [[i, i + 1, i + 2] for i in range(4)]


def test_keys_that_dali_cannot_hold(tmp_path: Path, write_shard: Callable[..., str]) -> None:
    path = tmp_path / "x.tar"
    with wds.TarWriter(str(path), encoder=False) as sink:
        sink.write({"__key__": "a b", "txt": b""})
    with pytest.raises(tc.InvalidKeyError, match="DALI's index cannot represent"):
        tc.write_index(path)
    assert list(tc.write_index(path, dali_index=False).keys) == ["a b"]


@given(st.data())
@settings(max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
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


# --- memory ---


def test_memory(tmp_path: Path) -> None:
    with tc.ShardWriter(tmp_path / "x.tar", fsync=False) as sink:
        for i in range(10_000):
            sink.write(f"{i:06d}", [torch.zeros(1)], cls=0)
    index = load_index(ShardFile(str(tmp_path / "x.tar")))
    assert index.nbytes / 10_000 < 64 + 6
    cache = index.caches[""]
    assert sum(a.nbytes for a in (cache.skeleton_begin, cache.tensors_begin, cache.layout, cache.digest)) < 24 * 10_000


def test_opening_a_thousand_shards_loads_none(tmp_path: Path) -> None:
    with tc.ShardWriter(tmp_path / "%04d.tar", max_samples=2, fsync=False, dali_index=False, manifest=False) as sink:
        for i in range(2):
            sink.write(str(i), torch.tensor(i))
    shard = (tmp_path / "0000.tar").read_bytes()
    entries = [ShardEntry(f"{number:04d}.tar", 2, len(shard)) for number in range(1000)]
    for number in range(1000):
        (tmp_path / f"{number:04d}.tar").write_bytes(shard)
    counts = {entry.url: {"": 2} for entry in entries}
    write_manifest(
        str(tmp_path / "manifest.json"),
        entries,
        {"version": 1, "caches": counts},
    )
    before = len(os.listdir("/proc/self/fd"))  # earlier tests may have left connections open
    with tc.open(tmp_path) as cache:
        assert len(cache) == 2000
        assert not any("index" in vars(s) for s in cache._store.shards)
        assert len(os.listdir("/proc/self/fd")) <= before + 1
        assert int(cache[1001]) == 1
        assert [s.path[-8:] for s in cache._store.shards if "index" in vars(s)] == ["0500.tar"]
        assert len(os.listdir("/proc/self/fd")) < before + 100


# --- damage ---


@pytest.fixture
def damaged(tmp_path: Path) -> Path:
    with tc.ShardWriter(tmp_path / "x.tar", manifest=False) as sink:
        for i in range(4):
            sink.write(f"{i}", diffusion_sample(i), json=i)
    return tmp_path / "x.tar"


def assert_right_or_refused(path: Path, expected: bytes) -> bool:
    try:
        found = load_index(ShardFile(str(path)))
    except tc.FormatError:
        return False
    assert build_footer(found, 1 << 20) == expected
    return True


def test_flipped_bytes(damaged: Path) -> None:
    expected = build_footer(index_of(damaged), 1 << 20)
    shard = bytearray(damaged.read_bytes())
    end = index_of(damaged).end
    positions = [*range(end, len(shard) - TRAILER_NBYTES, 7), *range(len(shard) - TRAILER_NBYTES, len(shard))]
    right = 0
    for position in positions:
        shard[position] ^= 0xA5
        damaged.write_bytes(shard)
        right += assert_right_or_refused(damaged, expected)
        shard[position] ^= 0xA5
    assert right > 0.7 * len(positions)


def test_truncated(damaged: Path) -> None:
    expected = build_footer(index_of(damaged), 1 << 20)
    shard, end = damaged.read_bytes(), index_of(damaged).end
    for nbytes in [*range(len(shard), end, -31), end + 512, end, end - 1, end - 1000, 700, 512, 100, 1, 0]:
        damaged.write_bytes(shard[:nbytes])
        assert assert_right_or_refused(damaged, expected) == (nbytes >= end + 512)


def test_garbage_behind(damaged: Path) -> None:
    expected = build_footer(index_of(damaged), 1 << 20)
    shard = damaged.read_bytes()
    for tail in (b"x", bytes(512), shard[-TRAILER_NBYTES:], shard[-3000:], os.urandom(70_000)):
        damaged.write_bytes(shard + tail)
        assert assert_right_or_refused(damaged, expected)


def test_a_sidecar_of_another_state(damaged: Path) -> None:
    path = damaged
    end = index_of(path).end
    path.write_bytes(path.read_bytes()[: end + 1024])
    tc.write_index(path)
    assert load_index(ShardFile(str(path))).keys[0] == "0"
    index = index_of(path)
    sidecar = Path(f"{path}.index")
    for nbytes in (end, 1 << 40):
        sidecar.write_bytes(build_footer(replace(index, end=index.end), nbytes))
        assert list(load_index(ShardFile(str(path))).keys) == list(index.keys)
    for raw in (b"", b"x" * 10, sidecar.read_bytes()[:-1]):
        sidecar.write_bytes(raw)
        assert list(load_index(ShardFile(str(path))).keys) == list(index.keys)


def test_an_index_beside_a_tar_that_ends_after_one_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.tar"
    with tc.ShardWriter(path, footer=False, dali_index=False, manifest=False) as sink:
        sink.write("a", {"x": torch.ones(3)})
    path.write_bytes(path.read_bytes()[:-512])
    tc.write_index(path, dali_index=False)
    monkeypatch.setattr("wds_tensorcache.shards.load_index.scan", None)
    assert list(tc.open(path).keys()) == ["a"]
