"""Lazy tensors and arrays, which read their bytes only if needed.

The bytes come from a `ByteSource`: a member in memory, or a `FileRange` of a shard (`shards/shard.py`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import torch
from torch.utils.data import get_worker_info
from torch.utils.data._utils.collate import default_collate_fn_map

from wds_tensorcache.codec.reference import ByteSource, Reference
from wds_tensorcache.codec.views import check_array, check_tensor, view_array, view_tensor

_MAX_GAP = 1 << 14  # bytes between two tensors that cost less than another read
_SCRATCH = memoryview(bytearray(_MAX_GAP))  # gaps are read into it, by all threads at once; its content is never used


class Lazy:
    """Base of `LazyTensor` and `LazyArray`: one tensor's reference and byte source."""

    __slots__ = ("__weakref__", "_reference", "_source")
    _reference: Reference
    _source: ByteSource

    def __new__(cls, reference: Reference, source: ByteSource) -> Any:
        self = _new(cls)
        _set_reference(self, reference)
        _set_source(self, source)
        return self

    name = property(lambda self: self._reference.name, doc="Name of the tensor in its `.safetensors` member.")
    dtype = property(lambda self: self._reference.dtype, doc="Dtype of the loaded value.")
    shape = property(lambda self: self._reference.shape, doc="Shape of the loaded value.")
    ndim = property(lambda self: len(self._reference.shape), doc="Number of dimensions.")
    nbytes = property(lambda self: self._reference.end - self._reference.begin, doc="Bytes of the elements.")

    view_memory: Any  # `view_tensor` or `view_array`
    check: Any  # `check_tensor` or `check_array`

    @classmethod
    def view_buffer(cls, buffer: Any, dtype: Any, shape: tuple[int, ...]) -> Any:
        """Return a buffer as a tensor or array, after checking its values. Memory: aliases the buffer."""
        return cls.check(cls.view_memory(buffer, dtype, shape))

    def _renamed(self, name: str) -> Any:
        return type(self)(replace(self._reference, name=name), self._source)

    load: Any

    def view_bytes(self) -> np.ndarray[Any, Any]:
        """Return the bytes of the elements as a 1-D uint8 array.

        Raises:
            ValueError: The cache was closed.
            FormatError, RemoteError: The shard was changed, or cannot be read.

        Memory: aliases the source, or is a copy if the shard cannot be mapped; never write into it. Reading a map kills the
            process (SIGBUS) if the shard is truncated in place or the disk fails.
        """
        return self._source.view(self._reference.begin, self._reference.end)

    def _load(self, copy: bool) -> Any:
        reference = self._reference
        buffer = self._source.read(reference.begin, reference.end) if copy else self.view_bytes()
        return self.view_buffer(buffer, reference.dtype, reference.shape)

    def _check_out(self, out: Any) -> None:
        if isinstance(out, Lazy):
            _refuse_in_place(type(out), "load(out=…)")
        if out.shape != self.shape or out.dtype != self.dtype:
            raise ValueError(f"out is {out.dtype}{list(out.shape)}, expected the dtype and shape of {self!r}")

    def __getitem__(self, index: Any) -> Any:
        first, rest = (index[0], index[1:]) if type(index) is tuple and index else (index, ())
        length = self.shape[0] if self.shape else 0
        if type(first) is int and -length <= first < length:
            rows = range(first % length, first % length + 1)
            rest = (0, *rest)
        elif type(first) is slice and first.step in (None, 1) and length:
            rows = range(length)[first]
            rest = (slice(None), *rest) if rest else ()
        else:
            return self.load()[_loaded(index)]
        begin, stride = self._reference.begin, self.nbytes // length
        buffer = self._source.read(begin + rows.start * stride, begin + max(rows.start, rows.stop) * stride)
        part = self.view_buffer(buffer, self.dtype, (len(rows), *self.shape[1:]))
        return part[_loaded(rest)] if rest else part

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise AttributeError(f"a {type(self).__name__} is immutable; set attributes on the result of .load()")

    def __delattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"a {type(self).__name__} is immutable")

    def __setstate__(self, state: object) -> NoReturn:
        raise TypeError(f"a {type(self).__name__} takes no state, which could make it read another file")

    def __setitem__(self, index: object, value: object) -> NoReturn:
        raise TypeError(
            f"a {type(self).__name__} is read-only, so the assignment would be lost; assign to the result of .load()"
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        # Frame 1 is the caller of the pickler: a pickler written in C has no Python frame.
        if sys._getframe(1).f_globals.get("__name__") == "torch.serialization":
            return self._reduce_for_torch_save(protocol)
        r = self._reference
        source, begin = self._source.cut(r.begin, r.end)
        end = begin + r.end - r.begin
        return _rebuild, (type(self), source, r.name, r.kind, r.dtype, tuple(r.shape), begin, end, r.attribute)

    # Result of `__reduce_ex__` for `torch.save`: `torch.load(weights_only=True)` refuses our classes.
    _reduce_for_torch_save: Any

    def __copy__(self) -> Any:
        return self

    def __deepcopy__(self, memo: object) -> Any:
        return self

    def __iter__(self) -> Iterator[Any]:
        return iter(self.load())

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        if copy is False:
            raise ValueError(f"reading a {type(self).__name__} always copies; .load(copy=False) returns a view")
        array = np.asarray(self.load())
        return array if dtype is None else array.astype(dtype, copy=False)

    def __dlpack__(self, **kwargs: Any) -> Any:
        return self.load().__dlpack__(**kwargs)

    def __dlpack_device__(self) -> Any:
        return 1, 0  # kDLCPU

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r}, shape={list(self.shape)}, dtype={self.dtype})"


class PendingLoads:
    """Lazy tensors to be loaded together, with one read for adjacent tensors."""

    __slots__ = ("_reads", "_unchecked")

    def __init__(self) -> None:
        # id of the source, offset, number of the read (so that sources are not compared), source, buffer
        self._reads: list[tuple[int, int, int, ByteSource, Any]] = []
        self._unchecked: list[tuple[Callable[[Any], Any], Any]] = []

    def add(self, lazy: Lazy) -> Any:
        """Allocate and return a lazy tensor's value. `run` fills in the elements."""
        reference, source = lazy._reference, lazy._source
        begin = reference.begin
        buffer = source.allocate(reference.end - begin)
        if len(buffer):
            self._reads.append((id(source), begin, len(self._reads), source, buffer))
        value = lazy.view_memory(buffer, reference.dtype, reference.shape)
        if reference.dtype is torch.bool or type(lazy) is LazyArray:
            self._unchecked.append((lazy.check, value))
        return value

    def run(self) -> None:
        """Read the bytes of all added tensors. Raise FormatError for an invalid value or a changed shard, or RemoteError."""
        self._reads.sort()
        source: Any = None
        buffers: list[Any] = []
        first = end = 0
        for _, begin, _, owner, buffer in self._reads:
            gap = begin - end
            if owner is not source or not 0 <= gap <= _MAX_GAP:
                if buffers:
                    source.read_into(buffers, first)
                source, buffers, first = owner, [], begin
            elif gap:
                buffers.append(_SCRATCH[:gap])
            buffers.append(buffer)
            end = begin + len(buffer)
        if buffers:
            source.read_into(buffers, first)
        for check, value in self._unchecked:
            check(value)


def _rebuild(cls: Any, source: ByteSource, name: str, kind: str, dtype: Any, shape: Any, *rest: Any) -> Any:
    # pickling the `Reference` as an object would take twice as long
    return cls(Reference(name, kind, dtype, torch.Size(shape) if kind == "tensor" else shape, *rest), source)


_new: Any = object.__new__
_set_reference: Any = vars(Lazy)["_reference"].__set__
_set_source: Any = vars(Lazy)["_source"].__set__


def _loaded(value: Any) -> Any:
    cls = type(value)
    if issubclass(cls, Lazy):
        return value.load()
    if cls is list or cls is tuple:
        return cls(map(_loaded, value))
    if cls is dict:
        return {key: _loaded(part) for key, part in value.items()}
    return value


def _holds_lazy(value: Any) -> bool:
    return isinstance(value, Lazy) or (type(value) in (list, tuple) and any(map(_holds_lazy, value)))


def _refuse_in_place(cls: type, name: str) -> NoReturn:
    raise TypeError(
        f"{name} would write into a {cls.__name__}, so the result would be lost; call .load() and write into the loaded copy"
    )


def check_device(device: Any) -> None:
    """Raise RuntimeError if `device` is unknown, or CUDA without a GPU."""
    if device is not None and torch.device(device).type == "cuda" and not torch.cuda.is_available():
        raise RuntimeError(f"device={device!r}, but torch sees no GPU; leave it out, or install torch with CUDA")


class LazyTensor(Lazy):
    """A torch.Tensor whose bytes have not been read yet.

    Each use in a torch function, operator, method or index expression reads the tensor into private memory, which belongs
    to the caller. If the first index is an int or a slice of step 1, only the selected bytes of the first dimension
    are read. Metadata, such as `shape`, `dtype` and `numel()`, needs no read. For repeated use, call `.load()` once.

    Memory: holds no copy of its elements. It keeps its source alive: bytes in memory, or the shard of an open cache. An
        unpickled copy keeps the path and identity of the shard's file, but not the shard.
    Threads/fork/pickle: immutable, so safe in all three. If the source is in memory, the pickle contains only the bytes of
        this tensor.
    """

    __slots__ = ()

    if TYPE_CHECKING:  # types of attributes that `__getattr__` and the base class provide
        ndim: int
        dim: Callable[[], int]
        numel: Callable[[], int]
        element_size: Callable[[], int]
        is_complex: Callable[[], bool]
        is_contiguous: Callable[..., bool]
        is_floating_point: Callable[[], bool]

        def __getitem__(self, index: Any) -> torch.Tensor: ...

    view_memory: Any = staticmethod(view_tensor)
    check: Any = staticmethod(check_tensor)

    @property
    def device(self) -> torch.device:
        """The CPU, the device of `.load()` by default."""
        return torch.device("cpu")

    def __len__(self) -> NoReturn:
        # torch treats an index whose len() is below 32 as a tuple of indices, so tensor[lazy] would be silently wrong.
        raise TypeError("a LazyTensor has no len(); use .shape[0]")

    def load(
        self, device: torch.device | str | None = None, out: torch.Tensor | None = None, *, copy: bool = True
    ) -> torch.Tensor:
        """Read the tensor and return it.

        Args:
            device: Device of the result; the CPU by default. Ignored if `out` is given.
            out: Tensor of the same shape and dtype to read into, which is also returned.
            copy: False uses a view of the source, if possible; on the CPU, the view is the result. Never write into it:
                other reads would see the change. The view of a shard is a memory map, and reading it **kills the process**
                (SIGBUS) if the shard is truncated in place. Ignored if `out` is given.

        Raises:
            ValueError: `out` has a different shape or dtype, or the cache was closed.
            TypeError: `out` is lazy.
            RuntimeError: `device` is not available.
            FormatError: A bool tensor contains bytes other than 0 and 1, or the shard was changed.
            RemoteError: The remote shard cannot be read.

        Memory: private to the caller, and aligned to 16 bytes. With `copy=False`, the result may be a view, which aliases the
            source and keeps it alive.
        """
        if out is not None:
            self._check_out(out)
            return self._load_into(out)
        tensor: torch.Tensor = self._load(copy)
        if device is None:
            return tensor
        check_device(device)
        return tensor.to(device)

    def _load_into(self, out: torch.Tensor) -> torch.Tensor:
        is_plain = out.is_cpu and out.is_contiguous() and not out.is_conj() and not out.is_neg()
        if not is_plain or self.dtype is torch.bool:
            with torch.no_grad():
                return out.copy_(self.load())
        if self.nbytes:
            # a contiguous tensor may have any strides in dimensions of size 1
            raw: Any = out.detach().as_strided((out.numel(),), (1,)).view(torch.uint8).numpy()
            self._source.read_into([memoryview(raw)], self._reference.begin)
        return out

    def _reduce_for_torch_save(self, protocol: Any) -> Any:
        tensor: Any = self.load()
        return tensor.__reduce_ex__(protocol)

    # A method, although `__getattr__` would provide it: trainers look for `to` in the class of a value.
    def to(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Load the tensor and call `torch.Tensor.to` on it; return the result."""
        return self.load().to(*_loaded(list(args)), **_loaded(kwargs))

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        writes = (name.endswith("_") and not name.endswith("__")) or name.startswith("__i") or kwargs.get("inplace")
        target = args[0] if args else kwargs.get("input", kwargs.get("self", kwargs.get("tensor")))
        if _holds_lazy(kwargs.get("out")) or (writes and name not in _NOT_IN_PLACE and _holds_lazy(target)):
            _refuse_in_place(cls, name)
        return func(*_loaded(list(args)), **_loaded(kwargs))

    def __getattr__(self, name: str) -> Any:
        # Provides all attributes of a torch.Tensor except in-place methods.
        if name.startswith("__") or not hasattr(torch.Tensor, name):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        if name.endswith("_"):
            return lambda *args, **kwargs: _refuse_in_place(type(self), name)
        if name in _WITHOUT_BYTES:
            return getattr(torch.empty(self.shape, dtype=self.dtype, device="meta"), name)
        value = getattr(self.load(), name)
        if not callable(value):
            return value
        return lambda *args, **kwargs: value(*_loaded(list(args)), **_loaded(kwargs))

    def __format__(self, spec: str) -> str:
        return format(self.load(), spec) if spec else repr(self)


_NOT_IN_PLACE = frozenset({"__invert__", "__index__", "__int__", "__iter__"})
_WITHOUT_BYTES = frozenset(
    "dim ndimension numel nelement size stride is_contiguous layout requires_grad is_cuda is_sparse itemsize element_size "
    "is_floating_point is_complex is_signed".split()
)


class LazyArray(Lazy):
    """A numpy array whose bytes have not been read yet. Numpy functions and ufuncs accept it; see `LazyTensor`.

    `len()` returns the size of the first dimension. `torch.save` raises TypeError.
    """

    __slots__ = ()

    view_memory: Any = staticmethod(view_array)
    check: Any = staticmethod(check_array)

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("len() of a 0-d array")
        return int(self.shape[0])

    def load(self, out: np.ndarray[Any, Any] | None = None, *, copy: bool = True) -> np.ndarray[Any, Any]:
        """Read the array and return it; see `LazyTensor.load`. Without `out`, it is C-contiguous and little-endian.

        Raises:
            ValueError, TypeError, RemoteError: As for `LazyTensor.load`.
            FormatError: A bool or text array contains invalid values, or the shard was changed.
        """
        if out is None:
            return self._load(copy)  # type: ignore[no-any-return]
        self._check_out(out)
        out[...] = self._load(True)
        return out

    def _reduce_for_torch_save(self, protocol: Any) -> NoReturn:
        raise TypeError(
            f"torch.save of {self!r}: torch.load refuses numpy arrays; save torch.from_numpy(x.load()), "
            "or save tc.realize(sample) and read it with torch.load(weights_only=False)"
        )

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or not hasattr(np.ndarray, name):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        if name in _ARRAY_IN_PLACE:
            return lambda *args, **kwargs: _refuse_in_place(type(self), name)
        return getattr(self.load(), name)


_ARRAY_IN_PLACE = frozenset(
    {"byteswap", "fill", "itemset", "partition", "put", "resize", "setfield", "setflags", "sort"}
)
_BINARY = "add sub mul truediv floordiv mod divmod pow matmul and or xor lshift rshift".split()
_OTHERS = "eq ne lt le gt ge neg pos abs invert bool int float complex index contains".split()


def _operator(name: str) -> Any:
    def method(self: Any, *args: Any) -> Any:
        function = getattr(self.load(), name, None)
        return NotImplemented if function is None else function(*_loaded(list(args)))

    return method


def _in_place_operator(name: str) -> Any:
    return lambda self, other: _refuse_in_place(type(self), name)


for _cls in (LazyTensor, LazyArray):
    for _name in (*_BINARY, *(f"r{name}" for name in _BINARY), *_OTHERS):
        setattr(_cls, f"__{_name}__", _operator(f"__{_name}__"))
    for _name in _BINARY:
        setattr(_cls, f"__i{_name}__", _in_place_operator(f"__i{_name}__"))
    _cls.__hash__ = object.__hash__  # type: ignore[method-assign]  # by identity, as for tensors


def _collate_tensors(batch: list[Any], *, collate_fn_map: Any = None) -> torch.Tensor:
    """Load tensors into the rows of a tensor `[B, …]`."""
    first = batch[0]
    _check_stackable(batch)
    shape, is_worker = (len(batch), *first.shape), get_worker_info() is not None
    rows = torch.empty(0 if is_worker else shape, dtype=first.dtype, device="cpu")
    if is_worker:
        # shared memory, because sending it to the main process needs no copy
        shared: Any = torch.UntypedStorage._new_shared(len(batch) * first.nbytes, device="cpu")  # type: ignore[no-untyped-call]
        rows.set_(shared, 0, shape)  # type: ignore[call-overload]
    for item, row in zip(batch, rows, strict=True):
        item.load(out=row) if isinstance(item, LazyTensor) else row.copy_(item)
    return rows


def _collate_arrays(batch: list[Any], *, collate_fn_map: Any = None) -> torch.Tensor:
    _check_stackable(batch)
    arrays = [torch.as_tensor(item.load() if isinstance(item, LazyArray) else item) for item in batch]
    stacked: torch.Tensor = default_collate_fn_map[torch.Tensor](arrays, collate_fn_map=collate_fn_map)
    return stacked


def _check_stackable(batch: list[Any]) -> None:
    first = batch[0]
    for item in batch:
        if not isinstance(item, (Lazy, torch.Tensor, np.ndarray)):
            _refuse_values(batch)
        # torch promotes the dtypes of arrays
        if item.shape != first.shape or (isinstance(first, LazyTensor) and item.dtype != first.dtype):
            problem = f"cannot stack {item!r} onto {first!r}: shapes and dtypes must be equal"
            raise RuntimeError(f"{problem}; {_COLLATE_REMEDY}")


def _refuse_values(batch: list[Any], *, collate_fn_map: Any = None) -> NoReturn:
    values = sorted(batch, key=lambda item: isinstance(item, Lazy))
    names = (repr(item) if item is None or isinstance(item, Lazy) else type(item).__name__ for item in values)
    raise TypeError(f"default_collate cannot batch {' and '.join(dict.fromkeys(names)):.200}; {_COLLATE_REMEDY}")


_COLLATE_REMEDY = (
    "read batches of a cache with tc.torch_loader(cache, batch_size=…, collate=…), or with collate_fn=cache.read_batch and "
    "range(len(cache)) as dataset; collate={NAME: 'pad'} or 'list' takes tensors of several shapes, and a function of the "
    "samples, such as list, takes any values"
)
# torch's `default_collate` reads each tensor once, directly into its row of the batch
default_collate_fn_map.setdefault(LazyTensor, _collate_tensors)
default_collate_fn_map.setdefault(LazyArray, _collate_arrays)
default_collate_fn_map.setdefault(type(None), _refuse_values)  # torch itself would only name the type
