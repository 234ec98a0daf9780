"""Requests that choose one of several alternatives for each sample: only the bytes of the chosen one are read.

A batch sees each sample as if the chosen tensor had the name under which the batch has it, without the other alternatives.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import unquote

import numpy as np

from wds_tensorcache.codec.layout import Form, Layout
from wds_tensorcache.codec.lazy import Lazy
from wds_tensorcache.codec.reference import parse_reference, reference_text
from wds_tensorcache.codec.tree import Wanted, flatten, project, rebuild, separate
from wds_tensorcache.errors import BatchError, list_names
from wds_tensorcache.reading.batch.assemble import nest_batch
from wds_tensorcache.reading.batch.columns import Layouts, layouts_of
from wds_tensorcache.reading.batch.request import Request, Structures, check_names, keep_known
from wds_tensorcache.reading.choices.alternatives import Alternatives, Group
from wds_tensorcache.reading.choices.chooser import Choices, Chooser
from wds_tensorcache.reading.schema import whole_schema

__all__ = ["ChosenRequest", "choose_tensors", "nest_chosen"]

Array = np.ndarray[Any, Any]
_Available = list[list[tuple[str, ...]]]  # for each group, the alternatives that a sample has


@dataclass(frozen=True, slots=True)
class ChosenRequest(Request):
    """A request with one alternative chosen for each sample.

    Attributes:
        alternatives: Alternatives that were chosen from.
        chooser: How they were chosen.
        choices: For each group, the choice of each sample, int64 `[B]`.
        available: Alternatives that the samples of each distinct layout have.
        whole: Layouts of the samples with all their tensors.
        narrowed: Layouts of the samples as the batch sees them.
        values: Groups of alternatives that are not tensors; see `values.py`.
    """

    alternatives: Alternatives
    chooser: Chooser
    choices: Sequence[Array]
    available: Sequence[_Available]
    whole: Layouts
    narrowed: Layouts
    values: Sequence[Group] = ()

    def layouts(self) -> Layouts:
        return self.narrowed

    def sample(self, i: int) -> Any:
        structures: Any = self.structures
        return structures.selected(self.rows.sample(i), self._chosen(i))

    def whole_sample(self, i: int) -> Any:
        structures: Any = self.structures
        sample = self.rows.sample(i)
        check_names(self.rows, i, sample)
        return separate(structures.whole(sample, self._chosen(i)))[0]

    def in_view(self, store: Any, structures: Structures, fixed: tuple[str, ...] = ()) -> Request:
        choices, wanted = dict(zip(self.alternatives.groups, self.choices, strict=True)), structures.wanted
        if wanted is not None:  # without the groups that the view lacks
            names = [
                {name for each in self.available for one in each[at] for name in one if name}
                for at in range(len(choices))
            ]
            kept = [group for group, each in zip(choices, names, strict=True) if any(map(wanted, each))]
            if not kept:
                return Request(store, self.rows, structures, fixed)
            alternatives = Alternatives(tuple(kept))
        else:
            alternatives = self.alternatives
        request = Request(store, self.rows, structures, fixed)
        return choose_tensors(request, alternatives, lambda group, counts: choices[group])

    def again(self) -> Request:
        structures: Any = self.structures
        request = Request(self.store, replace(self.rows, known_layouts=[]), structures._base, self.fixed)
        return choose_tensors(request, self.alternatives, self.chooser)

    def schema(self) -> Any:
        return self.alternatives.schema_of(whole_schema(self.store))

    def named_choices(self) -> Choices:
        """Return the choices by name."""
        found: dict[str, Array] = {}
        chosen: dict[str, list[str]] = {}
        each = list(map(self._chosen, range(len(self))))
        for group, choices in zip(self.alternatives.groups, self.choices, strict=True):
            for name in group.names:
                found[name], chosen[name] = choices, [names[name] for names in each]
        return Choices(found, chosen)

    def keeping(self, names: Sequence[str]) -> ChosenRequest:
        """Return this request with only the tensors `names` of the batch."""
        structures: Any = self.structures
        return replace(self, structures=structures.keeping(tuple(names)))

    def _chosen(self, i: int) -> dict[str, str]:
        """Return the name of the chosen tensor of sample `i`, by name in the batch."""
        available = self.available[self.whole.which.item(i)]
        return {
            name: chosen
            for group, choices, each in zip(self.alternatives.groups, self.choices, available, strict=True)
            for name, chosen in zip(group.names, each[choices.item(i)], strict=True)
        }


def choose_tensors(request: Request, alternatives: Alternatives, chooser: Chooser) -> ChosenRequest:
    """Return a request that has only the chosen alternative of each group.

    Raises:
        BatchError: A sample has none of the alternatives of a name, or different numbers of alternatives for names that are
            chosen together.
    """
    structures = _structures_for(request.structures, alternatives)
    request.find_names()  # an old index may lack names of alternatives
    whole = layouts_of(request.rows)
    available = [structures.available(layout) for layout in whole.items]
    values = [
        group
        for at, group in enumerate(alternatives.groups)
        if len(group.names) == 1 and not any(each[at] for each in available)
    ]
    if values:
        tensors = Alternatives(tuple(group for group in alternatives.groups if group not in values))
        return replace(choose_tensors(request, tensors, chooser), values=values)
    choices = []
    for at, group in enumerate(alternatives.groups):
        for number, each in enumerate(available):
            if not each[at]:
                patterns = [one for patterns in group.patterns for one in patterns]
                raise BatchError(
                    f"sample {whole.key(number)!r} has none of the alternatives of {group.names[0]!r:.100}: "
                    f"{list_names(patterns)}; it has {list_names(whole.items[number].named, patterns[0])}"
                )
        choices.append(chooser(group, np.array([len(each[at]) for each in available])[whole.which]))
    # cost per sample: one step in Python
    combined = list(zip(whole.which.tolist(), *(each.tolist() for each in choices), strict=True))
    distinct = sorted(set(combined))  # in one order, so that other batches find their columns again
    distinct.remove(combined[0])
    numbers = {each: number for number, each in enumerate([combined[0], *distinct])}
    which = np.array([numbers[each] for each in combined], np.int64)
    items = [
        structures.narrow(whole.items[at], [each[n] for each, n in zip(available[at], chosen, strict=True)])
        for at, *chosen in numbers
    ]
    is_mixed = any(item.tensors.keys() != items[0].tensors.keys() for item in items)
    narrowed = Layouts(request.rows, items, which, is_mixed)
    covers = alternatives.covers
    fixed = (*(name for name in request.fixed if not covers(name)), *alternatives.names)
    return ChosenRequest(
        request.store, request.rows, structures, fixed, alternatives, chooser, choices, available, whole, narrowed
    )


def nest_chosen(request: ChosenRequest, tensors: Mapping[str, Any]) -> Any:
    """Return a batch with `tensors` by their names in the batch; see `Cache.nest`."""
    kept = request.keeping(tuple(tensors))
    layouts = kept.layouts()
    structure = kept.structures.structure_for(layouts, tuple(name for name in kept.fixed if name in tensors))
    for name in tensors:
        if name not in structure.names:
            known = list_names(structure.names, name)
            raise KeyError(f"sample {request.key(0)!r} has no tensor {name!r:.100}; it has {known}")
    return nest_batch(kept, tensors, layouts, structure=structure)


class _ChosenStructures(Structures):
    """The structures of samples as a batch with chosen alternatives sees them. `kept` limits the tensors; None for all."""

    def __init__(self, base: Structures, alternatives: Alternatives, kept: tuple[str, ...] | None = None) -> None:
        is_selected, covers = base.wanted, alternatives.covers
        super().__init__(
            lambda name: (
                not covers(name) and (is_selected is None or is_selected(name)) and (kept is None or name in kept)
            )
        )
        self._base = base
        self._alternatives = alternatives
        self._kept = kept
        self._names = tuple(name for name in alternatives.names if kept is None or name in kept)
        # each value refers to the object whose id is in the key, so the id is not reused
        self._available: dict[Any, tuple[Form, _Available]] = {}
        self._layouts: dict[Any, tuple[Layout, Layout]] = {}
        self._plans: dict[Any, tuple[Form, list[tuple[str, str]], tuple[str, ...]]] = {}

    def keeping(self, names: tuple[str, ...]) -> _ChosenStructures:
        """Return the structures with only the tensors `names` of the batch."""
        return _structures_for(self._base, self._alternatives, names)

    def available(self, layout: Layout) -> _Available:
        """Return the alternatives of a sample with this layout, by group."""
        known = self._available.get(id(layout.form))
        if known is None:
            wanted = self._base.wanted
            names = [name for name in layout.named if wanted is None or wanted(name)]
            known = layout.form, self._available_among(names)
            keep_known(self._available, id(layout.form), known)
        return known[1]

    def _available_among(self, names: Sequence[str]) -> _Available:
        try:
            return [group.alternatives_in(names) for group in self._alternatives.groups]
        except ValueError as exc:
            raise BatchError(f"a sample with the tensors {list_names(names)} {exc}") from exc

    def narrow(self, layout: Layout, chosen: Sequence[tuple[str, ...]]) -> Layout:
        """Return a layout without alternatives, and with the chosen tensors under their names in the batch."""
        key = (id(layout), *chosen)
        known = self._layouts.get(key)
        if known is None:
            known = layout, self._make(layout, chosen)
            keep_known(self._layouts, key, known)
        return known[1]

    def _make(self, layout: Layout, chosen: Sequence[tuple[str, ...]]) -> Layout:
        key = (id(layout.form), layout.texts, layout.further, *chosen)
        known = self._plans.get(key)
        if known is None:
            known = layout.form, *self._plan(layout, chosen)
            keep_known(self._plans, key, known)
        _, old, texts = known
        # hot path: once for each layout and choice of a batch
        tensors = {name: layout.named[each] for name, each in old}
        return Layout(tensors, layout.data_begin, layout.nbytes, layout.form, texts)

    def _plan(self, layout: Layout, chosen: Sequence[tuple[str, ...]]) -> tuple[list[tuple[str, str]], tuple[str, ...]]:
        """Return pairs of the name in the batch and in the sample, and the strings of the references by the former."""
        assert self.wanted is not None
        texts = layout.named_texts
        old = [(name, name) for name in layout.named if self.wanted(name)]
        for group, names in zip(self._alternatives.groups, chosen, strict=True):
            for name, each in zip(group.names, names, strict=True):
                if not each:
                    continue
                if name in layout.named and self.wanted(name):
                    raise BatchError(
                        f"choose={{{name!r}: …}}: samples have another tensor of this name; choose a new name"
                    )
                old.append((name, each))
        found = []
        for name, each in old:
            kind, _, attribute = parse_reference(texts[each])
            found.append(reference_text(kind, name, attribute))
        return old, tuple(found)

    def whole(self, sample: Any, chosen: dict[str, str] | None = None) -> Any:
        """Return a sample with the chosen alternatives, and with all tensors that are not alternatives.

        Without `chosen`, it has the first alternative of each name, and nothing for a name without alternatives.

        Raises:
            BatchError: There is no place in the sample for a chosen tensor.
        """
        lazies, wanted = flatten(sample), self._base.wanted
        if chosen is None:
            available = self._available_among([name for name in lazies if wanted is None or wanted(name)])
            chosen = {
                name: first
                for group, each in zip(self._alternatives.groups, available, strict=True)
                for name, first in zip(group.names, each[0] if each else (), strict=bool(each))
            }
        made = {name: _renamed(lazies[chosen[name]], name) for name in self._names if chosen.get(name)}
        covers = self._alternatives.covers
        # a container of alternatives goes with them; any other keeps its place, as with `select`
        kept = project(sample, lambda name: name in made or not covers(name), prunes=True)
        if kept is None and type(sample) is dict:
            kept = {}
        kept = rebuild(kept, lambda value: made.get(value.name, value) if isinstance(value, Lazy) else value)
        for pattern in self._alternatives.patterns:
            _remove_none(kept, pattern.removesuffix(".*"), self._names)  # as the tensor in its place in other samples
        for name, lazy in made.items():
            if name not in lazies:
                kept = _inserted(kept, name, lazy)
        return kept

    def selected(self, sample: Any, chosen: dict[str, str] | None = None) -> Any:
        """Return a sample as the batch sees it; `chosen` is as for `whole`."""
        return project(self.whole(sample, chosen), self._is_in_batch)

    def _is_in_batch(self, name: str) -> bool:
        assert self.wanted is not None
        return name in self._names or self.wanted(name)

    @property
    def wanted_in_whole(self) -> Wanted:
        return self._is_in_batch

    def _whole(self, sample: Any) -> Any:
        return self.whole(sample)


def _structures_for(
    base: Structures, alternatives: Alternatives, kept: tuple[str, ...] | None = None
) -> _ChosenStructures:
    key = alternatives, kept
    known: Any = base.chosen.get(key)
    if known is None:
        known = _ChosenStructures(base, alternatives, kept)
        keep_known(base.chosen, key, known)
    return known  # type: ignore[no-any-return]


def _renamed(lazy: Any, name: str) -> Any:
    return type(lazy)(replace(lazy._reference, name=name), lazy._source)


def _remove_none(sample: Any, name: str, kept: Collection[str]) -> None:
    """Remove None at the path `name` from its dict, unless the name is one of `kept`."""
    *path, last = (unquote(part) for part in name.split("."))
    for part in path:
        sample = sample.get(part) if type(sample) is dict else None
    if type(sample) is dict and name not in kept and last in sample and sample[last] is None:
        del sample[last]


def _inserted(sample: Any, name: str, lazy: Any) -> Any:
    """Return `sample` with a tensor at the path `name`, whose dicts are made if they do not exist."""
    *path, last = (unquote(part) for part in name.split("."))
    root = target = sample if type(sample) is not dict else dict(sample)
    for part in path:
        if type(target) is not dict:
            break
        inner = target.get(part, {})
        target[part] = inner = dict(inner) if type(inner) is dict else inner
        target = inner
    if type(target) is not dict or last in target:
        raise BatchError(f"choose={{{name!r}: …}}: samples have another value at this place; choose a new name")
    target[last] = lazy
    return root
