"""Decode a pickle that names storages, as in files of `torch.save`, with the reader of skeletons.

`torch.load(weights_only=True)` runs no code, but its cost is unbounded: 500 bytes can describe a dict key of nested, shared
tuples whose hash takes years, and 400 bytes can allocate `bytearray(2**31)`. Here the pickle is translated to the opcodes of
FORMAT.md 2.4, and the reader of these opcodes limits its work.
"""

from __future__ import annotations

import math
import uuid
from collections import OrderedDict
from functools import partial
from typing import Any

import torch

from wds_tensorcache.codec.dtypes import TORCH_TRUE
from wds_tensorcache.codec.skeleton import opcodes as op
from wds_tensorcache.codec.skeleton.limits import add_key_parts, call_budget
from wds_tensorcache.codec.skeleton.reader import unpickle
from wds_tensorcache.codec.skeleton.types import ALLOW_ONLY, Allowed, Builder
from wds_tensorcache.codec.tree import shown, walk
from wds_tensorcache.errors import FormatError, UnsafeSkeletonError
from wds_tensorcache.integrations.pickles.storages import File, Storage, load_storage, view_storage
from wds_tensorcache.integrations.pickles.translate import BINPERSID
from wds_tensorcache.integrations.pickles.types import PICKLED_TYPES, UuidReader

_MAX_NDIM = 64
_MAX_SIZE = 1 << 59
_STORAGES = {
    "Double": torch.float64, "Float": torch.float32, "Half": torch.float16, "BFloat16": torch.bfloat16, "Long": torch.int64,
    "Int": torch.int32, "Short": torch.int16, "Char": torch.int8, "Byte": torch.uint8, "Bool": torch.bool,
    "ComplexDouble": torch.complex128, "ComplexFloat": torch.complex64,
}  # fmt: skip


class TensorReader:
    """The opcodes and builders that decode one pickle with tensors, with the budgets that limit their work.

    Subclasses may add to `opcodes` and `builders`, and override the methods for storages, tensors and states.

    Args:
        file: The file with the storages, or its writable content.
        records: Range of bytes of each storage in the file, by `data/{key}`.
        nbytes: Length of the pickle.
        limit: Limit for the total bytes of all tensors; elements that tensors share count once per tensor.
        remedy, limit_remedy: As for `load_pth`.
    """

    # classes of objects that are parts of tensors, and must not be left in the result
    INNER: tuple[type, ...] = (Storage,)

    def __init__(
        self, file: File, records: dict[str, range], nbytes: int, limit: int, remedy: str, limit_remedy: str
    ) -> None:
        self._file, self._records, self.remedy, self._limit_remedy = file, records, remedy, limit_remedy
        self._memory: dict[str, Any] = {}
        self._limit = self._nbytes_left = limit
        self._num_key_parts = 0
        self._elements_left = call_budget(nbytes)
        self._uuids = UuidReader()
        self.opcodes = {
            **ALLOW_ONLY,
            BINPERSID: self.open_storage,
            op.BUILD: self.set_state,
            op.NEWOBJ: self._uuids.create,
        }
        self.builders = {
            **_BUILDERS,
            ("torch._utils", "_rebuild_tensor_v2"): Builder(partial(self.build_tensor, has_dtype=False)),
            ("torch._utils", "_rebuild_tensor_v3"): Builder(partial(self.build_tensor, has_dtype=True)),
        }
        for module in ("__builtin__", "builtins"):  # in protocol 2, and in protocol 3
            self.builders[module, "set"] = Builder(partial(self._build_set, set), factory=set)
            self.builders[module, "frozenset"] = Builder(partial(self._build_set, frozenset))

    def unpickle(self, body: bytes, allow: Allowed) -> Any:
        """Return the object in a translated pickle. A reader decodes only one."""
        try:
            return unpickle(body, 0, None, self.builders, allow, self.opcodes)
        finally:
            # these refer to the reader, which would keep the file's memory until a garbage collection
            self.opcodes.clear()
            self.builders.clear()

    def check(self, result: Any) -> None:
        """Raise an error if the pickle has left something that is not part of a sample."""
        self._uuids.check()
        if any(part.__class__ in self.INNER for part, _ in walk(result)):
            raise UnsafeSkeletonError(
                "the object contains a storage or a class of arrays itself, expected tensors and arrays"
            )

    @property
    def nbytes(self) -> int:
        """Number of bytes of all tensors so far; elements that tensors share count once per tensor."""
        return self._limit - self._nbytes_left

    def set_state(self, stack: list[Any], allow: Allowed, num_callables: int) -> int:
        """Run BUILD: set the state of an object; return how many builders were called."""
        if stack[-2].__class__ is OrderedDict:
            stack.pop()  # `_metadata`, the versions of a module's state dict
        elif stack[-2].__class__ is uuid.UUID:
            self._uuids.fill(stack[-2], stack.pop())
        else:
            return ALLOW_ONLY[op.BUILD](stack, allow, num_callables)
        return 0

    def open_storage(self, stack: list[Any], allow: Allowed, num_callables: int) -> int:
        """Run BINPERSID: replace the description of a storage by the storage; return how many builders were called."""
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
            memory = self._memory[key] = self.load_memory(record)
        if not 0 <= count * dtype.itemsize <= len(memory):
            raise FormatError(f"storage {key!r:.80} declares {count} elements of {dtype} in {len(memory)} bytes")
        stack.append(Storage(memory, dtype))
        return 0

    def load_memory(self, record: range) -> Any:
        """Return the memory of a storage, whose `len` is its number of bytes."""
        return load_storage(self._file, record)

    def view_tensor(self, storage: Storage, dtype: torch.dtype, offset: int, size: Any, stride: Any, count: int) -> Any:
        """Return a checked tensor; `count` is the number of elements from its first to its last in the storage."""
        return view_storage(storage.memory, dtype, offset, size, stride)

    def build_tensor(self, args: tuple[Any, ...], *, has_dtype: bool) -> Any:
        """Return a tensor by the arguments of torch's function; `has_dtype` says whether one of them is its dtype."""
        storage, offset, size, stride, requires_grad, hooks, *rest = args
        dtype = rest.pop(0) if has_dtype else storage.dtype
        if storage.__class__ is not Storage or dtype.__class__ is not torch.dtype or len(size) > _MAX_NDIM:
            raise FormatError(f"a tensor has no storage, no dtype, or more than {_MAX_NDIM} dimensions")
        if hooks or any(rest) or dtype not in TORCH_TRUE:
            raise FormatError(f"a tensor of {dtype} has hooks, is conjugated, or has an unsupported dtype{self.remedy}")
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
        tensor = self.view_tensor(storage, dtype, offset, size, stride, end - offset if count else 0)
        return tensor.requires_grad_(requires_grad) if tensor.__class__ is torch.Tensor else tensor

    def _build_set(self, cls: type, args: tuple[Any, ...]) -> Any:
        (items,) = args
        if items.__class__ is not list:
            raise TypeError(f"cannot build a {cls.__name__} from {shown(items)}")
        # Many sets may be built from one memoized list, so a small file could take much memory and time.
        self._elements_left -= len(items)
        if self._elements_left < 0:
            raise FormatError("the sets have too many elements together, because they are built from the same lists")
        self._num_key_parts = add_key_parts(self._num_key_parts, items)
        return cls(items)


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


def unpickle_without_tensors(body: bytes) -> Any:
    """Return the object in a translated pickle with None in place of each tensor."""
    return unpickle(body, 0, None, _WITHOUT_TENSORS, {}, {**ALLOW_ONLY, BINPERSID: _skip_storage})


def _skip_storage(stack: list[Any], allow: Allowed, num_callables: int) -> int:
    stack[-1] = None
    return 0
