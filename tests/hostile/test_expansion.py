"""Streams and members that expand: few compressed bytes never take much memory, and honest ones need at most one option."""

from __future__ import annotations

import bz2
import gzip
import lzma
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import webdataset as wds

import wds_tensorcache as tc
from tests.hostile.pickles import little_memory
from tests.reading.batches import write
from tests.shards.tars import build

EMPTY_SETS = b"\x80\x05](" + b"\x8f" * 4_000_000 + b"e."  # 400 bytes of memory for each byte
NO_TENSORS = (2).to_bytes(8, "little") + b"{}"
COMPRESSORS: dict[str, Callable[[bytes], bytes]] = {
    "gz": gzip.compress,
    "bz2": bz2.compress,
    "xz": lambda content: lzma.compress(content, preset=0),
}


def tar_of(*members: tuple[str, bytes]) -> bytes:
    return build(list(members))


def stream(url: object, **options: Any) -> list[dict[str, Any]]:
    return list(wds.DataPipeline(wds.SimpleShardList(str(url)), tc.tarfile_to_samples(**options), tc.decode()))


def resumable(url: object, **options: Any) -> list[dict[str, Any]]:
    return list(tc.ResumablePipeline(str(url), tc.decode(), **options))


def refused(read: Callable[..., Any], *args: Any) -> str:
    """Return the text of the error with which bytes are refused, after a check that they took little memory."""
    with little_memory(4 * (64 << 20)), pytest.raises(tc.FormatError) as caught:
        read(*args)
    return str(caught.value)


@pytest.mark.parametrize("read", [stream, resumable])
@pytest.mark.parametrize("kind", COMPRESSORS)
def test_a_small_stream_with_a_large_skeleton(tmp_path: Path, kind: str, read: Any) -> None:
    path = tmp_path / f"a.tar.{kind}"
    path.write_bytes(COMPRESSORS[kind](tar_of(("0.skel.pyd", EMPTY_SETS), ("0.safetensors", NO_TENSORS))))
    assert path.stat().st_size < 10_000
    text = refused(read, path)
    assert all(part in text for part in (path.name, "0.skel.pyd", "4,000,006 bytes", "max_expanded_nbytes="))


OBJECTS = dict.fromkeys(["pyd", "PKL", "pickle"], EMPTY_SETS) | {
    "json": b"[" + b"{}," * 4_000_000 + b"0]",
    "jsn": b"[" + b"[]," * 4_000_000 + b"0]",
    "mp": b"\xdd" + (12_000_000).to_bytes(4, "big") + b"\x80" * 12_000_000,
    "msg": b"\xdd" + (12_000_000).to_bytes(4, "big") + b"\x90" * 12_000_000,
}


@pytest.mark.parametrize("kind", OBJECTS)
def test_small_streams_and_members_with_large_objects(tmp_path: Path, kind: str) -> None:
    """Such 12 KB took 340 MB as JSON, and 880 MB as MessagePack."""
    path = tmp_path / "a.tar"
    inside, outside = (f"0.{kind}.gz", gzip.compress(OBJECTS[kind])), (f"0.{kind}", OBJECTS[kind])
    for content in (tar_of(inside), gzip.compress(tar_of(outside))):
        path.write_bytes(content)
        assert path.stat().st_size < 100_000
        assert "max_expanded_nbytes=" in refused(stream, path)
    assert "max_expanded_nbytes=" in refused(stream, f"pipe:cat {path}")


@pytest.mark.parametrize(("kind", "members"), [("gz", 1), ("gz", 200), ("bz2", 200), ("xz", 200)])
def test_zeros(tmp_path: Path, kind: str, members: int) -> None:
    path, nbytes = tmp_path / "zeros", 66 << 20
    content = tar_of(*((f"0.{i}", bytes(nbytes // members)) for i in range(members)))
    path.write_bytes(COMPRESSORS[kind](content))
    text = refused(stream, path)
    assert "max_expanded_nbytes=" in text
    assert "compressed bytes" in text


def test_honest_masks_of_zeros_need_the_option(tmp_path: Path) -> None:
    masks = torch.eye(66, 1 << 20, dtype=torch.uint8)
    write(tmp_path / "a-%d.tar", [{"mask": mask, "i": i} for i, mask in enumerate(masks)], manifest=False)
    path = tmp_path / "a.tar.gz"
    path.write_bytes(gzip.compress((tmp_path / "a-0.tar").read_bytes(), 6))
    assert "max_expanded_nbytes=" in refused(stream, path)
    for read in (stream, resumable):
        found = [sample["tensorcache"] for sample in read(path, max_expanded_nbytes=1 << 30)]
        assert [(cache["i"], int(cache["mask"].load().argmax())) for cache in found] == [(i, i) for i in range(66)]


@pytest.mark.long
def test_honest_shards_need_none(tmp_path: Path) -> None:
    numbers = np.random.default_rng(1)
    words = [f"word{i}" for i in range(500)]
    with tc.ShardWriter(tmp_path / "a-%d.tar", manifest=False) as sink:
        sink.write("many", {f"tensor {i}": torch.full((2,), float(i)) for i in range(20_000)})
        sink.write("text", [" ".join(numbers.choice(words, 12)) for _ in range(10_000)])
        for i in range(2_000):
            sink.write(f"{i:04d}", {"x": torch.zeros(64), "caption": " ".join(numbers.choice(words, 30)), "n": i})
    plain, packed = tmp_path / "a-0.tar", tmp_path / "a.tar.bz2"
    packed.write_bytes(bz2.compress(plain.read_bytes()))
    assert 5 * packed.stat().st_size < plain.stat().st_size
    tars = tc.tarfile_to_samples()
    for expected, sample in zip(tars([{"url": str(plain)}]), tars([{"url": str(packed)}]), strict=True):
        assert {**sample, "__url__": None} == {**expected, "__url__": None}
