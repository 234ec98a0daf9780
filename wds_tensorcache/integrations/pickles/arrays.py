"""Decode pickles of plain values, numpy arrays and tensors with the reader of skeletons, which runs no code.

Such pickles are the `.pyd` and `.pickle` members of webdataset, and the files of `pickle.dump`. numpy pickles an array as a
call of `_reconstruct` and a state, from protocol 5 on as a call of `_frombuffer`. A tensor contains its elements as a file of
`torch.save` in the format that torch had before 1.6: five pickles, and the elements.
"""

from __future__ import annotations

import io
import math
import pickletools
from typing import Any, BinaryIO

import numpy as np

from wds_tensorcache.codec.skeleton.reader import unpickle
from wds_tensorcache.codec.skeleton.types import BUILDERS, Allowed, Builder
from wds_tensorcache.codec.tree import shown
from wds_tensorcache.errors import FormatError, UnsafeSkeletonError
from wds_tensorcache.integrations.pickles.advice import advising
from wds_tensorcache.integrations.pickles.storages import Storage
from wds_tensorcache.integrations.pickles.tensor_reader import TensorReader
from wds_tensorcache.integrations.pickles.translate import translate

_OLD_TORCH = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."  # the first pickle in files of torch before 1.6
_MAX_NDIM = 32
_plain_dtype: Any = BUILDERS["numpy", "dtype"]
_TIMES = ("M8", "m8")
_UNITS = frozenset(b"Y M W D h m s ms us ns ps fs as".split())
_NO_METADATA: Any = np.dtype("M8[s]").__reduce__()[2][-1][0]  # numpy 1 and 2 differ


class _ArrayClass:
    """`numpy.ndarray`, an argument of `_reconstruct`."""


_ARRAY_CLASS = _ArrayClass()


def decode_pickle(raw: bytes, limit: int, remedy: str) -> Any:
    """Return the object in a pickle of protocol 2 or later.

    Args:
        raw: The pickle, with nothing after it.
        limit: Limit for the total bytes of all tensors and arrays.
        remedy: Advice for users that trust the file, at the end of messages.

    Raises:
        UnsafeSkeletonError: The pickle contains more than plain values, types of FORMAT.md, numpy arrays and scalars of
            numbers and texts, dense tensors and parameters.
        FormatError: The pickle is damaged, or exceeds `limit`.

    Memory: arrays may alias one newly allocated copy of `raw`'s bytes, and may be read-only.
    """
    with advising(remedy):
        body = translate(raw)
        reader = ArrayReader(io.BytesIO(), {}, len(body), limit, remedy, remedy)
        result = reader.unpickle(body, {})
        reader.check(result)
        return result


class ArrayReader(TensorReader):
    """The opcodes and builders that decode one pickle with tensors and arrays; the arguments are those of `TensorReader`."""

    INNER = (Storage, _ArrayClass)

    def __init__(
        self, file: BinaryIO, records: dict[str, range], nbytes: int, limit: int, remedy: str, limit_remedy: str
    ) -> None:
        super().__init__(file, records, nbytes, limit, remedy, limit_remedy)
        self._array_nbytes_left = limit
        for core in ("core", "_core"):  # numpy 1 and 2
            self.builders["numpy." + core + ".multiarray", "_reconstruct"] = Builder(_begin_array)
            self.builders["numpy." + core + ".multiarray", "scalar"] = Builder(_build_scalar)
            self.builders["numpy." + core + ".numeric", "_frombuffer"] = Builder(_view_buffer)
        self.builders["numpy", "ndarray"] = _ARRAY_CLASS
        self.builders["numpy", "dtype"] = Builder(_build_dtype)
        self.builders["torch.storage", "_load_from_bytes"] = Builder(self._load_storage)

    def set_state(self, stack: list[Any], allow: Allowed, num_callables: int) -> int:
        target = stack[-2]
        if isinstance(target, np.dtype):
            _set_byte_order(target, stack.pop())
        elif target.__class__ is np.ndarray:
            self._fill_array(target, stack.pop())
        else:
            return super().set_state(stack, allow, num_callables)
        return 0

    def _fill_array(self, array: Any, state: Any) -> None:
        _, shape, dtype, is_fortran, raw = state
        _check_array(raw, dtype, shape)
        if array.nbytes or array.shape != (0,) or is_fortran.__class__ is not bool or raw.__class__ is not bytes:
            raise FormatError("an array is filled twice, or with something else than bytes")
        # The state may be in the memo, and then fill many arrays, each with a copy of the bytes.
        self._array_nbytes_left -= len(raw)
        if self._array_nbytes_left < 0:
            raise FormatError("the arrays together are much larger than the pickle")
        array.__setstate__((1, shape, dtype, is_fortran, raw))

    def _load_storage(self, args: tuple[Any, ...]) -> Storage:
        """Build a storage from a file of `torch.save` as before torch 1.6."""
        (raw,) = args
        if raw.__class__ is not bytes or not raw.startswith(_OLD_TORCH):
            raise FormatError("a tensor's elements are not in the format of torch.save")
        stream = io.BytesIO(raw)
        pickles = []
        for _ in range(5):  # magic number, version, system, storage, keys
            begin = stream.tell()
            for _ in pickletools.genops(stream):
                pass
            pickles.append(translate(raw[begin : stream.tell()]))
        system, keys = (unpickle(pickles[number], 0, None, {}, {}) for number in (2, 4))
        data = range(stream.tell() + 8, len(raw))  # after the number of elements
        if keys.__class__ is not list or len(keys) != 1 or keys[0].__class__ is not str or not system["little_endian"]:
            raise FormatError("a tensor has several storages, or is not little-endian")
        reader = TensorReader(stream, {f"data/{keys[0]}": data}, len(raw), len(raw), self.remedy, self.remedy)
        storage = reader.unpickle(pickles[3], {})
        if storage.__class__ is not Storage:
            raise FormatError(f"expected a storage, got {shown(storage)}")
        return storage


def _check_array(raw: Any, dtype: Any, shape: Any) -> None:
    """Raise FormatError if these are not the bytes of an array with this dtype and shape."""
    is_shape = shape.__class__ is tuple and all(n.__class__ is int and n >= 0 for n in shape)
    if not isinstance(dtype, np.dtype) or not isinstance(raw, (bytes, bytearray)) or not is_shape:
        raise FormatError(f"expected bytes, a dtype and a shape, got {shown(raw)}, {shown(dtype)}, {shown(shape)}")
    if not dtype.itemsize and math.prod(shape):
        raise FormatError(f"{math.prod(shape):,} elements of {dtype.str!r} have no bytes")
    if len(shape) > _MAX_NDIM or math.prod(shape) * dtype.itemsize != len(raw):
        raise FormatError(f"an array of {dtype} {list(shape)!r:.200} has {len(raw):,} bytes")


def _begin_array(args: tuple[Any, ...]) -> np.ndarray[Any, Any]:
    if args[0] is not _ARRAY_CLASS:
        raise UnsafeSkeletonError(f"an array has the class {shown(args[0])}, expected numpy.ndarray")
    return np.empty(0, np.int8)


def _view_buffer(args: tuple[Any, ...]) -> Any:
    raw, dtype, shape, order, *axes = args
    _check_array(raw, dtype, shape)
    flat = np.frombuffer(raw, dtype) if len(raw) else np.empty(0, dtype)
    if order == "K" and axes and axes[0] is not None:
        return flat.reshape(shape).transpose(axes[0])
    return flat.reshape(shape, order=order)


def _build_scalar(args: tuple[Any, ...]) -> Any:
    dtype, raw = args
    _check_array(raw, dtype, ())
    return np.frombuffer(raw, dtype, 1)[0] if len(raw) else dtype.type()


def _build_dtype(args: tuple[Any, ...]) -> Any:
    """Build a dtype whose byte order may still be set: a new object, not the one that numpy uses everywhere."""
    try:
        # the state of a dtype of times has its unit
        return np.dtype(args[0] if args[0] in _TIMES else _plain_dtype.build(args[:1]), False, True)
    except ValueError as exc:
        raise UnsafeSkeletonError(f"arrays of {shown(args[0])} are not read, only of numbers, texts and times") from exc


def _set_byte_order(dtype: np.dtype[Any], state: Any) -> None:
    _, order, *rest = state
    is_sized = dtype.kind in "SU"
    if order not in ("<", ">", "|", "=") or rest[:3] != [None] * 3 or rest[3] not in (-1, dtype.itemsize):
        raise UnsafeSkeletonError(f"the dtype {dtype} has fields, or an unknown byte order")
    # numpy trusts these sizes.
    size = (dtype.itemsize, dtype.alignment) if is_sized else (-1, -1)
    version, unit = (4, [(_NO_METADATA, _parse_unit(rest[6:]))]) if dtype.kind in "mM" else (3, [])
    dtype.__setstate__((version, order, None, None, None, *size, 0, *unit))  # type: ignore[attr-defined]


def _parse_unit(rest: list[Any]) -> tuple[bytes, int, int, int]:
    """Return the unit of a dtype of times: its name, and the number of units in one step."""
    match rest:
        case [(metadata, (bytes(name), int(count), 1, 1))] if not metadata and name in _UNITS and 0 < count < 10**9:
            return name, count, 1, 1
    raise UnsafeSkeletonError("a dtype of times has no unit, or an unknown one")
