"""Lazy tensors and arrays: where their bytes are, and what can be asked of them without reading."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any, NoReturn

import numpy as np
import torch

from wds_tensorcache.codec.devices import check_device
from wds_tensorcache.codec.reference import Reference, Source
from wds_tensorcache.codec.views import check_array, check_tensor, view_array, view_tensor

__all__ = ["Lazy", "LazyArray", "LazyTensor", "read_array", "read_tensor"]


class Lazy:
    """What both kinds share: an immutable pair of a reference and a source."""

    __slots__ = ("__weakref__", "_reference", "_source")
    _reference: Reference
    _source: Source

    def __new__(cls, reference: Reference, source: Source) -> Any:
        self = _new(cls)
        _set_reference(self, reference)
        _set_source(self, source)
        return self

    name = property(lambda self: self._reference.name, doc="The tensor's name in its `.safetensors` member.")
    dtype = property(lambda self: self._reference.dtype, doc="The dtype that loading gives.")
    shape = property(lambda self: self._reference.shape, doc="The shape that loading gives.")
    ndim = property(lambda self: len(self._reference.shape), doc="Number of dimensions.")
    nbytes = property(lambda self: self._reference.end - self._reference.begin, doc="Bytes of the elements.")

    def view_bytes(self) -> np.ndarray[Any, Any]:
        """Return the elements' bytes as uint8.

        Memory: the source's; never write into it. A shard's is a memory map: if the shard is cut short in place, or the
            disk cannot read it, reading the view kills the process (SIGBUS).
        """
        return self._source.view(self._reference.begin, self._reference.end)

    def _extent(self, rows: tuple[int, int]) -> tuple[int, int]:
        """Return the bytes of the member that hold `rows` of the first dimension."""
        begin, end = self._reference.begin, self._reference.end
        stride = (end - begin) // self.shape[0]
        return begin + rows[0] * stride, begin + rows[1] * stride

    def _rows(self, index: Any) -> tuple[tuple[int, int], Any] | None:
        """Return which rows `index` needs, and the index into those; None if it is not simply a part of the first dim."""
        first, rest = (index[0], index[1:]) if type(index) is tuple and index else (index, ())
        if not self.shape or not self.shape[0]:
            return None
        if type(first) is int and -self.shape[0] <= first < self.shape[0]:
            row = first % self.shape[0]
            return (row, row + 1), (0, *rest)
        if type(first) is slice and first.step in (None, 1):
            try:
                begin, end, _ = first.indices(self.shape[0])
            except TypeError:
                return None
            return (begin, max(begin, end)), (slice(None), *rest)
        return None

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise AttributeError(f"a {type(self).__name__} is immutable; set attributes on what .load() returns")

    def __delattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"a {type(self).__name__} is immutable")

    def __setstate__(self, state: object) -> NoReturn:
        raise TypeError(f"a {type(self).__name__} takes no state")

    def __setitem__(self, index: object, value: object) -> NoReturn:
        raise TypeError(
            f"a {type(self).__name__} is read-only, what is assigned would be lost; assign to what .load() returns"
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        # A C pickler has no frame of its own: this is its caller's.
        if sys._getframe(1).f_globals.get("__name__") == "torch.serialization":
            return self._reduce_for_torch_save(protocol)
        r = self._reference
        source, begin = self._source.cut(r.begin, r.end)
        moved = begin + r.end - r.begin
        return _rebuild, (type(self), source, r.name, r.kind, r.dtype, tuple(r.shape), begin, moved, r.attribute)

    def _reduce_for_torch_save(self, protocol: Any) -> Any:
        """Return a reduction that `torch.load` accepts with weights_only=True: without classes of this package."""
        raise NotImplementedError

    def __copy__(self) -> Any:
        return self

    def __deepcopy__(self, memo: object) -> Any:
        return self

    def __iter__(self) -> Iterator[Any]:
        return iter(self.load())

    def load(self) -> Any:
        raise NotImplementedError

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r}, shape={list(self.shape)}, dtype={self.dtype})"


def _rebuild(cls: Any, source: Source, name: str, kind: str, dtype: Any, shape: Any, *rest: Any) -> Any:
    """Return a lazy tensor that was pickled: without its Reference, whose own pickling would take twice as long."""
    return cls(Reference(name, kind, dtype, torch.Size(shape) if kind == "tensor" else shape, *rest), source)


_new: Any = object.__new__
_set_reference: Any = vars(Lazy)["_reference"].__set__
_set_source: Any = vars(Lazy)["_source"].__set__


def read_tensor(source: Source, begin: int, end: int, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """Return the bytes `[begin, end)` of `source` as a tensor in memory of its own."""
    tensor = view_tensor(source.read(begin, end), dtype, shape)
    return check_tensor(tensor) if dtype is torch.bool else tensor


def read_array(
    source: Source, begin: int, end: int, dtype: np.dtype[Any], shape: tuple[int, ...]
) -> np.ndarray[Any, Any]:
    """Return the bytes `[begin, end)` of `source` as an array in memory of its own."""
    return check_array(view_array(source.read(begin, end), dtype, shape))


def _loaded(value: Any) -> Any:
    """Return `value` with every lazy tensor in plain lists, tuples and dicts loaded."""
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
        f"{name} would write into a {cls.__name__}, where the result is lost; call .load() and write into that"
    )


class LazyTensor(Lazy):
    """A torch.Tensor that has not been read yet.

    Torch functions, operators, methods and indexing read it each time they are used, into fresh memory that is the
    caller's own; a part of the first dimension reads only its own bytes. What is used more than once: `.load()` it once.

    Memory: holds its source (the member's bytes, or what identifies the file), not its elements.
    Threads/fork/pickle: immutable, safe everywhere; pickles with just its own bytes if its source is memory.
    """

    __slots__ = ()

    device = property(lambda self: torch.device("cpu"), doc="Where `.load()` puts it by default.")
    requires_grad = property(lambda self: False, doc="Caches hold values: False.")
    is_cuda = property(lambda self: False, doc="False: `.load(device)` puts it elsewhere.")

    layout = property(lambda self: torch.strided, doc="Always torch.strided.")
    itemsize = property(lambda self: self._like().element_size(), doc="Bytes of one element.")

    def _like(self) -> torch.Tensor:
        """Return a tensor with this dtype and no bytes, which answers what depends on the dtype alone."""
        return torch.empty(0, dtype=torch.uint8, device="cpu").view(self.dtype)

    def element_size(self) -> int:
        """Return the bytes of one element."""
        return self._like().element_size()

    def is_floating_point(self) -> bool:
        """Return whether the dtype is a floating-point one."""
        return self._like().is_floating_point()

    def is_complex(self) -> bool:
        """Return whether the dtype is a complex one."""
        return self._like().is_complex()

    def is_contiguous(self) -> bool:
        """Return True: what is loaded always is."""
        return True

    def __len__(self) -> NoReturn:
        # torch takes an index that has a length below 32 for a tuple of indices: tensor[lazy] would be silently wrong
        raise TypeError("a LazyTensor has no len(); use .shape[0]")

    def numel(self) -> int:
        """Return the number of elements."""
        return int(self.shape.numel())

    def dim(self) -> int:
        """Return the number of dimensions."""
        return len(self.shape)

    def size(self, dim: int | None = None) -> Any:
        """Return the shape, or one dimension of it."""
        return self.shape if dim is None else self.shape[dim]

    def load(
        self, device: torch.device | str | None = None, out: torch.Tensor | None = None, *, copy: bool = True
    ) -> torch.Tensor:
        """Return the tensor.

        Args:
            device: Where to put it; the CPU by default.
            out: Receives the elements and is returned; its shape and dtype must be the same.
            copy: False gives a view of the source, CPU only: never write into it, other reads of the source see it. A
                shard's view is a memory map, and **a shard that is cut short in place kills the process** that reads it
                (SIGBUS).

        Raises:
            ValueError: `out` has another shape or dtype.
            RuntimeError: `device` is not there.
            FormatError: A bool tensor holds other bytes than 0 and 1.

        Memory: fresh and the caller's own, aligned to 16 bytes; with `copy=False` it aliases the source and keeps it alive.
        """
        if out is not None:
            if isinstance(out, Lazy):
                _refuse_in_place(type(out), "load(out=…)")
            if out.shape != self.shape or out.dtype != self.dtype:
                raise ValueError(f"out is {out.dtype}{list(out.shape)}, but {self!r} is not")
            return self._load_into(out)
        reference = self._reference
        if copy:
            tensor = read_tensor(self._source, reference.begin, reference.end, reference.dtype, reference.shape)
        else:
            tensor = check_tensor(view_tensor(self.view_bytes(), reference.dtype, reference.shape))
        check_device(device)
        return tensor if device is None else tensor.to(device)

    def _reduce_for_torch_save(self, protocol: Any) -> Any:
        tensor: Any = self.load()
        return tensor.__reduce_ex__(protocol)

    def to(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Load the tensor and return what its `torch.Tensor.to` does; trainers look for this method in a value's class."""
        return self.load().to(*_loaded(list(args)), **_loaded(kwargs))

    def _load_into(self, out: torch.Tensor) -> torch.Tensor:
        if (
            out.device.type != "cpu"
            or not out.is_contiguous()
            or out.is_conj()
            or out.is_neg()
            or self.dtype is torch.bool
        ):
            with torch.no_grad():
                return out.copy_(self.load())
        if self.nbytes:
            raw: Any = out.detach().reshape(-1).view(torch.uint8).numpy()
            self._source.read_into(memoryview(raw), self._reference.begin)
        return out

    def __getitem__(self, index: Any) -> torch.Tensor:
        found = self._rows(index)
        if found is None:
            return self.load()[_loaded(index)]
        rows, rest = found
        part = read_tensor(self._source, *self._extent(rows), self.dtype, (rows[1] - rows[0], *self.shape[1:]))
        return part[_loaded(rest)] if rest != (slice(None),) else part

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        writes = (name.endswith("_") and not name.endswith("__")) or name.startswith("__i") or kwargs.get("inplace")
        target = args[0] if args else kwargs.get("input", kwargs.get("self", kwargs.get("tensor")))
        statistics = [kwargs.get(key) for key in ("running_mean", "running_var")] + list(args[1:3])
        if (
            _holds_lazy(kwargs.get("out"))
            or (writes and name not in _NOT_IN_PLACE and _holds_lazy(target))
            or (name in ("batch_norm", "instance_norm") and _holds_lazy(statistics) and kwargs.get("training", True))
        ):
            _refuse_in_place(cls, name)
        return func(*_loaded(list(args)), **_loaded(kwargs))

    def __getattr__(self, name: str) -> Any:
        # everything a tensor can do, except what would change it
        if name.startswith("__") or not hasattr(torch.Tensor, name):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        if name.endswith("_"):
            return lambda *args, **kwargs: _refuse_in_place(type(self), name)
        value = getattr(self.load(), name)
        if not callable(value):
            return value
        return lambda *args, **kwargs: value(*_loaded(list(args)), **_loaded(kwargs))

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        if torch.bfloat16 == self.dtype or (self.dtype.itemsize == 1 and self.dtype.is_floating_point):
            raise TypeError(
                f"numpy has no {self.dtype}; use .load().float().numpy(), or .load().view(torch.uint8).numpy()"
            )
        if copy is False:
            raise ValueError("reading a lazy tensor always copies; .load(copy=False) gives a view")
        array = self.load().numpy()
        return array if dtype is None else array.astype(dtype, copy=False)

    def __dlpack__(self, **kwargs: Any) -> Any:
        return self.load().__dlpack__(**kwargs)

    def __dlpack_device__(self) -> Any:
        return 1, 0  # kDLCPU

    def __format__(self, spec: str) -> str:
        return format(self.load(), spec) if spec else repr(self)


_NOT_IN_PLACE = frozenset({"__invert__", "__index__", "__int__", "__iter__"})


_BINARY = "add sub mul truediv floordiv mod divmod pow matmul and or xor lshift rshift".split()
_OTHERS = "eq ne lt le gt ge neg pos abs invert bool int float complex index contains".split()
_OPERATORS = [f"__{name}__" for name in (*_BINARY, *(f"r{name}" for name in _BINARY), *_OTHERS)]


def _operator(name: str) -> Any:
    def method(self: Any, *args: Any) -> Any:
        function = getattr(self.load(), name, None)
        return NotImplemented if function is None else function(*_loaded(list(args)))

    method.__name__ = name
    return method


def _in_place_operator(name: str) -> Any:
    def method(self: Any, other: Any) -> NoReturn:
        _refuse_in_place(type(self), name)

    method.__name__ = name
    return method


def _install_operators(cls: Any) -> None:
    """Give `cls` every operator of what it loads; the augmented ones refuse."""
    for name in _OPERATORS:
        setattr(cls, name, _operator(name))
    for name in _BINARY:
        setattr(cls, f"__i{name}__", _in_place_operator(f"__i{name}__"))
    cls.__hash__ = object.__hash__  # by identity, as tensors do


class LazyArray(Lazy):
    """A numpy array that has not been read yet: what `LazyTensor` is for tensors; `np.asarray` and ufuncs take it."""

    __slots__ = ()

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("len() of a 0-d array")
        return int(self.shape[0])

    def load(self, out: np.ndarray[Any, Any] | None = None, *, copy: bool = True) -> np.ndarray[Any, Any]:
        """Return the array, little-endian and C-contiguous; arguments, errors and memory as in `LazyTensor.load`."""
        if out is not None:
            if isinstance(out, Lazy):
                _refuse_in_place(type(out), "load(out=…)")
            if out.shape != self.shape or out.dtype != self.dtype:
                raise ValueError(f"out is {out.dtype}{list(out.shape)}, but {self!r} is not")
            out[...] = self.load()
            return out
        reference = self._reference
        if copy:
            return read_array(self._source, reference.begin, reference.end, reference.dtype, reference.shape)
        return check_array(view_array(self.view_bytes(), reference.dtype, reference.shape))

    def _reduce_for_torch_save(self, protocol: Any) -> NoReturn:
        raise TypeError(
            f"torch.save of {self!r}: torch.load refuses numpy arrays; save torch.from_numpy(x.load()), or tc.realize(sample) "
            "for torch.load(weights_only=False)"
        )

    def __getitem__(self, index: Any) -> Any:
        found = self._rows(index)
        if found is None:
            return self.load()[_loaded(index)]
        rows, rest = found
        part = read_array(self._source, *self._extent(rows), self.dtype, (rows[1] - rows[0], *self.shape[1:]))
        return part[_loaded(rest)]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or not hasattr(np.ndarray, name):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        if name in _ARRAY_IN_PLACE:
            return lambda *args, **kwargs: _refuse_in_place(type(self), name)
        return getattr(self.load(), name)

    def __dlpack__(self, **kwargs: Any) -> Any:
        return self.load().__dlpack__(**kwargs)

    def __dlpack_device__(self) -> Any:
        return 1, 0  # kDLCPU

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        if copy is False:
            raise ValueError("reading a lazy array always copies; .load(copy=False) gives a view")
        array = self.load()
        return array if dtype is None else array.astype(dtype, copy=False)


_ARRAY_IN_PLACE = frozenset(
    {"byteswap", "fill", "itemset", "partition", "put", "resize", "setfield", "setflags", "sort"}
)


_install_operators(LazyTensor)
_install_operators(LazyArray)
