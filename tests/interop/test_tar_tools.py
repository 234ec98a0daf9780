"""tarfile, GNU tar, shell pipes and webdataset's `pipe:` read a shard to its last byte."""

from __future__ import annotations

import shutil
import subprocess
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import webdataset as wds

import wds_tensorcache as tc
from tests.conftest import diffusion_sample
from tests.same import assert_same


def large_sample(index: int) -> dict[str, Any]:
    """Return a sample of more than the 64 KiB that a pipe holds, so that a reader that stops early breaks the pipe."""
    return {**diffusion_sample(index), "wide": torch.arange(30_000) + index}


@pytest.fixture
def large_shard(write_shard: Callable[..., str]) -> str:
    samples = [{"__key__": f"{i:03d}", "tensorcache": large_sample(i), "txt": f"photo {i}"} for i in range(3)]
    return write_shard(samples)


@pytest.fixture
def members() -> dict[str, bytes]:
    """The members of `large_shard` in order, made without a tar."""
    result = {}
    for i in range(3):
        skeleton, tensors = tc.encode_sample(large_sample(i))
        result |= {
            f"{i:03d}.safetensors": tensors,
            f"{i:03d}.skel.pyd": skeleton,
            f"{i:03d}.txt": f"photo {i}".encode(),
        }
    return result


def read_folder(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


@pytest.mark.parametrize("mode", ["r:", "r|*"])
def test_tarfile(large_shard: str, members: dict[str, bytes], mode: Any) -> None:
    with tarfile.open(large_shard, mode) as archive:
        found = [(entry.name, archive.extractfile(entry).read()) for entry in archive]  # type: ignore[union-attr]
    assert found == list(members.items())


def test_members_are_plain_and_reproducible(large_shard: str) -> None:
    with tarfile.open(large_shard, "r:") as archive:
        for entry in archive:
            assert (entry.type, entry.mtime, entry.pax_headers) == (tarfile.REGTYPE, 0, {})
            assert entry.offset_data == entry.offset + 512, "one header block: no extension records"


def test_gnu_tar_lists(large_shard: str, members: dict[str, bytes], gnu_tar: str) -> None:
    done = subprocess.run([gnu_tar, "tf", large_shard], capture_output=True, text=True, check=True)
    assert (done.stdout.split(), done.stderr) == (list(members), "")


def test_gnu_tar_extracts(large_shard: str, members: dict[str, bytes], gnu_tar: str, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    folder.mkdir()
    done = subprocess.run([gnu_tar, "xf", large_shard, "-C", str(folder)], capture_output=True, text=True, check=True)
    assert (read_folder(folder), done.stderr) == (members, "")


def test_cat_into_tar(large_shard: str, members: dict[str, bytes], gnu_tar: str, tmp_path: Path) -> None:
    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("bash is missing, which has pipefail: apt install bash")
    folder = tmp_path / "out"
    folder.mkdir()
    script = 'cat "$1" | "$2" x -C "$3"'  # pipefail: a SIGPIPE that hits cat fails the pipe
    command = [bash, "-o", "pipefail", "-c", script, "bash", large_shard, gnu_tar, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert read_folder(folder) == members


@pytest.mark.skipif(shutil.which("cat") is None, reason="cat is missing: apt install coreutils")
def test_webdataset_pipe(large_shard: str) -> None:
    samples = list(wds.WebDataset(f"pipe:cat {large_shard}", shardshuffle=False).compose(tc.decode()))
    assert [sample["txt"] for sample in samples] == ["photo 0", "photo 1", "photo 2"]
    for i, sample in enumerate(samples):
        assert_same(large_sample(i), sample["tensorcache"])
