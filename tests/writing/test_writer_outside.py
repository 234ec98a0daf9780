"""Our shards as other tools see them, and writers in other processes: killed, many at once, with another hash seed."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import webdataset as wds

import wds_tensorcache as tc
from tests.conftest import diffusion_sample
from tests.same import assert_same

INSTALL_DALI = "needs NVIDIA DALI: pip install nvidia-dali-cuda130 (runs without a GPU)"


def write(pattern: Path, count: int = 5, **options: Any) -> None:
    with tc.ShardWriter(pattern, fsync=False, **options) as sink:
        for i in range(count):
            sink.write(f"{i:03d}", diffusion_sample(i), json={"label": i}, **{"b.tensorcache": [torch.tensor(i)]})


@pytest.fixture
def shard(tmp_path: Path) -> Path:
    write(tmp_path / "x.tar")
    return tmp_path / "x.tar"


@pytest.fixture
def members() -> dict[str, bytes]:
    """Return the members of `shard` in order: skeletons before tensors."""
    result = {}
    for i in range(5):
        for prefix, sample in (("", diffusion_sample(i)), ("b.", [torch.tensor(i)])):
            skeleton, tensors = tc.encode_sample(sample)
            result |= {f"{i:03d}.{prefix}skel.pyd": skeleton, f"{i:03d}.{prefix}safetensors": tensors}
        result[f"{i:03d}.json"] = json.dumps({"label": i}).encode()
    return result


@pytest.mark.parametrize("mode", ["r:", "r|*"])
def test_tarfile(shard: Path, members: dict[str, bytes], mode: Any) -> None:
    with tarfile.open(shard, mode) as archive:
        found = [(entry.name, archive.extractfile(entry).read()) for entry in archive]  # type: ignore[union-attr]
    assert found == list(members.items())


def test_gnu_tar(shard: Path, members: dict[str, bytes], gnu_tar: str, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    done = subprocess.run([gnu_tar, "xvf", shard, "-C", tmp_path / "out"], capture_output=True, text=True, check=True)
    assert (done.stdout.split(), done.stderr) == (list(members), "")
    assert {name: (tmp_path / "out" / name).read_bytes() for name in members} == members


def test_stock_webdataset(shard: Path) -> None:
    dataset = wds.DataPipeline(wds.SimpleShardList([str(shard)]), wds.tarfile_to_samples(), tc.decode())
    samples = list(dataset)
    assert [(sample["__key__"], sample["json"]["label"]) for sample in samples] == [(f"{i:03d}", i) for i in range(5)]
    for i, sample in enumerate(samples):
        assert_same(diffusion_sample(i), sample["tensorcache"])
        assert_same([torch.tensor(i)], sample["b.tensorcache"])
    plain = list(wds.WebDataset(str(shard), shardshuffle=False).decode())
    assert plain[3]["b.skel.pyd"] == ["tensor:0"]


@pytest.mark.parametrize("count", [1, 40], ids=["shorter than the index", "longer"])
def test_members_appended_with_tar(shard: Path, gnu_tar: str, tmp_path: Path, count: int) -> None:
    more = {
        f"new{i}.{kind}": raw
        for i in range(count)
        for kind, raw in zip(("skel.pyd", "safetensors"), tc.encode_sample([torch.tensor(i)]), strict=True)
    }
    for name, raw in more.items():
        (tmp_path / name).write_bytes(raw)
    subprocess.run([gnu_tar, "rf", shard, "-C", tmp_path, *more], check=True)
    with tarfile.open(shard) as archive:
        assert archive.getnames()[-2 * count :] == list(more)
    (tmp_path / "manifest.json").unlink()
    with tc.open(shard, cache="") as cache:
        assert list(cache.keys()) == [*(f"{i:03d}" for i in range(5)), *(f"new{i}" for i in range(count))]
        assert_same(diffusion_sample(4), cache["004"])
        assert_same([torch.tensor(count - 1)], cache[-1])


def test_a_manifest_of_another_state(shard: Path, tmp_path: Path) -> None:
    with shard.open("ab") as file:
        file.write(bytes(10))
    with pytest.raises(
        tc.FormatError, match=r"x\.tar has \d+ bytes, but .*manifest\.json says \d+: one of the two is stale"
    ):
        tc.open(tmp_path, cache="")


def test_dali_with_our_index(shard: Path, members: dict[str, bytes]) -> None:
    dali = pytest.importorskip("nvidia.dali", reason=INSTALL_DALI)
    wds2idx = pytest.importorskip("wds2idx", reason=INSTALL_DALI)
    with wds2idx.IndexCreator(str(shard), str(shard) + ".theirs", verbose=False) as index:
        index.create_index()
    assert shard.with_suffix(".idx").read_bytes() == Path(str(shard) + ".theirs").read_bytes()
    fields = ["skel.pyd", "safetensors", "b.skel.pyd", "b.safetensors", "json"]

    @dali.pipeline_def(batch_size=1, num_threads=1, device_id=None)
    def pipeline() -> Any:
        return tuple(
            dali.fn.readers.webdataset(
                paths=[str(shard)],
                index_paths=[str(shard.with_suffix(".idx"))],
                ext=fields,
                missing_component_behavior="error",
                name="reader",
            )
        )

    pipe = pipeline()
    pipe.build()
    assert pipe.epoch_size("reader") == 5
    for i in range(5):
        found = [output.at(0).tobytes() for output in pipe.run()]
        assert found == [members[f"{i:03d}.{field}"] for field in fields]


def test_the_manifest_is_of_wids_shape(tmp_path: Path) -> None:
    write(tmp_path / "%d.tar", max_samples=3)
    document = json.loads((tmp_path / "manifest.json").read_text())
    sizes = [(tmp_path / f"{i}.tar").stat().st_size for i in range(2)]
    digests = [(tmp_path / f"{i}.tar").read_bytes()[-16:-8][::-1].hex() for i in range(2)]
    assert document == {
        "__kind__": "wids-shard-index-v1",
        "wids_version": 1,
        "shardlist": [
            {"url": f"{i}.tar", "nsamples": 3 - i, "filesize": sizes[i], "index": digests[i]} for i in range(2)
        ],
        "tensorcache": {"version": 1, "caches": {f"{i}.tar": {"": 3 - i, "b": 3 - i} for i in range(2)}},
    }


# --- other processes ---


def write_sets(pattern: str, count: int, tell: Callable[[], object] = lambda: None) -> None:
    """Write samples whose order in memory depends on the hash seed; call `tell` after a few."""
    with tc.ShardWriter(pattern, max_samples=3, fsync=False) as sink:
        for i in range(count):
            sink.write(f"{i:05d}", {**diffusion_sample(i), "set": {"a", "b", str(i)}}, json=i)
            if i == 10:
                tell()


def start(pattern: Path, count: int, seed: int) -> subprocess.Popen[bytes]:
    """Write them in a new interpreter."""
    code = f"from tests.writing.test_writer_outside import write_sets\nwrite_sets({str(pattern)!r}, {count})"
    command = [sys.executable, "-c", code]
    environment = {**os.environ, "PYTHONHASHSEED": str(seed), "PYTHONPATH": os.pathsep.join([os.getcwd(), *sys.path])}
    return subprocess.Popen(command, env=environment)


def assert_listed_is_right(folder: Path) -> int:
    for shard in json.loads((folder / "manifest.json").read_text())["shardlist"]:
        with tarfile.open(folder / shard["url"]) as archive:
            assert len(archive.getnames()) == 3 * shard["nsamples"]
    cache = tc.open(folder)
    for key, sample in zip(cache.keys(), cache, strict=True):
        assert_same({**diffusion_sample(int(key)), "set": {"a", "b", str(int(key))}}, sample)
    cache.close()
    return len(cache)


def test_processes_share_a_folder_and_agree(tmp_path: Path) -> None:
    writers = [start(tmp_path / f"{kind}-%03d.tar", 30, seed=seed) for seed, kind in enumerate(["train", "val"])]
    for writer in writers:
        assert writer.wait(60) == 0
    assert [shard["url"] for shard in json.loads((tmp_path / "manifest.json").read_text())["shardlist"]] == [
        f"{kind}-{i:03d}.tar" for kind in ("train", "val") for i in range(10)
    ]
    assert assert_listed_is_right(tmp_path) == 60
    for i in range(10):  # whatever the hash seed is
        for kind in ("tar", "idx"):
            train, val = (tmp_path / f"{name}-{i:03d}.{kind}" for name in ("train", "val"))
            assert train.read_bytes() == val.read_bytes()


# a writer that was killed after it had named a shard has not listed it
@pytest.mark.filterwarnings("ignore:.*manifest.json does not list 1 of the shards:UserWarning")
def test_a_killed_writer_leaves_whole_shards(tmp_path: Path) -> None:
    for attempt in range(3):
        folder = tmp_path / str(attempt)
        from_it, to_us = os.pipe()
        writer = os.fork()
        if writer == 0:
            try:
                write_sets(str(folder / "%05d.tar"), 100_000, lambda: os.write(to_us, b"1"))  # noqa: B023
            finally:
                os._exit(1)
        os.close(to_us)
        assert os.read(from_it, 1) == b"1"
        os.close(from_it)
        time.sleep(0.02 * attempt)
        os.kill(writer, signal.SIGKILL)
        assert os.waitstatus_to_exitcode(os.waitpid(writer, 0)[1]) == -signal.SIGKILL
        assert assert_listed_is_right(folder) >= 9
        for path in folder.glob("*.tar"):  # one at most has its name and is not listed yet
            with tarfile.open(path) as archive:
                assert len(archive.getnames()) == 9
        with tc.ShardWriter(folder / "%05d.tar", overwrite=True) as sink:
            sink.write("a", 0)
        assert sorted(os.listdir(folder)) == ["00000.idx", "00000.tar", "manifest.json"]


def test_the_same_bytes_as_webdataset_writes(tmp_path: Path) -> None:
    """A scan of the shard that webdataset's writer makes of the same members finds the same samples."""
    write(tmp_path / "x.tar", footer=False)
    stream = io.BytesIO()
    with wds.TarWriter(stream, encoder=False, mtime=0) as sink, tarfile.open(tmp_path / "x.tar") as archive:
        for entry in archive:
            raw = archive.extractfile(entry).read()  # type: ignore[union-attr]
            sink.write({"__key__": entry.name[:3], entry.name[4:]: raw})
    ours = (tmp_path / "x.tar").read_bytes()
    assert stream.getvalue()[: len(ours)] == ours


def test_write_is_not_webdatasets(tmp_path: Path) -> None:
    with (
        tc.ShardWriter(tmp_path / "%d.tar", fsync=False) as writer,
        pytest.raises(TypeError, match=r"write\(key, sample"),
    ):
        writer.write({"__key__": "a", "x": 1})  # type: ignore[arg-type]


@pytest.mark.parametrize("pattern", ["x.idx", "%d.index", "data.%d", "a-%03d.idx"])
def test_patterns_whose_shards_would_be_overwritten_by_indexes(tmp_path: Path, pattern: str) -> None:
    with pytest.raises(ValueError, match="share a name"):
        tc.ShardWriter(tmp_path / pattern)
    assert not list(tmp_path.iterdir())
