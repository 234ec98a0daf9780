"""Decode files of `torch.save` with the reader of skeletons.

`torch.load(weights_only=True)` runs no code, but its cost is unbounded: 500 bytes can describe a dict key of nested, shared
tuples whose hash takes years, and 400 bytes can allocate `bytearray(2**31)`. Here the pickle is translated to the opcodes of
FORMAT.md 2.4, and the reader of these opcodes limits its work.
"""

from __future__ import annotations

import io
import math
import pickletools
import struct
import uuid
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, BinaryIO, TypeAlias

import numpy as np
import torch

from wds_tensorcache.codec.dtypes import TORCH_TRUE
from wds_tensorcache.codec.skeleton import opcodes as op
from wds_tensorcache.codec.skeleton.limits import KeyCosts, call_budget
from wds_tensorcache.codec.skeleton.reader import unpickle
from wds_tensorcache.codec.skeleton.types import ALLOW_ONLY, Allowed, Builder
from wds_tensorcache.codec.tree import shown, walk
from wds_tensorcache.codec.views import check_tensor, view_tensor
from wds_tensorcache.errors import FormatError, TensorCacheError, UnsafeSkeletonError
from wds_tensorcache.integrations.pickles.advice import advising
from wds_tensorcache.integrations.pickles.translate import BINPERSID, translate
from wds_tensorcache.integrations.pickles.types import PICKLED_TYPES, UuidReader
from wds_tensorcache.integrations.pickles.zip_list import list_zipped

__all__ = [
    "NOT_PLANNED",
    "Indexer",
    "PlanReader",
    "Storage",
    "TensorPart",
    "TensorReader",
    "decode_file",
    "decode_pth",
    "index_pth",
    "load_pth",
    "load_storage",
    "peek_pth",
    "view_storage",
]

_ZIP = b"PK\x03\x04"
_IS_ENCRYPTED = 1
_MAX_NDIM = 64
_MAX_SIZE = 1 << 59
_TWO_LENGTHS = struct.Struct("<HH").unpack
_ALIGNMENT = 16  # of memory in bytes, enough for every dtype
File: TypeAlias = "BinaryIO | memoryview"
# a function of a file, its pickle, the ranges of its records, and the limit of `decode_pth`
PlanReader: TypeAlias = Callable[[File, bytes, dict[str, range], int], Any]
NOT_PLANNED: Any = object()  # what a `PlanReader` returns if the pickle must be decoded
_STORAGES = {
    "Double": torch.float64, "Float": torch.float32, "Half": torch.float16, "BFloat16": torch.bfloat16, "Long": torch.int64,
    "Int": torch.int32, "Short": torch.int16, "Char": torch.int8, "Byte": torch.uint8, "Bool": torch.bool,
    "ComplexDouble": torch.complex128, "ComplexFloat": torch.complex64,
}  # fmt: skip
_REMEDY = "; if you trust the file, call torch.load in a handler: tc.decode(wds.handle_extension('pth', …))"

_LIMIT_REMEDY = "; if you trust the file, use tc.decode(max_expanded_nbytes=…)"


def decode_pth(
    raw: bytes,
    limit: int,
    allow: Allowed,
    remedy: str = _REMEDY,
    limit_remedy: str = _LIMIT_REMEDY,
    reader_class: type[TensorReader] | None = None,
) -> Any:
    """Return the object in a file of `torch.save`, with all tensors on the CPU; `_metadata` of state dicts is dropped.

    Args:
        raw: Content of the file, a zip from torch 1.6 or later.
        limit: Limit for the total bytes of all tensors; elements that tensors share count once per tensor.
        allow: As for `unpickle`.
        remedy, limit_remedy: Advice for users that trust the file, at the end of messages; the second one for `limit`.
        reader_class: Class of the reader; by default `TensorReader`.

    Raises:
        UnsafeSkeletonError: The file contains more than dense tensors, parameters, plain values and types of FORMAT.md.
        FormatError: The file is damaged, in a different format, or exceeds `limit`.

    Memory: newly allocated, one block for each storage; all tensors of a storage share its block.
    """
    return load_pth(io.BytesIO(raw), limit, allow, remedy, limit_remedy, reader_class)


def load_pth(
    file: BinaryIO,
    limit: int,
    allow: Allowed,
    remedy: str = _REMEDY,
    limit_remedy: str = _LIMIT_REMEDY,
    reader_class: type[TensorReader] | None = None,
) -> Any:
    """Return the object in an open file of `torch.save`, as `decode_pth` does; the other arguments are the same."""
    return decode_file(file, limit, allow, remedy, limit_remedy, reader_class or TensorReader)


def index_pth(file: BinaryIO, limit: int, remedy: str = _REMEDY) -> Any:
    """Return the object in a file of `torch.save` with a `TensorPart` in place of each tensor. No tensor is read.

    Args:
        file: The open file. Only its pickle, and the names and positions of its tensors, are read.
        limit, remedy: As for `decode_pth`.

    Raises:
        UnsafeSkeletonError: The file contains more than `decode_pth` reads, or a parameter.
        FormatError: The file is damaged, in a different format, or exceeds `limit`.
    """
    return decode_file(file, limit, {}, remedy, remedy, Indexer)


@dataclass(frozen=True, slots=True, eq=False)
class TensorPart:
    """A tensor in a file of `torch.save`, not read yet.

    Attributes:
        dtype: Dtype of the tensor.
        begin, end: Range of bytes in the file that contains all its elements.
        size, stride: Shape and strides in elements; its first element is at `begin`.
    """

    dtype: torch.dtype
    begin: int
    end: int
    size: tuple[int, ...]
    stride: tuple[int, ...]

    def view(self, buffer: Any) -> torch.Tensor:
        """Return the tensor whose elements are in the writable `buffer`, the bytes `[begin, end)` of the file.

        Raises:
            FormatError: A bool is a byte other than 0 or 1.

        Memory: aliases `buffer` and keeps it alive, unless it has elements of other tensors.
        """
        flat = view_tensor(buffer, self.dtype, ((self.end - self.begin) // self.dtype.itemsize,))
        tensor = check_tensor(flat.as_strided(self.size, self.stride))
        # Hazard: a small file can describe many tensors of few elements, each at both ends of a large storage
        return tensor.clone() if len(flat) > tensor.numel() else tensor


def decode_file(
    file: File,
    limit: int,
    allow: Allowed,
    remedy: str,
    limit_remedy: str,
    reader_class: type[TensorReader],
    read_planned: PlanReader | None = None,
) -> Any:
    """Return the object in a file of `torch.save`, as `decode_pth` does; the arguments are the same but for two.

    Args:
        file: The open file, or its content.
        read_planned: Function that may return the object without decoding its pickle; see `PlanReader`.
    """
    nbytes = len(file) if isinstance(file, memoryview) else file.seek(0, io.SEEK_END)
    begin = _read(file, range(4))
    if begin != _ZIP:
        if not begin:
            raise FormatError("the file is empty")
        # older files, and those of `pickle.dump`, begin with the number of their protocol
        advice = remedy if begin[:1] == b"\x80" else ""
        raise FormatError(f"expected a zip file, the format of torch.save since torch 1.6{advice}")
    with advising(remedy):
        records = _list_records(file, nbytes)
        pickled = _read(file, records["data.pkl"])
        if "byteorder" in records and _read(file, records["byteorder"]) != b"little":
            raise FormatError(f"the tensors are not little-endian{remedy}")
        if read_planned is not None:
            planned = read_planned(file, pickled, records, limit)
            if planned is not NOT_PLANNED:
                return planned
        body = translate(pickled)
        reader = reader_class(file, records, len(body), limit, remedy, limit_remedy)
        result = reader.unpickle(body, allow)
        reader.check(result)
        return result


def peek_pth(begin: bytes) -> Any:
    """Return the object in a file of `torch.save` with None in place of each tensor.

    Args:
        begin: First bytes of the file, with its whole pickle, which torch writes before the tensors.

    Raises:
        UnsafeSkeletonError: The file contains more than `decode_pth` reads.
        FormatError: `begin` is damaged, or ends inside the pickle.
    """
    try:
        name_nbytes, extra_nbytes = struct.unpack_from("<HH", begin, 26)
        name, pickled = begin[30 : 30 + name_nbytes], begin[30 + name_nbytes + extra_nbytes :]
        if not begin.startswith(_ZIP) or not name.endswith(b"/data.pkl"):
            raise FormatError("expected a file of torch.save, whose first record is its pickle")
        *_, (_, _, last) = pickletools.genops(pickled)
        body = translate(pickled[: (last or 0) + 1])
    except TensorCacheError:
        raise
    except Exception as exc:  # pickletools raises many kinds of exceptions
        raise FormatError(f"cannot be decoded: {exc!r:.300}") from exc
    return unpickle(body, 0, None, _WITHOUT_TENSORS, {}, {**ALLOW_ONLY, BINPERSID: _skip_storage})


def _list_records(file: File, nbytes: int) -> dict[str, range]:
    """Return the positions of the bytes of each file in the zip, by their names in the folder that contains them all."""
    files = list_zipped(file, nbytes)
    folder = files[0].filename.partition("/")[0] + "/"
    records = {}
    for each in files:
        # checksums are not compared: torch does not compare them either, and may omit them when it writes
        head = each.header_offset + 26
        begin = head + 4 + sum(_TWO_LENGTHS(_read(file, range(head, head + 4))))  # after its name and extra fields
        is_plain = each.compress_type == zipfile.ZIP_STORED and not each.flag_bits & _IS_ENCRYPTED
        if not is_plain or begin + each.file_size > nbytes:
            raise FormatError(f"{each.filename!r:.100} is compressed, encrypted or cut short, expected a plain file")
        records[each.filename.removeprefix(folder)] = range(begin, begin + each.file_size)
    if len(records) < len(files) or sum(map(len, records.values())) > nbytes:
        raise FormatError("files in the zip overlap or have the same name")
    return records


def _read(file: File, record: range) -> bytes:
    if isinstance(file, memoryview):
        return bytes(file[record.start : record.stop])
    file.seek(record.start)
    return file.read(len(record))


@dataclass(frozen=True, slots=True, eq=False)
class Storage:
    """The memory of tensors, as uint8 elements, and the dtype of those tensors that do not say theirs."""

    memory: Any  # for `Indexer`, the range of bytes
    dtype: torch.dtype


class TensorReader:
    """The opcodes and builders that decode one pickle with tensors, with the budgets that limit their work.

    Args:
        file: The file with the storages, or its writable content.
        records: Range of bytes of each storage in the file, by `data/{key}`.
        nbytes: Length of the pickle.
        limit: Limit for the total bytes of all tensors; elements that tensors share count once per tensor.
        remedy, limit_remedy: As for `decode_pth`.
    """

    # classes of objects that are parts of tensors, and must not be left in the result
    INNER: tuple[type, ...] = (Storage,)

    def __init__(
        self, file: File, records: dict[str, range], nbytes: int, limit: int, remedy: str, limit_remedy: str
    ) -> None:
        self._file, self._records, self._remedy, self._limit_remedy = file, records, remedy, limit_remedy
        self._memory: dict[str, Any] = {}
        self._limit = self._nbytes_left = limit
        self._key_costs = KeyCosts(nbytes)
        self._elements_left = call_budget(nbytes)
        self._uuids = UuidReader()
        self.opcodes = {
            **ALLOW_ONLY,
            BINPERSID: self._open_storage,
            op.BUILD: self._set_state,
            op.NEWOBJ: self._uuids.create,
        }
        self.builders = {
            **_BUILDERS,
            ("torch._utils", "_rebuild_tensor_v2"): Builder(partial(self._build_tensor, has_dtype=False)),
            ("torch._utils", "_rebuild_tensor_v3"): Builder(partial(self._build_tensor, has_dtype=True)),
        }
        for module in ("__builtin__", "builtins"):  # in protocol 2, and in protocol 3
            self.builders[module, "set"] = Builder(partial(self._build_set, set), factory=set)
            self.builders[module, "frozenset"] = Builder(partial(self._build_set, frozenset))

    def check(self, result: Any) -> None:
        """Raise an error if the pickle has left something that is not part of a sample."""
        self._uuids.check()
        if any(part.__class__ in self.INNER for part, _ in walk(result)):
            raise UnsafeSkeletonError(
                "the object contains a storage or a class of arrays itself, expected tensors and arrays"
            )

    def _set_state(self, stack: list[Any], allow: Allowed, callables: int) -> int:
        if stack[-2].__class__ is OrderedDict:
            stack.pop()  # `_metadata`, the versions of a module's state dict
        elif stack[-2].__class__ is uuid.UUID:
            self._uuids.fill(stack[-2], stack.pop())
        else:
            return ALLOW_ONLY[op.BUILD](stack, allow, callables)
        return 0

    def unpickle(self, body: bytes, allow: Allowed) -> Any:
        """Return the object in a translated pickle. A reader decodes only one."""
        try:
            return unpickle(body, 0, None, self.builders, allow, self.opcodes)
        finally:
            # these refer to the reader, which would keep the file's memory until a garbage collection
            self.opcodes.clear()
            self.builders.clear()

    def _open_storage(self, stack: list[Any], allow: Any, callables: int) -> int:
        match stack.pop():
            case ("storage", torch.dtype() as dtype, str(key), str(), int(count), *rest) if rest in ([], [None]):
                pass  # files from before torch 1.6 have None at the end
            case other:
                raise FormatError(f"expected the description of a storage, got {shown(other)}")
        memory = self._memory.get(key)
        if memory is None:
            record = self._records.get(f"data/{key}")
            if record is None:
                raise FormatError(f"storage {key!r:.80} is not in the zip")
            memory = self._memory[key] = self._load(record)
        if not 0 <= count * dtype.itemsize <= len(memory):
            raise FormatError(f"storage {key!r:.80} declares {count} elements of {dtype} in {len(memory)} bytes")
        stack.append(Storage(memory, dtype))
        return 0

    def _load(self, record: range) -> Any:
        return load_storage(self._file, record)

    def _view(self, storage: Storage, dtype: torch.dtype, offset: int, size: Any, stride: Any, count: int) -> Any:
        """Return a checked tensor; `count` is the number of elements from its first to its last in the storage."""
        return view_storage(storage.memory, dtype, offset, size, stride)

    def _build_tensor(self, args: tuple[Any, ...], *, has_dtype: bool) -> Any:
        storage, offset, size, stride, requires_grad, hooks, *rest = args
        dtype = rest.pop(0) if has_dtype else storage.dtype
        if storage.__class__ is not Storage or dtype.__class__ is not torch.dtype or len(size) > _MAX_NDIM:
            raise FormatError(f"a tensor has no storage, no dtype, or more than {_MAX_NDIM} dimensions")
        if hooks or any(rest) or dtype not in TORCH_TRUE:
            raise FormatError(
                f"a tensor of {dtype} has hooks, is conjugated, or has an unsupported dtype{self._remedy}"
            )
        for n in (offset, *size, *stride):
            if n.__class__ is not int or not 0 <= n < _MAX_SIZE:
                raise FormatError("a tensor has an impossible shape, stride or offset")
        count = math.prod(size)
        end = offset + 1
        for n, step in zip(size, stride, strict=True):
            end += (n - 1) * step
        # torch counts a dimension of 0 as 1 for strides
        num_strided = count or math.prod(n or 1 for n in size)
        if (end if count else 0) * dtype.itemsize > len(storage.memory) or num_strided >= _MAX_SIZE:
            raise FormatError(f"a tensor of {dtype}{list(size)} exceeds its storage of {len(storage.memory)} bytes")
        self._nbytes_left -= count * dtype.itemsize
        if self._nbytes_left < 0:
            raise FormatError(f"the tensors together need more than {self._limit} bytes{self._limit_remedy}")
        tensor = self._view(storage, dtype, offset, size, stride, end - offset if count else 0)
        return tensor.requires_grad_(requires_grad) if tensor.__class__ is torch.Tensor else tensor

    def _build_set(self, cls: type, args: tuple[Any, ...]) -> Any:
        (items,) = args
        if items.__class__ is not list:
            raise TypeError(f"cannot build a {cls.__name__} from {shown(items)}")
        # Hazard: many sets may be built from one memoized list, so a small file could take much memory and time.
        self._elements_left -= len(items)
        if self._elements_left < 0:
            raise FormatError("the sets have too many elements together, because they are built from the same lists")
        self._key_costs.add(None, items, True)
        return cls(items)


class Indexer(TensorReader):
    """A reader that returns parts of the file in place of tensors. It reads no storage."""

    def _load(self, record: range) -> Any:
        return record

    def _view(self, storage: Storage, dtype: torch.dtype, offset: int, size: Any, stride: Any, count: int) -> Any:
        begin = storage.memory.start + offset * dtype.itemsize if count else storage.memory.start
        return TensorPart(dtype, begin, begin + count * dtype.itemsize, tuple(size), tuple(stride))


def load_storage(file: File, record: range) -> torch.Tensor:
    """Return the bytes of a storage: a view of a `memoryview` if it is aligned, otherwise newly allocated."""
    if isinstance(file, memoryview) and len(record):
        array = np.frombuffer(file, np.uint8, len(record), record.start)
        if array.__array_interface__["data"][0] % _ALIGNMENT == 0:  # as torch has written it
            return torch.from_numpy(array)
    memory = torch.empty(len(record), dtype=torch.uint8, device="cpu")
    if isinstance(file, memoryview):
        memory.numpy()[:] = file[record.start : record.stop]
        return memory
    file.seek(record.start)
    if file.readinto(memory.numpy()) != len(record):  # type: ignore[attr-defined]
        raise FormatError("the file was cut short while it was read")
    return memory


def view_storage(memory: torch.Tensor, dtype: torch.dtype, offset: int, size: Any, stride: Any) -> torch.Tensor:
    """Return a tensor of a storage, whose bools are checked. The caller has checked that the tensor fits."""
    tensor = torch.empty(0, dtype=dtype, device="cpu")
    return check_tensor(tensor.set_(memory.untyped_storage(), offset, size, stride))


def _skip_storage(stack: list[Any], allow: Allowed, callables: int) -> int:
    stack[-1] = None
    return 0


def _build_parameter(args: tuple[Any, ...]) -> torch.nn.Parameter:
    tensor, requires_grad, hooks = args
    if tensor.__class__ is not torch.Tensor or hooks:
        raise TypeError(f"cannot build a parameter from {shown(tensor)}, or one with hooks")
    return torch.nn.Parameter(tensor, requires_grad)


_BUILDERS: dict[tuple[str, str], object] = {
    **PICKLED_TYPES,
    ("torch._utils", "_rebuild_parameter"): Builder(_build_parameter),
    ("torch.storage", "UntypedStorage"): torch.uint8,
    **{("torch", f"{name}Storage"): dtype for name, dtype in _STORAGES.items()},
}
_WITHOUT_TENSORS: dict[tuple[str, str], object] = {
    **_BUILDERS,
    ("torch._utils", "_rebuild_tensor_v2"): Builder(lambda args: None),
    ("torch._utils", "_rebuild_tensor_v3"): Builder(lambda args: None),
    ("torch._utils", "_rebuild_parameter"): Builder(lambda args: None),
}
