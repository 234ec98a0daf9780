"""Dtypes and shapes of the samples' tensors, taken from the index."""

from __future__ import annotations

import fnmatch
import glob
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NoReturn, TypeAlias

import numpy as np
import torch

from wds_tensorcache.codec.dtypes import dtype_name
from wds_tensorcache.codec.header import Form, Further
from wds_tensorcache.codec.reference import Reference, resolve
from wds_tensorcache.codec.tree import flatten
from wds_tensorcache.errors import list_names
from wds_tensorcache.reading.positions import Positions, by_shard, in_order
from wds_tensorcache.reading.store import Store
from wds_tensorcache.shards.shard import Shard

Array = np.ndarray[Any, Any]
DType: TypeAlias = "torch.dtype | np.dtype[np.generic]"
# a tensor's name, its reference in a sample, its shapes, int64 `[n, ndim]`, and the number of samples of each shape
Tensor: TypeAlias = "tuple[str, Reference, Array, Array]"


@dataclass(frozen=True, slots=True)
class TensorSchema:
    """The properties of one tensor across all samples.

    Attributes:
        name: Path of the tensor in the samples.
        kind: `"tensor"` for torch tensors, `"ndarray"` for numpy arrays; the kind in one of the samples if samples differ.
        dtype: The dtype of the loaded tensor, a torch or numpy dtype; a tuple of dtypes if samples differ.
        shape: Size of each dimension, or (smallest, largest) if samples differ; None if samples differ in their number of
            dimensions.
        nbytes: Total bytes of the tensor in all samples of the cache or view.
        num_samples: Number of samples of the cache or view that have the tensor.
    """

    name: str
    kind: str
    dtype: DType | tuple[DType, ...]
    shape: tuple[int | tuple[int, int], ...] | None
    nbytes: int
    num_samples: int


class _Shapes(dict[str, tuple[int, ...]]):
    """Shapes by tensor name. A wrong name raises a KeyError that names the sample and lists its tensors."""

    __slots__ = ("key",)
    key: str

    def __missing__(self, name: object) -> NoReturn:
        remedy = (
            f"if other samples have it, leave this one out: cache.filter(lambda entry: {name!r:.100} in entry.shapes)"
        )
        raise KeyError(f"sample {self.key!r} has no tensor {name!r:.100}; it has {list_names(self, name)}; {remedy}")


@dataclass(frozen=True, slots=True)
class Entry:
    """The properties of one sample, as recorded in the index.

    Attributes:
        key: Key of the sample.
        nbytes: Total bytes of the sample's tensors.
        shapes: Shape of each tensor of the sample, by the tensor's name.
    """

    key: str
    nbytes: int
    shapes: dict[str, tuple[int, ...]]


def make_entry(key: str, nbytes: int, shapes: dict[str, tuple[int, ...]]) -> Entry:
    shapes = _Shapes(shapes)
    shapes.key = key
    return Entry(key, nbytes, shapes)


class _Forms:
    """Known references of tensors for each form. Samples of one form differ only in shapes."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, tuple[str, ...] | None, Further], tuple[Form, dict[str, Reference]]] = {}

    def references(self, shard: Shard, row: int) -> dict[str, Reference]:
        """Return the references of a sample by tensor name. Their shapes may come from another sample of the same form."""
        layout = shard.layout(row)
        key = (id(layout.form), layout.texts, layout.further)
        if key not in self._known:
            if layout.texts is not None:
                references = {name: resolve(layout, text) for name, text in layout.named_texts.items()}
            else:
                # the index contains only stored dtypes; a skeleton has the true ones
                references = {name: lazy._reference for name, lazy in flatten(shard.sample(row)).items()}
            self._known[key] = layout.form, references
        return self._known[key][1]

    def shapes(self, shard: Shard, row: int) -> dict[str, tuple[int, ...]]:
        references = self.references(shard, row)
        return {
            name: tensor.shape[: len(references[name].shape)] if name in references else tensor.shape
            for name, tensor in shard.layout(row).named.items()
        }


def schema_of(store: Store, positions: Positions) -> dict[str, TensorSchema]:
    """Return the schema of the samples at `positions`. Cost: as for `stored_shapes`."""
    return merge_shapes(stored_shapes(store, positions))


def merge_shapes(tensors: Iterable[Tensor]) -> dict[str, TensorSchema]:
    schema: dict[str, TensorSchema] = {}
    for name, reference, shapes, counts in tensors:
        low, high = shapes.min(0).tolist(), shapes.max(0).tolist()
        shape = tuple(a if a == b else (a, b) for a, b in zip(low, high, strict=True))
        nbytes = int((shapes.prod(1) * counts).sum()) * int(reference.dtype.itemsize)
        new = TensorSchema(name, reference.kind, reference.dtype, shape, nbytes, int(counts.sum()))
        schema[name] = merge_schema(schema.get(name), new)
    return schema


def whole_schema(store: Store) -> Mapping[str, TensorSchema]:
    """Return the schema of all samples. Cost: loads the index of every shard, once."""
    if store.schema is None:
        store.load_indexes()
        store.schema = schema_of(store, range(len(store)))
    return store.schema


def stored_shapes(store: Store, positions: Positions) -> Iterator[Tensor]:
    """Yield a `Tensor` for each tensor of each form at `positions`.

    A shape may occur several times. Cost: a few numpy operations per shard and form. Memory: the shapes of all layouts in all
    shards.
    """
    forms = _Forms()
    # by form and references: the shapes of all tensors of each layout, and its number of samples
    parts: dict[int, tuple[Form, dict[str, Reference], list[Array], list[Array]]] = {}
    for shard, _, rows in by_shard(store, positions):
        table, numbers = shard.index.layouts, shard.columns.layout[rows]
        counts = np.bincount(numbers, minlength=len(table))
        first = np.zeros(len(table), np.int64)  # row of one sample of each layout
        first[numbers[::-1]] = rows[::-1]
        layouts = np.flatnonzero(counts)
        form_numbers = table.form[layouts]
        for number in np.unique(form_numbers).tolist():
            form, used = table.forms[number], layouts[form_numbers == number]
            references = forms.references(shard, first[used].min().item())
            _, _, dims, num_samples = parts.setdefault(id(references), (form, references, [], []))
            num_dims = sum(ndim for *_, ndim in form.entries)
            dims.append(table.dims[table.dims_begin[used, None] + np.arange(num_dims)].astype(np.int64))
            num_samples.append(counts[used])
    for form, references, dims, num_samples in parts.values():
        shapes, counts = np.concatenate(dims), np.concatenate(num_samples)
        ends = accumulate(ndim for *_, ndim in form.entries)
        firsts = {name: end - ndim for (name, _, ndim), end in zip(form.entries, ends, strict=True)}
        further = [name for name, reference in references.items() if name != reference.name]
        # inside a set, a dict's key or an allowed object, tensors have no path
        for name in [*filter(references.__contains__, firsts), *further]:
            reference = references[name]
            begin = firsts[reference.name]
            yield name, reference, shapes[:, begin : begin + len(reference.shape)], counts


def merge_schema(old: TensorSchema | None, new: TensorSchema) -> TensorSchema:
    if old is None:
        return new
    dtypes = tuple(dict.fromkeys((*_as_tuple(old.dtype), *_as_tuple(new.dtype))))
    shape = None
    if old.shape is not None and new.shape is not None and len(old.shape) == len(new.shape):
        ends = [(*_as_tuple(a), *_as_tuple(b)) for a, b in zip(old.shape, new.shape, strict=True)]
        shape = tuple(min(sizes) if min(sizes) == max(sizes) else (min(sizes), max(sizes)) for sizes in ends)
    dtype = dtypes if len(dtypes) > 1 else dtypes[0]
    nbytes, num_samples = old.nbytes + new.nbytes, old.num_samples + new.num_samples
    return TensorSchema(new.name, old.kind, dtype, shape, nbytes, num_samples)


def format_tensor(tensor: TensorSchema) -> str:
    """Return a tensor's dtype and shape as text, for example `bfloat16 [3..7, 16]`."""
    dtypes = "/".join(dtype_name(dtype) for dtype in _as_tuple(tensor.dtype))
    sizes = ["..".join(map(str, _as_tuple(size))) for size in tensor.shape or ()]
    shape = f"[{', '.join(sizes)}]" if tensor.shape is not None else "[…]"
    return f"{dtypes} {shape}{'' if tensor.kind == 'tensor' else ' (numpy)'}"


def _as_tuple(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)


def entries(store: Store, positions: Positions) -> Iterator[Entry]:
    """Yield an `Entry` for each sample at `positions`."""
    forms, last, shapes = _Forms(), None, dict[str, tuple[int, ...]]()
    for shard, rows in in_order(store, positions):
        for row in rows.tolist():
            layout = shard.layout(row)
            if layout is not last:
                last, shapes = layout, forms.shapes(shard, row)
            yield make_entry(shard.key(row), layout.nbytes - layout.data_begin, shapes)


def shapes_of(store: Store, positions: Positions, name: str) -> tuple[list[tuple[int, ...]], Array]:
    """Return a tensor's distinct shapes, and each sample's index into them. Raise KeyError if a sample lacks it."""
    forms = _Forms()
    numbers: dict[tuple[int, ...], int] = {}
    result = np.empty(len(positions), np.int64)
    for shard, which, rows in by_shard(store, positions):
        _, firsts, inverse = np.unique(shard.columns.layout[rows], return_index=True, return_inverse=True)
        shapes = []
        for row in rows[firsts].tolist():
            entry = make_entry(shard.key(row), 0, forms.shapes(shard, row))
            shapes.append(numbers.setdefault(entry.shapes[name], len(numbers)))
        result[which] = np.array(shapes)[inverse]
    return list(numbers), result


def members_of(store: Store, positions: Positions) -> dict[str, Array]:
    """Return masks of samples with a member `KEY.suffix`, by suffix, bool `[len(positions)]`."""
    result: dict[str, Array] = {}
    for shard, which, rows in by_shard(store, positions):
        for suffix in shard.index.members:
            having = shard.find_members(rows, suffix) >= 0
            if having.any():
                result.setdefault(suffix, np.zeros(len(positions), np.bool_))[which] = having
    return result


def as_patterns(patterns: Any) -> tuple[str, ...]:
    """Return the patterns of `select` as a tuple. Raise TypeError if one is not a string."""
    names = (patterns,) if isinstance(patterns, (str, int)) else tuple(patterns)
    if not all(isinstance(name, str) for name in names):
        raise TypeError(
            f"select takes names of tensors, got {patterns!r:.100}; for samples, cache[…] takes indices, keys or a mask"
        )
    return names


def with_trees(patterns: Iterable[str]) -> tuple[str, ...]:
    """Return `patterns`, and a pattern for the tensors inside each matching container."""
    patterns = tuple(patterns)
    # a name with brackets matches only its escaped pattern
    patterns = (*patterns, *(glob.escape(pattern) for pattern in patterns if "[" in pattern))
    return (*patterns, *(f"{pattern}.*" for pattern in patterns))


def find_unknown(patterns: Iterable[str], names: Collection[str]) -> str | None:
    """Return the first pattern that matches no tensor and no container."""
    return next((name for name in patterns if not any(fnmatch.filter(names, one) for one in with_trees([name]))), None)


def name_matcher(patterns: Iterable[str]) -> Callable[[str], bool]:
    """Return a predicate for names that match one of the `fnmatch` patterns."""
    match = re.compile("|".join(f"(?:{fnmatch.translate(pattern)})" for pattern in patterns) or r"(?!)").match
    return lambda name: match(name) is not None
