"""The state of a loader for checkpoints: it fits into JSON, and a loader of different samples refuses it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import xxhash

from wds_tensorcache.training.steps import Course, Position

__all__ = ["dataset_digest", "order_digest", "position_from", "state_of"]

VERSION = 1


def state_of(position: Position, settings: Mapping[str, Any], digest: str, weights: Any) -> dict[str, Any]:
    """Return the state of a loader at a position."""
    at = asdict(position) | {"counts": list(position.counts)}
    return {"version": VERSION, "position": at, "settings": dict(settings), "dataset": digest, "weights": weights}


def position_from(state: Mapping[str, Any], settings: Mapping[str, Any], digest: str, course: Course) -> Position:
    """Return the position in a state; raise ValueError if the state is damaged, or has other settings or samples."""
    if not isinstance(state, Mapping) or state.get("version") != VERSION:
        raise ValueError(f"expected a loader's state of version {VERSION}, got {state!r:.200}")
    missing = {"dataset", "settings", "position", "weights"} - set(state)
    if missing or not isinstance(state["settings"], Mapping):
        lacks = ", ".join(sorted(missing)) or "a dict of settings"
        raise ValueError(f"the state of a loader is damaged: it lacks {lacks}")
    if state["dataset"] != digest:
        raise ValueError(f"the state belongs to a different dataset: {state['dataset']}; this loader has {digest}")
    for name, value in settings.items():
        if state["settings"].get(name) != value:
            saved = state["settings"].get(name)
            raise ValueError(f"the state belongs to a loader with {name}={saved!r}, but this one has {name}={value!r}")
    at = state["position"]
    if isinstance(at, Mapping) and set(at) == set(Position.__slots__) and isinstance(at["counts"], (list, tuple)):
        position = Position(**{**at, "counts": tuple(at["counts"])})
        numbers = (position.epoch, position.used, position.step, position.began, *position.counts)
        if all(type(number) is int and 0 <= number < 1 << 62 for number in numbers) and course.has(position):
            return position
    raise ValueError(f"the state has a position that this loader cannot have: {at!r:.200}")


def dataset_digest(caches: Sequence[Any]) -> str:
    """Return a text that identifies the samples of caches: their number, and a hash of their keys in order."""
    digest = xxhash.xxh3_128()
    for cache in caches:
        digest.update(b"%d," % len(cache))
        for key in cache.keys():  # noqa: SIM118 - iterating over a cache would decode its samples
            digest.update(key.encode("utf-8", "surrogateescape") + b"\0")
    return f"{sum(map(len, caches))} samples, keys {digest.hexdigest()}"


def order_digest(streams: Sequence[Any]) -> str:
    """Return a hash of what determines an order besides seed and `shuffle`: counts, blocks, windows, samples of each bucket."""
    digest = xxhash.xxh3_64()
    for stream in streams:
        for part in stream.identity():
            digest.update(np.ascontiguousarray(part, np.int64).tobytes() + b";")
    return digest.hexdigest()
