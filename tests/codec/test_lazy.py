"""Lazy tensors: nothing is read before it is used, results are private, and they stand in wherever a tensor may."""

from __future__ import annotations

import copy
import gc
import io
import operator
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import default_collate

import wds_tensorcache as tc
from tests.reading.batches import write
from tests.same import assert_same

T = torch.arange(24, dtype=torch.float32).reshape(4, 2, 3)


def lazy_of(value: Any) -> Any:
    return tc.decode_sample(*tc.encode_sample(value))


Opener = Callable[[Any, bytes], tuple[Any, list[tuple[int, int]]]]


@pytest.fixture
def open_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Opener:
    """A function that returns a lazy sample of a shard, and the ranges that will be read of its tensors.

    Its arguments are the sample and the bytes of its first tensor, where the ranges are counted from.
    """

    def opened(sample: Any, first: bytes) -> tuple[Any, list[tuple[int, int]]]:
        lazy = tc.open(write(tmp_path, [sample]), io="pread")[0]
        zero = (tmp_path / "000.tar").read_bytes().index(first)
        reads: list[tuple[int, int]] = []
        pread, preadv = os.pread, os.preadv

        def recording_pread(fd: int, nbytes: int, begin: int) -> bytes:
            reads.append((begin - zero, begin - zero + nbytes))
            return pread(fd, nbytes, begin)

        def recording_preadv(fd: int, buffers: Any, begin: int, *flags: int) -> int:
            reads.append((begin - zero, begin - zero + sum(map(len, buffers))))
            return preadv(fd, buffers, begin, *flags)

        monkeypatch.setattr(os, "pread", recording_pread)
        monkeypatch.setattr(os, "preadv", recording_preadv)
        return lazy, reads

    return opened


def test_realize_reads_neighbors_at_once(open_recorded: Opener) -> None:
    first, b, near, far = bytes(range(3)), bytes(range(3, 40)), bytes(100), bytes(100_000)
    parts = {"first": first, "b": b, "near": near, "bools": b"\1\0", "far": far, "last": b"\2\0", "e": b""}
    tensors = {name: torch.tensor(list(part), dtype=torch.uint8) for name, part in parts.items()}
    lazy, reads = open_recorded({**tensors, "bools": tensors["bools"].bool()}, first + b)
    some = {name: lazy[name] for name in ("last", "bools", "e")}
    real = tc.realize({**some, "b": [lazy["b"], lazy["first"]], "again": lazy["first"]})
    assert reads == [(0, 142), (100_142, 100_144)]
    assert real["again"] is real["b"][1]
    assert [real["again"].tolist(), real["b"][0].tolist()] == [[0, 1, 2], list(range(3, 40))]
    assert [real["bools"].tolist(), real["last"].tolist(), real["e"].tolist()] == [[True, False], [2, 0], []]


def test_realize_more_tensors_than_one_call_reads(tmp_path: Path) -> None:
    tensors = torch.arange(1.0, 2500.0).split(1)
    assert torch.equal(torch.cat(tc.realize(tc.open(write(tmp_path, [tensors]))[0])), torch.cat(tensors))


def test_questions_that_need_no_bytes(open_recorded: Opener) -> None:
    sample, reads = open_recorded({"x": T}, T.numpy().tobytes())
    lazy = sample["x"]
    assert (lazy.name, lazy.shape, lazy.dtype, lazy.ndim, lazy.dim()) == ("x", T.shape, T.dtype, 3, 3)
    assert (lazy.nbytes, lazy.numel(), lazy.size(), lazy.size(1)) == (96, 24, T.shape, 2)
    assert (lazy.device, lazy.requires_grad, lazy.is_contiguous()) == (torch.device("cpu"), False, True)
    assert repr(lazy) == str(lazy) == "LazyTensor('x', shape=[4, 2, 3], dtype=torch.float32)"
    assert isinstance(hash(lazy), int)
    assert copy.copy(lazy) is copy.deepcopy(lazy) is lazy
    assert reads == []


@pytest.mark.parametrize(
    ("index", "rows"),
    [
        (slice(2, 4), (2, 4)),
        (slice(-1, None), (3, 4)),
        (slice(3, 1), (3, 3)),
        (-1, (3, 4)),
        ((1, 0), (1, 2)),
        ((slice(1, 2), ..., 1), (1, 2)),
        (slice(None, None, 2), (0, 4)),
        (None, (0, 4)),
        ([3, 1], (0, 4)),
        (torch.tensor([True, False, True, False]), (0, 4)),
    ],
    ids=str,
)
def test_a_part_of_the_first_dimension_reads_only_its_bytes(open_recorded: Opener, index: Any, rows: Any) -> None:
    sample, reads = open_recorded({"x": T}, T.numpy().tobytes())
    lazy = sample["x"]
    assert torch.equal(lazy[index], T[index])
    assert reads == ([] if rows[0] == rows[1] else [(rows[0] * 24, rows[1] * 24)])


def test_results_are_fresh_and_private() -> None:
    skeleton, tensors = tc.encode_sample(T)
    before = bytearray(tensors)  # bytes() of bytes would be the same object
    lazy = tc.decode_sample(skeleton, tensors)
    first, second = lazy.load(), lazy.load()
    assert first.data_ptr() != second.data_ptr()
    assert first.data_ptr() % 16 == 0
    first.zero_()
    lazy[1:].zero_()
    assert torch.equal(second, T)
    assert torch.equal(lazy.load(), T)
    assert tensors == before
    a, b = tc.decode_sample(*tc.encode_sample([T, T + 1]), lazy=False)
    a.zero_()
    assert torch.equal(b, T + 1)
    assert a.untyped_storage().data_ptr() != b.untyped_storage().data_ptr()


def test_load_into_and_views() -> None:
    lazy = lazy_of(T)
    batch = torch.zeros(2, *T.shape)
    assert lazy.load(out=batch[1]).data_ptr() == batch[1].data_ptr()
    assert torch.equal(batch, torch.stack([torch.zeros_like(T), T]))
    strided = torch.zeros(3, 2, 4).permute(2, 1, 0)
    assert torch.equal(lazy.load(out=strided), T)
    columns = torch.zeros(1, 2)  # torch takes one of them for contiguous
    assert lazy_of(torch.ones(1)).load(out=columns[:, 1]).tolist() == [1]
    assert columns.tolist() == [[0, 1]]
    for out, shown in ((T.double(), r"float64\[4, 2, 3\]"), (T.flatten(), r"float32\[24\]")):
        with pytest.raises(ValueError, match=f"out is torch.{shown}"):
            lazy.load(out=out)
    view = lazy.load(copy=False)
    del lazy
    gc.collect()
    assert torch.equal(view, T)
    assert torch.equal(lazy_of(T).load("cpu"), T)


FUNCTIONS: list[Any] = [
    lambda x: torch.stack([x, x]),
    lambda x: 1 - x,
    lambda x: x @ x.mT,
    lambda x: F.linear(x, torch.ones(5, 3)),
    lambda x: x.to(torch.float64),
    lambda x: torch.where(x > 2, x, torch.zeros(())),
    lambda x: torch.as_tensor(x),
    lambda x: torch.from_numpy(np.asarray(x)),
    lambda x: torch.from_dlpack(x),
    lambda x: torch.add(T, x, out=torch.empty_like(T)),
    lambda x: T.clone().add_(x),
    lambda x: torch.tensor([float(v) for v in x[0, 0]]),
    lambda x: next(iter(x)),
    lambda x: default_collate([x, x]),
]


@pytest.mark.parametrize("function", FUNCTIONS, ids=range(len(FUNCTIONS)))
def test_functions_take_it_as_a_tensor(function: Any) -> None:
    assert torch.equal(function(lazy_of(T)), function(T))


def test_scalars() -> None:
    lazy = lazy_of(torch.tensor(3))
    assert (int(lazy), float(lazy), bool(lazy), [1, 2, 3, 4][lazy], f"{lazy:3d}") == (3, 3.0, True, 4, "  3")
    assert 3 in lazy_of(torch.tensor([1, 3]))
    with pytest.raises(TypeError, match=r"no len\(\); use .shape\[0\]"):
        len(lazy)
    for tensor, index in ((lazy, 0), (lazy_of(T), 4)):
        with pytest.raises(IndexError):
            tensor[index]


@pytest.mark.parametrize("index", [[1, 0], [True, False, True, True], [[0, 1], [1, 0]], list(range(2)) * 20], ids=str)
def test_it_indexes_real_tensors(index: list[Any]) -> None:
    real = torch.tensor(index)
    lazy = lazy_of(real)
    assert torch.equal(T[lazy], T[real])
    if real.dtype is not torch.bool:
        assert torch.equal(T[:, :, lazy], T[:, :, real])
    written, expected = torch.zeros_like(T), torch.zeros_like(T)
    written[lazy] = 1
    expected[real] = 1
    assert torch.equal(written, expected)


def test_numpy_takes_it() -> None:
    lazy = lazy_of(T)
    np.testing.assert_array_equal(np.asarray(lazy, dtype=np.float64), T.numpy())
    np.testing.assert_array_equal(np.stack([lazy, lazy]), np.stack([T, T]))
    with pytest.raises(TypeError):  # torch's
        np.asarray(lazy_of(T.bfloat16()))


WRITES: list[Any] = [
    lambda x: x.add_(1),
    lambda x: F.relu(x, inplace=True),
    lambda x: torch.add(T, 1, out=x),
    lambda x: torch._foreach_add_([x], 1),
    lambda x: operator.iadd(x, 1),
    lambda x: operator.setitem(x, 0, 1),
    lambda x: x.requires_grad_(),
    lambda x: torch.relu_(input=x),
    lambda x: torch._foreach_add_(self=[x], scalar=1),
    lambda x: x.load(out=x),
]


@pytest.mark.parametrize("write", WRITES, ids=range(len(WRITES)))
def test_writes_that_would_be_lost_are_refused(write: Any) -> None:
    with pytest.raises(TypeError, match=r"is lost|would be lost|add_.* doesn't apply to a 'LazyTensor'"):
        write(lazy_of(T))


def test_it_is_immutable() -> None:
    for lazy in (lazy_of(T), lazy_of(T.numpy())):
        with pytest.raises(AttributeError, match="immutable"):
            lazy.grad = 1
        with pytest.raises(AttributeError, match="immutable"):
            lazy._source = None
        with pytest.raises(AttributeError, match="immutable"):
            del lazy._source
        with pytest.raises(TypeError, match="takes no state"):
            lazy.__setstate__({})
        with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
            lazy.nonsense  # noqa: B018


def test_arrays() -> None:
    array = np.arange(12, dtype=np.int16).reshape(3, 4)
    lazy = lazy_of(array)
    assert isinstance(lazy, tc.LazyArray)
    assert (lazy.shape, lazy.dtype, lazy.ndim, len(lazy), lazy.nbytes) == ((3, 4), array.dtype, 2, 3, 24)
    for found, expected in (
        (array * lazy, array * array),
        (np.concatenate([lazy, array]), np.concatenate([array, array])),
        (lazy[lazy > 3], array[array > 3]),
        (lazy.sum(axis=0), array.sum(axis=0)),
        (np.exp(lazy), np.exp(array)),
        (lazy.load(out=np.empty_like(array)), array),
    ):
        np.testing.assert_array_equal(found, expected)
    assert torch.equal(default_collate([lazy, lazy]), torch.as_tensor(np.stack([array, array])))
    assert lazy.load().flags.writeable
    lazy.load()[...] = 0
    np.testing.assert_array_equal(lazy, array)
    with pytest.raises(TypeError, match="sort would write"):
        lazy.sort()
    with pytest.raises(ValueError, match=r"out is int8"):
        lazy.load(out=np.empty((3, 4), np.int8))


def test_it_pickles_with_its_own_bytes_only() -> None:
    big, small = tc.decode_sample(*tc.encode_sample([torch.zeros(100_000), T]))
    for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
        pickled = pickle.dumps(small, protocol)
        assert len(pickled) < 1000
        again = pickle.loads(pickled)
        assert isinstance(again, tc.LazyTensor)
        assert repr(again) == repr(small)
        assert torch.equal(again, T)
    assert len(pickle.dumps(big)) > 400_000
    assert np.array_equal(pickle.loads(pickle.dumps(lazy_of(np.arange(3)))), np.arange(3))


def test_realize() -> None:
    sample = tc.decode_sample(*tc.encode_sample({"a": [T, T], "b": (1, "x"), "n": np.arange(2)}))
    real = tc.realize(sample)
    assert real["a"][0] is real["a"][1]
    assert type(real["a"][0]) is torch.Tensor
    assert type(real["n"]) is np.ndarray
    assert real["b"] is sample["b"], "what holds nothing lazy is kept"
    assert isinstance(sample["a"][0], tc.LazyTensor)
    assert torch.equal(tc.realize(lazy_of(T), device="cpu"), T)
    assert tc.realize(7) == 7


def test_tensors_that_cannot_be_stored_are_refused() -> None:
    for value in (torch.zeros([1] * 65), torch.zeros([1] * 64, dtype=torch.complex128)):
        with pytest.raises(tc.EncodeError, match="its stored form has 65 dimensions; the limit is 64"):
            tc.encode_sample({"x": value})
    cut = torch.ones(1000)
    cut.untyped_storage().resize_(8)
    with pytest.raises(tc.EncodeError, match="its storage was freed or shortened"):
        tc.encode_sample({"x": cut})
    assert tc.decode_sample(*tc.encode_sample(torch.ones(4, 6).t()[1::2, :2])).load().shape == (3, 2)


SAMPLE: dict[str, Any] = {
    "half": torch.arange(4.0).bfloat16().reshape(2, 2),
    "bool": torch.tensor([True, False]),
    "complex": torch.tensor([1 + 2j]),
    "scalar": torch.tensor(3),
    "empty": torch.zeros(0, 3),
    "plain": [1, "a", (2.0, None)],
}


def save(value: Any, **options: Any) -> io.BytesIO:
    file = io.BytesIO()
    torch.save(value, file, **options)
    file.seek(0)
    return file


@pytest.mark.filterwarnings("ignore:Detected pickle protocol:UserWarning")  # torch's, of all but 2
# torch.load takes no tensor of protocol 4 with weights_only=True
@pytest.mark.parametrize(("protocol", "weights_only"), [(2, True), (3, True), (2, False), (4, False), (5, False)])
@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "legacy"])
def test_torch_load_takes_what_torch_save_wrote(protocol: int, zipped: bool, weights_only: bool) -> None:
    lazy = lazy_of(SAMPLE)
    lazy["again"] = lazy["half"]
    file = save(lazy, pickle_protocol=protocol, _use_new_zipfile_serialization=zipped)
    loaded = torch.load(file, weights_only=weights_only)
    assert loaded.pop("again") is loaded["half"]
    assert {type(loaded[name]) for name in SAMPLE if name != "plain"} == {torch.Tensor}
    assert_same(SAMPLE, loaded)


def test_arrays_fail_when_they_are_saved() -> None:
    lazy = tc.decode_sample(*tc.encode_sample({"x": np.arange(3)}))
    for value in (lazy["x"], lazy):
        with pytest.raises(TypeError, match=r"torch.load refuses numpy arrays; save torch.from_numpy\(x.load\(\)\)"):
            save(value)
    array = torch.load(save(tc.realize(lazy)), weights_only=False)["x"]
    assert array.tolist() == [0, 1, 2]
