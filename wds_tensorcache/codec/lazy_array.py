"""Lazy numpy arrays: what `LazyTensor` is for tensors."""

from __future__ import annotations

from typing import Any, NoReturn

import numpy as np

from wds_tensorcache.codec.lazy import Lazy, install_operators, loaded, refuse_in_place
from wds_tensorcache.codec.reference import Source
from wds_tensorcache.codec.views import check_array, view_array

__all__ = ["LazyArray", "read_array"]


def read_array(
    source: Source, begin: int, end: int, dtype: np.dtype[Any], shape: tuple[int, ...]
) -> np.ndarray[Any, Any]:
    """Return the bytes `[begin, end)` of `source` as an array in memory of its own."""
    return check_array(view_array(source.read(begin, end), dtype, shape))


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
                refuse_in_place(type(out), "load(out=…)")
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
            return self.load()[loaded(index)]
        rows, rest = found
        part = read_array(self._source, *self._extent(rows), self.dtype, (rows[1] - rows[0], *self.shape[1:]))
        return part[loaded(rest)]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or not hasattr(np.ndarray, name):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        if name in _ARRAY_IN_PLACE:
            return lambda *args, **kwargs: refuse_in_place(type(self), name)
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


install_operators(LazyArray)
