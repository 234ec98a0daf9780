"""Which samples are asked for, and the structure of the batch: the first sample's, kept for the batches to come."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from wds_tensorcache.codec.lazy import Lazy
from wds_tensorcache.codec.reference import reference_text
from wds_tensorcache.codec.skeleton.template import Template
from wds_tensorcache.errors import BatchError
from wds_tensorcache.reading.batch.columns import Columns, Layouts, check_same_names
from wds_tensorcache.reading.batch.nest import Path, Recipe, is_shared, named_tensors, project, recipe_of
from wds_tensorcache.reading.batch.rows import Rows
from wds_tensorcache.reading.shard_set import Store

__all__ = ["Request", "Structure", "columns_of", "structure_of"]

_MAX_COLUMNS = 64


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
        columns: Columns of batches whose samples are all of one layout, by that layout's id.
        slots: Which of the template's values stands alone at a path; None if the value there is more than one.
    """

    sample: Any
    tensors: dict[str, Lazy]
    template: Template | None
    recipe: Recipe | None
    is_plain: bool
    columns: dict[int, Columns] = field(default_factory=dict)
    slots: dict[Path, int | None] = field(default_factory=dict)


def structure_of(sample: Any, template: Template | None) -> Structure:
    """Return the structure of `sample`, which is of that template if it is of one."""
    tensors = named_tensors(sample)
    is_plain = not is_shared(sample) and not any("@" in name or "~" in name for name in tensors)
    return Structure(sample, tensors, template, recipe_of(sample) if template is not None else None, is_plain)


@dataclass(frozen=True, slots=True)
class Request:
    """The samples of a batch, and the tensors that are asked for.

    Attributes:
        store: The shards, and the memory and threads to read them with.
        rows: The samples.
        structure: The first sample's.
        wanted: Returns whether a tensor is selected, by name; None if all are.
    """

    store: Store
    rows: Rows
    structure: Structure
    wanted: Callable[[str], bool] | None

    def sample(self, i: int) -> Any:
        """Return sample `i` of the batch, with lazy tensors."""
        sample = self.rows.sample(i)
        return sample if self.wanted is None else project(sample, self.wanted)


def columns_of(request: Request, layouts: Layouts) -> Columns:
    """Return the tensors of the first sample, which all samples must have.

    Raises:
        BatchError: A sample lacks a tensor, or has more, or has one of another kind or dtype.
    """
    structure = request.structure
    kept, first = structure.columns, id(layouts.items[0])
    columns = kept.get(first) if layouts.which is None else None
    if columns is None:
        names = list(structure.tensors)
        check_same_names(layouts, names, request.wanted)
        columns = Columns(names, layouts.items)
        columns.resolve(
            structure.tensors, [_texts(request, layouts, number) for number in range(len(layouts.items))], layouts
        )
        if layouts.which is None and structure.template is not None and layouts.items[0].texts is not None:
            if len(kept) >= _MAX_COLUMNS:
                kept.clear()
            kept[first] = columns  # has the layout, which so keeps its id
    return columns


def _texts(request: Request, layouts: Layouts, number: int) -> dict[str, str]:
    """Return how the skeletons of a layout refer to its tensors, by name."""
    layout = layouts.items[number]
    if layout.texts is not None:
        return dict(zip(layout.tensors, layout.texts, strict=True))
    # the index could not read these skeletons, so that each may refer to its tensors in its own way
    found: dict[str, str] = {}
    for i in np.flatnonzero(layouts.numbers() == number).tolist():
        references = [lazy._reference for lazy in named_tensors(request.sample(i)).values()]
        texts = {r.name: reference_text(r.kind, r.name, r.attribute) for r in references}
        found = found or texts
        if texts != found:
            name = next(name for name in found if texts.get(name) != found[name])
            one, other = layouts.key(number), layouts.rows.key(i)
            raise BatchError(f"tensor {name!r} is of another kind or dtype in sample {other!r} than in {one!r}")
    return found
