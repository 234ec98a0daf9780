"""Layouts and forms: what `.safetensors` members with equal or similar headers have in common (FORMAT.md 3.1).

A *layout* is a parsed header: the names, dtypes, shapes and byte ranges of the tensors in a member. A *form* is what
remains of a layout without its shapes: names, dtypes and numbers of dimensions. The samples of a cache share a few forms
and layouts, so both are stored once, in tables. Hazard: headers come from files, so a hostile file could fill these tables
if they had no limits on the number and size of their entries.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from wds_tensorcache.codec.dtypes import STORED

__all__ = ["MAX_CACHED_NBYTES", "MAX_LAYOUTS", "Form", "Further", "Layout", "StoredTensor", "form_of", "make_layout"]

MAX_LAYOUTS = 1024
MAX_CACHED_NBYTES = 1 << 16
Further: TypeAlias = tuple[tuple[str, str], ...]  # further names of tensors, each with the tensor's name


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor of a header.

    Attributes:
        name: Name of the tensor.
        dtype: Stored dtype, a key of `STORED`.
        shape: Shape in elements of `dtype`.
        begin, end: Byte range in the whole member, which includes the header.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


@dataclass(slots=True, eq=False)
class Form:
    """The common part of layouts that differ only in shapes, for example the layouts of texts of different lengths.

    Attributes:
        entries: (name, stored dtype, number of dimensions) of each tensor, in the order of their bytes.
        template: `Template` learned from an earlier skeleton of this form; None before that.
        num_interpreted: Number of skeletons that were read without the template.
        names: A template, and the further names of the tensors in samples that match it.
    """

    entries: tuple[tuple[str, str, int], ...]
    template: Any = None
    num_interpreted: int = 0
    names: tuple[Any, Further] = None, ()


@dataclass(slots=True)
class Layout:
    """The contents of a header, shared by all members with an equal header.

    Attributes:
        tensors: Tensors by name, in the order of their bytes; the bytes have no holes.
        data_begin: Offset of the first tensor in the member.
        nbytes: Length of the whole member, including its header.
        form: Form of this layout.
        texts: String of the reference to each tensor, in the same order; None if unknown, as after `parse_header`.
        further: Further names of tensors, each with the tensor's name.
        named: Tensors by all of their names.
        references: References by their strings; filled by `resolve`.
        resolved: A template; its references, in the order of the template; and the strings of these references, in the order of
            the tensors. Set by `resolve_template`.
    """

    tensors: dict[str, StoredTensor]
    data_begin: int
    nbytes: int
    form: Form = field(compare=False, repr=False)
    texts: tuple[str, ...] | None = field(default=None, compare=False)
    further: Further = field(default=(), compare=False)
    named: dict[str, StoredTensor] = field(init=False, compare=False, repr=False)
    references: dict[str, Any] = field(default_factory=dict, compare=False, repr=False)
    resolved: tuple[Any, Any, Any] = field(default=(None, None, None), compare=False, repr=False)

    def __post_init__(self) -> None:
        self.named = self.tensors
        if self.further:
            self.named = self.tensors | {further: self.tensors[name] for further, name in self.further}

    @property
    def named_texts(self) -> dict[str, str]:
        """Strings of the references by all names of the tensors; `texts` must be known."""
        assert self.texts is not None
        texts = dict(zip(self.tensors, self.texts, strict=True))
        return texts | {further: texts[name] for further, name in self.further}


# Results of `make_layout`. The table is cleared when it is full, so equal layouts may be different objects.
_MADE: dict[tuple[Form, bytes, int, tuple[str, ...] | None, Further], Layout] = {}
# Forms by their entries. The table is cleared when it is full; only the templates of the forms are lost.
_FORMS: dict[tuple[tuple[str, str, int], ...], Form] = {}


def form_of(entries: tuple[tuple[str, str, int], ...]) -> Form:
    """Return the form with these entries. Equal entries give the same object, unless they are long or the table was cleared."""
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


def make_layout(
    form: Form, dims: Sequence[int], data_begin: int, texts: tuple[str, ...] | None = None, further: Further = ()
) -> Layout:
    """Return the layout of `form` whose shapes, concatenated, are `dims`; the caller has validated them."""
    # Hazard: the author of an index can choose integers whose hashes collide; the hashes of bytes have a secret seed.
    contents = (form, array("Q", dims).tobytes(), data_begin, texts, further)
    layout = _MADE.get(contents)
    if layout is not None:
        return layout
    tensors = {}
    begin, first = data_begin, 0
    for name, dtype, ndim in form.entries:
        shape = tuple(dims[first : first + ndim])
        end = begin + math.prod(shape) * STORED[dtype][0]
        tensors[name] = StoredTensor(name, dtype, shape, begin, end)
        begin, first = end, first + ndim
    layout = Layout(tensors, data_begin, begin, form, texts, further)
    if not _is_small(form.entries):
        return layout
    if len(_MADE) >= MAX_LAYOUTS:
        _MADE.clear()
    return _MADE.setdefault(contents, layout)
