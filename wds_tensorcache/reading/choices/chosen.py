"""Requests that choose one of several alternatives for each sample: only the bytes of the chosen one are read.

A batch sees each sample as if the chosen tensor had the name under which the batch has it, without the other alternatives.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import unquote

import numpy as np

from wds_tensorcache.codec.layout import Form, Layout
from wds_tensorcache.codec.lazy import Lazy
from wds_tensorcache.codec.reference import MemorySource, parse_reference, reference_text, resolve
from wds_tensorcache.codec.tree import flatten, project, rebuild
from wds_tensorcache.errors import BatchError, list_names
from wds_tensorcache.reading.batch.assemble import nest_batch
from wds_tensorcache.reading.batch.columns import Layouts, layouts_of
from wds_tensorcache.reading.batch.request import Request, Structures, keep_known
from wds_tensorcache.reading.choices.alternatives import Alternatives, Group
from wds_tensorcache.reading.choices.draw import Choices, Pick

__all__ = ["ChosenRequest", "choose", "nest_chosen"]

Array = np.ndarray[Any, Any]
_Options = list[list[tuple[str, ...]]]  # for each group, its alternatives in one sample


@dataclass(frozen=True, slots=True)
class ChosenRequest(Request):
    """A request with one alternative chosen for each sample.

    Attributes:
        alternatives: Alternatives that were chosen from.
        picks: For each group, the position of each sample's choice, int64 `[B]`.
        options: Alternatives of each distinct layout.
        whole: Layouts of the samples with all their tensors.
        narrowed: Layouts of the samples as the batch sees them.
        values: Groups of alternatives that are not tensors; see `values.py`.
    """

    alternatives: Alternatives
    picks: Sequence[Array]
    options: Sequence[_Options]
    whole: Layouts
    narrowed: Layouts
    values: Sequence[Group] = ()

    def layouts(self) -> Layouts:
        return self.narrowed

    def sample(self, i: int) -> Any:
        structures: Any = self.structures
        return structures.selected(self.rows.sample(i), self._chosen(i))

    whole_sample = sample

    def in_view(self, store: Any, structures: Structures) -> Request:
        picks, wanted = dict(zip(self.alternatives.groups, self.picks, strict=True)), structures.wanted
        if wanted is not None:  # without the groups that the view lacks
            names = [{name for each in self.options for one in each[at] for name in one} for at in range(len(picks))]
            kept = [group for group, each in zip(picks, names, strict=True) if any(map(wanted, each))]
            if not kept:
                return Request(store, self.rows, structures)
            alternatives = Alternatives(tuple(kept))
        else:
            alternatives = self.alternatives
        return choose(Request(store, self.rows, structures), alternatives, lambda group, counts: picks[group])

    def choices(self) -> Choices:
        """Return the choices by name."""
        positions: dict[str, Array] = {}
        chosen: dict[str, list[str]] = {}
        each = list(map(self._chosen, range(len(self))))
        for group, picks in zip(self.alternatives.groups, self.picks, strict=True):
            for name in group.names:
                positions[name], chosen[name] = picks, [names[name] for names in each]
        return Choices(positions, chosen)

    def keeping(self, names: Sequence[str]) -> ChosenRequest:
        """Return this request with only the tensors `names` of the batch."""
        structures: Any = self.structures
        return replace(self, structures=structures.keeping(tuple(names)))

    def _chosen(self, i: int) -> dict[str, str]:
        """Return the name of the chosen tensor of sample `i`, by name in the batch."""
        options = self.options[self.whole.which.item(i)]
        return {
            name: chosen
            for group, picks, each in zip(self.alternatives.groups, self.picks, options, strict=True)
            for name, chosen in zip(group.names, each[picks.item(i)], strict=True)
        }


def choose(request: Request, alternatives: Alternatives, pick: Pick) -> ChosenRequest:
    """Return a request that has only the chosen alternative of each group.

    Raises:
        BatchError: A sample has none of the alternatives of a name, or different numbers of alternatives for names that are
            chosen together.
    """
    structures = _structures_for(request.structures, alternatives)
    listed = layouts_of(request.rows)
    whole = _with_texts(request, listed)
    options = [structures.options(layout) for layout in whole.items]
    values = [
        group
        for at, group in enumerate(alternatives.groups)
        if len(group.names) == 1 and not any(each[at] for each in options)
    ]
    if values:
        tensors = Alternatives(tuple(group for group in alternatives.groups if group not in values))
        return replace(choose(request, tensors, pick), values=values)
    picks = []
    for at, group in enumerate(alternatives.groups):
        for number, each in enumerate(options):
            if not each[at]:
                patterns = ", ".join(map(repr, (one for patterns in group.patterns for one in patterns)))
                raise BatchError(
                    f"sample {whole.key(number)!r} has none of the alternatives of {group.names[0]!r}: {patterns}"
                )
        picks.append(pick(group, np.array([len(each[at]) for each in options])[whole.which]))
    # cost per sample: one step in Python
    combined = list(zip(whole.which.tolist(), *(each.tolist() for each in picks), strict=True))
    distinct = sorted(set(combined))  # in one order, so that other batches find their columns again
    distinct.remove(combined[0])
    numbers = {each: number for number, each in enumerate([combined[0], *distinct])}
    which = np.array([numbers[each] for each in combined], np.int64)
    items = [
        structures.narrow(whole.items[at], [each[n] for each, n in zip(options[at], chosen, strict=True)])
        for at, *chosen in numbers
    ]
    is_mixed = any(item.tensors.keys() != items[0].tensors.keys() for item in items)
    narrowed = Layouts(request.rows, items, which, listed.exemplars if is_mixed else (), is_mixed)
    return ChosenRequest(request.store, request.rows, structures, alternatives, picks, options, whole, narrowed)


def nest_chosen(request: ChosenRequest, tensors: Mapping[str, Any]) -> Any:
    """Return a batch with `tensors` by their names in the batch; see `Cache.nest`."""
    kept = request.keeping(tuple(tensors))
    layouts = kept.layouts()
    structure = kept.structures.structure_for(layouts)
    for name in tensors:
        if name not in structure.tensors:
            known = list_names(structure.tensors, name)
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
        self._options: dict[Any, tuple[Form, _Options]] = {}
        self._layouts: dict[Any, tuple[Layout, Layout]] = {}
        self._plans: dict[Any, tuple[Form, list[tuple[str, str]], tuple[str, ...]]] = {}
        self._lazies: dict[Any, tuple[Layout, dict[str, Lazy]]] = {}

    def keeping(self, names: tuple[str, ...]) -> _ChosenStructures:
        """Return the structures with only the tensors `names` of the batch."""
        return _structures_for(self._base, self._alternatives, names)

    def options(self, layout: Layout) -> _Options:
        """Return the alternatives of a sample with this layout, by group."""
        known = self._options.get(id(layout.form))
        if known is None:
            wanted = self._base.wanted
            names = [name for name in layout.tensors if wanted is None or wanted(name)]
            known = layout.form, self._options_among(names)
            keep_known(self._options, id(layout.form), known)
        return known[1]

    def _options_among(self, names: Sequence[str]) -> _Options:
        try:
            return [group.options(names) for group in self._alternatives.groups]
        except ValueError as exc:
            raise BatchError(f"a sample with the tensors {', '.join(map(repr, names))} {exc}") from exc

    def narrow(self, layout: Layout, chosen: Sequence[tuple[str, ...]]) -> Layout:
        """Return a layout without alternatives, and with the chosen tensors under their names in the batch."""
        key = (id(layout), *chosen)
        known = self._layouts.get(key)
        if known is None:
            known = layout, self._make(layout, chosen)
            keep_known(self._layouts, key, known)
        return known[1]

    def _make(self, layout: Layout, chosen: Sequence[tuple[str, ...]]) -> Layout:
        key = (id(layout.form), layout.texts, *chosen)
        known = self._plans.get(key)
        if known is None:
            known = layout.form, *self._plan(layout, chosen)
            keep_known(self._plans, key, known)
        _, old, texts = known
        # hot path: once for each layout and choice of a batch
        tensors = {name: layout.tensors[each] for name, each in old}
        return Layout(tensors, layout.data_begin, layout.nbytes, layout.form, texts)

    def _plan(self, layout: Layout, chosen: Sequence[tuple[str, ...]]) -> tuple[list[tuple[str, str]], tuple[str, ...]]:
        """Return pairs of the name in the batch and in the sample, and the strings of the references by the former."""
        assert layout.texts is not None
        assert self.wanted is not None
        texts = dict(zip(layout.tensors, layout.texts, strict=True))
        old = [(name, name) for name in layout.tensors if self.wanted(name)]
        for group, names in zip(self._alternatives.groups, chosen, strict=True):
            for name, each in zip(group.names, names, strict=True):
                if name in layout.tensors and self.wanted(name):
                    raise BatchError(
                        f"choose={{{name!r}: …}}: samples have another tensor of this name; choose a new name"
                    )
                old.append((name, each))
        found = []
        for name, each in old:
            kind, _, attribute = parse_reference(texts[each])
            found.append(reference_text(kind, name, attribute))
        return old, tuple(found)

    def selected(self, sample: Any, chosen: dict[str, str] | None = None) -> Any:
        """Return a sample as the batch sees it; without `chosen`, with the first alternative of each name.

        Raises:
            BatchError: There is no place in the sample for a chosen tensor.
        """
        lazies, wanted = flatten(sample), self._base.wanted
        if chosen is None:
            options = self._options_among([name for name in lazies if wanted is None or wanted(name)])
            chosen = {
                name: first
                for group, each in zip(self._alternatives.groups, options, strict=True)
                for name, first in zip(group.names, each[0], strict=True)
            }
        made = {name: _renamed(lazies[chosen[name]], name) for name in self._names}
        rest: Any = self.wanted
        covers = self._alternatives.covers
        # a container of alternatives goes with them; any other keeps its place, as with `select`
        kept = project(sample, lambda name: name in made or not covers(name), prunes=True)
        if kept is None and type(sample) is dict:
            kept = {}
        kept = project(kept, lambda name: name in made or rest(name))
        kept = rebuild(kept, lambda value: made.get(value.name, value) if isinstance(value, Lazy) else value)
        for name, lazy in made.items():
            if name not in lazies:
                kept = _inserted(kept, name, lazy)
        return kept

    @property
    def wanted_in_whole(self) -> None:
        return None

    def _whole(self, sample: Any) -> Any:
        return self.selected(sample)

    def known_tensors(self, layout: Layout) -> dict[str, Lazy] | None:
        known = self._lazies.get(id(layout))
        return None if known is None else known[1]

    def tensors(self, layouts: Layouts) -> dict[str, Lazy]:
        layout = layouts.items[0]
        tensors = None if layouts.is_mixed else self.known_tensors(layout)
        if tensors is None:
            tensors = dict(self.structure_for(layouts).tensors)
            for each in reversed(layouts.items):  # the first layout that has a tensor determines its kind and dtype
                texts = dict(zip(each.tensors, each.texts or (), strict=True))
                for name in tensors.keys() & texts.keys():
                    tensors[name] = Lazy(resolve(each, texts[name]), MemorySource(b""))
            if not layouts.is_mixed:
                keep_known(self._lazies, id(layout), (layout, tensors))
        return tensors


def _structures_for(
    base: Structures, alternatives: Alternatives, kept: tuple[str, ...] | None = None
) -> _ChosenStructures:
    key = alternatives, kept
    known: Any = base.chosen.get(key)
    if known is None:
        known = _ChosenStructures(base, alternatives, kept)
        keep_known(base.chosen, key, known)
    return known  # type: ignore[no-any-return]


def _with_texts(request: Request, layouts: Layouts) -> Layouts:
    """Return layouts that have the strings of their references; those that the index lacks come from the skeletons."""
    if all(layout.texts is not None for layout in layouts.items):
        return layouts
    items, which = list(layouts.items), layouts.which.copy()
    for i, at in enumerate(layouts.which.tolist()):
        layout = layouts.items[at]
        if layout.texts is not None:
            continue
        references = {name: lazy._reference for name, lazy in flatten(request.rows.sample(i)).items()}
        tensors = {name: tensor for name, tensor in layout.tensors.items() if name in references}
        texts = [reference_text(references[name].kind, name, references[name].attribute) for name in tensors]
        form = Form(tuple(entry for entry in layout.form.entries if entry[0] in references))
        which[i] = len(items)
        items.append(Layout(tensors, layout.data_begin, layout.nbytes, form, tuple(texts)))
    used, which = np.unique(which, return_inverse=True)
    first = which.item(0)
    # the first sample's layout comes first
    order = [first, *(number for number in range(len(used)) if number != first)]
    place = np.empty(len(order), np.int64)
    place[order] = np.arange(len(order))
    return Layouts(layouts.rows, [items[used.item(number)] for number in order], place[which])


def _renamed(lazy: Any, name: str) -> Any:
    return type(lazy)(replace(lazy._reference, name=name), lazy._source)


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
