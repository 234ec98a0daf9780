"""`schema` and `repr` say what the index knows of every tensor, without reading one."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

import wds_tensorcache as tc
from tests.reading.batches import write

DTYPES = [torch.bfloat16, torch.complex128, torch.float8_e4m3fn, torch.float8_e8m0fnu, torch.bool, torch.float64]
ARRAYS = ["M8[ns]", "m8[25s]", "S3", "U4", "c16", "<f2", ">i4"]


def test_schema(tmp_path: Path) -> None:
    samples = [
        {str(dtype): torch.zeros(i, 2 * dtype.itemsize, dtype=torch.uint8).view(dtype) for dtype in DTYPES}
        | {name: np.zeros((3, i), name) for name in ARRAYS}
        | {"scalar": torch.tensor(1.0)}
        | ({"sometimes": torch.zeros(1)} if i == 2 else {})
        for i in range(1, 4)
    ]
    for max_samples in (1, 10):
        with tc.open(write(tmp_path / str(max_samples), samples, max_samples=max_samples)) as cache:
            schema = cache.schema
            for dtype in DTYPES:
                found = schema[str(dtype).replace(".", "%2E")]
                assert (found.kind, found.dtype, found.shape) == ("tensor", dtype, ((1, 3), 2))
                assert (found.nbytes, found.num_samples) == (12 * dtype.itemsize, 3)
            for name in ARRAYS:
                dtype = np.dtype(name).newbyteorder("<")
                found = schema[name.replace(".", "%2E")]
                assert (found.kind, found.dtype, found.shape) == ("ndarray", dtype, (3, (1, 3)))
                assert found.nbytes == 18 * dtype.itemsize
            assert schema["scalar"].shape == ()
            assert (schema["sometimes"].num_samples, schema["sometimes"].nbytes) == (1, 4)
            assert cache[2:].schema["U4"].shape == (3, 3)
            assert "sometimes" not in cache[2:].schema


def test_samples_that_differ(tmp_path: Path) -> None:
    samples = [
        {"x": torch.zeros(2, 3), "n": np.zeros(2)},
        {"x": torch.zeros(4, 3).bfloat16(), "n": torch.zeros(2, 2)},
        {"x": torch.zeros(1, 3), "n": np.zeros(2)},
    ]
    for max_samples in (1, 10):
        with tc.open(write(tmp_path / str(max_samples), samples, max_samples=max_samples)) as cache:
            x, n = cache.schema["x"], cache.schema["n"]
            assert (x.dtype, x.shape) == ((torch.float32, torch.bfloat16), ((1, 4), 3))
            assert (x.nbytes, x.num_samples) == (24 + 24 + 12, 3)
            assert (set(n.dtype), n.shape, n.nbytes) == ({np.dtype("<f8"), torch.float32}, None, 48)


# --- repr, which looks at little of a large cache ---


def test_repr(tmp_path: Path) -> None:
    samples = [{"x": torch.zeros(i + 1, 2).bfloat16(), "a": [np.zeros(3, "f4")], "i": i} for i in range(5)]
    folder = Path(write(tmp_path / "a", samples, max_samples=2, fingerprint={"model": "vae", "size": 64}))
    nbytes = sum(path.stat().st_size for path in folder.glob("*.tar"))
    with tc.open(folder) as cache:
        assert repr(cache).splitlines() == [
            f"TensorCache: 5 samples in 3 shards of {nbytes:,} bytes",
            "  a.0: float32 [3] (numpy)",
            "  x: bfloat16 [1..5, 2]",
            "  fingerprint: {'model': 'vae', 'size': 64}",
        ]
        joined = tc.join({"one": cache[:2], "two": cache[:2].select("x")})
        assert repr(joined).splitlines() == [
            f"JoinedCache: 2 samples in 6 shards of {2 * nbytes:,} bytes",
            "  one.a.0: float32 [3] (numpy)",
            "  one.x: bfloat16 [1..2, 2]",
            "  two.x: bfloat16 [1..2, 2]",
            "  fingerprint: {'model': 'vae', 'size': 64}",
        ]


def test_little_is_read_of_a_large_cache(tmp_path: Path) -> None:
    folder = write(tmp_path, [{"x": torch.tensor(i)} for i in range(3000)], max_samples=500)
    with tc.open(folder) as cache:
        assert "(tensors of the first 1,000 samples)" in repr(cache)


def test_closed_and_missing(tmp_path: Path) -> None:
    folder = Path(write(tmp_path, [{"x": torch.tensor(0)}]))
    cache = tc.open(folder)
    cache.close()
    assert repr(cache).startswith("TensorCache: 1 sample in 1 shard of ")
    cache = tc.open(folder)
    (folder / "000.tar").unlink()
    assert repr(cache).splitlines()[0] == "TensorCache: 1 sample in 1 shard"
