"""How a batch chooses among alternatives: drawn from the seeds of its samples, or as the caller says; and what it chose."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn, TypeAlias

import numpy as np

from wds_tensorcache.reading.choices.alternatives import Alternatives, Group
from wds_tensorcache.reading.seeds import fractions_of, sample_seeds

__all__ = ["Choices", "Draw", "Pick", "draw_from", "pick_given"]

Array = np.ndarray[Any, Any]
# returns the position of each sample's choice, int64 `[B]`, from a group and each sample's number of alternatives
Pick: TypeAlias = "Callable[[Group, Array], Array]"


@dataclass(frozen=True, slots=True, eq=False)
class Draw:
    """All that determines the random choices of a batch besides the sample indices.

    Attributes:
        seed: Seed of the loader.
        epochs: Epoch of the batch, or of each sample, int64 `[B]`.
        alternatives: Alternatives to choose from; None if there are none.
        given: Choices that the caller made, by name; None to draw.
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
                raise ValueError(f"choices has {name!r}, but choose= has {', '.join(map(repr, names))}")

    def seeds(self, indices: Array) -> Array:
        """Return a seed for each sample, int64 `[B]`."""
        return sample_seeds(self.seed, self.epochs, indices)

    def pick(self, indices: Array) -> Pick:
        """Return the function that chooses for the samples at `indices`."""
        return draw_from(self.seeds(indices)) if self.given is None else pick_given(self.given, len(indices))


def draw_from(seeds: Array) -> Pick:
    """Return a function that chooses each alternative with equal probability; the choice depends only on the sample's seed."""
    return lambda group, counts: (fractions_of(seeds, group.purpose) * counts).astype(np.int64)


def pick_given(given: Mapping[str, Any], count: int) -> Pick:
    """Return a function that makes the choices `given` by name; without an entry, it chooses the first alternative.

    Raises (on use):
        ValueError: The choices for a name are not `count` integers, or differ between names that are chosen together.
        IndexError: A sample has no such alternative.
    """

    def pick(group: Group, counts: Array) -> Array:
        found = [np.asarray(given[name]) for name in group.names if name in given] or [np.zeros(count, np.int64)]
        for each in found:
            if each.shape != (count,) or each.dtype.kind not in "iu" or not np.array_equal(each, found[0]):
                raise ValueError(
                    f"choices for {', '.join(map(repr, group.names))}: expected {count} integers, got {each!r:.200}"
                )
        outside = np.flatnonzero((found[0] < 0) | (found[0] >= counts))
        if len(outside):
            at = outside.item(0)
            raise IndexError(
                f"choices[{group.names[0]!r}][{at}] = {found[0][at]} out of range [0, {counts[at]}), "
                "the alternatives of the sample"
            )
        return found[0].astype(np.int64)

    return pick


class Choices(Mapping[str, Array]):
    """The choices in a batch, by name: `choices["text"]` is the position of each sample's choice, int64 `[B]`.

    `choices.names("text")` gives the names of the chosen tensors. `read_batch(indices, choose=…, choices=choices)` reads the
    same tensors again.

    Threads/fork/pickle: immutable, safe everywhere.
    """

    __slots__ = ("_chosen", "_positions")
    _positions: dict[str, Array]
    _chosen: dict[str, list[str]]

    def __init__(self, positions: dict[str, Array], chosen: dict[str, list[str]]) -> None:
        object.__setattr__(self, "_positions", positions)
        object.__setattr__(self, "_chosen", chosen)

    def names(self, name: str) -> list[str]:
        """Return the name of each sample's chosen tensor; raise KeyError if the batch has no choice of this name."""
        return list(self._chosen[name])

    def with_more(self, others: Choices, prefix: str) -> Choices:
        """Return these choices and `others`, whose names get a prefix."""
        positions = {prefix + name: found for name, found in others._positions.items()}
        chosen = {prefix + name: [prefix + each for each in found] for name, found in others._chosen.items()}
        return Choices(self._positions | positions, self._chosen | chosen)

    def __getitem__(self, name: str) -> Array:
        return self._positions[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._positions)

    def __len__(self) -> int:
        return len(self._positions)

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise AttributeError("Choices are immutable")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Choices) and self._chosen == other._chosen

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"Choices({self._chosen!r})"

    def __reduce__(self) -> Any:
        return Choices, (self._positions, self._chosen)
