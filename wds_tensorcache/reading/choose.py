"""`choose=`: alternatives among the tensors and values of a sample.

In a batch, the chosen alternative is an ordinary tensor under another name, so no other alternative is read. Chosen values come
from the decoded samples.
"""

from __future__ import annotations

import fnmatch
import glob
import math
import re
import warnings
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from itertools import accumulate, chain
from numbers import Real
from typing import Any, TypeAlias

import numpy as np
from torch.utils.data import get_worker_info

from wds_tensorcache.arguments import user_level
from wds_tensorcache.codec.header import Form, Layout, keep_bounded
from wds_tensorcache.codec.tree import DICTS, SEQUENCES, Path, Wanted, empty_like, flatten, project, rebuild
from wds_tensorcache.errors import BatchError, list_names
from wds_tensorcache.reading.batch.columns import Layouts, layouts_of
from wds_tensorcache.reading.batch.leaves import Leaves
from wds_tensorcache.reading.batch.request import NewNames, Request, Structures
from wds_tensorcache.reading.batch.values import Decoded, is_tensor
from wds_tensorcache.reading.positions import spread
from wds_tensorcache.reading.schema import TensorSchema, merge_schema, name_matcher, whole_schema
from wds_tensorcache.reading.seeds import fractions_of, purpose_of, sample_seeds
from wds_tensorcache.reading.structure import put, steps_of
from wds_tensorcache.storage.threads import computed_once

Array = np.ndarray[Any, Any]
# alternatives by name, or by a tuple of names that are chosen together
Choose: TypeAlias = "Mapping[Any, Any]"
# Called with a group, the number of alternatives of each sample, and a function that returns the edges of each sample's
# alternatives, for a group with weights; returns the index of the chosen alternative, int64 [B].
Chooser: TypeAlias = "Callable[[Group, Array, Callable[[], list[_Edges]]], Array]"
# For each alternative of a sample, the end of its part of [0, 1); () if all parts have the same length.
_Edges: TypeAlias = "tuple[float, ...]"
# (index of a pattern, parts of an alternative's name that its wildcards match) for each pattern that matches the alternative.
# Names that are chosen together are paired by it.
_Match: TypeAlias = "tuple[tuple[int, tuple[str, ...]], ...]"
_WILDCARD = re.compile(r"\*|\?|\[!?\]?[^\]]*\]")
_POSITIONAL = re.compile(r"(^|\.)@\d+(\.|$)|~\d+$")  # a part of a name that depends on the order of the keys in a dict
_NUMBER = re.compile(r"(^|\.)[-@]?\d+(\.|$)")  # a part of a name that may be an index, or a key that is not text
_NUM_EXAMINED = 8  # samples in which the numbers of alternatives are compared
_EXPECTED = (
    "lists of tensor names, or of patterns, by name: {'latent': ['latent', 'latent_flipped'], 'text': 'captions.*'}, "
    "or dicts with their weights: {'text': {'captions.0': 2, 'captions.*': 1}}"
)
_EXPECTED_TOGETHER = (
    "a tuple of as many names or patterns as the key: {('text', 'caption'): ('texts.*', 'captions.*')}, or a list of such "
    "tuples: [('texts.0', 'captions.0'), ('texts.1', 'captions.1')], or a dict with their weights"
)

# --- the argument ---


@dataclass(frozen=True)
class Group:
    """Names that are chosen together, with the alternatives of each name."""

    names: tuple[str, ...]  # in the batch
    patterns: tuple[tuple[str, ...], ...]  # for each name, the names or patterns of its alternatives in a sample
    prefix: str = ""  # of these names in the joined cache to which the samples belong; empty without a joined cache
    weights: tuple[float, ...] | None = None  # of each pattern of a name; None for equal probabilities

    @computed_once
    def whole_names(self) -> list[str]:
        """Names in the batch of the joined cache. Choices and seeds use these names."""
        return [self.prefix + name for name in self.names]

    @computed_once
    def purpose(self) -> str:
        """Text for the seeds of the choices, so that groups choose independently."""
        return purpose_of("choose", self.whole_names)

    def without(self, prefix: str) -> Group | None:
        """Return the group without a joined cache's prefix. Return None if a name or an alternative lacks it."""
        if not all(text.startswith(prefix) for texts in (self.names, *self.patterns) for text in texts):
            return None
        names, *patterns = (tuple(text[len(prefix) :] for text in texts) for texts in (self.names, *self.patterns))
        return Group(names, tuple(patterns), self.prefix + prefix, self.weights)

    def edges(
        self, distinct: Sequence[Mapping[_Match, str]], which: Iterable[int], key: Callable[[int], str]
    ) -> list[_Edges]:
        """Return the edges of each sample's alternatives. Raise BatchError if all alternatives of a sample have weight 0.

        Args:
            distinct: The distinct sets of alternatives of the samples.
            which: Index into `distinct` for each sample.
            key: Function from an index into `distinct` to the key of a sample, for errors.
        """
        edges: list[_Edges] = []
        for at, alternatives in enumerate(distinct):
            parts = _edges(self.weights or (), tuple(alternatives))
            if parts is None:
                names = list(alternatives.values())
                problem = f"has only alternatives of {self.names[0]!r:.100} with weight 0: {list_names(names)}"
                raise BatchError(f"sample {key(at)!r} {problem}; give one of them a larger weight")
            edges.append(parts)
        return [edges[at] for at in which]

    def is_in(self, cache: Any) -> bool:
        """Return whether a cache's tensors, or first sample's values, contain an alternative."""
        patterns = [pattern for row in self.patterns for pattern in row]
        return bool(_expand(patterns, cache._batch_names())) or bool(
            len(cache) and _has_values(cache._sample(0), patterns)
        )


@dataclass(frozen=True)
class Alternatives:
    """A parsed `choose=`, without groups if nothing is to choose. Equal arguments give equal objects."""

    groups: tuple[Group, ...] = ()

    def __reduce__(self) -> Any:
        return Alternatives, (self.groups,)  # without `covers`, which cannot be pickled

    @classmethod
    def of(cls, choose: Any) -> Alternatives:
        """Parse an argument `choose=`. Raise ValueError if its form is wrong."""
        if not isinstance(choose, Mapping) or not choose:
            raise ValueError(f"choose={choose!r:.200}, expected a dict of {_EXPECTED}")
        alternatives = cls(tuple(_parse_group(name, wanted) for name, wanted in choose.items()))
        names = alternatives.names
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise ValueError(
                f"choose={choose!r:.200}: the name {twice!r:.100} occurs twice; list all its alternatives in one entry"
            )
        return alternatives

    @classmethod
    def for_caches(cls, choose: Any, caches: Sequence[Any]) -> Alternatives:
        """Return the alternatives for `choose=`, after `check` with each cache. `choose` may be None, or already checked."""
        if choose is None or isinstance(choose, Alternatives):
            return choose or cls()
        alternatives = cls.of(choose)
        for cache in caches:
            alternatives.check(cache)
        return alternatives

    @property
    def names(self) -> list[str]:
        return [name for group in self.groups for name in group.names]

    @computed_once
    def patterns(self) -> dict[str, tuple[str, ...]]:
        """Names or patterns of the alternatives, by name in the batch."""
        pairs = (zip(group.names, group.patterns, strict=True) for group in self.groups)
        return dict(chain.from_iterable(pairs))

    @computed_once
    def covers(self) -> Wanted:
        """Predicate for the names of tensors that are alternatives."""
        patterns = list(chain.from_iterable(self.patterns.values()))
        return name_matcher([*patterns, *map(glob.escape, patterns)])  # a name may contain brackets

    def check(self, cache: Any) -> None:
        """Check that `cache` has these alternatives. Warn if independent choices seem to belong together.

        Raises:
            BatchError: A name or pattern matches no tensor of the whole cache, and no value of its first sample. Or a name in
                the batch belongs to a tensor outside its alternatives.
            ValueError: An alternative is a container of tensors.
        """
        names = list(cache.schema)
        try:
            self.check_patterns(names)
        except BatchError:  # a view may leave alternatives out; this costs the index of every shard
            self.check_patterns(cache._stored_names())
        for name, patterns in self.patterns.items():
            if _expand(patterns, names):
                continue
            _check_container(name, patterns, names)
            try:
                cache.select(patterns)  # a SharedDataset may not know all names
            except KeyError as exc:
                if not len(cache) or not _has_values(cache._sample(0), patterns):
                    hint = f"; the first sample has {list_names(cache._sample(0))}" if len(cache) else ""
                    for member in filter(cache.members.__contains__, patterns):
                        remedy = f"which a transform reads: info.cache.read_members(info.indices, {member!r:.100})"
                        hint = f"; {member!r:.100} is a member, {remedy}"
                    raise BatchError(f"choose={{{name!r:.100}: …}}: {exc.args[0]}{hint}") from exc
        for name in filter(self.patterns.__contains__, names):
            if not self.covers(name):
                raise _other_tensor(name)
        self._warn_of_pairs(cache)

    def check_patterns(self, names: Sequence[str]) -> None:
        """Raise BatchError if tensors match only a part of a name's patterns."""
        for name, patterns in self.patterns.items():
            unknown = [pattern for pattern in patterns if not _expand([pattern], names)]
            if 0 < len(unknown) < len(patterns):
                problem = f"no sample has a tensor {unknown[0]!r:.100}; there are {list_names(names, unknown[0])}"
                raise BatchError(f"choose={{{name!r:.100}: …}}: {problem}")

    def _warn_of_pairs(self, cache: Any) -> None:
        """Warn if independent patterns match equally many alternatives in all examined samples."""
        patterns = [(group.names[0], group.patterns[0]) for group in self.groups if group.patterns[0][0].endswith("*")]
        if len(patterns) < 2:
            return
        counts = []
        for number in spread(len(cache), _NUM_EXAMINED):
            sample = cache._sample(number)
            names = list(flatten(sample))
            counts.append([len(_expand(row, names) or _values(sample, row)) for _, row in patterns])
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
        """Return patterns of the stored tensors for a batch of tensors `names`."""
        return [pattern for name in names for pattern in self.patterns.get(name, (glob.escape(name),))]

    def schema_of(self, schema: Mapping[str, TensorSchema]) -> dict[str, TensorSchema]:
        """Return the schema of a batch from the schema of its samples."""
        merged = {name: tensor for name, tensor in schema.items() if not self.covers(name)}
        for name, patterns in self.patterns.items():
            for alternative in _expand(patterns, list(schema)).values():
                merged[name] = merge_schema(merged.get(name), replace(schema[alternative], name=name))
        return merged

    def chosen_nbytes(self, sizes: Mapping[str, int]) -> int:
        """Return a sample's bytes in a batch, averaged over alternatives. `sizes` has the bytes of its tensors."""
        total = sum(size for name, size in sizes.items() if not self.covers(name))
        for patterns in self.patterns.values():
            alternatives = _expand(patterns, list(sizes))
            total += sum(sizes[name] for name in alternatives.values()) // max(len(alternatives), 1)
        return total


def _parse_group(name: Any, wanted: Any) -> Group:
    is_tuple = isinstance(name, tuple)
    names = name if is_tuple else (name,)
    alternatives = [wanted] if isinstance(wanted, str) or (is_tuple and isinstance(wanted, tuple)) else wanted
    alternatives = list(wanted) if isinstance(wanted, Mapping) else alternatives
    rows = []
    if isinstance(alternatives, Sequence) and names:
        rows = [item if is_tuple else (item,) for item in alternatives]
    are_alike = all(isinstance(row, tuple) and len(row) == len(names) for row in rows)
    if not rows or not are_alike or not all(isinstance(text, str) for row in (names, *rows) for text in row):
        expected = _EXPECTED_TOGETHER if is_tuple else _EXPECTED
        raise ValueError(f"choose={{{name!r:.100}: {wanted!r:.200}}}, expected {expected}")
    patterns = tuple(zip(*rows, strict=True))
    weights = _parse_weights(name, wanted) if isinstance(wanted, Mapping) else (1.0,) * len(rows)
    are_apart = len(rows) == 1 or not any(len(set(row)) < len(row) or any(map(glob.has_magic, row)) for row in patterns)
    return Group(names, patterns, weights=None if are_apart and len(set(weights)) == 1 else weights)


def _parse_weights(name: Any, wanted: Mapping[Any, Any]) -> tuple[float, ...]:
    weights: list[float] = []
    for alternative, weight in wanted.items():
        number = math.nan
        if isinstance(weight, Real) and not isinstance(weight, bool):
            with suppress(OverflowError):  # a huge int
                number = float(weight)
        if not 0 <= number < math.inf:
            problem = f"choose={{{name!r:.100}: …}}: the weight of {alternative!r:.100} is {weight!r:.100}"
            raise ValueError(f"{problem}; expected a finite number of at least 0, such as 2 or 0.5")
        weights.append(number)
    if not any(weights):
        raise ValueError(f"choose={{{name!r:.100}: …}}: all weights are 0; give an alternative a larger weight")
    return tuple(weights)


@lru_cache(maxsize=1024)
def _edges(weights: tuple[float, ...], matches: tuple[_Match, ...]) -> _Edges | None:
    largest = max(weights[number] for match in matches for number, _ in match)
    if not largest:
        return None
    # relative to the largest, so that no sum overflows, and no sample has only weights that round to 0
    totals = [sum(weights[number] / largest for number, _ in match) for match in matches]
    if len(set(totals)) == 1:
        return ()
    *ends, total = accumulate(totals)
    return (*(end / total for end in ends), 1.0)


def _expand(patterns: Sequence[str], names: Collection[str]) -> dict[_Match, str]:
    """Return matching names by their matches, in the order of the patterns."""
    # natural order: `captions.2` before `captions.10`
    ordered, matches = sorted(names, key=_natural), dict[str, list[tuple[int, tuple[str, ...]]]]()
    for number, pattern in enumerate(patterns):
        if pattern in names:
            matches.setdefault(pattern, []).append((number, ()))
            continue
        parse = re.compile("(.*?)".join(map(re.escape, _WILDCARD.split(pattern))), re.DOTALL).fullmatch
        for name in ordered:
            if fnmatch.fnmatchcase(name, pattern) and (parsed := parse(name)):
                matches.setdefault(name, []).append((number, parsed.groups()))
    return {tuple(match): name for name, match in matches.items()}


def _natural(name: str) -> list[tuple[bool, int, str]]:
    return [(not part.isdecimal(), int(part) if part.isdecimal() else 0, part) for part in name.split(".")]


def _check_container(name: str, patterns: Sequence[str], names: Sequence[str]) -> None:
    for pattern in patterns:
        if fnmatch.filter(names, f"{pattern}.*"):
            raise ValueError(
                f"choose={{{name!r:.100}: {pattern!r:.100}}}: samples have a container of tensors there; choose among them "
                f"by {pattern + '.*'!r:.100}"
            )


def _other_tensor(name: str) -> BatchError:
    return BatchError(f"choose={{{name!r}: …}}: the samples have another tensor of this name; choose a new name")


# --- choosing ---


@dataclass(frozen=True, slots=True, eq=False)
class Randomness:
    """The inputs for a batch's seeds and choices, except its sample indices."""

    seed: int = 0  # of the loader
    epochs: int | Array = 0  # epoch of the batch, or of each sample, int64 `[B]`
    alternatives: Alternatives = Alternatives()
    choices: Mapping[str, Any] | None = None  # that the caller made, by name; None to choose by the seeds

    @classmethod
    def of(cls, choose: Any, choices: Mapping[str, Any] | None) -> Randomness:
        """Parse `choose=` and `choices=` of `read_batch`. Raise ValueError if they do not fit together."""
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
        return sample_seeds(self.seed, self.epochs, indices)

    def chooser(self, indices: Array) -> Chooser:
        """Return the function that chooses for the samples at `indices`.

        Without `choices`, it chooses at random, with equal probabilities or by the weights of the group. A random choice
        depends only on the seed of the sample, the number and weights of its alternatives, and the names of the group.

        Raises (on use):
            ValueError: The choices for a name are not integers `[B]`, or differ between names that are chosen together.
            IndexError: A sample has no such alternative.
        """
        choices, count = self.choices, len(indices)
        if choices is None:
            seeds = self.seeds(indices)

            def draw(group: Group, counts: Array, edges: Callable[[], list[_Edges]]) -> Array:
                fractions = fractions_of(seeds, group.purpose)
                drawn: Array = (fractions * counts).astype(np.int64)
                for i, ends in enumerate(edges() if group.weights else ()):  # cost per sample
                    if ends:
                        drawn[i] = bisect_right(ends, fractions.item(i))
                return drawn

            return draw

        def choose(group: Group, counts: Array, edges: Callable[[], list[_Edges]]) -> Array:
            columns = [np.asarray(choices[name]) for name in group.whole_names if name in choices]
            first = columns[0] if columns else np.zeros(count, np.int64)
            for column in columns:
                if column.shape != (count,) or column.dtype.kind not in "iu" or not np.array_equal(column, first):
                    raise ValueError(
                        f"choices for {list_names(group.whole_names)}: expected {count} integers, got {column!r:.200}"
                    )
            for at in np.flatnonzero((first < 0) | (first >= counts))[:1].tolist():
                raise IndexError(
                    f"choices[{group.whole_names[0]!r}][{at}] = {first[at]} out of range [0, {counts[at]}), "
                    "the alternatives of the sample"
                )
            return first.astype(np.int64)

        return choose


@dataclass(frozen=True, slots=True, repr=False)
class Choices(Mapping[str, Array]):
    """The index of each sample's chosen alternative, by name, int64 `[B]`.

    `choices.chosen("text")` returns the names of the chosen alternatives, "" for a sample that lacks the tensor.
    `read_batch(indices, choose=…, choices=choices)` reads the same tensors again. Choices are equal if these names are equal.
    Each look-up by name returns a new array.

    Threads/fork/pickle: immutable, safe everywhere.
    """

    _choices: dict[str, Array] = field(compare=False)
    _chosen: dict[str, list[str]]

    def chosen(self, name: str) -> list[str]:
        """Return the name of each sample's chosen alternative. Raise KeyError if the batch has no choice of this name."""
        return list(self._chosen[name])

    def __getitem__(self, name: str) -> Array:
        return np.array(self._choices[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._choices)

    def __len__(self) -> int:
        return len(self._choices)

    def __repr__(self) -> str:
        return f"Choices({self._chosen!r})"


# --- requests ---


@dataclass(frozen=True, slots=True)
class ChosenRequest(Request):
    """A request with one alternative chosen for each sample."""

    base: Request  # for whole samples
    alternatives: Alternatives
    chooser: Chooser
    picked: Layouts  # of the samples, with the chosen tensors
    # for each group with values, the alternatives of each sample, for the first name that has alternatives
    firsts: dict[Group, list[dict[_Match, str]]]
    # of each sample, int64 `[B]`; groups without tensors are missing until `values` is called
    choices: dict[Group, Array]
    of_values: Sequence[tuple[str, Group, tuple[str, ...]]]  # name, group and patterns of alternatives without tensors
    known_values: dict[str, list[tuple[str, Any]]] = field(default_factory=dict)  # result of `values`
    decoded: Decoded | None = None  # the values of the batch; None if the batch was not read

    def layouts(self) -> Layouts:
        return self.picked

    def values(self, samples: Sequence[Any] = ()) -> Mapping[str, Sequence[tuple[str, Any]]]:
        """Return `(alternative, value)` of each sample, by name in the batch. Tensors are left out.

        `samples` contains the samples of `rows` if all were decoded before. Raises BatchError if a sample has no alternatives,
        or if names that are chosen together cannot be paired; and the errors of `chooser`.
        """
        if not self.of_values or self.known_values:
            return self.known_values
        self.structures.note_values()
        decoded, chosen = self.decoded, dict[str, list[tuple[str, Any]]]()
        for name, group, patterns in self.of_values:
            find, expand, rows = partial(_values, patterns=patterns), lru_cache(partial(_expand, patterns)), list[Any]()
            if not samples:
                with suppress(BatchError, NewNames):  # structures differ, an index lacks names, or a value is no list
                    decoded = decoded or Decoded(self, self.picked)
                    rows = decoded.find(find)
            rows = rows or list(map(find, samples or self.rows.samples()))
            expanded = [expand(tuple(row)) for row in rows]
            firsts = self.firsts.setdefault(group, expanded)
            for i, (own, first) in enumerate(zip(expanded, firsts, strict=True)):
                if not own:
                    rest = self.structures.selected(self.structures.whole(self.rows.sample(i)))
                    raise _lacks_all(self.key(i), name, patterns, rest if isinstance(rest, dict) else ())
                if len(group.names) > 1 and own is not first:
                    _check_pairs(self.key(i), group, first, own)
            if group not in self.choices:
                edges = partial(group.edges, expanded, range(len(expanded)), self.key)
                self.choices[group] = self.chooser(group, np.array(list(map(len, expanded))), edges)
            picks = zip(expanded, firsts, self.choices[group].tolist(), strict=True)
            names = [own[list(first)[choice]] for own, first, choice in picks]
            chosen[name] = [(alternative, row[alternative]) for alternative, row in zip(names, rows, strict=True)]
        self.known_values.update(chosen)  # at once, for other threads
        return self.known_values

    def column(self, path: Path) -> list[Any]:
        return [value for _, value in self.values()[".".join(path)]]

    def place_chosen(self, batch: Any, tensors: Mapping[str, Any], decoded: Decoded) -> None:
        request = replace(self, decoded=decoded)
        are_there = all(any(_places(batch, patterns)) for *_, patterns in self.of_values)
        if not are_there or get_worker_info() is not None:
            request.values()  # an error during pickling of the batch would not reach the caller
        values = {name: Leaves(request, tuple(name.split("."))) for name, *_ in self.of_values}
        self._place(batch, {name: tensors[name] for name in self.picked.chosen[0]}, values)

    def sample(self, i: int) -> Any:
        chosen = self.known_values or self.values(self.rows.samples() if self.of_values else ())
        raw = self.rows.sample(i)
        sample = self.structures.selected(self.structures.whole(raw))
        lazies, stored = flatten(raw), self.picked.chosen[self.picked.which.item(i)]
        tensors = {name: None if one is None else lazies[one]._renamed(name) for name, one in stored.items()}
        self._place(sample, tensors, {name: pairs[i][1] for name, pairs in chosen.items()}, i)
        return sample

    def _place(self, batch: Any, tensors: Mapping[str, Any], values: Mapping[str, Any], i: int = 0) -> None:
        """Remove the alternative values, and put in the chosen tensors and values.

        `batch` is a batch or a single sample. Sample `i` shows which keys are ints.
        """
        for name in values:
            for place, key in _places(batch, self.alternatives.patterns[name]):
                del place[key]
        for name, chosen in (*tensors.items(), *values.items()):
            put(batch, name, chosen, self.rows.sample(i) if _NUMBER.search(name) else None)

    def in_view(self, store: Any, structures: Structures, fixed: tuple[str, ...] = ()) -> Request:
        return choose_alternatives(self.base.in_view(store, structures, fixed), self.alternatives, self.chooser)

    def again(self) -> Request:
        return choose_alternatives(self.base.again(), self.alternatives, self.chooser)

    def schema(self) -> Mapping[str, TensorSchema]:
        return self.alternatives.schema_of(whole_schema(self.store))

    def named_choices(self) -> Choices:
        values, stored = self.values(), [self.picked.chosen[at] for at in self.picked.which.tolist()]
        chosen = {
            name: [alternative for alternative, _ in values[name]]
            if name in values
            else [names[name] or "" for names in stored]
            for name in self.alternatives.names
        }
        return Choices({name: self.choices[group] for group in self.choices for name in group.names}, chosen)

    def keeping(self, names: tuple[str, ...]) -> ChosenRequest:
        chosen = [{name: stored for name, stored in tensors.items() if name in names} for tensors in self.picked.chosen]
        structures = self.structures.narrow(names)
        return replace(self, structures=structures, picked=replace(self.picked, chosen=chosen))


def choose_alternatives(request: Request, alternatives: Alternatives, chooser: Chooser) -> ChosenRequest:
    """Return a request that has only the chosen alternative of each group.

    Raises:
        BatchError: A sample has none of the alternatives of a name, or only alternatives of weight 0. Names that are chosen
            together cannot be paired. Or a pattern matches no tensor, or a name belongs to another tensor.
        ValueError: An alternative is a container of tensors, or `chooser` refuses the choices.
        IndexError: `chooser` refuses a choice.
    """
    request.find_names()  # an old index may lack names of alternatives
    stored = layouts_of(request.rows)
    stored_names = list({name for layout in stored.items for name in layout.named})
    rest: Any = request.structures.views.get(alternatives)
    if rest is None:
        try:
            alternatives.check_patterns(stored_names)
        except BatchError:  # this costs the index of every shard
            alternatives.check_patterns(list(whole_schema(request.store)))
        rest = _Rest(request.structures, alternatives)
        keep_bounded(request.structures.views, alternatives, rest)
    contents = [rest.contents(layout, partial(stored.key, at)) for at, layout in enumerate(stored.items)]
    available = [matches for matches, _ in contents]
    has_any = {name for matches in available for name, names in matches.items() if names}
    of_values, tensors = list[Any](), list[tuple[str, Group]]()
    choices, firsts = dict[Group, Array](), dict[Group, list[dict[_Match, str]]]()
    for group in alternatives.groups:
        has_tensors = any(map(has_any.__contains__, group.names))
        for name in group.names:
            patterns = alternatives.patterns[name]
            # all samples of the batch may lack a tensor, although its group has tensors
            if name in has_any or (has_tensors and _expand(patterns, list(whole_schema(request.store)))):
                tensors.append((name, group))
            else:
                _check_container(name, patterns, stored_names)
                of_values.append((name, group, patterns))
        if has_tensors:
            own = firsts[group] = [_find_first(stored, at, group, matches) for at, matches in enumerate(available)]
            counts = np.array(list(map(len, own)))[stored.which]
            choices[group] = chooser(group, counts, partial(group.edges, own, stored.which, stored.key))
    # cost per sample: one step in Python
    layout_of = stored.which.tolist()
    combined = list(zip(layout_of, *(column.tolist() for column in choices.values()), strict=True))
    distinct = sorted(set(combined))  # in one order, so that other batches find their columns again
    distinct.remove(combined[0])
    numbers = {combination: number for number, combination in enumerate([combined[0], *distinct])}
    which = np.array([numbers[combination] for combination in combined], np.int64)
    items, chosen = list[Layout](), list[dict[str, str | None]]()
    for at, *picks in numbers:
        items.append(stored.items[at])
        matches = {group: list(firsts[group][at])[pick] for group, pick in zip(choices, picks, strict=True)}
        chosen.append({name: available[at][name].get(matches[group]) for name, group in tensors})
    is_mixed = stored.is_mixed and any(names != contents[0][1] for _, names in contents)
    fixed = tuple(name for name in request.fixed if not alternatives.covers(name))
    picked = Layouts(request.rows, items, which, is_mixed, chosen)
    first = {group: [firsts[group][at] for at in layout_of] for _, group, _ in of_values if group in firsts}
    request_of = (request, alternatives, chooser, picked, first, choices, of_values)
    return ChosenRequest(request.store, request.rows, rest, fixed, *request_of)


def _find_first(
    stored: Layouts, at: int, group: Group, available: Mapping[str, dict[_Match, str]]
) -> dict[_Match, str]:
    """Return the alternatives of the group's first name that has any."""
    for name in group.names:
        if available[name]:
            return available[name]
    raise _lacks_all(stored.key(at), group.names[0], group.patterns[0], stored.items[at].named)


def _check_pairs(key: str, group: Group, first: dict[_Match, str], other: dict[_Match, str]) -> None:
    """Raise BatchError unless the alternatives can be paired by their names."""
    parts = (part for match in first for _, parts in match for part in parts)
    if first.keys() == other.keys() and not any(map(_POSITIONAL.search, parts)):
        return
    names = (
        list_names([own[match] for match in sorted(own, key=beside.__contains__)])  # alternatives without partner first
        for own, beside in ((first, other), (other, first))
    )
    raise BatchError(
        f"sample {key!r}: {list_names(group.names)} are chosen together, but their alternatives cannot be paired by name: "
        f"one has {', the other '.join(names)}. What wildcards match must be the same: store lists of one length, or dicts "
        f"with the same keys (text or ints); or list the pairs: {{{group.names!r:.100}: [('texts.a', 'captions.b'), …]}}"
    )


def _lacks_all(key: str, name: str, patterns: Sequence[str], names: Any) -> BatchError:
    return BatchError(
        f"sample {key!r} has none of the alternatives of {name!r:.100}: {list_names(patterns)}; "
        f"it has {list_names(names, patterns[0])}"
    )


class _Rest(Structures):
    """The structures of samples without the alternatives that are tensors."""

    def __init__(self, base: Structures, alternatives: Alternatives) -> None:
        is_selected, covers = base.wanted, alternatives.covers
        super().__init__(lambda name: not covers(name) and (is_selected is None or is_selected(name)), base.optional)
        self._is_selected, self._alternatives = is_selected, alternatives
        # the value refers to the form whose id is in the key, so the id is not reused
        self._contents: dict[Any, tuple[Form, _Contents]] = {}

    def contents(self, layout: Layout, sample_key: Callable[[], str]) -> _Contents:
        """Return alternatives by name in the batch, and the other tensors' names. Raise BatchError if they clash."""
        key = id(layout.form), layout.texts, layout.further
        kept = self._contents.get(key)
        if kept is None:
            names, covers = list(filter(self._is_selected, layout.named)), self._alternatives.covers
            alternatives = {name: _expand(patterns, names) for name, patterns in self._alternatives.patterns.items()}
            fixed_names = {name for name in names if not covers(name)}
            for name in fixed_names & alternatives.keys():
                raise _other_tensor(name)
            for group in self._alternatives.groups:
                first, *rest = [alternatives[name] for name in group.names if alternatives[name]] or [{}]
                for other in rest:
                    _check_pairs(sample_key(), group, first, other)
            kept = layout.form, (alternatives, fixed_names)
            keep_bounded(self._contents, key, kept)
        return kept[1]

    def whole(self, sample: Any) -> Any:
        """Return a sample without its alternatives. Drop None in their places, and containers that held only alternatives."""
        kept = project(super().whole(sample), lambda name: not self._alternatives.covers(name), prunes=True)
        if kept is None and type(sample) in DICTS:
            kept = empty_like(sample)
        for pattern in chain.from_iterable(self._alternatives.patterns.values()):
            for place, key in _places(kept, (pattern,)):
                item = place[key]
                items = item.values() if type(item) in DICTS else item if type(item) in SEQUENCES else ()
                if item is None or (pattern.endswith(".*") and items and all(part is None for part in items)):
                    del place[key]
        return kept

    def comparable(self, sample: Any) -> Any:
        sample = rebuild(sample, lambda leaf: leaf)  # a copy of its containers
        for patterns in self._alternatives.patterns.values():
            for place, key in _places(sample, patterns):
                del place[key]
        return sample

    def _missing(self, layouts: Layouts, base: int, fixed: tuple[str, ...]) -> tuple[str, ...]:
        missing = super()._missing(layouts, base, fixed)
        return tuple(name for name in missing if not self._alternatives.covers(name))


_Contents: TypeAlias = "tuple[dict[str, dict[_Match, str]], set[str]]"

# --- values ---


def _find(sample: Any, pattern: str) -> Iterator[tuple[Any, Any, str]]:
    """Yield container, key or index, and name of each matching item."""
    part, dot, rest = pattern.partition(".")
    steps = steps_of(sample)
    for name in [part] if part in steps else fnmatch.filter(steps, part):
        if not dot:
            yield sample, steps[name], name
            continue
        for container, key, tail in _find(sample[steps[name]], rest):
            yield container, key, f"{name}.{tail}"


def _places(sample: Any, patterns: Sequence[str]) -> Iterator[tuple[dict[Any, Any], Any]]:
    """Yield dict and key of possible alternatives, and of their containers."""
    for pattern in patterns:
        for place, key, _ in list(_find(sample, pattern.removesuffix(".*"))):
            # the caller may have deleted the key of a dict that occurs twice
            if type(place) in DICTS and key in place and (pattern.endswith(".*") or type(place[key]) not in DICTS):
                yield place, key


def _values(sample: Any, patterns: Sequence[str]) -> dict[str, Any]:
    """Return alternatives by name, without None and tensors. Raise BatchError if `NAME` of `NAME.*` is not a container."""
    values: dict[str, Any] = {}
    for pattern in patterns:
        is_list = pattern.endswith(".*")
        for place, key in _places(sample, [pattern]) if is_list else ():
            if place[key] is not None and not isinstance(place[key], (dict, *SEQUENCES)):
                problem = f"a {type(place[key]).__name__} at {pattern.removesuffix('.*')!r}"
                raise BatchError(f"a sample has {problem}, expected a list of alternatives")
        for place, key, name in _find(sample, pattern):
            item = place[key]
            if item is not None and not is_tensor(item) and (is_list or type(item) not in DICTS):
                values[name] = item
    return values


def _has_values(sample: Any, patterns: Sequence[str]) -> bool:
    return any(_places(sample, patterns)) or bool(_values(sample, patterns))
