"""The state of a loader for checkpoints: it fits into JSON, and a loader of different samples refuses it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import xxhash

from wds_tensorcache.training.key_summary import difference, summary_of
from wds_tensorcache.training.steps import MAX_EPOCHS, Course, Permuted, Position

__all__ = ["identity_of", "order_digest", "position_from", "state_of"]

VERSION = 2  # version 1 had other orders, seeds and weights
_SHOWN = 8  # buckets in an error


def identity_of(caches: Sequence[Any], streams: Sequence[Permuted]) -> dict[str, str]:
    """Return the part of a state that identifies the samples.

    `"dataset"` must be equal in both loaders: the number of samples, and a hash of their keys in order. The rest tells what
    differs: `"keys"` has a summary of the keys of each cache, and `"sizes"` the number of samples in each bucket, both as text.
    """
    digest, keys = xxhash.xxh3_128(), []
    for cache in caches:
        digest.update(b"%d," % len(cache))
        keys.append(summary_of(cache.keys(), digest))
    found = {"dataset": f"{sum(map(len, caches))} samples, keys {digest.hexdigest()}", "keys": " ".join(keys)}
    return found | (
        {"sizes": " ".join(str(len(stream)) for stream in streams)} if streams[0].members is not None else {}
    )


def state_of(
    position: Position, settings: Mapping[str, Any], identity: Mapping[str, str], weights: Any
) -> dict[str, Any]:
    """Return the state of a loader at a position."""
    at = asdict(position) | {"counts": list(position.counts)}
    return {"version": VERSION, "position": at, "settings": dict(settings), **identity, "weights": weights}


def position_from(
    state: Mapping[str, Any],
    settings: Mapping[str, Any],
    identity: Mapping[str, str],
    course: Course,
    caches: Sequence[Any],
) -> Position:
    """Return the position in a state; raise ValueError if the state is damaged, or has other settings or samples."""
    if isinstance(state, Mapping) and state.get("version") == 1:
        raise ValueError(
            "the state has version 1, and this release of wds_tensorcache shuffles samples in another order. Either finish the "
            "epoch with the release that wrote the state, or leave the state out, and call set_epoch to begin an epoch anew"
        )
    if not isinstance(state, Mapping) or state.get("version") != VERSION:
        raise ValueError(f"expected a loader's state of version {VERSION}, got {state!r:.200}")
    missing = {"dataset", "settings", "position", "weights"} - set(state)
    if missing or not isinstance(state["settings"], Mapping):
        lacks = ", ".join(sorted(missing)) or "a dict of settings"
        raise ValueError(f"the state of a loader is damaged: it lacks {lacks}")
    if state["dataset"] != identity["dataset"]:
        raise ValueError(
            f"the state belongs to a different dataset: {state['dataset']}; this loader has {identity['dataset']}"
            + _difference_of_keys(state.get("keys"), caches)
        )
    for name in {**settings, **state["settings"]}:
        saved, value = state["settings"].get(name), settings.get(name)
        if saved != value:
            raise ValueError(
                f"the state belongs to a loader with {name}={saved!r:.200}, but this one has {name}={value!r:.200}"
                + (_difference_of_sizes(state, settings, identity) if name in ("streams", "order") else "")
            )
    at = state["position"]
    if isinstance(at, Mapping) and set(at) == set(Position.__slots__) and isinstance(at["counts"], (list, tuple)):
        position = Position(**{**at, "counts": tuple(at["counts"])})
        numbers = (position.epoch, position.used, position.step, position.began, *position.counts)
        are_valid = all(type(number) is int and 0 <= number < 1 << 62 for number in numbers)
        if are_valid and position.epoch < 2 * MAX_EPOCHS and course.has(position):
            return position
    raise ValueError(f"the state has a position that this loader cannot have: {at!r:.200}")


def _difference_of_keys(saved: Any, caches: Sequence[Any]) -> str:
    """Return what differs between the keys of a state and those of `caches`; empty if the state has no summary of its keys."""
    summaries = saved.split() if isinstance(saved, str) else []
    if len(summaries) != len(caches):
        return ""
    found = [difference(summary, cache.keys()) for summary, cache in zip(summaries, caches, strict=True)]
    numbered = [(f"cache {number} of mix: " if len(caches) > 1 else "", text) for number, text in enumerate(found)]
    return "".join(f"\n{name}{text}" for name, text in numbered if text)


def _difference_of_sizes(state: Mapping[str, Any], settings: Mapping[str, Any], identity: Mapping[str, str]) -> str:
    """Return which buckets have other numbers of samples in a state; empty if there are no buckets."""
    names, sizes = state["settings"].get("streams"), state.get("sizes")
    if not isinstance(names, (list, tuple)) or not isinstance(sizes, str) or "sizes" not in identity:
        return ""
    before = dict(zip(map(str, names), sizes.split(), strict=False))
    now = dict(zip(settings["streams"], identity["sizes"].split(), strict=True))
    changed = [
        f"bucket {name} has {before.get(name, 0)} samples in the state and {now.get(name, 0)} here"
        for name in {**before, **now}
        if before.get(name) != now.get(name)
    ]
    if len(changed) > _SHOWN:
        changed[_SHOWN:] = [f"and {len(changed) - _SHOWN} other buckets"]
    remedy = "to begin an epoch with the buckets as they are here, do not load the state, and call set_epoch"
    return "".join(f"\n{text}" for text in [*changed, remedy])


def order_digest(streams: Sequence[Any]) -> str:
    """Return a hash of what determines an order besides seed and `shuffle`: counts, blocks, windows, samples of each bucket."""
    digest = xxhash.xxh3_64()
    for stream in streams:
        for part in stream.identity():
            digest.update(np.ascontiguousarray(part, np.int64).tobytes() + b";")
    return digest.hexdigest()
