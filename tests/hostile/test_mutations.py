"""Any byte or slice of a sample or a shard may change, any bytes may come: a right result, or one of our errors."""

from __future__ import annotations

import io
import itertools
import pickle
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import wds_tensorcache as tc
from tests.hostile.forged import COUNT, by_stream, is_right, write
from tests.hostile.pickles import ONE_TENSOR, PROTO, decode, text
from tests.same import assert_same
from tests.strategies import samples

# a change of a shard may make a block of zeros, after which readers stop
pytestmark = pytest.mark.filterwarnings("ignore:.*a tar header after the end of the archive:UserWarning")


class Trusted:
    pass


class Stock(pickle.Unpickler):
    """Python's own, which is given what our reader has let through, and then names nothing but listed types."""

    def find_class(self, module: str, name: str) -> Any:
        if module.partition(".")[0] not in MODULES:
            raise pickle.UnpicklingError(f"{module}.{name}")
        return super().find_class(module, name)


MODULES = "builtins collections datetime decimal fractions uuid pathlib numpy torch".split()


class Texts(pickle.Pickler):
    """A pickler that writes texts in place of tensors, lazy or not."""

    def persistent_id(self, obj: Any) -> str | None:
        if isinstance(obj, (tc.LazyTensor, tc.LazyArray)):
            reference = obj._reference
            attribute = "" if reference.attribute is None else f"?dtype={reference.attribute}"
            return f"{reference.kind}:{reference.name}{attribute}"
        return "a tensor" if isinstance(obj, (torch.Tensor, np.ndarray)) else None


class Same(pickle.Unpickler):
    def persistent_load(self, pid: str) -> str:
        return pid


def with_texts(sample: Any) -> Any:
    """Return a copy of a sample with texts in place of its tensors."""
    file = io.BytesIO()
    Texts(file, 5).dump(sample)
    file.seek(0)
    return Same(file).load()


def assert_as_stock(lazy: Any, skeleton: bytes) -> None:
    """Assert that a decoded sample is what Python's own unpickler makes of the skeleton, with texts for tensors."""
    assert_same(Stock(io.BytesIO(skeleton)).load(), with_texts(lazy))


@given(samples(), st.data())
def test_any_byte_may_change(sample: Any, data: st.DataObject) -> None:
    skeleton, tensors = tc.encode_sample(sample)
    whole = bytearray(skeleton + tensors)
    position = data.draw(st.integers(0, len(whole) - 1))
    whole[position] ^= data.draw(st.integers(1, 255))
    damaged = bytes(whole[: len(skeleton)]), bytes(whole[len(skeleton) :])
    with pytest.raises(tc.FormatError):
        tc.decode_sample(*damaged, verify=True)
    try:
        lazy = tc.decode_sample(*damaged)
        found = tc.realize(lazy)
    except tc.TensorCacheError:
        return  # the other allowed outcome; anything else fails the test
    assert_as_stock(lazy, damaged[0])
    if position >= len(skeleton):
        assert_same(with_texts(sample), with_texts(found))


OPCODES = [bytes([code]) for code in b"(.0123NR]})abehjst\x85\x86\x87\x88\x89\x8f\x90\x91\x93\x94\x81\x92"]
NAMES = "a builtins format list tensor:x collections defaultdict deque torch Size float32".split()
PIECES = [*OPCODES, b"K\x07", b"h\x00", b"h\x01", b"G" + bytes(8), *map(text, NAMES)]


@given(st.lists(st.sampled_from(PIECES), max_size=40).map(b"".join), st.booleans())
def test_any_opcodes(body: bytes, allow: bool) -> None:
    try:
        value = decode(body, ONE_TENSOR, allow=[Trusted] if allow else [])
    except tc.TensorCacheError:
        return
    assert_as_stock(value, PROTO + body + b".")


# --- shards ---


def _shard() -> tuple[bytes, list[bytes]]:
    """Return a shard, and the members of its samples."""
    with tempfile.TemporaryDirectory() as folder:
        path = write(Path(folder) / "x.tar", text=True)
        shard, index = path.read_bytes(), tc.write_index(path, dali_index=False)
    (cache,) = index.caches.values()
    skeletons = list(zip(cache.skeleton_begin.tolist(), cache.skeleton_nbytes.tolist(), strict=True))
    tensors = list(zip(cache.tensors_begin.tolist(), index.layouts.nbytes[cache.layout].tolist(), strict=True))
    return shard, [shard[begin : begin + nbytes] for begin, nbytes in (*skeletons, *tensors)]


SHARD, MEMBERS = _shard()
KINDS = ["flip", "flip", "delete", "repeat", "zero", "swap", "cut"]
PLACES = st.one_of(st.integers(0, len(SHARD) - 1), st.integers(0, len(SHARD) // 512 - 1).map(lambda at: at * 512))
LENGTHS = st.one_of(st.integers(1, 700), st.sampled_from([512, 1024, 2048, 3072, 4096]))
CHANGES = st.tuples(st.sampled_from(KINDS), PLACES, LENGTHS, st.integers(1, 255))


def changed(kind: str, at: int, length: int, bits: int) -> bytes:
    """Return the shard with a byte flipped, or a slice deleted, repeated, zeroed, or swapped with the next one; or cut."""
    shard = bytearray(SHARD)
    part = shard[at : at + length]
    if kind == "flip":
        shard[at] ^= bits
    elif kind == "delete":
        del shard[at : at + length]
    elif kind == "repeat":
        shard[at:at] = part
    elif kind == "zero":
        shard[at : at + length] = bytes(len(part))
    elif kind == "swap":
        shard[at : at + 2 * length] = shard[at + length : at + 2 * length] + part
    else:
        del shard[at:]
    return bytes(shard)


@settings(max_examples=200)
@given(CHANGES)
def test_streams_that_verify(change: tuple[str, int, int, int]) -> None:
    """Only the tar's checksum, which is a sum, covers names and other members."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "x.tar"
        path.write_bytes(changed(*change))
        try:
            found = by_stream(path, verify=True, only="none")
        except tc.TensorCacheError as exc:
            assert str(path) in str(exc)  # noqa: PT017
            return
        for one in found:
            if "tensorcache" in one:
                assert is_right(one["tensorcache"], one["tensorcache"]["i"])


def read_all(path: Path) -> list[Any]:
    with tc.open(path, io="auto") as cache:
        for number, suffix in itertools.product(range(len(cache)), cache.members):
            with suppress(KeyError):
                cache.read_members([number], suffix)
        return [(key, tc.realize(cache[i]), cache.read_tensors([i])) for i, key in enumerate(cache.keys())]


@settings(max_examples=200)
@given(CHANGES)
def test_open(change: tuple[str, int, int, int]) -> None:
    """Where members were changed or moved, tc.open may return the bytes that are there now; tc.verify reports it."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "x.tar"
        path.write_bytes(shard := changed(*change))
        try:
            found = read_all(path)
        except tc.TensorCacheError:  # also if no cache is left in it
            return
        for key, sample, batch in found:
            assert batch["x"].shape == (1, 6)
            number = "k0 k1 k2 k3".split().index(key)
            halves = MEMBERS[number], MEMBERS[COUNT + number]
            if all(shard.startswith(half, SHARD.index(half)) for half in halves):
                assert is_right(sample, number)
                assert bool((batch["x"] == number).all())
            elif not is_right(sample, number):
                assert not tc.verify(path).ok
