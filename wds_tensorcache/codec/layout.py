"""Layouts and forms: the contents of equal headers, kept once in bounded caches (FORMAT.md 3.1).

Samples of one cache share a few layouts. Hazard: entries come from files, so the caches bound their number and size.
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
    """One entry of a header.

    Attributes:
        name, dtype: Name, and stored dtype of safetensors.
        shape: Shape in elements of `dtype`.
        begin, end: Range of bytes in the *member*.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


@dataclass(slots=True, eq=False)
class Form:
    """The common part of layouts that differ only in shapes, as those of ragged samples do.

    Attributes:
        entries: (name, stored dtype, number of dimensions) of each tensor, in the order of their bytes.
        template: Template of an earlier skeleton; None before one is learnt.
        num_interpreted: Number of samples that did not match a template.
    """

    entries: tuple[tuple[str, str, int], ...]
    template: Any = None
    num_interpreted: int = 0


@dataclass(slots=True)
class Layout:
    """The contents of all members with one header.

    Attributes:
        tensors: Entries by name, in the order of their bytes, without holes.
        data_begin: Offset of the first tensor in the member.
        nbytes: Bytes of the whole member, with its header.
        form: Form of this layout.
        texts: References to the tensors, in the same order; None if only the header is known.
        references: Resolved references by text; filled by `resolve`.
        resolved: A template with its resolved references, in its order, and their texts, in the order of the tensors.
    """

    tensors: dict[str, StoredTensor]
    data_begin: int
    nbytes: int
    form: Form = field(compare=False, repr=False)
    texts: tuple[str, ...] | None = field(default=None, compare=False)
    references: dict[str, Any] = field(default_factory=dict, compare=False, repr=False)
    resolved: tuple[Any, Any, Any] = field(default=(None, None, None), compare=False, repr=False)


# Layouts of indexes and writers. After the table was full, equal layouts may be two objects.
_MADE: dict[tuple[Form, bytes, int, tuple[str, ...] | None], Layout] = {}
# By entries. Dropping a form loses only its template.
_FORMS: dict[tuple[tuple[str, str, int], ...], Form] = {}


def form_of(entries: tuple[tuple[str, str, int], ...]) -> Form:
    """Return the form with these entries: the same object each time, unless there are very many entries."""
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
    """Return the layout of `form` with the concatenated, valid shapes `dims`."""
    # Hazard: the author of an index can choose integers whose hashes collide. The hashes of bytes are seeded.
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
