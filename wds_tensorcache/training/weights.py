"""Weights of samples and of mixed caches, and draws by weight."""

from __future__ import annotations

import base64
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from wds_tensorcache.errors import list_names
from wds_tensorcache.reading.seeds import as_fractions, random_bits, stream_seed

Array = np.ndarray[Any, Any]


class _SampleWeights(NamedTuple):
    """The weights of the samples of one cache."""

    values: Array  # of all samples, float64
    totals: list[float]  # sum of the weights of each stream of the cache, up to a factor
    sums: dict[int, Array]  # cumulative weights in each stream, by its number


class Weights:
    """The current weights of a plan. A change applies to all steps that are computed after it.

    Attributes:
        caches: Weight of each cache of `mix`, float64; None if the caches have no weights.
        samples: Weights of the samples in some caches, by the index of the cache.
    """

    def __init__(
        self, names: Sequence[str], caches: Any, samples: Mapping[int, Any], streams: Sequence[Any], seed: int
    ) -> None:
        self._names, self._streams = list(names), streams
        self._seeds = [stream_seed(seed, "draws", number) for number in range(len(streams))]
        self.caches = None if caches is None else self._cache_weights(caches)
        self.samples = {source: self._sample_weights(source, weights) for source, weights in samples.items()}

    @property
    def are_used(self) -> bool:
        return self.caches is not None or bool(self.samples)

    def draw(self, number: int, epoch: int, positions: Array) -> Array:
        """Draw sample indices from stream `number` at positions of an epoch."""
        stream = self._streams[number]
        drawn = draw(self.samples[stream.source].sums[number], self._seeds[number], epoch, positions)
        return drawn if stream.members is None else np.take(stream.members, drawn)

    @property
    def mix(self) -> dict[str, float]:
        """The weights of the caches by name; empty without such weights."""
        return {} if self.caches is None else dict(zip(self._names, self.caches.tolist(), strict=True))

    def change(self, weights: Any) -> None:
        """Replace the weights. With `mix`, `weights` contains a weight for each cache, or lists of sample weights, by name.

        Raises:
            ValueError: There are no weights, or the new weights do not match them; nothing is changed then.
        """
        if not self.are_used:
            raise ValueError("the loader was made without weights= and without weights in mix=")
        if self.caches is None:
            self.samples = {0: self._sample_weights(0, weights)}
            return
        by_name = {self._names[source]: source for source in self.samples}
        is_dict = isinstance(weights, Mapping) and weights and set(weights) <= set(by_name)
        if is_dict and all(map(_is_list, weights.values())):
            self.samples |= {by_name[name]: self._sample_weights(by_name[name], w) for name, w in weights.items()}
        else:
            self.caches = self._cache_weights(weights)

    def _cache_weights(self, weights: Any) -> Array:
        is_dict = isinstance(weights, Mapping) and set(weights) == set(self._names)
        if not is_dict or any(map(_is_list, weights.values())):
            raise ValueError(
                f"weights={weights!r:.200}, expected a dict with {list_names(self._names)}, or lists of weights of samples "
                "for caches that have such weights"
            )
        return _as_weights([weights[name] for name in self._names], len(self._names))

    def _sample_weights(self, source: int, weights: Any) -> _SampleWeights:
        streams = {number: stream for number, stream in enumerate(self._streams) if stream.source == source}
        values = _as_weights(weights, sum(stream.count for stream in streams.values()))
        scaled = values / values.max()
        totals = [float(_select(scaled, stream).sum()) for stream in streams.values()]
        return _SampleWeights(values, totals, {n: cumulate(_select(values, s)) for n, s in streams.items()})

    def state(self) -> Any:
        if not self.are_used:
            return None
        return {
            "caches": None if self.caches is None else _pack(self.caches),
            "samples": {str(source): _pack(weights.values) for source, weights in self.samples.items()},
        }

    def load(self, state: Any) -> None:
        """Load the weights of a state. If they do not match, raise ValueError and change nothing."""
        if (state is None) is self.are_used:
            raise ValueError(f"the state has {'no weights' if state is None else 'weights'}, unlike this loader")
        if state is None:
            return
        try:
            count = len(self._names)
            caches = None if self.caches is None else _as_weights(_unpack(state["caches"], count), count)
            samples = {
                source: self._sample_weights(source, _unpack(state["samples"][str(source)], len(weights.values)))
                for source, weights in self.samples.items()
            }
        except (KeyError, TypeError, ValueError, zlib.error) as exc:
            raise ValueError(f"the state has no valid weights: {exc!r:.200}") from exc
        self.caches, self.samples = caches, samples


def cumulate(weights: Array) -> Array:
    """Return cumulative sums of weights, relative to the largest, for `draw`."""
    sums: Array = np.cumsum(weights / (weights.max() or 1))  # dividing by the maximum prevents an infinite sum
    return sums


def draw(sums: Array, seed: int, epoch: int, positions: Array) -> Array:
    """Draw indices with replacement at positions of an epoch. `sums` is a result of `cumulate`."""
    drawn = np.searchsorted(sums, as_fractions(random_bits(seed, epoch, positions)) * sums[-1], "right")
    # a product that is rounded up to the last sum would draw no sample, or a sample with the weight 0
    kept: Array = np.minimum(drawn, np.searchsorted(sums, sums[-1]))
    return kept


def _select(values: Array, stream: Any) -> Array:
    return values if stream.members is None else np.take(values, stream.members)


def _as_weights(weights: Any, count: int) -> Array:
    """Return a copy of weights as float64 `[count]`; raise ValueError if invalid."""
    expected = f"expected {count} numbers, all finite, none negative, not all 0"
    try:
        # torch refuses some strides and dtypes of numpy, and reads a Series of pandas by its labels
        if not isinstance(weights, (torch.Tensor, Sequence)) and np.asarray(weights).dtype.kind in "biuf":
            weights = np.array(weights, np.float64)
        values: Array = torch.as_tensor(weights, dtype=torch.float64, device="cpu").detach().numpy().copy()
    except (TypeError, ValueError, OverflowError, RuntimeError) as exc:
        raise ValueError(f"weights={weights!r:.200}: {expected}") from exc
    if values.shape != (count,) or not np.isfinite(values).all() or (values < 0).any() or not values.any():
        raise ValueError(f"weights of shape {list(values.shape)}: {expected}")
    return values


def _is_list(weights: Any) -> bool:
    return isinstance(weights, Sequence) or getattr(weights, "ndim", 0) > 0


def _pack(values: Array) -> str:
    return base64.b64encode(zlib.compress(values.astype("<f8").tobytes(), 1)).decode()


def _unpack(text: str, count: int) -> Array:
    # a state from a stranger may expand to any size
    raw = zlib.decompressobj().decompress(base64.b64decode(text), 8 * count + 1)
    values: Array = np.frombuffer(raw, "<f8").copy()
    return values
