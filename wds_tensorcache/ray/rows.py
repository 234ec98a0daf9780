"""The two forms of a sample as a row of Ray.

A row with *columns* has a column for each tensor and each small value. An *exact* row has the two members of the sample in a
shard: `__skeleton__` and `__tensors__`. Both forms have the key in `__key__`, and a `Mark` as JSON in `__tensorcache__`.
Members outside the cache are in columns named by a dot and the suffix, such as `.jpg`.
"""

from __future__ import annotations

import json
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any
from urllib.parse import unquote

import numpy as np
import pyarrow as pa
import torch

from wds_tensorcache.codec.carriers import arrow_carrier
from wds_tensorcache.codec.dtypes import dtype_name
from wds_tensorcache.codec.lazy import Lazy
from wds_tensorcache.codec.reference import component
from wds_tensorcache.codec.sample import decode_sample, encode_sample
from wds_tensorcache.codec.tree import flatten, map_leaves, walk
from wds_tensorcache.errors import EncodeError, FormatError, InvalidKeyError, StaleCacheError, TensorCacheError
from wds_tensorcache.ray.columns import PLAIN, is_in_arrow, value_kind, values_by_column
from wds_tensorcache.reading.description import value_name
from wds_tensorcache.reading.structure import value_at
from wds_tensorcache.shards.names import hashed_key

KEY, MARK, SKELETON, TENSORS = "__key__", "__tensorcache__", "__skeleton__", "__tensors__"
RESERVED = frozenset({KEY, MARK, SKELETON, TENSORS})
MEMBER = "."  # first character of the columns of members; no path in a sample begins with it


@dataclass(frozen=True, slots=True)
class Mark:
    """Facts about a sample that the columns of its row lack.

    Attributes:
        columns: Dtype of each tensor of the sample, and type of each small value, by column: `"int"`, any type in a column of
            Python objects, `"object"` in all other columns. None if only other samples of the block have a value.
        is_whole: True if the columns contain the whole sample; False, for example, if the sample contains lists.
        is_described: True if the sample comes from a cache with a fingerprint.
        original: Name from which `tc.safe_key` made the key, if the key contains only a hash of the name.
    """

    columns: Mapping[str, Any] = field(default_factory=dict)
    is_whole: bool = True
    is_described: bool = False
    original: str | None = None

    def encode(self) -> str:
        columns = {name: _type_text(kind) for name, kind in self.columns.items()}
        return json.dumps([columns, self.is_whole, self.is_described, self.original])


def _type_text(kind: Any) -> str | None:
    if isinstance(kind, torch.dtype):
        return f"tensor:{dtype_name(kind)}"
    return f"ndarray:{kind.str}" if isinstance(kind, np.dtype) else kind


def _parse_type(text: str | None) -> Any:
    if text is None:
        return None
    kind, is_dtype, name = text.partition(":")
    if not is_dtype:
        return kind
    return arrow_carrier(getattr(torch, name) if kind == "tensor" else np.dtype(name)).true


@lru_cache(maxsize=256)
def parse_mark(text: str) -> Mark:
    """Parse the text of a mark; raise FormatError if it is none."""
    try:
        columns, is_whole, is_described, original = json.loads(text)
        types = {name: _parse_type(kind) for name, kind in columns.items()}
    except (ValueError, TypeError, AttributeError, SyntaxError, RecursionError) as exc:
        raise FormatError(f"the column {MARK!r} has {text!r:.100}, not made by read_ray; drop the column") from exc
    return Mark(types, bool(is_whole), bool(is_described), original if isinstance(original, str) else None)


def split_batch(batch: Any) -> tuple[dict[str, Any], list[Mark | None]]:
    """Return the values of a batch by column, and the rows' marks."""
    columns = values_by_column(batch)
    marks: list[Mark | None] = [None] * len(next(iter(columns.values()), ()))
    # Ray's `join` and `zip` add suffixes to the names of columns that both datasets have, also to the column of marks
    for column in sorted(name for name in columns if name.startswith(MARK)):
        suffix = column.removeprefix(MARK)
        for at, text in enumerate(columns.pop(column)):
            if text is not None:
                mark = parse_mark(str(text))
                marks[at] = _merge(marks[at] or Mark(), mark, suffix, columns) if suffix else mark
    return {name: _undo_conversions(name, values, marks) for name, values in columns.items()}, marks


def _merge(first: Mark, mark: Mark, suffix: str, columns: Container[str]) -> Mark:
    """Return the mark of a joined row. Shared columns of `mark` end in `suffix`."""
    kinds = {
        name + suffix if name + suffix in columns and name + suffix not in mark.columns else name: kind
        for name, kind in mark.columns.items()
    }
    is_whole, is_described = first.is_whole and mark.is_whole, first.is_described or mark.is_described
    return Mark({**kinds, **first.columns}, is_whole, is_described, first.original or mark.original)


def _undo_conversions(name: str, values: Sequence[Any], marks: Sequence[Mark | None]) -> Sequence[Any]:
    """Undo the changes that numpy, pandas and Arrow make to a column. Raise EncodeError if an int has lost bits."""
    # in a union of datasets, rows of one of them may lack a column of the other
    default = None if any(mark is not None and name in mark.columns for mark in marks) else ""
    kinds = ["" if mark is None else mark.columns.get(name, default) for mark in marks]
    may_be_float = not isinstance(values, np.ndarray) or values.dtype.kind == "f"
    if not {None, "str", "bytes"} & set(kinds) and not (may_be_float and "int" in kinds):
        return values

    def own(value: Any, kind: Any) -> Any:
        if kind == "bytes" and isinstance(value, str):
            return value.encode()
        if kind == "str" and isinstance(value, bytes):
            return value.decode()
        if kind is None and _may_be_null(value):
            return None
        if kind != "int" or not isinstance(value, float) or not value.is_integer():
            return value
        # nulls in other rows turn ints into floats
        if abs(value) >= 1 << 53:
            problem = (
                f"column {name!r} has an int near {value:.0f}, which became a float because other rows lack the value"
            )
            raise EncodeError(f"{problem}; use batch_format='pyarrow', or give every sample the value")
        return int(value)

    return list(map(own, values, kinds))


def _may_be_null(value: Any) -> bool:
    """Return whether a value of numpy or pandas may be a null."""
    if isinstance(value, np.ndarray):
        return value.ndim > 0 and not value.size
    return value is None or (isinstance(value, (float, np.floating)) and bool(value != value))


def describe_sample(sample: Any) -> tuple[dict[str, Any], dict[str, Any], bool]:
    """Return tensors and values by column, and whether they are everything."""
    tensors, values = flatten(sample), dict[str, Any]()

    def note(path: tuple[Any, ...]) -> None:
        if path and all(type(step) in (str, int) for step in path):
            value = value_at(sample, path)
            if not any(isinstance(part, Lazy) for part, _ in walk(value)):
                values.setdefault(value_name(path), value)

    map_leaves(sample, lambda lazy: None, note)
    for name in (*tensors, *RESERVED):
        values.pop(name, None)
    is_whole = type(sample) is dict and RESERVED.isdisjoint(sample) and _is_nested(sample, set())
    return tensors, values, is_whole


def _is_nested(value: Any, seen: set[int]) -> bool:
    """Return whether a value has only dicts, tensors and small values. Each dict and tensor must occur once."""
    if type(value) is not dict and not isinstance(value, Lazy):
        return value_kind([value]) in PLAIN
    # an empty dict inside the sample has no column
    if id(value) in seen or (type(value) is dict and seen and not value):
        return False
    seen.add(id(value))
    return isinstance(value, Lazy) or all(
        type(key) is str and unquote(component(key, 0)) == key and _is_nested(item, seen) for key, item in value.items()
    )


def as_tensor(value: Any, dtype: Any = None) -> Any:
    """Return a column's value as a tensor or array of `dtype`.

    Without a dtype, only arrays of numbers become tensors.

    Hazard: the result may alias read-only memory of Ray; never write into it.
    """
    if value is None:
        return None
    if dtype is not None and not isinstance(dtype, str):
        carrier = arrow_carrier(dtype)
        # Ray makes lists of the tensors of a batch of numpy if one of its rows is None
        array = np.asarray(value, carrier.dtype if isinstance(value, list) else None)
        if array.dtype == f"V{dtype.itemsize}":
            array = array.reshape(-1).view(carrier.dtype).reshape(array.shape + carrier.inner)
        if not array.ndim and array.dtype.kind in "biuf" and is_in_arrow(dtype):
            # Arrow and pandas widen the numbers of tensors without dimensions
            with np.errstate(all="ignore"):
                narrow = array.astype(carrier.dtype)
            array = narrow if narrow == array or (narrow != narrow and array != array) else array
        if carrier.fits(array):
            return carrier.restore(array)
        if isinstance(dtype, np.dtype):
            return array
    if isinstance(value, np.generic) and not value.dtype.hasobject:
        item = value.item()
        # Python's times have no nanoseconds, so numpy gives an int
        return value if value.dtype.kind in "mM" and isinstance(item, int) else item
    if not isinstance(value, np.ndarray):
        return value
    if value.dtype.hasobject:
        return value.tolist()
    array = np.array(value, value.dtype.newbyteorder("="))
    try:
        return torch.from_numpy(array)
    except TypeError:  # torch lacks the dtype
        return array


def sample_of(row: Mapping[str, Any], mark: Mark | None, allow: Iterable[type] = ()) -> Any:
    """Return the nested sample of a row.

    Raises:
        EncodeError: The columns lack a part of the sample, or have no place in it.
    """
    sample: Any = {}
    members: tuple[Any, Any] = row.get(SKELETON), row.get(TENSORS)
    if members != (None, None):
        sample = decode_sample(*members, allow=allow)
    elif mark is not None and not mark.is_whole:
        remedy = "read_ray(…, exact=True) does; or return new samples with ray_table"
        raise EncodeError(f"columns do not have all of the sample, for example not its lists; {remedy}")
    for name, value in row.items():
        if name in RESERVED or name.startswith(MEMBER) or (value is None and mark is not None):
            continue
        *path, last = (unquote(part) for part in name.split("."))
        target = sample
        for part in path:
            target = target.setdefault(part, {}) if type(target) is dict else None
        if type(target) is not dict or last in target:
            problem = f"column {name!r} has no place in the sample, which has another value there"
            raise EncodeError(f"{problem}; rename the column")
        target[last] = as_tensor(value, None if mark is None else mark.columns.get(name))
    return sample


def exact_columns(
    keys: Sequence[str], samples: Iterable[Any], marks: Iterable[Mark], allow: Iterable[type]
) -> dict[str, Any]:
    """Return the columns of exact rows, without the column of keys."""
    allow = tuple(allow)
    members = []
    for key, sample in zip(keys, samples, strict=True):
        try:
            members.append(encode_sample(sample, allow=allow))
        except TensorCacheError as exc:
            raise exc.at(f"sample {key!r}") from exc
    return {
        SKELETON: pa.array([skeleton for skeleton, _ in members], pa.large_binary()),
        TENSORS: pa.array([tensors for _, tensors in members], pa.large_binary()),
        MARK: pa.array([mark.encode() for mark in marks], pa.string()),
    }


def keys_of(columns: Mapping[str, Sequence[Any]], key: str) -> list[str]:
    """Return the values of the column `key` as keys.

    Raises:
        KeyError: There is no such column.
        InvalidKeyError: A value is neither text nor an integer.
    """
    if key not in columns:
        raise KeyError(f"no column {key!r} among {sorted(columns)!r:.300}; pass key=…")
    for value in columns[key]:
        if not isinstance(value, (str, int, np.integer)) or isinstance(value, bool):
            problem = f"column {key!r} has a {type(value).__name__} as key"
            raise InvalidKeyError(f"{problem}, expected text or integers: {value!r:.100}")
    return list(map(str, columns[key]))


def samples_of_block(
    block: Any, key: str, has_fingerprint: bool, allow: Iterable[type]
) -> Iterator[tuple[str, Any, dict[str, Any]]]:
    """Yield the key, the sample and the members of each row.

    Raises:
        StaleCacheError: `has_fingerprint` is False, but a row comes from a cache with a fingerprint.
        KeyError, InvalidKeyError, EncodeError: As for `keys_of` and `sample_of`.
    """
    columns, marks = split_batch(block)
    keys = keys_of(columns, key) if marks else []
    columns.pop(key, None)
    for at, (name, mark) in enumerate(zip(keys, marks, strict=True)):
        if mark is not None and mark.is_described and not has_fingerprint:
            raise StaleCacheError(
                f"sample {name!r} was read from a cache that has a fingerprint, but fingerprint= is not given; if the "
                "samples are still what it describes, pass fingerprint=tc.open(source).fingerprint, else a "
                "description of how they were made, or {} to leave it out"
            )
        row = {column: values[at] for column, values in columns.items()}
        members = {
            column[1:]: value for column, value in row.items() if column.startswith(MEMBER) and value is not None
        }
        try:
            sample = sample_of(row, mark, allow)
        except TensorCacheError as exc:
            raise exc.at(f"sample {name!r}") from exc
        if mark is not None and mark.original is not None and hashed_key(mark.original) == name:
            name = hashed_key(mark.original)  # with the original name; otherwise the row has another key now
        yield name, sample, members
