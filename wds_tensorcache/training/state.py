"""What a loader writes into checkpoints: small, for JSON, and refused by a loader of other samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import xxhash

from wds_tensorcache.reading.cache import TensorCache
from wds_tensorcache.training.steps import Course, Position

__all__ = ["check_state", "fingerprint_of", "order_digest", "position_from", "state_of"]

VERSION = 1


def state_of(position: Position, settings: Mapping[str, Any], fingerprint: str, weights: Any) -> dict[str, Any]:
    """Return the state of a loader that stands at `position`."""
    at = asdict(position) | {"counts": list(position.counts)}
    return {"version": VERSION, "position": at, "settings": dict(settings), "dataset": fingerprint, "weights": weights}


def check_state(state: Mapping[str, Any], settings: Mapping[str, Any], fingerprint: str) -> None:
    """Raise ValueError unless a state is of a loader with these settings and samples."""
    if not isinstance(state, Mapping) or state.get("version") != VERSION:
        raise ValueError(f"this release takes a loader's state of version {VERSION}, not {state!r:.200}")
    missing = {"dataset", "settings", "position", "weights"} - set(state)
    if missing or not isinstance(state["settings"], Mapping):
        raise ValueError(f"the state of a loader is damaged: {', '.join(sorted(missing)) or 'settings'}")
    if state["dataset"] != fingerprint:
        raise ValueError(f"the state is of another dataset: of {state['dataset']}, this one is {fingerprint}")
    for name, value in settings.items():
        if state["settings"].get(name) != value:
            raise ValueError(f"the state is of a loader with {name}={state['settings'].get(name)!r}, not {value!r}")


def position_from(state: Mapping[str, Any], course: Course) -> Position:
    """Return where a loader with this state stands.

    Raises:
        ValueError: There is no such place.
    """
    at = state["position"]
    names = ("epoch", "used", "step", "began")
    if isinstance(at, Mapping) and set(at) == {*names, "counts"} and isinstance(at["counts"], (list, tuple)):
        numbers, counts = [at[name] for name in names], tuple(at["counts"])
        if all(type(number) is int and 0 <= number < 1 << 62 for number in (*numbers, *counts)):
            epoch, used, step, began = numbers
            position = Position(epoch, counts, used, step, began)
            if course.has(position):
                return position
    raise ValueError(f"the state has a position that this loader cannot have: {at!r:.200}")


def fingerprint_of(caches: Sequence[Any]) -> str:
    """Return what tells the samples of caches apart: a hash of their keys in their order, and how many there are."""
    digest = xxhash.xxh3_128()
    for cache in caches:
        _add(digest, cache)
    return f"{sum(map(len, caches))} samples, keys {digest.hexdigest()}"


def order_digest(streams: Sequence[Any]) -> str:
    """Return a hash of what a seed does not say of an order: blocks, windows, and which samples a bucket has."""
    digest = xxhash.xxh3_64()
    for stream in streams:
        for part in stream.identity():
            digest.update(np.ascontiguousarray(part, np.int64).tobytes() + b";")
    return digest.hexdigest()


def _add(digest: Any, cache: Any) -> None:
    digest.update(b"%d," % len(cache))
    if not isinstance(cache, TensorCache) or cache._order is not None:
        keys: Any = cache.keys()
        for key in keys:
            digest.update(key.encode("utf-8", "surrogateescape") + b"\0")
        return
    for shard in cache._store.shards:
        found, rows = shard.index.keys, shard.columns.rows
        if rows is None:
            # as above: each key and a zero behind it
            digest.update(np.insert(found.text, found.ends.astype(np.int64), 0).tobytes())
        else:
            for row in rows.tolist():
                digest.update(found.raw(row) + b"\0")
