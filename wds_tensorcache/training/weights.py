"""Weights of samples or of mixed caches, and from which step on they hold."""

from __future__ import annotations

import base64
import zlib
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from wds_tensorcache.training.steps import Drawn

__all__ = ["Weights", "caches_of"]

Array = np.ndarray[Any, Any]


class Weights:
    """The weights at each step: of samples, of a mix, or none at all."""

    def __init__(self, weights: Any, mix: Mapping[str, tuple[Any, float]] | None, count: int, seed: int) -> None:
        self._names = list(mix) if mix is not None else None
        self._count = count if mix is None else len(mix)
        self._seed = seed
        self._is_used = weights is not None or mix is not None
        self._steps: list[int] = []
        self._values: list[Array] = []
        self._drawn: dict[int, Drawn] = {}  # by the step from which on
        self._packed: dict[int, str] = {}  # the same, for states
        if mix is not None:
            self.change(0, {name: weight for name, (_, weight) in mix.items()})
        elif weights is not None:
            self.change(0, weights)

    def change(self, step: int, weights: Any, current: int = 0) -> None:
        """Let `weights` hold from a step on; what held before step `current` is forgotten.

        Raises:
            ValueError: Not as many as there are samples or caches, none above 0, or any below 0 or not finite.
        """
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
        self._check(values)
        in_force = [(at, old) for at, old in self._pairs()[self._at(current) :] if at < step]
        self._set([*in_force, (step, values)])

    def _check(self, values: Array) -> None:
        if values.shape != (self._count,) or not np.isfinite(values).all() or (values < 0).any() or not values.any():
            raise ValueError(
                f"weights of shape {list(values.shape)}: expected {self._count} numbers of 0 or more, not all 0"
            )

    def _at(self, step: int) -> int:
        """Return which of the weights hold at a step."""
        return max(0, bisect_right(self._steps, step) - 1)

    def _pairs(self) -> list[tuple[int, Array]]:
        return list(zip(self._steps, self._values, strict=True))

    def _set(self, pairs: Sequence[tuple[int, Array]]) -> None:
        self._steps, self._values = [step for step, _ in pairs], [values for _, values in pairs]
        self._drawn.clear()
        self._packed.clear()

    def of_streams(self, step: int) -> Array:
        """Return the weights of a mix at a step."""
        return self._values[self._at(step)]

    def drawn(self, step: int) -> Drawn | None:
        """Return what draws the samples of a step; None if they are not drawn."""
        if not self._is_used or self._names is not None:
            return None
        at = self._at(step)
        if at not in self._drawn:
            self._drawn[at] = Drawn(self._values[at], self._seed)
        return self._drawn[at]

    def state(self, step: int) -> list[list[Any]]:
        """Return the weights at a step, and those that hold later, for JSON."""
        first = self._at(step)
        for at, values in self._pairs()[first:]:
            if at not in self._packed:
                self._packed[at] = base64.b64encode(zlib.compress(values.astype("<f8").tobytes(), 1)).decode()
        return [[at, self._packed[at]] for at in self._steps[first:]]

    def load(self, state: Sequence[Sequence[Any]]) -> None:
        """Take the weights of a state.

        Raises:
            ValueError: They are of other samples or caches, or no weights.
        """
        try:
            pairs = [(int(at), np.frombuffer(zlib.decompress(base64.b64decode(text)), "<f8")) for at, text in state]
        except (TypeError, ValueError, zlib.error) as exc:
            raise ValueError(f"the state has no weights: {exc}") from exc
        if any(len(values) != self._count for _, values in pairs) or bool(pairs) != self._is_used:
            raise ValueError(f"the state has weights of something else than {self._count} samples or caches")
        for _, values in pairs:
            self._check(values)
        steps = [at for at, _ in pairs]
        if steps != sorted(set(steps)):
            raise ValueError(f"the state has weights from steps {steps} on, which do not ascend")
        self._set(pairs)


def caches_of(mix: Any) -> list[Any]:
    """Return the caches of what `mix=` may be.

    Raises:
        ValueError: It is something else.
    """
    pairs = list(mix.values()) if isinstance(mix, Mapping) else []
    if not pairs or not all(isinstance(pair, tuple) and len(pair) == 2 for pair in pairs):
        raise ValueError(f"mix={mix!r:.200}, expected {{'a': (cache, 0.7), 'b': (other, 0.3)}}")
    return [cache for cache, _ in pairs]
