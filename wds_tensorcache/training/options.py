"""Options of a loader, their checks, and the streams that they describe."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

from wds_tensorcache.arguments import as_int
from wds_tensorcache.errors import add_note, list_names
from wds_tensorcache.reading.cache import Cache
from wds_tensorcache.reading.seeds import stream_seed
from wds_tensorcache.training.buckets import block_sizes, buckets_of
from wds_tensorcache.training.order import BlockOrder, EpochOrder
from wds_tensorcache.training.plan import Stream

_MAX_REPEATS = 1 << 30
_SAMPLER = (
    "its own sampler keeps the state; choose samples by weights=, mix=, bucket_by=, shuffle= or a view of the cache, such "
    "as cache.filter(…)"
)
# argument of torch's DataLoader -> remedy
REMEDIES = {
    "sampler": _SAMPLER,
    "batch_sampler": f"{_SAMPLER}, and pass batch_size=",
    "drop_last": "pass last_batch='drop' in place of drop_last=True",
    "generator": "pass seed=",
    "collate_fn": "pass collate=, a function of a list of samples, or for example 'pad'",
}


class StepOptions(TypedDict, total=False):
    """Options of `StepSampler` that every loader takes."""

    shuffle: bool | str
    seed: int
    rank: int | None
    world_size: int | None
    group: Any
    last_batch: str
    weights: Any
    mix: Mapping[str, Any] | None
    repeats: int | Mapping[str, int] | None
    bucket_by: Any
    window: int


def split_mix(mix: Any) -> tuple[list[Any], dict[str, Any] | None]:
    """Return the caches of `mix=`, and their weights by name or None. Raise ValueError if `mix` has another form."""
    values = list(mix.values()) if isinstance(mix, Mapping) else []
    if values and all(isinstance(value, Cache) for value in values):
        return values, None
    if not values or not all(isinstance(value, tuple) and len(value) == 2 for value in values):
        types = {name: type(value).__name__ for name, value in mix.items()} if values else type(mix).__name__
        expected = "{'a': (cache, 0.7), 'b': (other, 0.3)} with weights, or {'a': cache, 'b': other}"
        raise ValueError(f"mix= has the types {types}, expected {expected}")
    return [cache for cache, _ in values], {name: weight for name, (_, weight) in mix.items()}


def by_source(option: str, values: Any, mix: Mapping[str, Any] | None) -> dict[int, Any]:
    """Return the values of an option by cache index. With `mix`, raise ValueError unless it is a dict by names of caches."""
    if values is None or mix is None:
        return {} if values is None else {0: values}
    if not isinstance(values, Mapping) or not set(values) <= set(mix):
        raise ValueError(f"{option}={values!r:.200}, expected a dict with some of {list_names(mix)}, the names in mix=")
    return {list(mix).index(name): value for name, value in values.items()}


def check_repeats(repeats: Any) -> int:
    """Return `repeats` as an int. Raise TypeError or ValueError if it is not an int in range."""
    passes = as_int("repeats", repeats)
    if not 1 <= passes <= _MAX_REPEATS:
        raise ValueError(f"repeats={passes}, expected at least 1, and at most {_MAX_REPEATS:,}")
    return passes


def make_streams(
    caches: Sequence[Any],
    names: Sequence[str] | None,
    bucket_by: Any,
    repeats: Sequence[int],
    shuffle: bool | str,
    window: int,
    seed: int,
) -> list[Stream]:
    """Return a stream for each cache or bucket. `names` are the names in `mix`."""
    streams: list[Stream] = []
    for source, cache in enumerate(caches):
        try:
            buckets: dict[Any, Any] = {None: None} if bucket_by is None else buckets_of(cache, bucket_by)
        except Exception as exc:
            if names is not None:
                add_note(exc, f"this is the cache {names[source]!r} of mix=")
            raise
        for label, members in buckets.items():
            order: Any
            order_seed = stream_seed(seed, "order", len(streams))
            if shuffle == "blocks":
                order = BlockOrder(block_sizes(cache, members), window=window, seed=order_seed)
            else:
                count = len(cache if members is None else members)
                order = EpochOrder(count, shuffle=bool(shuffle), seed=order_seed)
            name = label
            if names is not None:
                name = names[source] if bucket_by is None else (names[source], label)
            streams.append(Stream(order, members, name=name, source=source, repeats=repeats[source]))
    return streams
