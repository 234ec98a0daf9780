"""Requests for the samples of a batch, and the structures of samples that earlier batches had."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np

from wds_tensorcache.codec.header import Form, Layout
from wds_tensorcache.codec.lazy import Lazy
from wds_tensorcache.codec.reference import reference_text
from wds_tensorcache.codec.skeleton.template import Template, item_getter
from wds_tensorcache.codec.tree import Path, Wanted, flatten, is_shared, map_leaves, project
from wds_tensorcache.errors import BatchError, FormatError
from wds_tensorcache.reading.batch.columns import Columns, Layouts, check_same_names, layouts_of
from wds_tensorcache.reading.batch.rows import Rows
from wds_tensorcache.reading.store import Store
from wds_tensorcache.reading.structure import merge
from wds_tensorcache.shards.shard import Shard

__all__ = ["Request", "Structure", "Structures", "Variant", "columns_of", "keep_known"]

_MAX_KNOWN = 64
_NUM_WITH_VALUES = 16
_MAX_LAYOUTS = 8  # batches of more layouts rarely have the same ones again
_Visits: TypeAlias = "tuple[list[str], list[Path], list[tuple[type, Any, Any]]]"


@dataclass(frozen=True, slots=True)
class Variant:
    """Another template than that of a batch's first sample. Its samples have the structure of the batch, but may lack tensors.

    Attributes:
        template: The template.
        nones: Numbers of the values that must be None, because the batch may have tensors in their places.
        slots: As `Structure.slots`.
    """

    template: Template
    nones: tuple[int, ...]
    slots: dict[Path, int | None] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Structure:
    """The structure of a batch, shared by all batches that begin with such a sample and complete it in the same way.

    Attributes:
        sample: Sample that shows the containers and their keys: the first one, with all tensors that any sample of the
            batch or of its shards has, including those that are not selected.
        tensors: Selected lazy tensors of `sample`, by name.
        template: Template that the first sample matches, if any.
        visits: Everything that `map_leaves` visits in the sample: tensor names, paths of all other values, and containers as in
            `Template`. None if the first sample matches no template, or lacks tensors.
        is_plain: True if tensor names determine where tensors are: each tensor occurs once, and its name is its path.
        nones: Paths at which the first sample has None, and another sample has a tensor, or a container of tensors.
        forms: Forms of the samples that completed `sample`.
        slots: For each path that was looked up, the index of the template's value at that path; None for a container; -1 for a
            tensor, or if the first sample has nothing there.
        variants: Other templates of samples that have this structure, by the ids of the templates.
    """

    sample: Any
    tensors: dict[str, Lazy]
    template: Template | None
    visits: _Visits | None
    is_plain: bool
    nones: tuple[Path, ...] = ()
    forms: tuple[Form, ...] = ()
    slots: dict[Path, int | None] = field(default_factory=dict)
    variants: dict[int, Variant] = field(default_factory=dict)


class Structures:
    """The known structures of a cache's samples, with only the selected tensors.

    A sample's form (names, stored dtypes and numbers of dimensions) is in the index, and determines the sample's tensors.
    A sample's template (the skeleton without plain values) determines where the tensors are in the sample. Only the
    skeleton tells the template, because samples of one form may have different containers and values.

    Args:
        wanted: Function that returns whether the tensor with a name is selected; None if all tensors are.

    Attributes:
        columns: Columns of batches with few layouts, by the ids of the layouts.
        chosen: Structures of the same samples with chosen alternatives; see `reading/choices`.
    """

    def __init__(self, wanted: Wanted | None) -> None:
        self.wanted = wanted
        self.columns: dict[tuple[int, ...], Columns] = {}
        self.chosen: dict[Any, Structures] = {}
        # number of next batches from remote shards that fetch all skeletons together with the tensors
        self.num_with_values = 0
        # by the id of the first sample's template; if it lacks tensors, also by the ids of `Structure.forms`
        self._by_template: dict[Any, Structure] = {}
        self._by_form: dict[
            Any, tuple[Form, dict[str, Lazy]]
        ] = {}  # the value refers to the form, so the id is not reused

    @property
    def wanted_in_whole(self) -> Wanted | None:
        """Function that returns whether the tensor with a name is selected, for samples from `Request.whole_sample`."""
        return self.wanted

    def note_values(self) -> None:
        """Record that the values of a batch are used."""
        self.num_with_values = _NUM_WITH_VALUES

    def selected(self, sample: Any) -> Any:
        """Return a sample with only its selected tensors."""
        return sample if self.wanted is None else project(sample, self.wanted)

    def structure_for(self, layouts: Layouts) -> Structure:
        """Return the structure of a batch."""
        rows = layouts.rows
        template, forms = rows.template(), tuple(form for form, *_ in layouts.exemplars) if layouts.exemplars else ()
        key: Any = (id(template), *map(id, forms)) if forms else id(template)
        structure = self._by_template.get(key)  # the value refers to the template and the forms, so no id is reused
        if structure is None:
            structure = self._structure(layouts, template, forms)
            if template is not None:
                keep_known(self._by_template, key, structure)
        return structure

    def _structure(self, layouts: Layouts, template: Template | None, forms: tuple[Form, ...]) -> Structure:
        sample, nones = self._whole(layouts.rows.sample(0)), set[Path]()
        for _, number, row in layouts.exemplars:
            try:
                other = self._whole(layouts.rows.shards[number].sample(row))
            except FormatError:
                if ((layouts.rows.number == number) & (layouts.rows.row == row)).any():
                    raise
                continue  # a damaged sample outside the batch, which then lacks its tensors
            sample, found = merge(sample, other)
            nones.update(found)
        wanted = self.wanted_in_whole or (lambda name: True)
        tensors = {name: lazy for name, lazy in flatten(sample).items() if wanted(name)}
        is_plain = not is_shared(sample, wanted) and not any("@" in name or "~" in name for name in tensors)
        visits = _visits_of(sample, wanted) if template is not None and not forms else None
        return Structure(sample, tensors, template, visits, is_plain, tuple(nones), forms)

    def _whole(self, sample: Any) -> Any:
        """Return a sample with the structure of the batch if all tensors are selected."""
        return sample

    def known_tensors(self, layout: Layout) -> dict[str, Lazy] | None:
        """Return the lazy tensors of an earlier sample with the same form and references, by name; None if there was none."""
        known = self._by_form.get((id(layout.form), layout.texts))
        return None if known is None else known[1]

    def tensors(self, layouts: Layouts) -> dict[str, Lazy]:
        """Return the batch's lazy tensors by name, with the kinds and dtypes of a sample's tensors."""
        layout = layouts.items[0]
        tensors = None if layouts.exemplars else self.known_tensors(layout)
        if tensors is None:
            structure = self.structure_for(layouts)
            tensors = structure.tensors
            if structure.template is not None and layout.texts is not None and not layouts.exemplars:
                keep_known(self._by_form, (id(layout.form), layout.texts), (layout.form, tensors))
        return tensors


class _Slot:
    """A placeholder for a tensor or another value while `_visits_of` runs."""

    def __init__(self, found: list[Any], what: Any) -> None:
        self.found, self.number = found, len(found)
        found.append(what)


def _visits_of(sample: Any, wanted: Wanted) -> _Visits:
    """Return `Structure.visits` of a sample that matches a template, and so has only dicts, lists and tuples, each once."""
    names: list[str] = []
    paths: list[Path] = []
    containers: list[tuple[type, Any, Any]] = []

    def visit(value: Any) -> int:
        if isinstance(value, _Slot):
            return value.number + (len(names) if value.found is paths else 0)
        items = list(map(visit, value.values() if type(value) is dict else value))
        containers.append((type(value), tuple(value) if type(value) is dict else (), item_getter(items)))
        return len(names) + len(paths) + len(containers) - 1

    visit(map_leaves(sample, lambda lazy: _Slot(names, lazy.name), lambda path: _Slot(paths, path), wanted))
    return names, paths, containers


def keep_known(known: dict[Any, Any], key: Any, value: Any) -> None:
    """Add an entry to a bounded dict. Hazard: files determine the number of layouts, so a hostile one could fill memory."""
    if len(known) >= _MAX_KNOWN:
        known.clear()
    known[key] = value


@dataclass(frozen=True, slots=True)
class Request:
    """The samples of a batch, and the known structures of the cache.

    Attributes:
        store: Shards, and the memory and threads to read them.
        rows: Shard, row and byte offset of each sample.
        structures: Known structures of the cache's samples.
    """

    store: Store
    rows: Rows
    structures: Structures

    def __len__(self) -> int:
        return len(self.rows.row)

    def key(self, i: int) -> str:
        """Return the key of sample `i` of the batch."""
        return self.rows.key(i)

    def layouts(self) -> Layouts:
        """Return the layouts of the batch."""
        return layouts_of(self.rows)

    def skeletons_ahead(self) -> Iterable[int]:
        """Return the samples of a batch whose skeletons are fetched together with the tensors, if they are in remote shards.

        These are all samples if the values of a recent batch were used, which are in the skeletons. Otherwise it is the first
        sample, for the structure of the batch, unless its template is known.
        """
        if self.structures.num_with_values > 0:
            self.structures.num_with_values -= 1
            return range(len(self))
        shard = self.rows.shards[self.rows.number.item(0)]
        return () if not isinstance(shard, Shard) or shard.knows_template(self.rows.row.item(0)) else (0,)

    def in_view(self, store: Store, structures: Structures) -> Request:
        """Return the request of the same samples in another view of the cache."""
        return Request(store, self.rows, structures)

    def sample(self, i: int) -> Any:
        """Return sample `i` of the batch, with lazy tensors."""
        return self.structures.selected(self.rows.sample(i))

    def whole_sample(self, i: int) -> Any:
        """Return sample `i` with the structure that the batch has if all tensors are selected."""
        return self.rows.sample(i)


def columns_of(request: Request, layouts: Layouts) -> Columns:
    """Return the columns of a batch, for all tensors that any of its samples has, or another sample of their shards.

    Raises:
        BatchError: A tensor has no place in the first sample, or differs in kind or dtype between samples.
    """
    known, key = request.structures.columns, tuple(map(id, layouts.items))
    columns = None if layouts.exemplars else known.get(key)
    if columns is None:
        tensors = request.structures.tensors(layouts)
        check_same_names(layouts, tensors, request.structures.wanted_in_whole)
        columns = Columns(list(tensors), layouts.items)
        columns.resolve(tensors, [_texts(request, layouts, number) for number in range(len(layouts.items))], layouts)
        is_known = not layouts.exemplars and request.structures.known_tensors(layouts.items[0]) is not None
        if is_known and len(key) <= _MAX_LAYOUTS and all(layout.texts is not None for layout in layouts.items):
            keep_known(known, key, columns)  # columns refer to the layouts, so the ids are not reused
    return columns


def _texts(request: Request, layouts: Layouts, number: int) -> dict[str, str]:
    """Return the reference texts in the skeletons of a layout, by tensor name."""
    layout = layouts.items[number]
    if layout.texts is not None:
        return dict(zip(layout.tensors, layout.texts, strict=True))
    # the index has no references for these skeletons, so those of each sample may differ
    found: dict[str, str] = {}
    for i in np.flatnonzero(layouts.which == number).tolist():
        references = [lazy._reference for lazy in flatten(request.sample(i)).values()]
        texts = {r.name: reference_text(r.kind, r.name, r.attribute) for r in references}
        found = found or texts
        if texts != found:
            name = next(name for name in found if texts.get(name) != found[name])
            one, other = layouts.key(number), layouts.rows.key(i)
            raise BatchError(f"tensor {name!r} differs in kind or dtype between samples {one!r} and {other!r}")
    return found
