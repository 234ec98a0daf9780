"""`schema`, `repr` and `describe`: what the index knows of every tensor, without reading one, and a bounded summary."""

from __future__ import annotations

import pickle
from collections import OrderedDict, deque
from pathlib import Path
from typing import Any

import numpy as np
import torch

import wds_tensorcache as tc
from tests.reading.batches import folder_of, write

LINES, CHARS = 330, 260  # bounds of a summary: lines, and characters of a line but the last


def photo(i: int) -> dict[str, Any]:
    made: dict[str, Any] = {
        "latent": torch.zeros(4, 8 + i % 3, 8).half(),
        "cond": [[torch.zeros(1, 2).bfloat16(), {"prompt": f"photo {i}", "size": (64, 48), "tags": ["a"] * (i % 3)}]],
        "score": None if i < 50 else 0.5,
    }
    return made | ({"alpha": np.zeros(1, "f4")} if i % 2 else {})


def members_of(i: int) -> dict[str, Any]:
    return {"json": {"i": i}} | ({"jpg": b""} if i < 7 else {})


PHOTOS = [photo(i) for i in range(100)]
folder = folder_of(PHOTOS, members=members_of, max_samples=40, fingerprint={"model": "vae"})


def test_summaries_are_printable(tmp_path: Path) -> None:
    """No name can reorder the text of a terminal, erase it or begin a line."""
    names = ["\u202eevil", "\u2066x", "\u2028", "\x1b[2J", "a\nb", "\x9b2J", "\u200b"]
    sample = {"v": dict.fromkeys(names, "\u202e"), "t": {name: torch.zeros(1) for name in names}, "é": 1}
    with tc.open(write(tmp_path, [sample])) as cache:
        for text in (str(cache.describe()), repr(cache)):
            assert all(line.isprintable() for line in text.split("\n"))
            assert len(text.split("\n")) < 4 + 3 * len(names)
            assert "\\u202eevil: float32 [1]" in text
        assert "  é: int" in str(cache.describe())


def test_attributes_and_summary(folder: Path) -> None:
    with tc.open(folder) as cache:
        found = cache.describe()
        assert (found.num_samples, found.num_shards, found.num_counted, found.num_examined) == (100, 3, 100, 64)
        assert found.members == cache.members == {"json": 100, "jpg": 7}
        assert found.fingerprint == {"model": "vae"}
        latent = found.tensors["latent"]
        assert latent.shapes == {(4, 8, 8): 34, (4, 9, 8): 33, (4, 10, 8): 33}
        assert (latent.dtype, latent.num_shapes, latent.shape) == (torch.float16, 3, (4, (8, 10), 8))
        assert found.nbytes == sum(tensor.nbytes for tensor in cache.schema.values())
        for name, schema in cache.schema.items():
            assert all(getattr(found.tensors[name], each) == getattr(schema, each) for each in schema.__slots__)
        tags = found.values["cond.0.1.tags"]
        assert (tags.types, tags.example) == ({"list of 0": 24, "list of 1..2 str": 40}, ["a"])
        assert repr(found).splitlines() == [
            f"Description: 100 samples in 3 shards, {found.nbytes:,} bytes of tensors",
            "tensors:",
            f"  latent: float16 [4, 8..10, 8], {latent.nbytes:,} bytes; "
            "3 shapes: [4, 8, 8] in 34, [4, 9, 8] in 33, [4, 10, 8] in 33",
            "  cond.0.0: bfloat16 [1, 2], 400 bytes",
            "  alpha: float32 [1] (numpy), 200 bytes, in 50 of 100 samples",
            "values of 64 samples:",
            "  cond.0.1.prompt: str, for example 'photo 0'",
            "  cond.0.1.size: tuple of 2 int, for example (64, 48)",
            "  cond.0.1.tags: list of 0 (24), list of 1..2 str (40), for example ['a']",
            "  score: None (32), float (32), for example 0.5",
            "members:",
            "  'json': 100 samples",
            "  'jpg': 7 samples",
            "fingerprint: {'model': 'vae'}",
        ]
        assert pickle.loads(pickle.dumps(found)) == found


def test_views(folder: Path) -> None:
    with tc.open(folder) as cache:
        found = cache[::10].select("latent").describe()
        assert list(found.tensors) == ["latent"]
        assert found.tensors["latent"].num_samples == found.num_samples == found.num_examined == 10
        # a tensor in a list that is not selected does not count as a value
        assert list(found.values) == ["cond.0.1.prompt", "cond.0.1.size", "cond.0.1.tags", "score"]
        twice = cache[[0, 0, 3]].describe()
        assert twice.tensors["latent"].shapes == {(4, 8, 8): 3}
        nothing = cache[:0].describe()
        assert (nothing.tensors, nothing.values, nothing.nbytes) == ({}, {}, 0)
        assert repr(nothing).splitlines()[0] == "Description: 0 samples in 3 shards, 0 bytes of tensors"


def test_joined(folder: Path, tmp_path: Path) -> None:
    texts = [{"plain": f"text {i}", "1": {2: i, ("a", 1): "b"}} for i in range(100)]
    write(tmp_path / "texts", texts, lambda i: {"txt": "x"}, max_samples=100)
    write(tmp_path / "bare", [f"a string as the whole sample {i}" for i in range(100)], max_samples=100)
    parts = {"photo": tc.join([folder, tmp_path / "texts"]), "bare": tmp_path / "bare"}
    with tc.join({"all": tc.join(parts)}) as named:
        found = named.describe()
        assert [tensor.name for tensor in found.tensors.values()] == list(found.tensors) == list(named.schema)
        assert found.values["all.photo.plain"].example == "text 0"
        assert found.values["all.photo.1.2"].types == {"int": 64}
        assert found.values["all.photo.1.('a', 1)"].types == {"str": 64}
        assert found.members == {"json": 100, "jpg": 7, "txt": 100}
        assert found.tensors["all.photo.latent"].shapes == {(4, 8, 8): 34, (4, 9, 8): 33, (4, 10, 8): 33}
        assert found.values["all.bare"].types == {"str": 64}
        assert found.num_shards == 5
    with tc.open(tmp_path / "bare") as bare:
        assert "  (the whole sample): str, for example 'a string as the whole sample 0'" in repr(bare.describe())


def test_a_shared_dataset_loads_nothing(tmp_path: Path) -> None:
    with tc.SharedDataset([photo(i) for i in range(30)], "describe", directory=tmp_path) as shared:
        found = shared.describe()
        assert (found.num_samples, found.num_counted, found.num_examined, found.tensors) == (30, 0, 0, {})
        assert "tensors of 0 samples in memory:" in repr(found)
        for i in (3, 4, 9):
            shared[i]
        stats = shared.stats()
        found = shared[2:].describe()
        assert shared.stats() == stats
        assert stats.num_samples == found.num_counted == 3
        assert found.tensors["latent"].shapes == {(4, 8, 8): 2, (4, 9, 8): 1}
        assert found.values["cond.0.1.prompt"].example == "photo 3"
        assert list(shared.select("alpha").describe().tensors) == ["alpha"]
        assert tc.join({"it": shared}).describe().num_counted == 3
        assert shared.stats() == stats


def test_thousands_of_names(tmp_path: Path) -> None:
    """Also if they differ between samples."""
    samples: list[Any] = [
        {"t" * 1000 + str(i): torch.zeros(1) for i in range(1500)} | {f"v{j}" + "v" * 4000: j for j in range(600)},
        {"t" * 1000 + "0": torch.zeros(1)} | {f"w{j}": j for j in range(600)},
    ]
    with tc.open(write(tmp_path, samples)) as cache:
        described = cache.describe()
        assert (len(described.tensors), len(described.values), described.num_examined) == (1500, 1000, 2)
        lines = repr(described).splitlines()
        assert len(lines) < LINES
        assert max(map(len, lines)) < CHARS
        assert "  … and 1,400 more" in lines
        assert "  … and 900 more" in lines
        assert described.values["w0"].num_samples == 1


def test_values_that_no_repr_should_print(tmp_path: Path) -> None:
    nested: Any = "x"
    for _ in range(20):
        nested = [nested, nested]
    within: list[Any] = [1]
    within.append(within)
    values = {
        "shared": nested,
        "cyclic": within,
        "long": "y" * 1_000_000,
        "bytes": b"z" * 1_000_000,
        "many": list(range(100_000)),
        "mixed": [1, "a", None, 2.0],
        "ordered": [OrderedDict(a=nested, b=[1])],
        "queue": deque([3]),
        "one": (1,),
        "large": 1 << 200,
        "floats": [-1.2345678901234567e-100] * 9,
        "ids": list(range(1000, 1100)),
    }
    with tc.open(write(tmp_path, [{"x": torch.zeros(1), **values}])) as cache:
        found = cache.describe()
        assert found.values["mixed"].types == {"list of 4 int or str or None or …": 1}
        assert found.values["many"].types == {"list of 100000 int": 1}
        lines = dict(line.strip().split(": ", 1) for line in repr(found).splitlines() if line.startswith("  "))
        assert all(len(line) < CHARS for line in lines.values())
        assert lines["cyclic"] == "list of 2 int or list, for example [1, [1, [1, [1, […]]]]]"
        many = "list of 100000 int, for example [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, …]"
        assert lines["many"] == many
        assert lines["floats"].count("-1.2345678901234567e-100") == 3
        assert lines["ids"].endswith(", 1009, 1010, …]")
        assert lines["queue"] == "deque of 1 int, for example deque([3])"
        assert lines["one"] == "tuple of 1 int, for example (1,)"
        assert lines["large"] == "int, for example an int of 201 bits"


DTYPES = [torch.bfloat16, torch.complex128, torch.float8_e4m3fn, torch.float8_e8m0fnu, torch.bool, torch.float64]
ARRAYS = ["M8[ns]", "m8[25s]", "S3", "U4", "c16", "<f2", ">i4"]


def test_schema(tmp_path: Path) -> None:
    unlike = [
        {"x": torch.zeros(2, 3), "n": np.zeros(2)},
        {"x": torch.zeros(4, 3).bfloat16(), "n": torch.zeros(2, 2)},
        {"x": torch.zeros(1, 3), "n": np.zeros(2)},
    ]
    samples = [
        {str(dtype): torch.zeros(i, 2 * dtype.itemsize, dtype=torch.uint8).view(dtype) for dtype in DTYPES}
        | {name: np.zeros((3, i), name) for name in ARRAYS}
        | {"scalar": torch.tensor(1.0)}
        | ({"sometimes": torch.zeros(1)} if i == 2 else {})
        | unlike[i - 1]
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
            x, n = schema["x"], schema["n"]
            assert (x.dtype, x.shape) == ((torch.float32, torch.bfloat16), ((1, 4), 3))
            assert (x.nbytes, x.num_samples) == (24 + 24 + 12, 3)
            assert (set(n.dtype), n.shape, n.nbytes) == ({np.dtype("<f8"), torch.float32}, None, 48)


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
    with tc.open(write(tmp_path, [{"x": torch.tensor(i)} for i in range(3000)], max_samples=500)) as cache:
        assert "(tensors of the first 1,000 samples)" in repr(cache)


def test_closed_and_missing(tmp_path: Path) -> None:
    folder = Path(write(tmp_path, [{"x": torch.tensor(0)}]))
    cache = tc.open(folder)
    cache.close()
    assert repr(cache).startswith("TensorCache: 1 sample in 1 shard of ")
    cache = tc.open(folder)
    (folder / "000.tar").unlink()
    assert repr(cache).splitlines()[0] == "TensorCache: 1 sample in 1 shard"
