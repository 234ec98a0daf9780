"""Weights of samples or of mixed caches, the steps at which weights change, and the caches of a mix."""

from __future__ import annotations

import base64
import zlib
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch

from wds_tensorcache.arguments import as_int
from wds_tensorcache.errors import list_names
from wds_tensorcache.reading.base_cache import Cache
from wds_tensorcache.reading.seeds import stream_seed
from wds_tensorcache.training.order import uniform

__all__ = ["MAX_REPEATS", "Drawn", "Weights", "caches_of", "repeats_of", "sample_weights_of", "weights_of"]

Array = np.ndarray[Any, Any]
MAX_REPEATS = 1 << 30


class Drawn:
    """A stream of samples drawn with replacement, in proportion to their weights.

    Attributes:
        weights: Weights of the samples, float64.
        buckets: Sample indices of each bucket; empty without buckets.
    """

    def __init__(self, weights: Array, seed: int, buckets: Sequence[Array] = ()) -> None:
        self.weights = weights
        self.buckets = buckets
        self._seed = seed

    @cached_property
    def parts(self) -> list[Drawn]:
        """The stream of each bucket, whose samples are numbered within the bucket."""
        return [
            Drawn(self.weights[members], stream_seed(self._seed, "bucket", number))
            for number, members in enumerate(self.buckets)
        ]

    @cached_property
    def sums(self) -> Array:
        """The sum of the weights of each bucket, up to a factor."""
        weights = self.weights / self.weights.max()
        return np.array([weights[members].sum() for members in self.buckets])

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
    """The weights at each step: one for each sample, or one for each cache of `mix`, or none.

    Attributes:
        are_used: False without weights.
        are_of_caches: True for weights of the caches of `mix`.
        names: Names of the caches; empty without `mix`.
        samples: Weights of the samples in some caches of `mix`, by name.
    """

    def __init__(
        self,
        weights: Any,
        names: Sequence[str] | None,
        count: int,
        seed: int,
        buckets: Sequence[Array] = (),
        samples: Mapping[str, Weights] | None = None,
    ) -> None:
        """Make the weights of `count` samples in buckets, or of the caches `names`; none if `weights` is None."""
        self.are_used = weights is not None
        self.are_of_caches = names is not None and self.are_used
        self.names = list(names or ())
        self.samples = dict(samples or {})
        self._count = count if names is None else len(names)
        self._seed = seed
        self._buckets = buckets if self.are_used and names is None else ()
        self._changes: list[tuple[int, Drawn]] = []  # in the order of the steps
        if self.are_used:
            self.change(0, weights)

    def of_samples(self, source: int) -> Weights | None:
        """Return the weights of the samples in a cache; None if its samples have none."""
        if self.are_of_caches:
            return self.samples.get(self.names[source])
        return self if self.are_used else None

    def change(self, step: int, weights: Any, current: int = 0) -> None:
        """Set the weights from `step` on, in place of later changes; forget weights that ended before the step `current`.

        With `mix`, these are the weights of all caches, or lists of the weights of samples for some caches.
        """
        if not self.are_used:
            raise ValueError("the loader was made without weights= and without weights in mix=")
        changed: dict[Weights, Any] = {self: weights}
        if self.names and isinstance(weights, Mapping) and weights and set(weights) <= set(self.samples):
            lists = {self.samples[name]: each for name, each in weights.items() if _is_list(each)}
            changed = lists if len(lists) == len(weights) else changed
        # check all lists before changing any
        for each, drawn in [(each, each._drawn(values)) for each, values in changed.items()]:
            kept = [change for change in each._from(current) if change[0] < step]
            each._changes = [*kept, (step, drawn)]

    def _drawn(self, weights: Any) -> Drawn:
        if self.names:
            is_dict = isinstance(weights, Mapping) and set(weights) == set(self.names)
            if not is_dict or any(map(_is_list, weights.values())):
                lists = f", or lists of weights of samples for {list_names(self.samples)}" if self.samples else ""
                raise ValueError(f"weights={weights!r:.200}, expected a dict with {list_names(self.names)}{lists}")
            weights = [weights[name] for name in self.names]
        try:
            values = torch.as_tensor(weights, dtype=torch.float64).detach().cpu().numpy().copy()
        except (TypeError, ValueError, OverflowError, RuntimeError) as exc:
            raise ValueError(f"weights={weights!r:.200}: expected {self._count} numbers") from exc
        return self._checked(values)

    def _checked(self, values: Array) -> Drawn:
        if values.shape != (self._count,) or not np.isfinite(values).all() or (values < 0).any() or not values.any():
            raise ValueError(
                f"weights of shape {list(values.shape)}: expected {self._count} numbers, all finite, none negative, not all 0"
            )
        return Drawn(values, self._seed, self._buckets)

    def _from(self, step: int) -> list[tuple[int, Drawn]]:
        """Return the weights at a step, and all later changes, each with its first step."""
        at = bisect_right(self._changes, step, key=lambda change: change[0])
        return self._changes[max(0, at - 1) :]

    def values(self, step: int) -> Array:
        """Return the weights at a step."""
        return self._from(step)[0][1].weights

    def drawn(self, step: int, bucket: int) -> Drawn:
        """Return the drawn samples of a bucket at a step, or of the whole cache if it has no buckets."""
        drawn = self._from(step)[0][1]
        return drawn.parts[bucket] if self._buckets else drawn

    def sums(self, step: int) -> Array:
        """Return the sum of the weights of each bucket at a step, up to a factor."""
        return self._from(step)[0][1].sums

    def state(self, step: int) -> Any:
        """Return the weights at a step and all later changes, for JSON; with weights of samples in a mix, a dict of these."""
        found = [[at, drawn.packed] for at, drawn in self._from(step)]
        if not self.samples:
            return found
        return {"mix": found, "samples": {name: each.state(step) for name, each in self.samples.items()}}

    def load(self, state: Any) -> None:
        """Replace the weights by the weights of a state; if these do not match, raise ValueError and change nothing."""
        try:
            states = {self: state}
            if self.samples:
                states = {self: state["mix"]} | {each: state["samples"][name] for name, each in self.samples.items()}
        except (TypeError, KeyError) as exc:
            raise ValueError(f"the state has no weights of samples of {list_names(self.samples)}") from exc
        for each, changes in [(each, each._parsed(found)) for each, found in states.items()]:
            each._changes = changes

    def _parsed(self, state: Any) -> list[tuple[int, Drawn]]:
        try:
            found = [(int(at), np.frombuffer(zlib.decompress(base64.b64decode(text)), "<f8")) for at, text in state]
        except (TypeError, ValueError, OverflowError, zlib.error) as exc:
            raise ValueError(f"the state has no valid weights: {exc}") from exc
        if bool(found) != self.are_used:
            raise ValueError(f"the state has {'weights' if found else 'no weights'}, unlike this loader")
        steps = [at for at, _ in found]
        if steps != sorted(set(steps)):
            raise ValueError(f"the state has weights from steps {steps} on, expected ascending steps")
        return [(at, self._checked(values)) for at, values in found]


def _is_list(weights: Any) -> bool:
    return isinstance(weights, Sequence) or getattr(weights, "ndim", 0) > 0


def caches_of(mix: Any) -> list[Any]:
    """Return the caches of a `mix=` argument: its values, or the first item of each pair."""
    given = list(mix.values()) if isinstance(mix, Mapping) else []
    if given and all(isinstance(each, Cache) for each in given):
        return given
    if not given or not all(isinstance(each, tuple) and len(each) == 2 for each in given):
        raise ValueError(
            f"mix={mix!r:.200}, expected {{'a': (cache, 0.7), 'b': (other, 0.3)}} with weights, or {{'a': cache, 'b': other}}"
        )
    return [cache for cache, _ in given]


def weights_of(mix: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the weights in a `mix=` argument; None if it has none."""
    if any(isinstance(each, Cache) for each in mix.values()):
        return None
    return {name: weight for name, (_, weight) in mix.items()}


def sample_weights_of(weights: Any, mix: Mapping[str, Any]) -> dict[str, Any]:
    """Return the weights of samples in some caches of `mix`, from an argument `weights=`; empty if it is None.

    Raises:
        ValueError: `weights` is not such a dict, or the caches themselves have no weights.
    """
    if weights is None:
        return {}
    if not isinstance(weights, Mapping) or not weights or not set(weights) <= set(mix):
        raise ValueError(
            f"weights={weights!r:.200}, expected a dict with some of {list_names(mix)}: weights of the samples in these caches "
            "of mix; to weight the samples of several caches together, open them as one cache with tc.open([…])"
        )
    if weights_of(mix) is None:
        raise ValueError("weights of samples in a mix need a weight of each cache, too: mix={'a': (cache, 0.7), …}")
    return dict(weights)


def repeats_of(repeats: Any, mix: Mapping[str, Any] | None) -> list[int]:
    """Return the number of passes over each cache in an epoch, from a `repeats=` argument."""
    names = [None] if mix is None else list(mix)
    given = {} if repeats is None else repeats if mix is not None else {None: repeats}
    if not isinstance(given, Mapping) or not set(given) <= set(names) or isinstance(given.get(None), Mapping):
        expected = "a number" if mix is None else f"a dict with some of {list_names(names)}"
        raise ValueError(f"repeats={repeats!r:.200}, expected {expected}")
    found = [as_int("repeats" if name is None else f"repeats[{name!r}]", given.get(name, 1)) for name in names]
    if min(found) < 1:
        raise ValueError(f"repeats={repeats!r:.200}, expected at least 1; leave out samples with cache.filter")
    if max(found) > MAX_REPEATS:
        raise ValueError(f"repeats={repeats!r:.200}, expected at most {MAX_REPEATS:,}")
    return found
