"""How a batch chooses among alternatives: by the seeds of its samples, or as the caller says; and what it chose."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn, TypeAlias

import numpy as np

from wds_tensorcache.errors import list_names
from wds_tensorcache.reading.choices.alternatives import Alternatives, Group
from wds_tensorcache.reading.seeds import fractions_of, sample_seeds

__all__ = ["Choices", "Chooser", "Randomness", "given_chooser", "random_chooser"]

Array = np.ndarray[Any, Any]
# returns each sample's choice, int64 `[B]`, for a group and each sample's number of alternatives; a choice is the number of one
Chooser: TypeAlias = "Callable[[Group, Array], Array]"


@dataclass(frozen=True, slots=True, eq=False)
class Randomness:
    """Everything that determines the seeds and choices of a batch besides the sample indices.

    Attributes:
        seed: Seed of the loader.
        epochs: Epoch of the batch, or of each sample, int64 `[B]`.
        alternatives: Alternatives to choose from; None if there are none.
        given: Choices that the caller made, by name; None to choose by the seeds.
    """

    seed: int = 0
    epochs: int | Array = 0
    alternatives: Alternatives | None = None
    given: Mapping[str, Any] | None = None

    def check_given(self) -> None:
        """Raise ValueError if a choice is given for a name that has no alternatives."""
        names = self.alternatives.names if self.alternatives is not None else []
        for name in self.given or ():
            if name not in names:
                raise ValueError(f"choices has {name!r:.100}, but choose= has {list_names(names, name)}")

    def seeds(self, indices: Array) -> Array:
        """Return a seed for each sample, int64 `[B]`."""
        return sample_seeds(self.seed, self.epochs, indices)

    def chooser(self, indices: Array) -> Chooser:
        """Return the function that chooses for the samples at `indices`."""
        return random_chooser(self.seeds(indices)) if self.given is None else given_chooser(self.given, len(indices))


def random_chooser(seeds: Array) -> Chooser:
    """Return a function that chooses each alternative with equal probability; the choice depends only on the sample's seed."""
    return lambda group, counts: (fractions_of(seeds, group.purpose) * counts).astype(np.int64)


def given_chooser(given: Mapping[str, Any], count: int) -> Chooser:
    """Return a function that makes the choices `given` by name; without an entry, it chooses the first alternative.

    Raises (on use):
        ValueError: The choices for a name are not `count` integers, or differ between names that are chosen together.
        IndexError: A sample has no such alternative.
    """

    def choose(group: Group, counts: Array) -> Array:
        found = [np.asarray(given[name]) for name in group.names if name in given] or [np.zeros(count, np.int64)]
        for each in found:
            if each.shape != (count,) or each.dtype.kind not in "iu" or not np.array_equal(each, found[0]):
                raise ValueError(f"choices for {list_names(group.names)}: expected {count} integers, got {each!r:.200}")
        outside = np.flatnonzero((found[0] < 0) | (found[0] >= counts))
        if len(outside):
            at = outside.item(0)
            raise IndexError(
                f"choices[{group.names[0]!r}][{at}] = {found[0][at]} out of range [0, {counts[at]}), "
                "the alternatives of the sample"
            )
        return found[0].astype(np.int64)

    return choose


class Choices(Mapping[str, Array]):
    """The choices in a batch, by name: `choices["text"]` is the number of each sample's alternative, int64 `[B]`.

    `choices.chosen("text")` gives the names of the chosen alternatives, "" for a sample that lacks the tensor.
    `read_batch(indices, choose=…, choices=choices)` reads the same tensors again.

    Threads/fork/pickle: immutable, safe everywhere.
    """

    __slots__ = ("_choices", "_chosen")
    _choices: dict[str, Array]
    _chosen: dict[str, list[str]]

    def __init__(self, choices: dict[str, Array], chosen: dict[str, list[str]]) -> None:
        object.__setattr__(self, "_choices", choices)
        object.__setattr__(self, "_chosen", chosen)

    def chosen(self, name: str) -> list[str]:
        """Return the name of each sample's chosen alternative; raise KeyError if the batch has no choice of this name."""
        return list(self._chosen[name])

    def _with_more(self, others: Choices, prefix: str) -> Choices:
        """Return these choices and `others`, whose names get a prefix."""
        choices = {prefix + name: found for name, found in others._choices.items()}
        chosen = {prefix + name: [prefix + each for each in found] for name, found in others._chosen.items()}
        return Choices(self._choices | choices, self._chosen | chosen)

    def __getitem__(self, name: str) -> Array:
        return np.array(self._choices[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._choices)

    def __len__(self) -> int:
        return len(self._choices)

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise AttributeError("Choices are immutable")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Choices) and self._chosen == other._chosen

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"Choices({self._chosen!r})"

    def __reduce__(self) -> Any:
        return Choices, (self._choices, self._chosen)
