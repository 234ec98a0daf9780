"""Weights of samples or of mixed caches, and the steps at which they change."""

from __future__ import annotations

import base64
import zlib
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch

from wds_tensorcache.training.order import uniform

__all__ = ["Drawn", "Weights", "caches_of"]

Array = np.ndarray[Any, Any]


class Drawn:
    """A stream of samples drawn with replacement, in proportion to their weights."""

    def __init__(self, weights: Array, seed: int) -> None:
        self.weights = weights
        self._seed = seed

    @cached_property
    def _sums(self) -> Array:
        return np.cumsum(self.weights / self.weights.max())  # dividing by the maximum prevents an infinite sum

    @cached_property
    def _last(self) -> int:
        # the last sample with a weight above 0, which bounds the draw in case of rounding
        return int(np.flatnonzero(self.weights)[-1])

    @cached_property
    def packed(self) -> str:
        """The weights as compressed text, for the state in a checkpoint."""
        return base64.b64encode(zlib.compress(self.weights.astype("<f8").tobytes(), 1)).decode()

    def indices(self, epoch: int, positions: Array) -> Array:
        """Return the samples drawn at positions of an epoch."""
        found = np.searchsorted(self._sums, uniform(self._seed, epoch, positions) * self._sums[-1], "right")
        kept: Array = np.minimum(found, self._last)
        return kept


class Weights:
    """The weights at each step: one for each sample, or one for each cache of `mix` (`are_of_streams`), or none."""

    def __init__(self, weights: Any, mix: Mapping[str, tuple[Any, float]] | None, count: int, seed: int) -> None:
        self.are_of_streams = mix is not None
        self._names = None if mix is None else list(mix)
        self._count = count if mix is None else len(mix)
        self._seed = seed
        self._changes: list[tuple[int, Drawn]] = []  # in the order of the steps
        if mix is not None:
            weights = {name: weight for name, (_, weight) in mix.items()}
        self._is_used = weights is not None
        if self._is_used:
            self.change(0, weights)

    def change(self, step: int, weights: Any, current: int = 0) -> None:
        """Set the weights from `step` on, in place of later changes; forget weights that ended before the step `current`."""
        if not self._is_used:
            raise ValueError("the loader was made without weights and without mix")
        if self._names is not None:
            if not isinstance(weights, Mapping) or set(weights) != set(self._names):
                raise ValueError(f"weights={weights!r:.200}, expected a dict with {', '.join(map(repr, self._names))}")
            weights = [weights[name] for name in self._names]
        try:
            values = torch.as_tensor(weights, dtype=torch.float64).detach().cpu().numpy().copy()
        except (TypeError, ValueError, RuntimeError) as exc:
            raise ValueError(f"weights={weights!r:.200}: expected {self._count} numbers") from exc
        kept = [change for change in self._from(current) if change[0] < step]
        self._changes = [*kept, (step, self._checked(values))]

    def _checked(self, values: Array) -> Drawn:
        if values.shape != (self._count,) or not np.isfinite(values).all() or (values < 0).any() or not values.any():
            raise ValueError(
                f"weights of shape {list(values.shape)}: expected {self._count} numbers, all finite, none negative, not all 0"
            )
        return Drawn(values, self._seed)

    def _from(self, step: int) -> list[tuple[int, Drawn]]:
        """Return the weights at a step, and all later changes, each with its first step."""
        at = bisect_right(self._changes, step, key=lambda change: change[0])
        return self._changes[max(0, at - 1) :]

    def values(self, step: int) -> Array:
        """Return the weights at a step."""
        return self._from(step)[0][1].weights

    def drawn(self, step: int) -> Drawn | None:
        """Return the stream of drawn samples at a step; None if samples have no weights."""
        return None if self.are_of_streams or not self._is_used else self._from(step)[0][1]

    def state(self, step: int) -> list[list[Any]]:
        """Return the weights at a step and all later changes, for JSON."""
        return [[at, drawn.packed] for at, drawn in self._from(step)]

    def load(self, state: Sequence[Sequence[Any]]) -> None:
        """Replace the weights by the weights of a state; if these do not match, raise ValueError and change nothing."""
        try:
            found = [(int(at), np.frombuffer(zlib.decompress(base64.b64decode(text)), "<f8")) for at, text in state]
        except (TypeError, ValueError, zlib.error) as exc:
            raise ValueError(f"the state has no valid weights: {exc}") from exc
        if bool(found) != self._is_used:
            raise ValueError(f"the state has {'weights' if found else 'no weights'}, unlike this loader")
        steps = [at for at, _ in found]
        if steps != sorted(set(steps)):
            raise ValueError(f"the state has weights from steps {steps} on, expected ascending steps")
        self._changes = [(at, self._checked(values)) for at, values in found]


def caches_of(mix: Any) -> list[Any]:
    """Return the caches of a `mix=` argument."""
    pairs = list(mix.values()) if isinstance(mix, Mapping) else []
    if not pairs or not all(isinstance(pair, tuple) and len(pair) == 2 for pair in pairs):
        raise ValueError(f"mix={mix!r:.200}, expected {{'a': (cache, 0.7), 'b': (other, 0.3)}}")
    return [cache for cache, _ in pairs]
