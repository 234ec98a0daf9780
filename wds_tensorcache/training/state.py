"""The state of a loader in checkpoints: small, for JSON, and refused by a loader of other samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import xxhash

from wds_tensorcache.training.steps import Course, Position

__all__ = ["fingerprint_of", "order_digest", "position_from", "state_of"]

VERSION = 1


def state_of(position: Position, settings: Mapping[str, Any], fingerprint: str, weights: Any) -> dict[str, Any]:
    """Return the state of a loader at a position."""
    at = asdict(position) | {"counts": list(position.counts)}
    return {"version": VERSION, "position": at, "settings": dict(settings), "dataset": fingerprint, "weights": weights}


def position_from(state: Mapping[str, Any], settings: Mapping[str, Any], fingerprint: str, course: Course) -> Position:
    """Return the position in a state; raise ValueError if the state is damaged, or of other settings or samples."""
    if not isinstance(state, Mapping) or state.get("version") != VERSION:
        raise ValueError(f"expected a loader's state of version {VERSION}, got {state!r:.200}")
    missing = {"dataset", "settings", "position", "weights"} - set(state)
    if missing or not isinstance(state["settings"], Mapping):
        raise ValueError(f"the state of a loader is damaged: {', '.join(sorted(missing)) or 'settings'}")
    if state["dataset"] != fingerprint:
        raise ValueError(f"the state is of another dataset: of {state['dataset']}, this one is {fingerprint}")
    for name, value in settings.items():
        if state["settings"].get(name) != value:
            raise ValueError(f"the state is of a loader with {name}={state['settings'].get(name)!r}, not {value!r}")
    at = state["position"]
    if isinstance(at, Mapping) and set(at) == set(Position.__slots__) and isinstance(at["counts"], (list, tuple)):
        position = Position(**{**at, "counts": tuple(at["counts"])})
        numbers = (position.epoch, position.used, position.step, position.began, *position.counts)
        if all(type(number) is int and 0 <= number < 1 << 62 for number in numbers) and course.has(position):
            return position
    raise ValueError(f"the state has a position that this loader cannot have: {at!r:.200}")


def fingerprint_of(caches: Sequence[Any]) -> str:
    """Return an identity of the samples of caches: a hash of their ordered keys, and their number."""
    digest = xxhash.xxh3_128()
    for cache in caches:
        digest.update(b"%d," % len(cache))
        for key in cache.keys():  # noqa: SIM118 - iterating over a cache would decode its samples
            digest.update(key.encode("utf-8", "surrogateescape") + b"\0")
    return f"{sum(map(len, caches))} samples, keys {digest.hexdigest()}"


def order_digest(streams: Sequence[Any]) -> str:
    """Return a hash of all that determines an order, except the seed: blocks, windows, samples of each bucket."""
    digest = xxhash.xxh3_64()
    for stream in streams:
        for part in stream.identity():
            digest.update(np.ascontiguousarray(part, np.int64).tobytes() + b";")
    return digest.hexdigest()
