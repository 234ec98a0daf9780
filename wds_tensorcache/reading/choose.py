"""`choose=`: alternatives among the tensors and values of a sample, of which a batch has the chosen one.

A chosen tensor is one more name of its alternative, so a batch reads it like any other tensor, and reads nothing else of the
alternatives. Values are chosen when they are looked at.
"""

from __future__ import annotations

import fnmatch
import glob
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain
from typing import Any, TypeAlias
from urllib.parse import unquote

import numpy as np
from torch.utils.data import get_worker_info

from wds_tensorcache.arguments import user_level
from wds_tensorcache.codec.header import Form, Layout
from wds_tensorcache.codec.tree import Path, Wanted, flatten, project
from wds_tensorcache.errors import BatchError, list_names
from wds_tensorcache.reading.batch.columns import Layouts, layouts_of
from wds_tensorcache.reading.batch.leaves import Leaves
from wds_tensorcache.reading.batch.request import Request, Structures, keep_known
from wds_tensorcache.reading.positions import spread
from wds_tensorcache.reading.schema import TensorSchema, merge_schema, name_matcher, whole_schema
from wds_tensorcache.reading.seeds import fractions_of, purpose_of, sample_seeds
from wds_tensorcache.reading.structure import put

Array = np.ndarray[Any, Any]
# alternatives by name, or by a tuple of names that are chosen together
Choose: TypeAlias = "Mapping[Any, Any]"
# Called with a group and the number of alternatives of each sample; returns the index of the chosen one, int64 [B].
Chooser: TypeAlias = "Callable[[Group, Array], Array]"
_NUM_EXAMINED = 8  # samples in which the numbers of alternatives are compared
_EXPECTED = (
    "lists of tensor names, or of patterns, by name: {'latent': ['latent', 'latent_flipped'], 'text': 'captions.*'}"
)

# --- the argument ---


@dataclass(frozen=True)
class Group:
    """Names that are chosen together, with the alternatives of each.

    Attributes:
        names: Names in the batch.
        patterns: For each name, the names or patterns of its alternatives in a sample.
    """

    names: tuple[str, ...]
    patterns: tuple[tuple[str, ...], ...]

    @cached_property
    def purpose(self) -> str:
        """Text for the seeds of the choices, so that groups choose independently."""
        return purpose_of("choose", self.names)


@dataclass(frozen=True)
class Alternatives:
    """A parsed `choose=`. Equal arguments give equal objects."""

    groups: tuple[Group, ...]

    @classmethod
    def of(cls, choose: Any) -> Alternatives:
        """Return the alternatives for an argument `choose=`; see `Cache.read_batch`.

        Raises:
            ValueError: `choose` is not such a dict, or gives a name twice.
        """
        if isinstance(choose, Alternatives):
            return choose
        if not isinstance(choose, Mapping) or not choose:
            raise ValueError(f"choose={choose!r:.200}, expected a dict of {_EXPECTED}")
        groups = tuple(_parse_group(name, wanted) for name, wanted in choose.items())
        names = [name for group in groups for name in group.names]
        if len(set(names)) < len(names):
            raise ValueError(f"choose={choose!r:.200}: a name occurs twice")
        return cls(groups)

    @classmethod
    def for_caches(cls, choose: Any, caches: Sequence[Any]) -> Alternatives | None:
        """Return the alternatives for an argument `choose=`, which may be None, after checking them with `check`."""
        if choose is None:
            return None
        alternatives = cls.of(choose)
        for cache in caches:
            alternatives.check(cache)
        return alternatives

    @property
    def names(self) -> list[str]:
        """Names of the chosen tensors and values in the batch."""
        return [name for group in self.groups for name in group.names]

    @cached_property
    def patterns(self) -> dict[str, tuple[str, ...]]:
        """Names and patterns of the alternatives of each name."""
        return {
            name: patterns for group in self.groups for name, patterns in zip(group.names, group.patterns, strict=True)
        }

    @cached_property
    def covers(self) -> Wanted:
        """Function that returns whether the tensor with a name is an alternative."""
        return name_matcher(pattern for patterns in self.patterns.values() for pattern in patterns)

    def check(self, cache: Any) -> None:
        """Raise an error unless `cache` has these alternatives. Warn if choices seem to belong together, but are made apart.

        Raises:
            BatchError: A name or pattern matches no tensor of the cache; or a name in the batch is that of a tensor that is
                not one of its alternatives.
            ValueError: A name is that of a container of tensors, whose tensors have the pattern `NAME.*`.
        """
        names = list(cache.schema)
        self.check_patterns(names)
        for name, patterns in self.patterns.items():
            if not _expand(patterns, names):
                ChosenValue(name, patterns, self.groups[0]).check(names)
            try:
                cache.select(patterns)
            except KeyError as exc:
                if not len(cache) or not any(_find_values(cache._sample(0), patterns)):
                    raise BatchError(f"choose={{{name!r:.100}: …}}: {exc.args[0]}") from exc
        for name in names:
            if not any(fnmatch.fnmatchcase(name, pattern) for pattern in self.patterns.get(name, "*")):
                raise _other_tensor(name)
        self._warn_of_pairs(cache)

    def check_patterns(self, names: Sequence[str]) -> None:
        """Raise BatchError if a pattern matches none of the tensor `names`, but another pattern of its alternatives does."""
        for name, patterns in self.patterns.items():
            unknown = [pattern for pattern in patterns if not _expand([pattern], names)]
            if 0 < len(unknown) < len(patterns):
                problem = f"no sample has a tensor {unknown[0]!r:.100}; there are {list_names(names, unknown[0])}"
                raise BatchError(f"choose={{{name!r:.100}: …}}: {problem}")

    def _warn_of_pairs(self, cache: Any) -> None:
        """Warn of two patterns that are chosen apart, although all examined samples have as many of one as of the other."""
        patterns = [(group.names[0], group.patterns[0]) for group in self.groups if group.patterns[0][0].endswith("*")]
        if len(patterns) < 2:
            return
        counts = []
        for number in spread(len(cache), _NUM_EXAMINED):
            sample = cache._sample(number)
            names = list(flatten(sample))
            counts.append([len(_expand(row, names)) or _count_values(sample, row) for _, row in patterns])
        for at, (name, one) in enumerate(patterns):
            for beside, (second, other) in enumerate(patterns[:at]):
                if all(count[at] == count[beside] for count in counts) and any(count[at] > 1 for count in counts):
                    warnings.warn(
                        f"choose= chooses {second!r} and {name!r} independently, although samples have equally many "
                        f"alternatives of both; if they belong together, pass {{({second!r}, {name!r}): "
                        f"({other[0]!r}, {one[0]!r})}}",
                        stacklevel=user_level(),
                    )

    def patterns_for(self, names: Sequence[str]) -> list[str]:
        """Return patterns that select what a batch with only the tensors `names` needs."""
        return [
            pattern
            for name in names
            for pattern in (self.patterns[name] if name in self.patterns else (glob.escape(name),))
        ]

    def schema_of(self, schema: Mapping[str, TensorSchema]) -> dict[str, TensorSchema]:
        """Return the properties of a batch's tensors, from those of the samples' tensors."""
        merged = {name: tensor for name, tensor in schema.items() if not self.covers(name)}
        for name, patterns in self.patterns.items():
            for alternative in _expand(patterns, list(schema)):
                merged[name] = merge_schema(merged.get(name), replace(schema[alternative], name=name))
        return merged

    def chosen_nbytes(self, sizes: Mapping[str, int]) -> int:
        """Return the bytes of the tensors of a batch's sample, on average, from those of the sample's tensors."""
        total = sum(size for name, size in sizes.items() if not self.covers(name))
        for patterns in self.patterns.values():
            alternatives = _expand(patterns, list(sizes))
            total += sum(sizes[name] for name in alternatives) // max(len(alternatives), 1)
        return total


def _parse_group(name: Any, wanted: Any) -> Group:
    shown = f"choose={{{name!r:.100}: {wanted!r:.200}}}"
    names = name if isinstance(name, tuple) else (name,)
    alternatives = (
        [wanted] if isinstance(wanted, str) or (isinstance(name, tuple) and isinstance(wanted, tuple)) else wanted
    )
    if (
        not isinstance(alternatives, Sequence)
        or not alternatives
        or not names
        or not all(isinstance(item, str) for item in names)
    ):
        raise ValueError(f"{shown}, expected {_EXPECTED}")
    rows = [item if isinstance(name, tuple) else (item,) for item in alternatives]
    for row in rows:
        if not isinstance(row, tuple) or len(row) != len(names) or not all(isinstance(item, str) for item in row):
            expected = "a tuple of names" if isinstance(name, tuple) else "a name or pattern"
            raise ValueError(f"{shown}: each alternative is {expected}, as many as in the key; expected {_EXPECTED}")
    return Group(names, tuple(zip(*rows, strict=True)))


def _expand(patterns: Sequence[str], names: Sequence[str]) -> list[str]:
    """Return the names that match patterns, each once: by pattern, then in natural order, `captions.2` before `captions.10`."""
    ordered = sorted(names, key=_natural)
    matches = (
        name
        for pattern in patterns
        for name in (
            [pattern] if pattern in names else [each for each in ordered if fnmatch.fnmatchcase(each, pattern)]
        )
    )
    return list(dict.fromkeys(matches))


def _natural(name: str) -> list[tuple[bool, int, str]]:
    return [(not part.isdecimal(), int(part) if part.isdecimal() else 0, part) for part in name.split(".")]


def _container_of_tensors(name: str, pattern: str) -> ValueError:
    return ValueError(
        f"choose={{{name!r:.100}: {pattern!r:.100}}}: samples have a container of tensors there; choose among them by "
        f"{pattern + '.*'!r:.100}"
    )


def _other_tensor(name: str) -> BatchError:
    return BatchError(f"choose={{{name!r}: …}}: the samples have another tensor of this name; choose a new name")


# --- choosing ---


@dataclass(frozen=True, slots=True, eq=False)
class Randomness:
    """The source of a batch's seeds and choices, besides its sample indices.

    Attributes:
        seed: Seed of the loader.
        epochs: Epoch of the batch, or of each sample, int64 `[B]`.
        alternatives: Alternatives to choose from; None if there are none.
        choices: Choices that the caller made, by name; None to choose by the seeds.
    """

    seed: int = 0
    epochs: int | Array = 0
    alternatives: Alternatives | None = None
    choices: Mapping[str, Any] | None = None

    @classmethod
    def of(cls, choose: Any, choices: Mapping[str, Any] | None) -> Randomness:
        """Return the arguments `choose=` and `choices=` of `Cache.read_batch`; by default, the first alternative is chosen.

        Raises:
            ValueError: `choose` and `choices` do not fit each other.
        """
        if choose is None:
            if choices is not None:
                raise ValueError("choices without choose=, which says what the alternatives are")
            return cls()
        alternatives, choices = Alternatives.of(choose), {} if choices is None else choices
        for name in choices:
            if name not in alternatives.names:
                raise ValueError(f"choices has {name!r:.100}, but choose= has {list_names(alternatives.names, name)}")
        return cls(alternatives=alternatives, choices=choices)

    def seeds(self, indices: Array) -> Array:
        """Return a seed for each sample, int64 `[B]`."""
        return sample_seeds(self.seed, self.epochs, indices)

    def chooser(self, indices: Array) -> Chooser:
        """Return the function that chooses for the samples at `indices`: each alternative with equal probability, or as given.

        A random choice depends only on the seed of the sample, its number of alternatives and the names of the group.

        Raises (on use):
            ValueError: The choices for a name are not integers `[B]`, or differ between names that are chosen together.
            IndexError: A sample has no such alternative.
        """
        choices, count = self.choices, len(indices)
        if choices is None:
            seeds = self.seeds(indices)
            return lambda group, counts: (fractions_of(seeds, group.purpose) * counts).astype(np.int64)

        def choose(group: Group, counts: Array) -> Array:
            columns = [np.asarray(choices[name]) for name in group.names if name in choices] or [
                np.zeros(count, np.int64)
            ]
            for column in columns:
                if column.shape != (count,) or column.dtype.kind not in "iu" or not np.array_equal(column, columns[0]):
                    raise ValueError(
                        f"choices for {list_names(group.names)}: expected {count} integers, got {column!r:.200}"
                    )
            outside = np.flatnonzero((columns[0] < 0) | (columns[0] >= counts))
            if len(outside):
                at = outside.item(0)
                raise IndexError(
                    f"choices[{group.names[0]!r}][{at}] = {columns[0][at]} out of range [0, {counts[at]}), "
                    "the alternatives of the sample"
                )
            return columns[0].astype(np.int64)

        return choose


@dataclass(frozen=True, slots=True, repr=False)
class Choices(Mapping[str, Array]):
    """The choices in a batch, by name: `choices["text"]` is the number of each sample's alternative, int64 `[B]`.

    `choices.chosen("text")` gives the names of the chosen alternatives, "" for a sample that lacks the tensor.
    `read_batch(indices, choose=…, choices=choices)` reads the same tensors again.

    Threads/fork/pickle: immutable, safe everywhere.
    """

    _choices: dict[str, Array] = field(compare=False)
    _chosen: dict[str, list[str]]

    def chosen(self, name: str) -> list[str]:
        """Return the name of each sample's chosen alternative; raise KeyError if the batch has no choice of this name."""
        return list(self._chosen[name])

    def _with_more(self, others: Choices, prefix: str) -> Choices:
        """Return these choices and `others`, whose names get a prefix."""
        choices = {prefix + name: values for name, values in others._choices.items()}
        chosen = {
            prefix + name: [alternative and prefix + alternative for alternative in values]
            for name, values in others._chosen.items()
        }
        return Choices(self._choices | choices, self._chosen | chosen)

    def __getitem__(self, name: str) -> Array:
        return np.array(self._choices[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._choices)

    def __len__(self) -> int:
        return len(self._choices)

    def __repr__(self) -> str:
        return f"Choices({self._chosen!r})"


# --- tensors ---


@dataclass(frozen=True, slots=True)
class ChosenRequest(Request):
    """A request with one alternative chosen for each sample.

    Attributes:
        base: The request for whole samples.
        alternatives, chooser: Alternatives that were chosen from, and how.
        choices: By group, the choice of each sample, int64 `[B]`. Values that are chosen with tensors have the same choices.
        counts: By group, the number of alternatives of each sample, int64 `[B]`.
        picked: Layouts of the samples, with the chosen tensors.
        values: Names whose alternatives are not tensors.
    """

    base: Request
    alternatives: Alternatives
    chooser: Chooser
    choices: dict[Group, Array]
    counts: dict[Group, Array]
    picked: Layouts
    values: Sequence[ChosenValue]

    def layouts(self) -> Layouts:
        return self.picked

    def sample(self, i: int) -> Any:
        raw = self.rows.sample(i)
        sample = self.structures.selected(self.structures.whole(raw))
        lazies = flatten(raw)
        for name, stored in self.picked.chosen[self.picked.which.item(i)].items():
            put(sample, name, None if stored is None else lazies[stored]._renamed(name))
        return sample

    def in_view(self, store: Any, structures: Structures, fixed: tuple[str, ...] = ()) -> Request:
        base, alternatives = self.base.in_view(store, structures, fixed), self.alternatives
        if structures.wanted is not None:  # without the groups that the view lacks
            names = {name for layout in layouts_of(self.rows).items for name in layout.named if structures.wanted(name)}
            kept = [
                group for group in self.choices if any(_expand(patterns, list(names)) for patterns in group.patterns)
            ]
            alternatives = Alternatives(tuple(kept))
        if not alternatives.groups:
            return base
        return choose_tensors(base, alternatives, lambda group, counts: self.choices[group])

    def again(self) -> Request:
        return choose_tensors(self.base.again(), self.alternatives, self.chooser)

    def schema(self) -> Mapping[str, TensorSchema]:
        return self.alternatives.schema_of(whole_schema(self.store))

    def named_choices(self) -> Choices:
        """Return the choices among tensors by name."""
        chosen = [self.picked.chosen[at] for at in self.picked.which.tolist()]
        names = {name: group for group in self.choices for name in group.names if name in chosen[0]}
        return Choices(
            {name: self.choices[group] for name, group in names.items()},
            {name: [stored[name] or "" for stored in chosen] for name in names},
        )

    def keeping(self, names: tuple[str, ...]) -> ChosenRequest:
        chosen = [{name: stored for name, stored in tensors.items() if name in names} for tensors in self.picked.chosen]
        structures = self.structures.narrow(names)
        return replace(self, structures=structures, picked=replace(self.picked, chosen=chosen))


def choose_tensors(request: Request, alternatives: Alternatives, chooser: Chooser) -> ChosenRequest:
    """Return a request that has only the chosen alternative of each group.

    Raises:
        BatchError: A sample has none of the alternatives of a name, or different numbers of alternatives for names that are
            chosen together; a pattern matches no tensor, or a name is that of another tensor.
    """
    request.find_names()  # an old index may lack names of alternatives
    rest, stored = _Rest.of(request.structures, alternatives), layouts_of(request.rows)
    contents = list(map(rest.contents, stored.items))
    available = [matches for matches, _ in contents]
    if not rest.is_checked:
        _check_patterns(request, alternatives, stored)
        rest.is_checked = True
    has_any = {name for matches in available for name, names in matches.items() if names}
    values, tensors = list[ChosenValue](), list[tuple[str, int]]()  # names with the number of their group
    choices, all_counts = dict[Group, Array](), dict[Group, Array]()
    for group in alternatives.groups:
        has_tensors = any(map(has_any.__contains__, group.names))
        for name, patterns in zip(group.names, group.patterns, strict=True):
            # all samples of the batch may lack a tensor that is chosen together with others
            if name in has_any or (has_tensors and _expand(patterns, list(whole_schema(request.store)))):
                tensors.append((name, len(choices)))
            else:
                values.append(ChosenValue(name, patterns, group))
                values[-1].check([name for layout in stored.items for name in layout.named])
        if has_tensors:
            counts = [_count(stored, at, group, matches) for at, matches in enumerate(available)]
            all_counts[group] = np.array(counts)[stored.which]
            choices[group] = chooser(group, all_counts[group])
    # cost per sample: one step in Python
    combined = list(zip(stored.which.tolist(), *(column.tolist() for column in choices.values()), strict=True))
    distinct = sorted(set(combined))  # in one order, so that other batches find their columns again
    distinct.remove(combined[0])
    numbers = {combination: number for number, combination in enumerate([combined[0], *distinct])}
    which = np.array([numbers[combination] for combination in combined], np.int64)
    items, chosen = list[Layout](), list[dict[str, str | None]]()
    for at, *picks in numbers:
        items.append(stored.items[at])
        chosen.append({name: names[picks[n]] if (names := available[at][name]) else None for name, n in tensors})
    is_mixed = stored.is_mixed and any(others != contents[0][1] for _, others in contents)
    fixed = tuple(name for name in request.fixed if not alternatives.covers(name))
    picked_layouts = Layouts(request.rows, items, which, is_mixed, chosen)
    return ChosenRequest(
        request.store, request.rows, rest, fixed,
        request, alternatives, chooser, choices, all_counts, picked_layouts, values,
    )  # fmt: skip


def _check_patterns(request: Request, alternatives: Alternatives, stored: Layouts) -> None:
    """Raise BatchError if a pattern matches no tensor of any sample, but others of the same name do: it is misspelled."""
    try:
        alternatives.check_patterns(list({name for layout in stored.items for name in layout.named}))
    except BatchError:  # this costs the index of every shard
        alternatives.check_patterns(list(whole_schema(request.store)))


def _count(stored: Layouts, at: int, group: Group, available: Mapping[str, Sequence[str]]) -> int:
    """Return the number of alternatives that samples of a layout have for a group."""
    counts = {name: len(available[name]) for name in group.names if available[name]}
    if not counts:
        patterns = [pattern for row in group.patterns for pattern in row]
        raise BatchError(
            f"sample {stored.key(at)!r} has none of the alternatives of {group.names[0]!r:.100}: {list_names(patterns)}; "
            f"it has {list_names(stored.items[at].named, patterns[0])}"
        )
    if len({*counts.values()}) > 1:
        shown = ", ".join(f"{count} of {name!r}" for name, count in counts.items())
        raise BatchError(f"sample {stored.key(at)!r} has {shown}; {_EQUAL}")
    return counts.popitem()[1]


_EQUAL = "names that are chosen together need equal numbers of alternatives"


class _Rest(Structures):
    """The structures of samples without the alternatives.

    Attributes:
        is_checked: True after the patterns of the alternatives were compared with the names of tensors.
    """

    def __init__(self, base: Structures, alternatives: Alternatives) -> None:
        is_selected, covers = base.wanted, alternatives.covers
        super().__init__(lambda name: not covers(name) and (is_selected is None or is_selected(name)), base.optional)
        self.is_checked = False
        self._is_selected, self._alternatives = is_selected, alternatives
        # the value refers to the form whose id is in the key, so the id is not reused
        self._contents: dict[Any, tuple[Form, _Contents]] = {}

    @classmethod
    def of(cls, base: Structures, alternatives: Alternatives) -> _Rest:
        rest: Any = base.views.get(alternatives)
        if rest is None:
            rest = cls(base, alternatives)
            keep_known(base.views, alternatives, rest)
        return rest  # type: ignore[no-any-return]

    def contents(self, layout: Layout) -> _Contents:
        """Return the alternatives of a sample with this layout, by name in the batch, and the names of its other tensors.

        Raises:
            BatchError: Another tensor has the name of a chosen one.
        """
        key = id(layout.form), layout.texts, layout.further
        kept = self._contents.get(key)
        if kept is None:
            names, covers = list(filter(self._is_selected, layout.named)), self._alternatives.covers
            alternatives = {name: _expand(patterns, names) for name, patterns in self._alternatives.patterns.items()}
            others = {name for name in names if not covers(name)}
            for name in others & alternatives.keys():
                raise _other_tensor(name)
            kept = layout.form, (alternatives, others)
            keep_known(self._contents, key, kept)
        return kept[1]

    def whole(self, sample: Any) -> Any:
        """Return a sample without its alternatives, without None in their places, and without containers of nothing else."""
        kept = project(super().whole(sample), lambda name: not self._alternatives.covers(name), prunes=True)
        if kept is None and type(sample) is dict:
            kept = {}
        for pattern in chain.from_iterable(self._alternatives.patterns.values()):
            *path, last = map(unquote, pattern.removesuffix(".*").split("."))
            place = kept
            for part in path:
                place = place.get(part) if type(place) is dict else None
            if type(place) is dict and last in place and place[last] is None:
                del place[last]
        return kept

    def _missing(self, layouts: Layouts, base: int, fixed: tuple[str, ...]) -> tuple[str, ...]:
        missing = super()._missing(layouts, base, fixed)
        return tuple(name for name in missing if not self._alternatives.covers(name))


_Contents: TypeAlias = "tuple[dict[str, list[str]], set[str]]"


def split(
    alternatives: Alternatives, prefixes: Sequence[str], names: Sequence[Sequence[str]]
) -> list[dict[Group, Group]]:
    """Return each joined cache's part of `alternatives`: groups with the names of tensors there, and the whole group of each.

    Args:
        alternatives: Alternatives among the tensors of all caches.
        prefixes: For each cache, the prefix of its tensors' names.
        names: For each cache, the names of its tensors, without prefix.

    Raises:
        ValueError: The alternatives of a name are in several caches, or the name is not one of the same cache.
    """
    whole = [[prefix + name for name in own] for prefix, own in zip(prefixes, names, strict=True)]
    alternatives.check_patterns(list(chain.from_iterable(whole)))
    parts: list[dict[Group, Group]] = [{} for _ in prefixes]
    for group in alternatives.groups:
        places = [
            (name, *_find_cache(name, patterns, prefixes, whole))
            for name, patterns in zip(group.names, group.patterns, strict=True)
        ]
        for number, prefix in enumerate(prefixes):
            names_of_part = [(name, matches) for name, at, matches in places if at == number]
            if names_of_part:
                own_names = tuple(name.removeprefix(prefix) for name, _ in names_of_part)
                patterns = tuple(
                    tuple(glob.escape(alternative.removeprefix(prefix)) for alternative in matches)
                    for _, matches in names_of_part
                )
                parts[number][Group(own_names, patterns)] = group
    return parts


def _find_cache(
    name: str, patterns: Sequence[str], prefixes: Sequence[str], names: Sequence[Sequence[str]]
) -> tuple[int | None, list[str]]:
    """Return the number of the cache that has the alternatives of a name, if they are tensors, and their names."""
    parts = [(number, matches) for number, own in enumerate(names) if (matches := _expand(patterns, own))]
    if len(parts) > 1:
        raise ValueError(
            f"choose={{{name!r}: …}}: {parts[0][1][0]!r} and {parts[1][1][0]!r} are tensors of different "
            "caches; write all alternatives into one cache and join that, or read both and choose in a transform"
        )
    for number, matches in parts:
        if not name.startswith(prefixes[number]):
            raise ValueError(
                f"choose={{{name!r}: …}}: {matches[0]!r} is an alternative; expected a name that begins with "
                f"{prefixes[number]!r}, because the batch has the chosen tensor among those of its cache"
            )
    return parts[0] if parts else (None, [])


# --- values ---


@dataclass(frozen=True, slots=True)
class ChosenValue:
    """Alternatives that are not tensors, for example captions as strings; the names of `group` are chosen together."""

    name: str
    patterns: tuple[str, ...]
    group: Group

    def check(self, names: Sequence[str]) -> None:
        """Raise ValueError if an alternative is a container of tensors; `names` are those of the tensors of samples."""
        for pattern in self.patterns:
            if fnmatch.filter(names, f"{pattern}.*"):
                raise _container_of_tensors(self.name, pattern)


_Source = tuple[str, Any, bool]  # name, value, and whether the value is a list of alternatives


def _find_values(batch: Any, patterns: Sequence[str]) -> Iterator[tuple[dict[Any, Any], Any, list[_Source]]]:
    """Yield each dict that has an alternative that is not a tensor, its key there, and the alternatives in the value."""
    for pattern in patterns:
        *path, last = map(unquote, pattern.split("."))
        is_list = last == "*" and bool(path)
        if is_list:
            *path, last = path
            pattern = pattern.removesuffix(".*")
        target = batch
        for part in path:
            target = target.get(part) if type(target) is dict else None
        if type(target) is not dict or last not in target:
            continue
        value = target[last]
        if is_list and type(value) is dict:
            yield target, last, [(f"{pattern}.{key}", item, False) for key, item in value.items()]
        elif type(value) is not dict:
            yield target, last, [(pattern, value, is_list)]


def _count_values(sample: Any, patterns: Sequence[str]) -> int:
    sources = [source for *_, matches in _find_values(sample, patterns) for source in matches]
    return sum(len(value) if is_list and isinstance(value, (list, tuple)) else 1 for _, value, is_list in sources)


def _take(batch: Any, values: Sequence[ChosenValue]) -> list[list[_Source]]:
    """Remove all alternatives from a batch or a sample, and return those of each name."""
    places = [list(_find_values(batch, value.patterns)) for value in values]
    for value, matches in zip(values, places, strict=True):
        if not matches:
            has = f"; they have {list_names(batch, value.patterns[0])}" if isinstance(batch, dict) else ""
            raise BatchError(
                f"the samples have none of the alternatives of {value.name!r:.100}: {list_names(value.patterns)}{has}"
            )
    for target, key, _ in chain.from_iterable(places):
        target.pop(key, None)  # two names may have the same alternatives
    return [[source for *_, sources in matches for source in sources] for matches in places]


def place_values(batch: Any, request: Any, chooser: Chooser, keys: Sequence[str]) -> Any:
    """Put the chosen values into a batch in place of the alternatives, and return the batch.

    Raises:
        BatchError: The batch has none of the alternatives, or another value at the place of the chosen one.
    """
    for name, chosen in _chosen_values(batch, request, chooser, keys).items():
        leaves = Leaves(chosen, tuple(name.split(".")))
        if get_worker_info() is not None:
            leaves.tolist()  # an error during pickling of the batch would not reach the caller
        put(batch, name, leaves)
    return batch


def place_in_samples(samples: list[Any], request: Any, chooser: Chooser, keys: Sequence[str]) -> list[Any]:
    """Put the chosen values into samples in place of the alternatives, and return the samples."""
    counts = dict(request.counts)
    sources = [_take(sample, request.values) for sample in samples]
    for number, value in enumerate(request.values):
        _, chosen = _choose([column[number] for column in sources], value, chooser, keys, counts)
        for sample, (_, item) in zip(samples, chosen, strict=True):
            put(sample, value.name, item)
    return samples


def choices_of_values(batch: Any, request: Any, chooser: Chooser, keys: Sequence[str]) -> Choices:
    """Return the choices among the values of a batch that has all alternatives. This decodes them."""
    results = {name: chosen.choose() for name, chosen in _chosen_values(batch, request, chooser, keys).items()}
    return Choices(
        {name: choices for name, (choices, _) in results.items()},
        {name: [alternative for alternative, _ in pairs] for name, (_, pairs) in results.items()},
    )


def _chosen_values(batch: Any, request: Any, chooser: Chooser, keys: Sequence[str]) -> dict[str, _Chosen]:
    counts = dict(request.counts)
    return {
        value.name: _Chosen(sources, value, chooser, keys, counts)
        for value, sources in zip(request.values, _take(batch, request.values), strict=True)
    }


@dataclass(slots=True)
class _Chosen:
    """The chosen values of a batch, as `Leaves` reads them: they are decoded and chosen on first use."""

    sources: Sequence[_Source]
    value: ChosenValue
    chooser: Chooser
    keys: Sequence[str]
    counts: dict[Group, Array]
    result: tuple[Array, list[tuple[str, Any]]] | None = None

    def __len__(self) -> int:
        return len(self.keys)

    def column(self, path: Path) -> list[Any]:
        """Return the chosen value of each sample."""
        return [value for _, value in self.choose()[1]]

    def choose(self) -> tuple[Array, list[tuple[str, Any]]]:
        """Return the choice of each sample, int64 `[B]`, and names and values of the chosen alternatives."""
        if self.result is None:
            columns = [(name, list(value), is_list) for name, value, is_list in self.sources]
            rows = [[(name, column[i], is_list) for name, column, is_list in columns] for i in range(len(self.keys))]
            self.result = _choose(rows, self.value, self.chooser, self.keys, self.counts)
        return self.result


def _choose(
    rows: Sequence[Sequence[_Source]],
    value: ChosenValue,
    chooser: Chooser,
    keys: Sequence[str],
    all_counts: dict[Group, Array],
) -> tuple[Array, list[tuple[str, Any]]]:
    """Return the choice of each sample, and names and values of the chosen alternatives.

    `all_counts` has the numbers of alternatives of names that are chosen together.
    """
    candidates = [_alternatives(sources, key) for sources, key in zip(rows, keys, strict=True)]
    counts = np.array(list(map(len, candidates)))
    for at in np.flatnonzero(all_counts.setdefault(value.group, counts) != counts)[:1].tolist():
        others = list_names([name for name in value.group.names if name != value.name])
        shown = f"{counts[at]} of {value.name!r}, {all_counts[value.group][at]} of {others}"
        raise BatchError(f"sample {keys[at]!r} has {shown}; {_EQUAL}")
    choices = chooser(value.group, counts)
    return choices, [alternatives[n] for alternatives, n in zip(candidates, choices.tolist(), strict=True)]


def _alternatives(sources: Sequence[_Source], key: str) -> list[tuple[str, Any]]:
    """Return names and values of the alternatives of a sample."""
    alternatives: list[tuple[str, Any]] = []
    for name, value, is_list in sources:
        if is_list and not isinstance(value, (list, tuple)):
            raise BatchError(
                f"sample {key!r} has a {type(value).__name__} at {name!r}, expected a list of alternatives"
            )
        alternatives += [(f"{name}.{at}", item) for at, item in enumerate(value)] if is_list else [(name, value)]
    if not alternatives:
        raise BatchError(f"sample {key!r} has no alternatives: {sources[0][0]!r} is empty")
    return alternatives
