"""The current weights of samples and of mixed caches, and samples drawn in proportion to them."""

from __future__ import annotations

import base64
import zlib
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch

from wds_tensorcache.errors import list_names
from wds_tensorcache.reading.seeds import stream_seed
from wds_tensorcache.training.order import uniform

Array = np.ndarray[Any, Any]


class Drawn:
    """A sequence of indices drawn with replacement, in proportion to their weights."""

    def __init__(self, weights: Array, seed: int) -> None:
        self._weights, self._seed = weights, seed

    @cached_property
    def _sums(self) -> Array:
        return np.cumsum(self._weights / self._weights.max())  # dividing by the maximum prevents an infinite sum

    @cached_property
    def _last(self) -> int:
        # the last index with a weight above 0, which bounds the draw in case of rounding
        return int(np.flatnonzero(self._weights)[-1])

    def indices(self, epoch: int, positions: Array) -> Array:
        """Return the indices drawn at positions of an epoch."""
        drawn = np.searchsorted(self._sums, uniform(self._seed, epoch, positions) * self._sums[-1], "right")
        kept: Array = np.minimum(drawn, self._last)
        return kept


class SampleWeights:
    """The weights of the samples of one cache.

    Attributes:
        values: Weights of the samples, float64.
        buckets: Sample indices of each bucket; None for all samples.
        seeds: Seed of the draws in each bucket.
    """

    def __init__(self, weights: Any, count: int, buckets: Sequence[Array | None], seeds: Sequence[int]) -> None:
        self.values = as_weights(weights, count)
        self.buckets, self.seeds = buckets, seeds

    @cached_property
    def sums(self) -> Array:
        """The sum of the weights of each bucket, up to a factor."""
        weights = self.values / self.values.max()
        return np.array([self._in(weights, members).sum() for members in self.buckets])

    @cached_property
    def _drawn(self) -> list[Drawn]:
        pairs = zip(self.buckets, self.seeds, strict=True)
        return [Drawn(self._in(self.values, members), seed) for members, seed in pairs]

    def _in(self, weights: Array, members: Array | None) -> Array:
        return weights if members is None else weights[members]

    def draw(self, bucket: int, epoch: int, positions: Array) -> Array:
        """Return the indices of the samples drawn from a bucket at positions of an epoch."""
        indices, members = self._drawn[bucket].indices(epoch, positions), self.buckets[bucket]
        return indices if members is None else np.take(members, indices)

    def changed(self, weights: Any) -> SampleWeights:
        """Return other weights of the same samples, from which the same random numbers draw."""
        return SampleWeights(weights, len(self.values), self.buckets, self.seeds)


class Weights:
    """The current weights of a plan. A change applies to all steps that are computed after it.

    Attributes:
        caches: Weight of each cache of `mix`, float64; None if they have none.
        samples: Weights of the samples in some caches, by the number of the cache.
    """

    def __init__(
        self, names: Sequence[str], caches: Any, samples: Mapping[int, Any], streams: Sequence[Any], seed: int
    ) -> None:
        """Make weights of the caches `names` of a mix, and of the samples in some caches."""
        self._names = list(names)
        self.samples: dict[int, SampleWeights] = {}
        self.caches = None if caches is None else self._cache_weights(caches)
        for source, weights in samples.items():
            numbers = [number for number, stream in enumerate(streams) if stream.source == source]
            buckets = [streams[number].members for number in numbers]
            seeds = [stream_seed(seed, "draws", number) for number in numbers]
            count = sum(streams[number].count for number in numbers)
            self.samples[source] = SampleWeights(weights, count, buckets, seeds)

    @property
    def are_used(self) -> bool:
        """True if there are any weights."""
        return self.caches is not None or bool(self.samples)

    def shares(self) -> dict[str, float]:
        """Return the share of each cache of `mix` in the steps."""
        assert self.caches is not None
        shares = self.caches / self.caches.max()  # prevents an infinite sum
        return dict(zip(self._names, (shares / shares.sum()).tolist(), strict=True))

    def change(self, weights: Any) -> None:
        """Replace the weights: with `mix`, those of all caches, or of the samples in some caches, as lists by name.

        Raises:
            ValueError: There are no weights, or the new ones do not match them; nothing is changed then.
        """
        if not self.are_used:
            raise ValueError("the loader was made without weights= and without weights in mix=")
        changed = {0: weights}
        if self.caches is not None:
            by_name = {self._names[source]: source for source in self.samples}
            is_dict = isinstance(weights, Mapping) and weights and set(weights) <= set(by_name)
            if not is_dict or not all(map(_is_list, weights.values())):
                self.caches = self._cache_weights(weights)
                return
            changed = {by_name[name]: values for name, values in weights.items()}
        self.samples |= {source: self.samples[source].changed(values) for source, values in changed.items()}

    def _cache_weights(self, weights: Any) -> Array:
        is_dict = isinstance(weights, Mapping) and set(weights) == set(self._names)
        if not is_dict or any(map(_is_list, weights.values())):
            weighted = [self._names[source] for source in self.samples]
            lists = f", or lists of weights of samples for {list_names(weighted)}" if weighted else ""
            raise ValueError(f"weights={weights!r:.200}, expected a dict with {list_names(self._names)}{lists}")
        return as_weights([weights[name] for name in self._names], len(self._names))

    def state(self) -> Any:
        """Return the weights for JSON; None if there are none."""
        if not self.are_used:
            return None
        caches = None if self.caches is None else _pack(self.caches)
        return {
            "caches": caches,
            "samples": {str(source): _pack(weights.values) for source, weights in self.samples.items()},
        }

    def load(self, state: Any) -> None:
        """Replace the weights by those of a state; if these do not match, raise ValueError and change nothing."""
        if state is None and not self.are_used:
            return
        if state is None or not self.are_used:
            raise ValueError(f"the state has {'no weights' if state is None else 'weights'}, unlike this loader")
        is_dict = isinstance(state, Mapping) and isinstance(state.get("samples"), Mapping)
        if not is_dict or set(state["samples"]) != set(map(str, self.samples)):
            raise ValueError("the state has no weights of the samples that this loader draws by weights")
        if (state.get("caches") is None) != (self.caches is None):
            raise ValueError("the state has no weights of the caches of mix, or this loader has none")
        caches = None if self.caches is None else _unpack(state["caches"], len(self._names))
        samples = {
            source: weights.changed(_unpack(state["samples"][str(source)], len(weights.values)))
            for source, weights in self.samples.items()
        }
        self.caches, self.samples = caches, samples


def as_weights(weights: Any, count: int) -> Array:
    """Return weights as float64 `[count]`, a copy.

    Raises:
        ValueError: They are not `count` numbers that are finite and not negative, or all are 0.
    """
    try:
        values: Array = torch.as_tensor(weights, dtype=torch.float64).detach().cpu().numpy().copy()
    except (TypeError, ValueError, OverflowError, RuntimeError) as exc:
        raise ValueError(f"weights={weights!r:.200}: expected {count} numbers") from exc
    if values.shape != (count,) or not np.isfinite(values).all() or (values < 0).any() or not values.any():
        raise ValueError(
            f"weights of shape {list(values.shape)}: expected {count} numbers, all finite, none negative, not all 0"
        )
    return values


def _is_list(weights: Any) -> bool:
    return isinstance(weights, Sequence) or getattr(weights, "ndim", 0) > 0


def _pack(values: Array) -> str:
    return base64.b64encode(zlib.compress(values.astype("<f8").tobytes(), 1)).decode()


def _unpack(text: Any, count: int) -> Array:
    try:
        # a state from a stranger may expand to any size
        raw = zlib.decompressobj().decompress(base64.b64decode(text), 8 * count + 1)
        return as_weights(np.frombuffer(raw, "<f8").copy(), count)
    except (TypeError, ValueError, zlib.error) as exc:
        raise ValueError(f"the state has no valid weights: {exc}") from exc
