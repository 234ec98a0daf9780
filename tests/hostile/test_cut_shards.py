"""Shards that are cut short in place under an open cache: an error that names the shard, and no signal."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

import wds_tensorcache as tc

NUM_SAMPLES = 100


def write(path: Path, width: int) -> bytes:
    with tc.ShardWriter(path, manifest=False, dali_index=False, fsync=False, overwrite=True) as sink:
        for i in range(NUM_SAMPLES):
            sink.write(f"{i:03d}", {"x": torch.full((width,), float(i)), "i": i})
    return path.read_bytes()


# In another process: a signal ends it, not the tests.
USES = """
    import os, pickle, sys
    import wds_tensorcache as tc

    def cut(path, way):
        nbytes = os.path.getsize(path)
        content = open(path, "rb").read()
        if way == "written anew":
            open(path, "wb").write(content[: nbytes // 2])
        else:
            os.truncate(path, nbytes // 2)
        if way == "grown again":
            os.truncate(path, nbytes)

    def check(path, io, way):
        cache = tc.open(path, io=io, num_threads=2)
        assert cache.read_batch(range(100))["i"][99] == 99
        batch = cache.read_batch(range(100))
        lazy = cache[99]["x"]
        pickled = pickle.dumps(lazy)
        cut(path, way)
        uses = {
            "batch": lambda: cache.read_batch(range(100)),
            "tensors": lambda: cache.read_tensors([99]),
            "padded": lambda: cache.read_batch(range(100), collate="pad"),
            "leaves": lambda: batch["i"].tolist(),
            "load": lazy.load,
            "view": lambda: lazy.load(copy=False).sum(),
            "write": lambda: tc.encode_sample(lazy),
            "sample": lambda: cache[99]["x"].load(),
            "pickle": lambda: pickle.loads(pickled).load(),
        }
        for what, use in uses.items():
            print(path, io, way, what, flush=True)
            try:
                use()
            except tc.TensorCacheError as exc:
                assert path in str(exc) and ("cut short" in str(exc) or "changed" in str(exc)), exc
            else:
                raise AssertionError(what)

    for path in sys.argv[1:]:
        content = open(path, "rb").read()
        for io in ("auto", "pread"):
            for way in ("cut", "grown again", "written anew"):
                os.unlink(path)
                open(path, "wb").write(content)
                check(path, io, way)
"""


def test_between_two_batches(tmp_path: Path) -> None:
    paths = {tmp_path / "small.tar": 64, tmp_path / "large.tar": 20_000}
    for path, width in paths.items():
        write(path, width)
    command = [sys.executable, "-c", textwrap.dedent(USES), *map(str, paths)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert not done.returncode, f"{done.returncode} after {done.stdout[-200:]}: {done.stderr[-500:]}"


def test_a_shard_that_is_restored_is_refused(tmp_path: Path) -> None:
    """Its bytes are the same again, but they were different for a while."""
    content = write(tmp_path / "x.tar", 64)
    with tc.open(tmp_path / "x.tar") as cache:
        cache.read_batch(range(9))
        os.truncate(tmp_path / "x.tar", 1000)
        (tmp_path / "x.tar").write_bytes(content)
        with pytest.raises(tc.FormatError, match=r"x\.tar: the shard was changed since it was opened; open it again"):
            cache.read_batch(range(9))


def test_lazy_tensors_are_copied_by_reads(tmp_path: Path) -> None:
    """A sample that is written elsewhere is copied by positioned reads, which raise an error."""
    write(tmp_path / "x.tar", 20_000)
    with tc.open(tmp_path / "x.tar") as cache:
        sample = cache[0]
        assert sum(map(len, tc.encode_sample(sample)[1:])) > 80_000
        os.truncate(tmp_path / "x.tar", 2048)
        with pytest.raises(tc.EncodeError):
            tc.encode_sample(sample)
