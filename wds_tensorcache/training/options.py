"""Options of a loader: they are checked, and a plan with streams and weights is made from them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

from wds_tensorcache.arguments import as_int
from wds_tensorcache.errors import list_names
from wds_tensorcache.reading.cache import Cache
from wds_tensorcache.reading.seeds import stream_seed
from wds_tensorcache.training.buckets import block_sizes, buckets_of
from wds_tensorcache.training.order import BlockOrder, EpochOrder
from wds_tensorcache.training.plan import MAX_BATCH, MAX_STEP, Plan, Stream
from wds_tensorcache.training.weights import Weights

LAST_BATCH = ("short", "pad", "wrap", "drop")
MAX_REPEATS = 1 << 30


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


def make_plan(
    cache: Any,
    batch_size: int,
    *,
    shuffle: bool | str,
    seed: int,
    rank: int,
    world_size: int,
    last_batch: str,
    weights: Any,
    mix: Mapping[str, Any] | None,
    repeats: int | Mapping[str, int] | None,
    bucket_by: Any,
    window: int,
) -> Plan:
    """Return the plan of a loader; the arguments are those of `StepSampler`, which describes them and their errors."""
    if (cache is None) == (mix is None):
        raise ValueError("expected either a cache, or mix= with several caches")
    batch_size, seed, window = as_int("batch_size", batch_size), as_int("seed", seed), as_int("window", window)
    if not 1 <= batch_size <= MAX_BATCH:
        raise ValueError(f"batch_size={batch_size}, expected at least 1, and at most {MAX_BATCH:,}")
    if last_batch not in LAST_BATCH:
        raise ValueError(f"last_batch={last_batch!r}, expected one of {', '.join(LAST_BATCH)}")
    if shuffle not in (True, False, "blocks"):
        raise ValueError(f"shuffle={shuffle!r}, expected True, False or 'blocks'")
    shuffle = shuffle if isinstance(shuffle, str) else bool(shuffle)
    if batch_size * world_size > MAX_STEP:
        raise ValueError(f"world_size={world_size}, expected at most {MAX_STEP // batch_size:,}")
    names = None if mix is None else list(mix)
    caches = [cache] if mix is None else _caches_of(mix)
    for member in caches:
        if not isinstance(member, Cache):
            raise ValueError(f"{member!r:.200} is not a cache; open it with tc.open")
        if not len(member):
            raise ValueError("the cache has no samples: did a filter or a slice leave none?")
    cache_weights, sample_weights = _weights_of(weights, mix)
    if repeats is not None and (cache_weights is not None or sample_weights):
        raise ValueError(
            "repeats and weights are mutually exclusive: leave out the weights, as in mix={'a': cache, 'b': other}"
        )
    passes = _repeats_of(repeats, mix)
    streams = _make_streams(caches, names, bucket_by, passes, shuffle, window, seed)
    modes = {"weights": bool(sample_weights), "mix": mix is not None, "buckets": bucket_by is not None}
    settings: dict[str, Any] = {
        "seed": seed,
        "shuffle": shuffle,
        "mode": "+".join(name for name, is_used in modes.items() if is_used) or "all",
        "streams": [str(stream.name) for stream in streams],
    }
    if mix is not None and sample_weights:
        settings["weighted"] = sorted(list(mix)[source] for source in sample_weights)
    if repeats is not None or (mix is not None and cache_weights is None):
        settings["repeats"] = passes
    return Plan(
        caches,
        streams,
        Weights(names or [], cache_weights, sample_weights, streams, seed),
        batch_size=batch_size,
        rank=rank,
        world_size=world_size,
        last_batch=last_batch,
        seed=seed,
        settings=settings,
    )


def _make_streams(
    caches: Sequence[Any],
    names: Sequence[str] | None,
    bucket_by: Any,
    repeats: Sequence[int],
    shuffle: bool | str,
    window: int,
    seed: int,
) -> list[Stream]:
    streams: list[Stream] = []
    for source, cache in enumerate(caches):
        buckets: dict[Any, Any] = {None: None} if bucket_by is None else buckets_of(cache, bucket_by)
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


def _caches_of(mix: Any) -> list[Any]:
    """Return the caches of a `mix=` argument: its values, or the first item of each pair."""
    values = list(mix.values()) if isinstance(mix, Mapping) else []
    if values and all(isinstance(value, Cache) for value in values):
        return values
    if not values or not all(isinstance(value, tuple) and len(value) == 2 for value in values):
        raise ValueError(
            f"mix={mix!r:.200}, expected {{'a': (cache, 0.7), 'b': (other, 0.3)}} with weights, or {{'a': cache, 'b': other}}"
        )
    return [cache for cache, _ in values]


def _weights_of(weights: Any, mix: Mapping[str, Any] | None) -> tuple[dict[str, Any] | None, dict[int, Any]]:
    """Return the weights of the caches of `mix`, None without, and those of the samples in some caches, by their number."""
    if mix is None:
        return None, {} if weights is None else {0: weights}
    has_weights = not any(isinstance(value, Cache) for value in mix.values())
    of_caches = {name: weight for name, (_, weight) in mix.items()} if has_weights else None
    if weights is None:
        return of_caches, {}
    if not isinstance(weights, Mapping) or not weights or not set(weights) <= set(mix):
        raise ValueError(
            f"weights={weights!r:.200}, expected a dict with some of {list_names(mix)}: weights of the samples in these caches "
            "of mix; to weight the samples of several caches together, open them as one cache with tc.open([…])"
        )
    if not has_weights:
        raise ValueError("weights of samples in a mix need a weight of each cache, too: mix={'a': (cache, 0.7), …}")
    return of_caches, {list(mix).index(name): values for name, values in weights.items()}


def _repeats_of(repeats: Any, mix: Mapping[str, Any] | None) -> list[int]:
    """Return the number of passes over each cache in an epoch, from a `repeats=` argument."""
    names = [None] if mix is None else list(mix)
    by_name = {} if repeats is None else repeats if mix is not None else {None: repeats}
    if not isinstance(by_name, Mapping) or not set(by_name) <= set(names) or isinstance(by_name.get(None), Mapping):
        expected = "a number" if mix is None else f"a dict with some of {list_names(names)}"
        raise ValueError(f"repeats={repeats!r:.200}, expected {expected}")
    passes = [as_int("repeats" if name is None else f"repeats[{name!r}]", by_name.get(name, 1)) for name in names]
    if min(passes) < 1:
        raise ValueError(f"repeats={repeats!r:.200}, expected at least 1; leave out samples with cache.filter")
    if max(passes) > MAX_REPEATS:
        raise ValueError(f"repeats={repeats!r:.200}, expected at most {MAX_REPEATS:,}")
    return passes
