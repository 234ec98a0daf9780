"""GNU tar and webdataset's `pipe:` read our shards, and we read what `tar -c .` makes of them."""

from __future__ import annotations

import base64
import subprocess
import tarfile
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
import webdataset as wds

import wds_tensorcache as tc
from tests.conftest import diffusion_sample
from tests.interop.other_python import tensor_samples
from tests.reading.batches import write
from tests.same import assert_same


def large_sample(index: int) -> dict[str, Any]:
    """Return a sample of more than the 64 KiB that a pipe holds, so that a reader that stops early breaks the pipe."""
    return {**diffusion_sample(index), "wide": torch.arange(30_000) + index}


@pytest.fixture
def dotted_shard(gnu_tar: str, tmp_path: Path) -> str:
    """A shard with an index that GNU tar extracted into a folder, which `tar -c .` packed, as the folder `sub`."""
    folder, path = tmp_path / "extracted", str(tmp_path / "dotted.tar")
    (folder / "sub").mkdir(parents=True)
    samples = [large_sample(i) for i in range(3)]
    shard = write(tmp_path / "0.tar", samples, lambda i: {"txt": f"photo {i}"}, manifest=False)
    subprocess.run([gnu_tar, "xf", shard, "-C", str(folder / "sub")], check=True)
    subprocess.run([gnu_tar, "--sort=name", "-cf", path, "-C", str(folder), "."], check=True)
    with tarfile.open(path) as archive:
        assert next(entry.name for entry in archive if entry.isfile()) == "./sub/000.safetensors"
    return path


KEYS = ["sub/000", "sub/001", "sub/002"]


@pytest.mark.filterwarnings("ignore:tc.build. samples of the source have a cache, and other members")
def test_keys_have_no_leading_dot(dotted_shard: str, tmp_path: Path) -> None:
    """`tar -c .` puts `./` before each name: indexed or not, as a stream or in a new cache, a key is the plain path."""
    for _ in range(2):
        with tc.open(dotted_shard) as cache:
            assert list(cache.keys()) == KEYS
            assert_same(large_sample(1), tc.realize(cache["sub/001"]))
            assert cache.read_members([2], "txt") == [b"photo 2"]
            assert cache.read_batch([0, 2])["wide"][:, 0].tolist() == [0, 2]
        assert tc.verify(dotted_shard).ok
        tc.write_index(dotted_shard)
    for path in (dotted_shard, f"pipe:cat {dotted_shard}"):
        stages = wds.SimpleShardList([path]), tc.tarfile_to_samples(), tc.decode()
        samples = list(wds.DataPipeline(*stages))
        assert [sample["__key__"] for sample in samples] == KEYS
        assert_same(large_sample(2), tc.realize(samples[2]["tensorcache"]))
    assert [sample["__key__"] for sample in tc.ResumablePipeline(dotted_shard)] == KEYS
    with tc.open(dotted_shard) as cache:
        tc.build(cache, lambda batch: [{"first": one["wide"][0]} for one in batch], tmp_path / "built", fingerprint={})
        tc.merge([dotted_shard], out=tmp_path / "merged")
    for path in (tmp_path / "built", tmp_path / "merged"):
        with tc.open(path) as cache:
            assert list(cache.keys()) == KEYS
        assert tc.verify(path).ok


@pytest.mark.parametrize("suffix", ["skel.pyd", "txt"])
def test_repair_of_a_shard_with_leading_dots(dotted_shard: str, suffix: str, tmp_path: Path) -> None:
    """Damaged members cost their sample, lost headers only if the index does not help."""
    tc.write_index(dotted_shard)
    with tarfile.open(dotted_shard) as archive:
        begin = archive.getmember(f"./sub/001.{suffix}").offset_data
    raw = bytearray(Path(dotted_shard).read_bytes())
    raw[begin - 512 : begin] = bytes(range(256)) * 2
    Path(dotted_shard).write_bytes(raw)
    tc.repair(dotted_shard, tmp_path / "repaired")
    with tc.open(tmp_path / "repaired") as cache:
        assert list(cache.keys()) == KEYS
        assert_same(large_sample(1), tc.realize(cache["sub/001"]))
    assert tc.verify(tmp_path / "repaired").ok


def test_the_index_of_dali_has_leading_dots(dotted_shard: str) -> None:
    """`wds2idx` writes the names in the tar."""
    tc.write_index(dotted_shard)
    path = Path(dotted_shard).with_suffix(".idx")
    path.write_text(path.read_text().replace(" sub/", " ./sub/"))
    assert tc.verify(dotted_shard).ok


# The sidecar that an earlier version made for the shard below, compressed. Its key is `./tensor`.
OLD_SIDECAR = (
    "eNqdk7FOwzAQhiNAqA/AA1SeGKwQu2lkdWKtWBhgiqLISS5t1MapYiM1qiox8wxsiAmJR2LhHZixkwqlIi0KXuzz+f/uzvaxU6se"
    "GxSGOSiecMXDEE02SIGQRRnzeA5ogsiQpDwmjDK94ybpGNAWo9prO3aSzUAqo0pUtTLn7z0XYSTn3Fg+CTCqyUWaSlBSbzmYBS2C"
    "XMASVCHCCGaZ2CMR7ziJYeK0UU3i8h8k4mBCDWoBldSc9X5JrKVmHWqKqfOjBpHIg+qO2NTBlBj1klfFg5J2WpR5LwDBlLYBtf/3"
    "JfyF0VWM9jBZ3q+QEaZu59OKqFLQj+ViOm6zmqR6IcaYegYheH4kOHM7pB4m5mtth4fHk7xbvVwsv6wT69y+ar7ewHo8u9EdVSdt"
    "QAhpeA55BKUxtWEe1yx9H107Oo2paRcSBNpVQgoliLhW+rs2nOhTQbB933WrNdjNl830+fbxSqa3zyrORAJr8g284S3x"
)


def test_an_older_index_with_leading_dots(tmp_path: Path) -> None:
    """It is read, and its keys are those of a new index."""
    with tarfile.open(tmp_path / "a.tar", "w", format=tarfile.USTAR_FORMAT) as archive:
        for suffix in ("skel.pyd", "safetensors"):
            path = Path(__file__).parent.parent / "golden" / "v1" / f"tensor.{suffix}"
            member = tarfile.TarInfo(f"./tensor.{suffix}")
            member.size = path.stat().st_size
            with open(path, "rb") as file:
                archive.addfile(member, file)
    (tmp_path / "a.tar.index").write_bytes(zlib.decompress(base64.b64decode(OLD_SIDECAR)))
    for _ in range(2):
        with tc.open(tmp_path / "a.tar") as cache:
            assert list(cache.keys()) == ["tensor"]
            assert_same(tensor_samples()["tensor"], tc.realize(cache["tensor"]))
        assert tc.verify(tmp_path / "a.tar").ok
        tc.write_index(tmp_path / "a.tar")
