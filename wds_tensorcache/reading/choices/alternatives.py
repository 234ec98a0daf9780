"""The argument `choose=`: which tensors of a sample are alternatives, and under which name a batch has the chosen one."""

from __future__ import annotations

import fnmatch
import glob
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeAlias
from urllib.parse import unquote

from wds_tensorcache.errors import BatchError
from wds_tensorcache.reading.schema import TensorSchema, merge_schema, name_matcher
from wds_tensorcache.reading.seeds import purpose_of

__all__ = ["Alternatives", "Choose", "Group", "find_values", "split"]

# alternatives by name, or by a tuple of names that are chosen together
Choose: TypeAlias = "Mapping[Any, Any]"


@dataclass(frozen=True)
class Group:
    """Names that are chosen together, with the alternatives of each.

    Attributes:
        names: Tensor names in the batch.
        patterns: For each name, the names or patterns of its alternatives in a sample.
    """

    names: tuple[str, ...]
    patterns: tuple[tuple[str, ...], ...]

    @cached_property
    def purpose(self) -> str:
        """Text that makes the choices of different groups independent."""
        return purpose_of("choose", self.names)

    def alternatives_in(self, names: Sequence[str]) -> list[tuple[str, ...]]:
        """Return the alternatives among the tensors `names` of a sample: for each, one tensor name per name of the group.

        The tensor name is "" for a name without alternatives, if other names of the group have some: the sample lacks it.
        Patterns expand in the order of the numbers in the names: `captions.2` comes before `captions.10`.

        Raises:
            ValueError: The names of the group have different numbers of alternatives.
        """
        found = [_expand(patterns, names) for patterns in self.patterns]
        count = max(map(len, found))
        found = [each or [""] * count for each in found]
        if len(set(map(len, found))) > 1:
            counts = ", ".join(f"{len(each)} of {name!r}" for each, name in zip(found, self.names, strict=True))
            raise ValueError(f"has {counts}; names that are chosen together need equal numbers of alternatives")
        return list(zip(*found, strict=True))


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
        groups = tuple(_group(name, wanted) for name, wanted in choose.items())
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
        """Names of the chosen tensors in the batch."""
        return [name for group in self.groups for name in group.names]

    @cached_property
    def patterns(self) -> tuple[str, ...]:
        """Names and patterns of all alternatives."""
        return tuple(pattern for group in self.groups for each in group.patterns for pattern in each)

    @cached_property
    def covers(self) -> Callable[[str], bool]:
        """Function that returns whether the tensor with a name is an alternative."""
        return name_matcher(self.patterns)

    def check(self, cache: Any) -> None:
        """Raise an error unless `cache` has these alternatives.

        Raises:
            BatchError: A name or pattern matches no tensor of the cache; or a name in the batch is that of a tensor that is
                not one of its alternatives.
        """
        for group in self.groups:
            try:
                cache.select([pattern for each in group.patterns for pattern in each])
            except KeyError as exc:
                if len(group.names) > 1 or not any(find_values(cache._sample(0), group)):
                    raise BatchError(f"choose={{{group.names[0]!r:.100}: …}}: {exc.args[0]}") from exc
        for name in cache.schema:
            if name in self.names and not any(fnmatch.fnmatchcase(name, pattern) for pattern in self.patterns_of(name)):
                raise BatchError(
                    f"choose={{{name!r}: …}}: the samples have another tensor of this name; choose a new name"
                )

    def patterns_of(self, name: str) -> tuple[str, ...]:
        """Return the names and patterns of the alternatives of one name."""
        return next(
            patterns
            for group in self.groups
            for each, patterns in zip(group.names, group.patterns, strict=True)
            if each == name
        )

    def patterns_for(self, names: Sequence[str]) -> list[str]:
        """Return patterns that select what a batch with only the tensors `names` needs."""
        chosen = [group for group in self.groups if any(name in names for name in group.names)]
        rest = [glob.escape(name) for name in names if name not in self.names]
        return rest + [pattern for group in chosen for each in group.patterns for pattern in each]

    def schema_of(self, schema: Mapping[str, TensorSchema]) -> dict[str, TensorSchema]:
        """Return the properties of a batch's tensors, from those of the samples' tensors."""
        found = {name: tensor for name, tensor in schema.items() if not self.covers(name)}
        for group in self.groups:
            for name, patterns in zip(group.names, group.patterns, strict=True):
                for each in _expand(patterns, list(schema)):
                    found[name] = merge_schema(found.get(name), replace(schema[each], name=name))
        return found


def find_values(batch: Any, group: Group) -> Iterator[tuple[dict[Any, Any], Any, list[tuple[str, Any, bool]]]]:
    """Find the alternatives of a group that are not tensors.

    Yields:
        The dict that has a value, its key there, and the alternatives that it is or contains: name, value, and whether the
        value is a list of alternatives.
    """
    for pattern in group.patterns[0]:
        *path, last = map(unquote, pattern.split("."))
        if last == "*" and path:
            *path, last = path
            pattern = pattern.removesuffix(".*")
            is_list = True
        else:
            is_list = False
        target = batch
        for part in path:
            target = target.get(part) if type(target) is dict else None
        if type(target) is not dict or last not in target:
            continue
        value = target[last]
        if is_list and type(value) is dict:
            yield target, last, [(f"{pattern}.{key}", each, False) for key, each in value.items()]
        elif type(value) is not dict:
            yield target, last, [(pattern, value, is_list)]


def split(
    alternatives: Alternatives, prefixes: Sequence[str], names: Sequence[Sequence[str]]
) -> list[dict[Group, Group]]:
    """Return each joined cache's part of `alternatives`.

    Args:
        alternatives: Alternatives among the tensors of all caches.
        prefixes: For each cache, the prefix of its tensors' names.
        names: For each cache, the names of its tensors, without prefix.

    Returns:
        For each cache, its groups with the names of tensors there, and the whole group of each.

    Raises:
        ValueError: The alternatives of a name are in several caches, or the name is not one of the same cache.
    """
    parts: list[dict[Group, Group]] = [{} for _ in prefixes]
    for group in alternatives.groups:
        homes: dict[str, tuple[int, str]] = {}  # the cache of each name, and an alternative there
        for number, (prefix, known) in enumerate(zip(prefixes, names, strict=True)):
            inner, patterns = [], []
            for name, wanted in zip(group.names, group.patterns, strict=True):
                found = _expand(wanted, [prefix + each for each in known])
                if not found:
                    continue
                home, other = homes.setdefault(name, (number, found[0]))
                if home != number:
                    raise ValueError(
                        f"choose={{{name!r}: …}}: {other!r} and {found[0]!r} are tensors of different caches; write all "
                        "alternatives into one cache and join that, or read both tensors and choose in a transform"
                    )
                inner.append(name)
                patterns.append(tuple(glob.escape(each[len(prefix) :]) for each in found))
            if inner:
                parts[number][Group(tuple(name[len(prefix) :] for name in inner), tuple(patterns))] = group
        for name, (number, found_name) in homes.items():
            if not name.startswith(prefixes[number]):
                raise ValueError(
                    f"choose={{{name!r}: …}}: {found_name!r} is an alternative; expected a name that begins with "
                    f"{prefixes[number]!r}, because the batch has the chosen tensor among those of its cache"
                )
    return parts


_EXPECTED = (
    "lists of tensor names, or of patterns, by name: {'latent': ['latent', 'latent_flipped'], 'text': 'captions.*'}"
)


def _group(name: Any, wanted: Any) -> Group:
    shown = f"choose={{{name!r:.100}: {wanted!r:.200}}}"
    names = name if isinstance(name, tuple) else (name,)
    each = [wanted] if isinstance(wanted, str) or (isinstance(name, tuple) and isinstance(wanted, tuple)) else wanted
    if not isinstance(each, Sequence) or not each or not names or not all(isinstance(one, str) for one in names):
        raise ValueError(f"{shown}, expected {_EXPECTED}")
    rows = [one if isinstance(name, tuple) else (one,) for one in each]
    for row in rows:
        if not isinstance(row, tuple) or len(row) != len(names) or not all(isinstance(one, str) for one in row):
            what = "a tuple of names" if isinstance(name, tuple) else "a name or pattern"
            raise ValueError(f"{shown}: each alternative is {what}, as many as in the key; expected {_EXPECTED}")
    return Group(names, tuple(zip(*rows, strict=True)))


def _expand(patterns: Sequence[str], names: Sequence[str]) -> list[str]:
    """Return the names that match patterns, each once: by pattern, then in natural order."""
    ordered = sorted(names, key=_natural)
    found = (
        name
        for pattern in patterns
        for name in (
            [pattern] if pattern in names else [each for each in ordered if fnmatch.fnmatchcase(each, pattern)]
        )
    )
    return list(dict.fromkeys(found))


def _natural(name: str) -> list[tuple[bool, int, str]]:
    return [(not part.isdecimal(), int(part) if part.isdecimal() else 0, part) for part in name.split(".")]
