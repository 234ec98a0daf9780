"""What a batch is like: the structure of its first sample, kept for the batches to come."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from wds_tensorcache.codec.lazy import Lazy
from wds_tensorcache.codec.skeleton.template import Template
from wds_tensorcache.reading.batch.columns import Columns
from wds_tensorcache.reading.batch.placement import Recipe, fill, is_shared, recipe_of

__all__ = ["Structure", "structure_of"]


@dataclass(frozen=True, slots=True)
class Structure:
    """What a batch is like whose first sample is like `sample`.

    Attributes:
        sample: For its containers and keys.
        tensors: Its lazy tensors by name.
        template: That the sample is of, if it is of one.
        recipe: How to make a batch, if it is of a template.
        is_plain: Whether samples with tensors of the same names have them in the same places: none is in two places, or
            has a name that was made up.
        columns: Of batches whose samples are all of one layout, by that.
    """

    sample: Any
    tensors: dict[str, Lazy]
    template: Template | None
    recipe: Recipe | None
    is_plain: bool
    columns: dict[int, Columns] = field(default_factory=dict)


def structure_of(sample: Any, template: Template | None) -> Structure:
    """Return the structure of `sample`, which is of that template if it is of one."""
    tensors: dict[str, Lazy] = {}
    fill(sample, lambda lazy: tensors.setdefault(lazy.name, lazy), lambda path: None)
    is_plain = not is_shared(sample) and not any("@" in name or "~" in name for name in tensors)
    return Structure(sample, tensors, template, recipe_of(sample) if template is not None else None, is_plain)
