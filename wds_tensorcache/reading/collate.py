"""Ways to collate the tensors of a batch, by tensor name."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from itertools import pairwise
from numbers import Integral
from typing import Any, TypeAlias

from wds_tensorcache.errors import BatchError, unknown_name

PadValue: TypeAlias = "complex | Mapping[str, complex]"
WAYS = ("stack", "list", "pad")  # accepted by read_batch
TENSOR_WAYS = (*WAYS, "auto")  # accepted by read_tensors


@dataclass(frozen=True, slots=True)
class Pad:
    """Padding of a tensor's rows, made by `tc.pad`, which explains the fields. A row contains one sample's data."""

    to: int | tuple[int, ...] | None = None
    value: complex = 0

    def __post_init__(self) -> None:
        lengths = self.to if isinstance(self.to, tuple) else () if self.to is None else (self.to,)
        are_lengths = all(isinstance(n, Integral) and not isinstance(n, bool) and n >= 0 for n in lengths)
        if not (lengths or self.to is None) or not are_lengths or any(a >= b for a, b in pairwise(lengths)):
            raise ValueError(
                f"to={self.to!r:.200}, expected a length, ascending lengths, or None for that of the longest row; "
                "as collate=, call it: tc.pad()"
            )

    def length(self, longest: int) -> int:
        """Return the length of the rows of a batch. The batch's longest tensor, of length `longest`, may exceed it."""
        if isinstance(self.to, tuple):
            return self.to[min(bisect_left(self.to, longest), len(self.to) - 1)]
        return longest if self.to is None else self.to


def pad(to: int | Sequence[int] | None = None, value: complex = 0) -> Pad:
    """Return a value for `collate=` that pads tensors to one length.

    Only the first dimension is padded; all other dimensions must be equal. A tensor without dimensions is stacked.

    Args:
        to: Length after padding, so that all batches have one shape. Or ascending lengths such as `[64, 128, 256]`: each batch
            gets the smallest length that fits, so that batches have few shapes. By default, the length of the longest tensor in
            the batch. Reading a tensor that is longer than all these lengths raises BatchError.
        value: Number that fills the padding of each tensor; texts and dates are filled with zero bytes. If a tensor's dtype
            cannot represent it, for example -1 in uint8, reading a batch raises BatchError.

    Raises:
        ValueError: `to` is neither a length nor a sequence of strictly ascending lengths. Lengths are ints of at least 0.
    """
    return Pad(tuple(to) if isinstance(to, Sequence) and not isinstance(to, str) else to, value)


@dataclass(frozen=True, slots=True)
class Collate:
    """The way to collate each tensor of a batch, by tensor name."""

    ways: Mapping[str, str | Pad]  # `"stack"`, `"list"`, `"pad"`, `"auto"` or a `Pad`, by tensor name or pattern
    pad_value: PadValue = 0  # for `"pad"`: a number, or numbers by tensor name or pattern
    prefix: str = ""  # added to a tensor's name before it is matched; used by joined caches

    def __post_init__(self) -> None:
        for option, wanted in ("collate", self.ways), ("pad_value", self.pad_value):
            for name in wanted if isinstance(wanted, Mapping) else ():
                if not isinstance(name, str):
                    expected = "names of tensors or patterns, which are strings; cache.schema lists the names"
                    raise TypeError(f"{option}={{{name!r:.100}: …}}, expected {expected}")

    def with_prefix(self, prefix: str) -> Collate:
        """Return a copy that adds `prefix` to tensor names."""
        return replace(self, prefix=self.prefix + prefix) if prefix else self

    def check_names(self, names: Sequence[str]) -> None:
        """Raise BatchError if a name or pattern except `*` matches no tensor."""
        for option, wanted in ("collate", self.ways), ("pad_value", self.pad_value):
            for pattern in wanted if isinstance(wanted, Mapping) else ():
                if pattern not in names and pattern != "*" and not any(fnmatchcase(name, pattern) for name in names):
                    raise BatchError(f"{option} has an {unknown_name('tensor', pattern, names)}")

    def way(self, name: str) -> str | Pad:
        """Return the way to collate a tensor.

        A name takes precedence over patterns, and the first matching pattern over others. The default is "stack".
        """
        name = self.prefix + name
        way: str | Pad = _find(self.ways, name, "stack")
        if way == "pad":
            return Pad(None, _find(self.pad_value, name, 0) if isinstance(self.pad_value, Mapping) else self.pad_value)
        return way


def _find(values: Mapping[str, Any], name: str, default: Any) -> Any:
    if name in values:
        return values[name]
    return next((value for pattern, value in values.items() if fnmatchcase(name, pattern)), default)


def collate_for(caches: Sequence[Any], collate: Any, pad_value: PadValue, more: Sequence[str] = ()) -> Any:
    """Return a `collate` that caches with different tensors accept.

    `more` has the names of tensors that are in the batches, but in no cache. See `as_collate` and `check_names` for errors.
    """
    if callable(collate):
        return collate
    ways = as_collate(collate, pad_value)
    if not (isinstance(collate, Mapping) or isinstance(pad_value, Mapping)):
        return collate
    ways.check_names([*dict.fromkeys(name for cache in caches for name in cache._batch_names()), *more])
    return ways


def as_collate(collate: Any, pad_value: PadValue, ways: tuple[str, ...] = WAYS) -> Collate:
    """Return the `Collate` for these arguments of `read_batch`. Raise ValueError if `collate` is a function or unknown."""
    if isinstance(collate, Collate):
        return collate
    by_name = collate if isinstance(collate, Mapping) else {"*": collate}
    for way in by_name.values():
        if not isinstance(way, Pad) and way not in ways:
            shown = f"{', '.join(map(repr, ways))}, tc.pad(…), a dict of these by tensor name"
            function = ", or a function of all samples of a batch" if ways is WAYS else ""
            raise ValueError(f"collate={way!r:.100}, expected {shown}{function}")
    return Collate(by_name, pad_value)
