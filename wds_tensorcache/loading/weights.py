"""Weights of samples or of mixed caches, and from which step on they hold."""

from __future__ import annotations

import base64
import zlib
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from wds_tensorcache.loading.course import Drawn

__all__ = ["Weights"]

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
        if mix is not None:
            self.change(0, {name: weight for name, (_, weight) in mix.items()})
        elif weights is not None:
            self.change(0, weights)

    def change(self, step: int, weights: Any) -> None:
        """Let `weights` hold from a step on.

        Raises:
            ValueError: Not as many as there are samples or caches, none above 0, or any below 0 or not finite.
        """
        if not self._is_used:
            raise ValueError("the loader was made without weights and without mix")
        if self._names is not None:
            if not isinstance(weights, Mapping) or set(weights) != set(self._names):
                raise ValueError(f"weights={weights!r:.200}, expected a dict with {', '.join(map(repr, self._names))}")
            weights = [weights[name] for name in self._names]
        values = torch.as_tensor(weights, dtype=torch.float64).detach().cpu().numpy().copy()
        if values.shape != (self._count,) or not np.isfinite(values).all() or (values < 0).any() or not values.any():
            raise ValueError(
                f"weights of shape {list(values.shape)}: expected {self._count} numbers of 0 or more, not all 0"
            )
        self._set([(at, old) for at, old in self._pairs() if at < step] + [(step, values)])

    def _pairs(self) -> list[tuple[int, Array]]:
        return list(zip(self._steps, self._values, strict=True))

    def _set(self, pairs: Sequence[tuple[int, Array]]) -> None:
        self._steps, self._values = [step for step, _ in pairs], [values for _, values in pairs]
        self._drawn.clear()

    def of_streams(self, step: int) -> Array:
        """Return the weights of a mix at a step."""
        return self._values[bisect_right(self._steps, step) - 1]

    def drawn(self, step: int) -> Drawn | None:
        """Return what draws the samples of a step; None if they are not drawn."""
        if not self._is_used or self._names is not None:
            return None
        at = bisect_right(self._steps, step) - 1
        if at not in self._drawn:
            self._drawn[at] = Drawn(self._values[at], self._seed)
        return self._drawn[at]

    def state(self, step: int) -> list[list[Any]]:
        """Return the weights at a step, and those that hold later, for JSON."""
        first = max(0, bisect_right(self._steps, step) - 1)
        return [
            [at, base64.b64encode(zlib.compress(values.astype("<f8").tobytes())).decode()]
            for at, values in self._pairs()[first:]
        ]

    def load(self, state: Sequence[Sequence[Any]]) -> None:
        """Take the weights of a state.

        Raises:
            ValueError: They are of other samples or caches.
        """
        pairs = [(int(at), np.frombuffer(zlib.decompress(base64.b64decode(text)), "<f8")) for at, text in state]
        if any(len(values) != self._count for _, values in pairs) or bool(pairs) != self._is_used:
            raise ValueError(f"the state has weights of something else than {self._count} samples or caches")
        self._set(pairs)
