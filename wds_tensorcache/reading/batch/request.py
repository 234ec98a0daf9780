"""Which samples are asked for, and what is known of such samples from the batches before."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from wds_tensorcache.codec.layout import Form, Layout
from wds_tensorcache.codec.lazy import Lazy
from wds_tensorcache.codec.reference import reference_text
from wds_tensorcache.codec.skeleton.template import Template
from wds_tensorcache.errors import BatchError
from wds_tensorcache.reading.batch.columns import Columns, Layouts, check_same_names
from wds_tensorcache.reading.batch.nest import Path, Recipe, is_shared, named_tensors, project, recipe_of
from wds_tensorcache.reading.batch.rows import Rows
from wds_tensorcache.reading.shard_set import Store

__all__ = ["Request", "Structure", "Structures", "columns_of"]

_MAX_KNOWN = 64


@dataclass(frozen=True, slots=True)
class Structure:
    """What a batch is like whose first sample is like `sample`.

    Attributes:
        sample: A sample, for its containers and keys.
        tensors: Its lazy tensors by name.
        template: The template that the sample is of, if any.
        recipe: How to make a batch, if the sample is of a template.
        is_plain: Whether samples with tensors of the same names have them in the same places: no tensor is in two places, or
            has a name that was made up.
        slots: Which of the template's values stands alone at a path; None if the value there is more than one.
    """

    sample: Any
    tensors: dict[str, Lazy]
    template: Template | None
    recipe: Recipe | None
    is_plain: bool
    slots: dict[Path, int | None] = field(default_factory=dict)


class Structures:
    """What is known of the samples of a cache, as far as their tensors are selected.

    Which tensors a sample has is known by its form, which the index has. Where they are in the sample is known by its
    template: that takes its skeleton, since samples of one form may differ in their containers and values.

    Args:
        wanted: Returns whether a tensor is selected, by name; None if all are.

    Attributes:
        columns: Columns of batches whose samples are all of one layout, by that layout's id.
    """

    def __init__(self, wanted: Callable[[str], bool] | None) -> None:
        self.wanted = wanted
        self.columns: dict[int, Columns] = {}
        self._by_template: dict[int, Structure] = {}
        self._by_form: dict[Any, tuple[Form, dict[str, Lazy]]] = {}  # has the form, which so keeps its id

    def selected(self, sample: Any) -> Any:
        """Return a sample with only those of its tensors that are selected."""
        return sample if self.wanted is None else project(sample, self.wanted)

    def of(self, rows: Rows) -> Structure:
        """Return the structure of a batch: its first sample's."""
        template = rows.template()
        structure = self._by_template.get(id(template))  # has the template, which so keeps its id
        if structure is None:
            sample = self.selected(rows.sample(0))
            tensors = named_tensors(sample)
            is_plain = not is_shared(sample) and not any("@" in name or "~" in name for name in tensors)
            recipe = recipe_of(sample) if template is not None else None
            structure = Structure(sample, tensors, template, recipe, is_plain)
            if template is not None:
                _keep(self._by_template, id(template), structure)
        return structure

    def known_tensors(self, layout: Layout) -> dict[str, Lazy] | None:
        """Return the lazy tensors by name of an earlier sample of the form; None if there was none."""
        known = self._by_form.get((id(layout.form), layout.texts))
        return None if known is None else known[1]

    def tensors(self, layouts: Layouts) -> dict[str, Lazy]:
        """Return lazy tensors by name, of the kinds and dtypes of the first sample's."""
        layout = layouts.items[0]
        tensors = self.known_tensors(layout)
        if tensors is None:
            structure = self.of(layouts.rows)
            tensors = structure.tensors
            if structure.template is not None and layout.texts is not None:
                _keep(self._by_form, (id(layout.form), layout.texts), (layout.form, tensors))
        return tensors


def _keep(known: dict[Any, Any], key: Any, value: Any) -> None:
    """Add to what is known, which is bounded: files have as many layouts and structures as their author likes."""
    if len(known) >= _MAX_KNOWN:
        known.clear()
    known[key] = value


@dataclass(frozen=True, slots=True)
class Request:
    """The samples of a batch, and what is known of them.

    Attributes:
        store: The shards, and the memory and threads to read them with.
        rows: The samples.
        structures: Structures of the cache that is asked.
    """

    store: Store
    rows: Rows
    structures: Structures

    def __len__(self) -> int:
        return len(self.rows.row)

    def key(self, i: int) -> str:
        """Return the key of sample `i` of the batch."""
        return self.rows.key(i)

    def sample(self, i: int) -> Any:
        """Return sample `i` of the batch, with lazy tensors."""
        return self.structures.selected(self.rows.sample(i))


def columns_of(request: Request, layouts: Layouts) -> Columns:
    """Return the tensors of the first sample, which all samples must have.

    Raises:
        BatchError: A sample lacks a tensor, or has more, or has one of another kind or dtype.
    """
    known, first = request.structures.columns, layouts.items[0]
    columns = known.get(id(first)) if len(layouts.items) == 1 else None
    if columns is None:
        tensors = request.structures.tensors(layouts)
        check_same_names(layouts, list(tensors), request.structures.wanted)
        columns = Columns(list(tensors), layouts.items)
        columns.resolve(tensors, [_texts(request, layouts, number) for number in range(len(layouts.items))], layouts)
        if len(layouts.items) == 1 and request.structures.known_tensors(first) is not None:
            _keep(known, id(first), columns)  # have the layout, which so keeps its id
    return columns


def _texts(request: Request, layouts: Layouts, number: int) -> dict[str, str]:
    """Return how the skeletons of a layout refer to its tensors, by name."""
    layout = layouts.items[number]
    if layout.texts is not None:
        return dict(zip(layout.tensors, layout.texts, strict=True))
    # the index could not read these skeletons, so that each may refer to its tensors in its own way
    found: dict[str, str] = {}
    for i in np.flatnonzero(layouts.which == number).tolist():
        references = [lazy._reference for lazy in named_tensors(request.sample(i)).values()]
        texts = {r.name: reference_text(r.kind, r.name, r.attribute) for r in references}
        found = found or texts
        if texts != found:
            name = next(name for name in found if texts.get(name) != found[name])
            one, other = layouts.key(number), layouts.rows.key(i)
            raise BatchError(f"tensor {name!r} is of another kind or dtype in sample {other!r} than in {one!r}")
    return found
