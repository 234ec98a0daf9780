"""The repr of a cache tells what is in it, and looks at little of a large one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

import wds_tensorcache as tc


def write(folder: Path, samples: list[Any], **options: Any) -> Path:
    with tc.ShardWriter(folder / "%06d.tar", fsync=False, **options) as sink:
        for i, sample in enumerate(samples):
            sink.write(f"{i:06d}", sample)
    return folder


def test_samples_shards_bytes_tensors_and_fingerprint(tmp_path: Path) -> None:
    samples = [{"x": torch.zeros(i + 1, 2).bfloat16(), "a": [np.zeros(3, "f4")], "i": i} for i in range(5)]
    folder = write(tmp_path / "a", samples, max_samples=2, fingerprint={"model": "vae", "size": 64})
    nbytes = sum(path.stat().st_size for path in folder.glob("*.tar"))
    with tc.open(folder) as cache:
        assert repr(cache).splitlines() == [
            f"TensorCache: 5 samples in 3 shards of {nbytes:,} bytes",
            "  a.0: float32 [3] (numpy)",
            "  x: bfloat16 [1..5, 2]",
            "  fingerprint: {'model': 'vae', 'size': 64}",
        ]
        assert repr(cache[1:3].select("x")).splitlines()[::2] == [
            f"TensorCache: 2 samples in 3 shards of {nbytes:,} bytes",
            "  fingerprint: {'model': 'vae', 'size': 64}",
        ]
        joined = tc.join({"one": cache, "two": cache})
        lines = repr(joined).splitlines()
        assert lines[0] == f"JoinedCache: 5 samples in 6 shards of {2 * nbytes:,} bytes"
        assert lines[1:] == [
            "  one.a.0: float32 [3] (numpy)",
            "  one.x: bfloat16 [1..5, 2]",
            "  two.a.0: float32 [3] (numpy)",
            "  two.x: bfloat16 [1..5, 2]",
            "  fingerprint: {'model': 'vae', 'size': 64}",
        ]
    assert repr(cache[:0]).startswith("TensorCache: 0 samples in 3 shards")


def test_little_is_read_of_a_large_cache(tmp_path: Path) -> None:
    folder = write(tmp_path, [{"x": torch.tensor(i)} for i in range(3000)], max_samples=500)
    with tc.open(folder) as cache:
        assert "(tensors of the first 1,000 samples)" in repr(cache)
        loaded = [shard for shard in cache._store.shards if "index" in vars(shard)]
        assert len(loaded) <= 2


def test_closed_and_missing(tmp_path: Path) -> None:
    folder = write(tmp_path, [{"x": torch.tensor(0)}])
    cache = tc.open(folder)
    cache.close()
    assert repr(cache).startswith("TensorCache: 1 sample in 1 shard of ")
    cache = tc.open(folder)
    (folder / "000000.tar").unlink()
    assert repr(cache).splitlines()[0] == "TensorCache: 1 sample in 1 shard"
