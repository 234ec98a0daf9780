"""`read_batch` is what stacking the samples one by one gives, by every way of reading, for every dtype and structure.

A function as `collate` gets whole samples of any structures.
"""

from __future__ import annotations

import ctypes
import errno
import math
import mmap
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import webdataset as wds
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functionalize
from torch.fx.experimental.proxy_tensor import make_fx

import wds_tensorcache as tc
from tests import strategies
from tests.children import run_in_child
from tests.reading.batches import COUNT, LARGE, SMALL, assert_all_same, assert_batch, folder_of, write
from tests.same import tensor_bytes

# gathered from maps, and not
small, large = folder_of(SMALL), folder_of(LARGE)


def tensor_of(dtype: torch.dtype, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """Return a tensor with arbitrary bits."""
    nbytes = math.prod(shape) * dtype.itemsize
    raw = np.random.default_rng(seed).integers(0, 2 if dtype is torch.bool else 256, nbytes, np.uint8)
    return (torch.from_numpy(raw) if nbytes else torch.empty(0, dtype=torch.uint8)).view(dtype).view(shape)


@pytest.mark.parametrize("io", ["auto", "pread"])
@pytest.mark.parametrize("threads", [1, 2, 4])
@pytest.mark.parametrize("samples", [SMALL, LARGE], ids=["small", "large"])
def test_ways_of_reading(small: str, large: str, io: str, threads: int, samples: list[Any]) -> None:
    with tc.open(small if samples is SMALL else large, io=io, num_threads=threads) as cache:
        for numbers in (range(COUNT), [5], [7, 3, 3, 22, 0, 7], range(COUNT - 1, -1, -2), [-1, -COUNT]):
            expected = [samples[i] for i in numbers]
            assert_batch(expected, cache.read_batch(numbers))
            assert_batch(expected, cache.read_batch(numbers, collate="list"), "list")
            assert_batch(expected, cache.read_batch(numbers, collate="pad"))
            assert_all_same(expected, cache.read_batch(numbers, collate=list))


def test_indices_of_every_kind(small: str) -> None:
    with tc.open(small) as cache:
        numbers = [3, 22, 3]
        for given_as in (
            tuple(numbers),
            iter(numbers),
            np.array(numbers, np.uint8),
            np.array(numbers)[::1],
            torch.tensor(numbers),
            [torch.tensor(3), np.int64(22), 3],
            ["003", "022", "003"],
            np.array(["003", "022", "003"]),
            ["003", 22, -20],
        ):
            assert_batch([SMALL[i] for i in numbers], cache.read_batch(given_as))
        view = cache[4:20:3]
        assert_batch([SMALL[7], SMALL[4]], view.read_batch([1, "004"]))
        for empty in ([], (), np.array([], np.int64), iter(())):
            with pytest.raises(ValueError, match="no indices: a batch has at least one sample"):
                cache.read_batch(empty)


@pytest.mark.parametrize("dtype", strategies.TORCH_DTYPES, ids=str)
def test_every_dtype(tmp_path: Path, dtype: torch.dtype) -> None:
    rows = [
        {"t": tensor_of(dtype, (3, 2), i), "n": tensor_of(dtype, (), i), "e": tensor_of(dtype, (0, 2), i)}
        for i in range(4)
    ]
    ragged = [{"r": tensor_of(dtype, (i, 3), i)} for i in range(4)]
    with tc.open(write(tmp_path / "a", rows)) as cache, tc.open(write(tmp_path / "b", ragged)) as other:
        assert_batch(rows, cache.read_batch(range(4)))
        assert_batch(rows, cache.read_batch(range(4), collate="list"), "list")
        assert_batch(ragged, other.read_batch(range(4), collate="list"), "list")
        padded, info = other.read_batch_with_info(range(4), collate="pad")
        assert info.shapes["r"].tolist() == [[0, 3], [1, 3], [2, 3], [3, 3]]
        zeros = torch.zeros(9 * dtype.itemsize, dtype=torch.uint8).view(dtype).view(3, 3)
        assert_batch([{"r": torch.cat([sample["r"], zeros[i:]])} for i, sample in enumerate(ragged)], padded)


@pytest.mark.parametrize("dtype", strategies.NUMPY_DTYPES, ids=str)
def test_every_dtype_of_numpy(tmp_path: Path, dtype: np.dtype[Any]) -> None:
    values = [["x"] * 3, ["yz"] * 3] if dtype.kind in "SU" else np.arange(6).reshape(2, 3) % 5
    rows = [np.array(values).astype(dtype)[::step] for step in (1, -1, 1, -1)]
    with tc.open(write(tmp_path / "a", rows)) as cache:
        assert_batch(rows, cache.read_batch(range(4)))
        assert_batch(rows, cache.read_batch(range(4), collate="list"), "list")
    ragged = [row[: i % 3] for i, row in enumerate(rows)]
    with tc.open(write(tmp_path / "b", ragged)) as cache:
        padded, info = cache.read_batch_with_info(range(4), collate="pad")
        ((_, shapes),) = info.shapes.items()
        assert shapes.tolist() == [[0, 3], [1, 3], [2, 3], [0, 3]]
        zeros = np.zeros((2, 3), dtype)
        assert_batch([np.concatenate([row, zeros[len(row) :]]) for row in ragged], padded)


plain = st.none() | st.booleans() | st.integers() | st.text(max_size=3) | st.binary(max_size=3) | st.floats()


@st.composite
def batches(draw: st.DrawFn) -> list[Any]:
    """Samples of one structure: equal tensors' shapes and dtypes, other values."""
    leaf = st.one_of(strategies.tensors(), strategies.arrays(), st.just("leaf"))
    keys = strategies.keys
    shape = draw(
        st.recursive(
            leaf,
            lambda inner: (
                st.lists(inner, max_size=3)
                | st.lists(inner, max_size=3).map(tuple)
                | st.dictionaries(keys, inner, max_size=3)
            ),
            max_leaves=8,
        )
    )
    return [_vary(draw, shape) for _ in range(draw(st.integers(1, 5)))]


def _vary(draw: st.DrawFn, value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        raw = bytearray(tensor_bytes(value) or b"\0")
        if draw(st.booleans()) and value.nbytes:
            raw[draw(st.integers(0, value.nbytes - 1))] ^= 1
        return torch.frombuffer(raw, dtype=torch.uint8)[: value.nbytes].view(value.dtype).view(value.shape)
    if isinstance(value, np.ndarray):
        return value.copy()
    if isinstance(value, dict):
        return {key: _vary(draw, item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_vary(draw, item) for item in value)
    return draw(plain)


@settings(max_examples=30)
@given(batches(), st.sampled_from(["pread", "auto"]), st.data())
def test_any_structure(samples: list[Any], io: str, data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as folder, tc.open(write(folder, samples, max_samples=2), io=io) as cache:
        numbers = data.draw(st.lists(st.integers(0, len(samples) - 1), min_size=1, max_size=6))
        expected = [samples[i] for i in numbers]
        for _ in range(2):  # the second time by template
            assert_batch(expected, cache.read_batch(numbers))
            assert_batch(expected, cache.read_batch(numbers, collate="list"), "list")
            assert_all_same(expected, cache.read_batch(numbers, collate=list))


@pytest.mark.parametrize("io", ["auto", "pread"])
def test_files_that_were_dropped_from_memory(small: str, large: str, io: str) -> None:
    for folder, samples in ((small, SMALL), (large, LARGE)):
        with tc.open(folder, io=io, num_threads=2) as cache:
            for numbers in (range(COUNT), [5, 3, 5] * 15):
                for path in Path(folder).glob("*.tar"):
                    with open(path, "rb") as file:
                        os.fsync(file.fileno())
                        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
                assert_batch([samples[i] for i in numbers], cache.read_batch(numbers))


def test_an_error_in_a_thread_is_raised_once_and_nothing_is_written_later(tmp_path: Path, monkeypatch: Any) -> None:
    folder = write(tmp_path, [torch.full((500_000,), float(i)) for i in range(12)], max_samples=12)
    preadv = os.preadv
    for threads in (1, 4):
        with tc.open(folder, num_threads=threads, io="pread") as cache:
            last = cache._store.shards[0].columns.tensors_begin.item(11)

            def fail(fd: int, buffers: Any, offset: int, *flags: int, last: int = last) -> int:
                if offset >= last and not flags:
                    raise OSError(errno.EIO, "Input/output error")
                return preadv(fd, buffers, offset, *flags)

            monkeypatch.setattr(os, "preadv", fail)
            with pytest.raises(OSError, match="Input/output error"):
                cache.read_batch(range(12))
            assert cache.read_batch(range(11)).sum(1).tolist() == [i * 5e5 for i in range(11)]
            monkeypatch.undo()
            assert cache.read_batch(range(12)).sum(1).tolist() == [i * 5e5 for i in range(12)]


def test_devices(small: str) -> None:
    with tc.open(small) as cache:
        expected = [SMALL[4], SMALL[2]]
        assert_batch(expected, cache.read_batch([4, 2], device="cpu"))
        with torch.device("meta"):
            assert_batch(expected, cache.read_batch([4, 2]))
            padded, info = cache.read_batch_with_info([4, 2], collate="pad")
            assert_batch(expected, padded)
            assert info.shapes["x"].device.type == info.is_padding.device.type == "cpu"
        assert cache.read_batch([4, 2], device="meta")["x"].is_meta
        assert cache.read_batch([4], device="meta", collate=list)[0]["x"].is_meta


def test_within_a_transform_of_torch(tmp_path: Path) -> None:
    """Under these, a call of torch may be recorded, and copy nothing."""
    samples = [{"t": torch.full((7,), i), "a": np.full(7, i)} for i in range(20)]
    with tc.open(write(tmp_path, samples)) as cache:
        order = list(range(19, -1, -1))
        assert functionalize(lambda x: x + cache.read_batch(order)["t"][:, 0])(torch.zeros(20)).tolist() == order
        traced = make_fx(lambda x: x + cache.read_batch(order)["t"][:, 0])(torch.zeros(20))
        assert traced(torch.zeros(20)).tolist() == order
        with FakeTensorMode():
            assert cache.read_batch(order)["a"][:, 6].tolist() == order


def test_rows_whose_shards_are_mapped_far_apart(tmp_path: Path) -> None:
    samples = [{"x": torch.full(((1 << 19) + 1,), i, dtype=torch.uint8)} for i in range(16)]
    folder = write(tmp_path, samples, max_samples=8)

    def read() -> None:
        cache = tc.open(folder)
        cache.read_batch([0] * 8)
        libc = ctypes.CDLL(None)
        libc.mmap.restype = ctypes.c_void_p
        libc.munmap.argtypes = ctypes.c_void_p, ctypes.c_size_t
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000  # MAP_NORESERVE

        def reserve(bits: int) -> int:
            return libc.mmap(None, ctypes.c_size_t(1 << bits), 0, flags, -1, 0)  # nothing may read it

        largest = reserve(46)
        for bits in range(40, 19, -1):  # fill the gaps above
            while (address := reserve(bits)) > largest:
                pass
            libc.munmap(address, 1 << bits)
        assert cache.read_batch(range(16))["x"][:, [0, -1]].tolist() == [[i, i] for i in range(16)]

    assert run_in_child(read, kill_after_s=120) == 0


X = torch.arange(3)
DIFFERENT: dict[str, list[Any]] = {
    "of several shapes": [{"x": torch.ones(2), "y": np.array(["a"]), "i": 0}, {"x": torch.ones(3).double()}, [X], None],
    "of several dtypes": [
        {"x": torch.ones(4, dtype=torch.bool)},
        {"x": torch.full((4,), 5, dtype=torch.uint8)},
        {"x": np.full(3, 7, np.int8)},
        {"x": torch.zeros(2, 2)},  # aligned, although 11 bytes come before it
        {"x": torch.tensor([1 + 2j, 3], dtype=torch.complex128)},
    ],
    "some in sets": [{"s": [{X}], "t": {X}}, {"x": X}],
    **{
        str(dtype): [{"x": X}, {"x": X, "m": torch.ones(5).to(dtype)}, {"x": X, "m": torch.ones(2).to(dtype)}]
        for dtype in (torch.uint8, torch.bool, torch.float8_e4m3fn)
    },
}


@pytest.mark.parametrize("samples", DIFFERENT.values(), ids=DIFFERENT)
def test_functions_get_samples_that_differ(tmp_path: Path, samples: list[Any]) -> None:
    with tc.open(write(tmp_path, samples)) as cache:
        for numbers in (list(range(len(samples))), [1, 0], [1, 1]):
            read = cache.read_batch(numbers, collate=list)
            assert_all_same([samples[i] for i in numbers], read)
            tensors = [sample.get("x") for sample in read if isinstance(sample, dict)]
            assert not any(x.data_ptr() % x.itemsize for x in tensors if isinstance(x, torch.Tensor))
        assert cache.read_batch([0, 1], collate=len) == 2


def test_skeletons_that_the_index_could_not_read(tmp_path: Path) -> None:
    @dataclass
    class Point:
        x: int = 1

    Point.__qualname__ = "Point"
    kinds = [torch.ones(3, dtype=torch.complex128), torch.ones(3, 2, dtype=torch.float64)]
    path = str(tmp_path / "0.tar")
    with wds.TarWriter(path, encoder=tc.encoder(allow=[Point])) as sink:
        for i, x in enumerate([kinds[0], kinds[1], kinds[0]]):
            sink.write({"__key__": str(i), "tensorcache": {"x": x, "o": Point(i)}})
    with tc.open(path, allow=[Point]) as cache:
        assert cache.read_batch([0, 2])["x"].dtype == torch.complex128
        for numbers in ([0, 1], [1, 0], [1, 2]):
            with pytest.raises(tc.BatchError, match="tensor 'x' (is|differs)"):
                cache.read_batch(numbers)
        assert cache.read_batch([1])["x"].shape == (1, 3, 2)
        assert list(cache.schema) == ["x"]


ARRAY_NDIM = 64  # numpy has no more dimensions
MOST = (1,) * ARRAY_NDIM
COLLATES = ["stack", "pad"]
PADDINGS = [("x", 1 << 56, "memory"), ("x", 1 << 61, "bytes"), ("xyzuvw", 1 << 57, "memory")]


@pytest.mark.parametrize("collate", COLLATES)
def test_as_many_dimensions_as_there_can_be(tmp_path: Path, collate: str) -> None:
    samples = [
        {"a": [np.full(MOST, i, "i4")], "less": np.full(MOST[1:], i, "f8"), "t": torch.full(MOST[1:], float(i))}
        for i in range(3)
    ]
    with tc.open(write(tmp_path, samples)) as cache:
        message = rf"tensor 'a\.0' of sample '002' cannot be stacked: .*{ARRAY_NDIM} dimensions.*'list'"
        for device in (None, "meta"):
            with pytest.raises(tc.BatchError, match=message):
                cache.read_batch([2, 0], device, collate=collate)
        assert_all_same(samples, cache.read_batch(range(3), collate=list))
        listed = cache.read_batch([2, 1], collate="list")
        assert [array.item() for array in listed["a"][0]] == [2, 1]
        batch = cache.select(["less", "t"]).read_batch([2, 0], collate=collate)
        for name in ("less", "t"):
            assert batch[name].shape == (2, *MOST[1:])
            assert batch[name].reshape(-1).tolist() == [2, 0]
        assert [array.shape for array in cache.read_tensors([2, 1], collate="auto")["a.0"]] == [MOST, MOST]


@pytest.mark.parametrize("kind", ["tensor", "ndarray"])
def test_empty_ones_whose_other_sizes_are_huge(tmp_path: Path, kind: str) -> None:
    """Nothing is in them, but torch and numpy multiply the sizes for their strides."""
    row = torch.empty(1 << 29, 0, 1 << 29, dtype=torch.uint8)
    with tc.open(write(tmp_path, [{"x": row if kind == "tensor" else row.numpy()}] * 40)) as cache:
        assert cache.read_batch([0, 1])["x"].shape == (2, 1 << 29, 0, 1 << 29)
        assert cache.read_batch([0], collate=list)[0]["x"].shape == (1 << 29, 0, 1 << 29)
        numbers = list(range(40))
        for collate in COLLATES:
            with pytest.raises(tc.BatchError, match=r"tensor 'x' of sample '000' cannot be stacked: .*bytes"):
                cache.read_batch(numbers, collate=collate)
        assert len(cache.read_batch(numbers, collate="list")["x"]) == 40
        assert len(cache.read_tensors(numbers, collate="auto")["x"]) == 40


@pytest.mark.parametrize(("names", "length", "word"), PADDINGS)
def test_padding_that_is_huge(tmp_path: Path, names: str, length: int, word: str) -> None:
    """The last is more than 2^63 bytes in all."""
    with tc.open(write(tmp_path, [dict.fromkeys(names, torch.ones(count)) for count in (2, 1)])) as cache:
        with pytest.raises(tc.BatchError, match=word):
            cache.read_batch([0, 1] * 4, collate=tc.pad(to=length))
        assert cache.read_batch([0, 1], collate="pad")["x"].tolist() == [[1, 1], [1, 0]]
