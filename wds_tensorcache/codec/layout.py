"""What headers with the same tensors share, each kept once in bounded caches (FORMAT.md 3.1).

Samples of one cache share a handful of layouts. Hazard: entries come from files, so their number and size are bounded.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from wds_tensorcache.codec.dtypes import STORED

__all__ = ["MAX_CACHED_NBYTES", "MAX_LAYOUTS", "Form", "Layout", "StoredTensor", "form_of", "make_layout"]

MAX_LAYOUTS = 1024
MAX_CACHED_NBYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One entry of a header: `shape` in elements of `dtype` (a safetensors name), bytes `[begin, end)` of the *member*."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


@dataclass(slots=True, eq=False)
class Form:
    """What layouts share if they differ in their shapes alone; ragged samples have one form.

    Attributes:
        entries: (name, stored dtype, number of dimensions) of each tensor, in the order of their bytes.
        template: Learnt from an earlier skeleton of the form; None before that.
        num_interpreted: Number of samples that no template matched.
    """

    entries: tuple[tuple[str, str, int], ...]
    template: Any = None
    num_interpreted: int = 0


@dataclass(slots=True)
class Layout:
    """What all members with the same header share.

    Attributes:
        tensors: Entries by name, in the order of their bytes, which have no holes.
        data_begin: Byte offset of the first tensor in the member, after the header.
        nbytes: Bytes of the whole member, header included.
        form: Shared by all layouts that differ in their shapes alone.
        texts: References to the tensors in the same order; None if only the header is known.
        references: Resolved references by text; filled by `resolve`.
        resolved: A template, its references resolved in its order, and their texts in the tensors' order.
    """

    tensors: dict[str, StoredTensor]
    data_begin: int
    nbytes: int
    form: Form = field(compare=False, repr=False)
    texts: tuple[str, ...] | None = field(default=None, compare=False)
    references: dict[str, Any] = field(default_factory=dict, compare=False, repr=False)
    resolved: tuple[Any, Any, Any] = field(default=(None, None, None), compare=False, repr=False)


# Layouts that an index describes. After the table was full, equal ones may be two objects.
_MADE: dict[tuple[Form, bytes, int, tuple[str, ...] | None], Layout] = {}
# By entries. A form that is dropped loses its template alone.
_FORMS: dict[tuple[tuple[str, str, int], ...], Form] = {}


def form_of(entries: tuple[tuple[str, str, int], ...]) -> Form:
    """Return the form with these entries: the same object each time, unless they are many."""
    form = _FORMS.get(entries)
    if form is None:
        if not _is_small(entries):
            return Form(entries)
        if len(_FORMS) >= MAX_LAYOUTS:
            _FORMS.clear()
        form = _FORMS.setdefault(entries, Form(entries))
    return form


def _is_small(entries: tuple[tuple[str, str, int], ...]) -> bool:
    return sum(len(name) + 64 for name, *_ in entries) <= MAX_CACHED_NBYTES


def make_layout(form: Form, dims: Sequence[int], data_begin: int, texts: tuple[str, ...] | None = None) -> Layout:
    """Return the layout of `form` whose shapes, one after another, are `dims`; these must be valid."""
    # Hazard: an index's author can choose numbers whose hashes collide. Hashes of bytes cannot be chosen.
    place = (form, array("Q", dims).tobytes(), data_begin, texts)
    layout = _MADE.get(place)
    if layout is not None:
        return layout
    tensors = {}
    begin, first = data_begin, 0
    for name, dtype, ndim in form.entries:
        shape = tuple(dims[first : first + ndim])
        end = begin + math.prod(shape) * STORED[dtype][0]
        tensors[name] = StoredTensor(name, dtype, shape, begin, end)
        begin, first = end, first + ndim
    layout = Layout(tensors, data_begin, begin, form, texts)
    if not _is_small(form.entries):
        return layout
    if len(_MADE) >= MAX_LAYOUTS:
        _MADE.clear()
    return _MADE.setdefault(place, layout)
