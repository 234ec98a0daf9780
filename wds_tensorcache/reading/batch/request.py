"""Requests for batches, and the known structures of samples."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import numpy as np

from wds_tensorcache.codec.header import Form, keep_bounded
from wds_tensorcache.codec.reference import reference_text
from wds_tensorcache.codec.skeleton.template import Template, item_getter
from wds_tensorcache.codec.tree import Path, Wanted, flatten, is_shared, map_leaves, names_of, project, separate
from wds_tensorcache.errors import BatchError, FormatError
from wds_tensorcache.reading.batch.columns import Columns, Layouts, layouts_of
from wds_tensorcache.reading.batch.rows import Rows, locate
from wds_tensorcache.reading.schema import TensorSchema, whole_schema
from wds_tensorcache.reading.store import Store
from wds_tensorcache.reading.structure import drop_none, insert, steps_of
from wds_tensorcache.shards.shard import Shard

_NUM_WITH_VALUES = 16
_MAX_LAYOUTS = 8  # batches of more layouts rarely have the same layouts again
_Visits: TypeAlias = "tuple[list[str], list[Path], list[tuple[type, Any, Any]]]"


class NewNames(Exception):
    """A signal to read the batch again: an index got new names. The old index lacked names that a skeleton has."""


@dataclass(frozen=True, slots=True)
class Structure:
    """The nesting of a batch. Batches with the same template and the same missing tensors share it."""

    # Sample of the batch with the most selected tensors, completed by the tensors that it lacks. It shows the containers and
    # their keys; tensors that are not selected remain.
    sample: Any
    names: tuple[str, ...]  # of the selected tensors
    template: Template | None  # that the sample matches, if any
    # Everything that `map_leaves` visits in the sample: tensor names, paths of all other values, and containers as in
    # `Template`. It is None if the sample matches no template, or lacks tensors.
    visits: _Visits | None
    is_plain: bool  # whether each tensor occurs once, and its name is its path
    is_exact: bool  # whether `sample` is unchanged, so that all samples of the template have this structure
    has_missing: bool  # whether the sample itself lacks tensors of the batch
    # keys for samples that match this structure: a template, and the indices of its values that are None
    checked: dict[Any, bool] = field(default_factory=dict)


class Structures:
    """The known structures of a cache's samples, with only the selected tensors.

    A sample's form (names, stored dtypes and numbers of dimensions) is in the index, and determines the sample's tensors.
    A sample's template (the skeleton without plain values) determines where the tensors are in the sample. The template is
    known only from the skeleton, because samples of one form may have different containers and values.

    Args:
        wanted: Function that returns whether the tensor with a given name is selected; None selects all tensors.
        optional: Names of tensors that are not selected, and that some samples lack.

    Attributes:
        columns: Columns of batches with few layouts, by the ids of the layouts, `Request.fixed` and the choices.
        views: Structures of the same samples with fewer tensors, by the names of these tensors or by the alternatives that are
            left out.
    """

    def __init__(self, wanted: Wanted | None, optional: Iterable[str] = ()) -> None:
        self.wanted = wanted
        self.optional = tuple(optional)
        self.columns: dict[tuple[Any, ...], Columns] = {}
        self.views: dict[Any, Structures] = {}
        # number of coming batches from remote shards that fetch all skeletons together with the tensors
        self.num_with_values = 0
        # by the template and the names of missing tensors
        self._by_template: dict[Any, Structure] = {}
        # the value refers to the form, so the id is not reused
        self._by_form: dict[Any, tuple[Form, tuple[str, ...]]] = {}

    def narrow(self, names: tuple[str, ...]) -> Structures:
        view = self.views.get(names)
        if view is None:
            view = copy.copy(self)
            Structures.__init__(view, lambda name: name in names and (self.wanted is None or self.wanted(name)))
            keep_bounded(self.views, names, view)
        return view

    def request(self, store: Store, positions: Any, fixed: tuple[str, ...]) -> Request:
        """Return a request for samples at `positions` of a store, int64 `[B]`."""
        return Request(store, locate(store, positions), self, fixed)

    def note_values(self) -> None:
        self.num_with_values = _NUM_WITH_VALUES

    def selected(self, sample: Any) -> Any:
        """Return a sample with only its selected tensors. It also lacks None in place of the tensors `optional`."""
        if self.wanted is None:
            return sample
        selected = project(sample, self.wanted)
        for name in self.optional:
            drop_none(selected, sample, name)
        return selected

    def comparable(self, sample: Any) -> Any:
        """Return a sample without values whose structures may differ."""
        return sample

    def find_base(self, layouts: Layouts) -> int:
        """Return the position of the sample with the most selected tensors. On a tie, more tensors win, then the first."""
        if not layouts.is_mixed:
            return 0
        wanted = self.wanted or (lambda name: True)
        counts = [(sum(map(wanted, layout.named)), len(layout.named)) for layout in layouts.items]
        most = max(counts)
        has_most = np.array([count == most for count in counts])
        return int(has_most[layouts.which].argmax())

    def structure_for(self, layouts: Layouts, fixed: tuple[str, ...] = ()) -> Structure:
        """Return the structure of a batch. Raise BatchError if a tensor has no place in it; see also `check_names`."""
        base = self.find_base(layouts) if layouts.is_mixed else 0
        missing = self._missing(layouts, base, fixed) if layouts.is_mixed or fixed else ()
        rows = layouts.rows
        shard, row = rows.shards[rows.number.item(base)], rows.row.item(base)
        if shard.is_remote and not shard.knows_template(row):
            rows.fetch_skeletons((base,))  # a new structure needs it, too
        stored = rows.fetched.get(base)
        template = shard.template(row) if stored is None else shard.template(row, stored)
        structure = self._by_template.get((template, missing))
        if structure is None:
            structure = self._structure(layouts, base, template, missing)
            if template is not None:
                keep_bounded(self._by_template, (template, missing), structure)
        return structure

    def _missing(self, layouts: Layouts, base: int, fixed: tuple[str, ...]) -> tuple[str, ...]:
        """Return names in the batch and in `fixed` that sample `base` lacks."""
        present = layouts.items[layouts.which.item(base)].named
        named = [name for layout in layouts.items for name in layout.named] if layouts.is_mixed else []
        return tuple(dict.fromkeys(name for name in (*named, *fixed) if name not in present))

    def _structure(self, layouts: Layouts, base: int, template: Template | None, missing: tuple[str, ...]) -> Structure:
        raw = layouts.rows.sample(base)
        check_names(layouts.rows, base, raw)
        sample, wanted = self.whole(raw), self.wanted or (lambda name: True)
        for name in missing:
            try:
                sample = insert(sample, name, self.whole(_donor(layouts, name, sample)))
            except ValueError as exc:
                if wanted(name):
                    raise BatchError(
                        f"sample {layouts.rows.key(base)!r} has neither tensor {name!r} of the batch, nor None in its place; "
                        "select the tensors that all samples have, take one of several by choose=, or collate with a function"
                    ) from exc
        names = tuple(filter(wanted, names_of(sample)))
        is_plain = not is_shared(sample, wanted) and not any("@" in name or "~" in name for name in names)
        visits = _visits_of(sample, wanted) if template is not None and not missing else None
        return Structure(sample, names, template, visits, is_plain, sample is raw, bool(missing))

    def whole(self, sample: Any) -> Any:
        """Return a sample with the structure of a batch of all tensors."""
        return separate(sample)[0]

    def names_for(self, layouts: Layouts, fixed: tuple[str, ...]) -> tuple[tuple[str, ...], bool]:
        """Return the names of a batch's tensors, and whether layouts determine them."""
        layout, key = layouts.items[0], None
        if not layouts.is_mixed and not self._missing(layouts, 0, fixed):
            # the bytes of a fetched skeleton would cost a request, so a kept form comes first
            key = id(layout.form), layout.texts, layout.further
            if key in self._by_form:
                return self._by_form[key][1], True
        structure = self.structure_for(layouts, fixed)
        if key is not None and structure.template is not None:
            keep_bounded(self._by_form, key, (layout.form, structure.names))
        return structure.names, structure.template is not None


def _donor(layouts: Layouts, name: str, sample: Any) -> Any:
    """Return a sample that shows how to insert tensor `name`, if needed."""
    # Only a sample shows whether the key `7` of a dict is an int, and the type of a container that `sample` lacks.
    if not re.search(r"(?:^|[.])-?[0-9]+(?:[.]|$)", name):
        for part in name.split(".")[:-1]:
            steps = steps_of(sample)
            sample = sample[steps[part]] if part in steps else None
        if sample is not None:
            return None
    rows = layouts.rows
    for number, layout in enumerate(layouts.items):
        if name in layout.named:
            return rows.sample(int(np.argmax(layouts.which == number)))
    for shard in rows.shards:
        for _, row in shard.forms() if isinstance(shard, Shard) else ():
            if name in shard.layout(row).named:
                return shard.sample(row)
    return None


def check_names(rows: Rows, i: int, sample: Any) -> None:
    """Compare a sample's tensors with its index. Raise FormatError if they differ, NewNames if an old index lacked names."""
    items, which, _ = rows.known_layouts
    number, layout = rows.number.item(i), items[which.item(i)]
    shard, texts = rows.shards[number], layout.named_texts
    if not isinstance(shard, Shard):
        return
    lazies = flatten(sample)
    is_same = True
    for lazy in lazies.values():
        reference = lazy._reference
        is_same &= texts.get(reference.name) == reference_text(reference.kind, reference.name, reference.attribute)
    has_names = {name: lazy.name for name, lazy in lazies.items() if name != lazy.name} == dict(layout.further)
    if is_same and not has_names and shard.index.layouts.further is None:
        rows.shards[number] = shard.with_names()  # type: ignore[index]
        raise NewNames
    if not (is_same and has_names):
        raise FormatError(f"{shard.path}: sample {rows.key(i)!r}: its tensors differ from the index")


def _visits_of(sample: Any, wanted: Wanted) -> _Visits:
    """Return `Structure.visits` of a sample that matches a template."""
    # such a sample contains only dicts, lists and tuples, and each container occurs once
    names: list[str] = []
    paths: list[Path] = []
    containers: list[tuple[type, Any, Any]] = []

    def visit(value: Any) -> int:
        if type(value) is int:  # the index of a name, or the inverted index of a path
            return value if value >= 0 else len(names) + ~value
        items = list(map(visit, value.values() if type(value) is dict else value))
        containers.append((type(value), tuple(value) if type(value) is dict else (), item_getter(items)))
        return len(names) + len(paths) + len(containers) - 1

    def number(items: list[Any], item: Any) -> int:
        items.append(item)
        return len(items) - 1

    visit(map_leaves(sample, lambda lazy: number(names, lazy.name), lambda path: ~number(paths, path), wanted))
    return names, paths, containers


@dataclass(frozen=True, slots=True)
class Request:
    """The samples of a batch, and the known structures of the cache."""

    store: Store
    rows: Rows
    structures: Structures
    # Names of tensors that have a place in every batch, even if all samples lack the tensor. Tensors that are not selected have
    # no place in batches or samples.
    fixed: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.rows.row)

    def key(self, i: int) -> str:
        return self.rows.key(i)

    def layouts(self) -> Layouts:
        return layouts_of(self.rows)

    def skeletons_ahead(self) -> Iterable[int]:
        """Return positions of remote samples whose skeletons to fetch with tensors."""
        # values of a recent batch were used, and skeletons contain them
        if self.structures.num_with_values > 0:
            self.structures.num_with_values -= 1
            return range(len(self))
        # the structure of the batch needs only the first sample, unless its template is known
        shard = self.rows.shards[self.rows.number.item(0)]
        return () if not isinstance(shard, Shard) or shard.knows_template(self.rows.row.item(0)) else (0,)

    def keeping(self, names: tuple[str, ...]) -> Request:
        return replace(self, structures=self.structures.narrow(names))

    def in_view(self, store: Store, structures: Structures, fixed: tuple[str, ...] = ()) -> Request:
        """Return a request for these samples in another view of the cache."""
        return Request(store, self.rows, structures, fixed)

    def again(self) -> Request:
        """Return a request for these samples, with an index's new names."""
        return replace(self, rows=replace(self.rows, known_layouts=[], known_samples={}))

    def find_names(self) -> bool:
        """Find names that old indexes lack; return whether this call adds names."""
        return bool(self.store.shards) and self.store.find_names(number for number, *_ in self.rows.by_shard)

    def place_chosen(self, batch: Any, tensors: Mapping[str, Any], decoded: Any) -> None:
        """Do nothing. A `ChosenRequest` puts the chosen tensors and values into the batch."""

    def schema(self) -> Mapping[str, TensorSchema]:
        """Return the schema of the whole cache, also for a view. Cost: the first call loads the index of every shard."""
        return whole_schema(self.store)

    def sample(self, i: int) -> Any:
        return self.structures.selected(self.rows.sample(i))


def columns_of(request: Request, layouts: Layouts) -> Columns:
    """Return the columns of a batch; see `Structures.structure_for` and `Columns.resolve` for errors."""
    cached, key = request.structures.columns, (*map(id, layouts.items), request.fixed)
    if layouts.chosen:
        key = (*key, *(tuple(chosen.items()) for chosen in layouts.chosen))
    columns = cached.get(key)
    if columns is None:
        names, are_known = request.structures.names_for(layouts, request.fixed)
        # one tensor with two names has memory for each: a transform may overwrite one of them
        columns = Columns(names, layouts)
        columns.resolve(layouts, request.schema)
        if are_known and len(layouts.items) <= _MAX_LAYOUTS:
            keep_bounded(cached, key, columns)  # columns refer to the layouts, so the ids are not reused
    return columns
