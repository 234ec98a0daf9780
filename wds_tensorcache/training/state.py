"""The state of a loader for checkpoints: it fits into JSON, and a loader of different samples refuses it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from wds_tensorcache.training.plan import MAX_EPOCHS, Plan, Position

VERSION = 2  # version 1 had other orders, seeds and weights


def build_state(plan: Plan, position: Position) -> dict[str, Any]:
    """Return the state of a loader at a position, with its current weights."""
    return {
        "version": VERSION,
        "position": asdict(position) | {"counts": list(position.counts)},
        "settings": dict(plan.settings),
        "dataset": plan.dataset,
        "weights": plan.weights.state(),
    }


def load_state(plan: Plan, state: Mapping[str, Any]) -> Position:
    """Load the weights of a state, and return its position.

    Raises:
        ValueError: The state is damaged, or belongs to other samples or settings; nothing is changed then.
    """
    version = state.get("version") if isinstance(state, Mapping) else None
    if version == 1:
        raise ValueError(
            "the state has version 1, from a release that shuffled samples in another order. Either finish the epoch with "
            "that release, or leave the state out, and call set_epoch to begin an epoch anew"
        )
    if version != VERSION:
        raise ValueError(f"expected a loader's state of version {VERSION}, got {state!r:.200}")
    missing = {"dataset", "settings", "position", "weights"} - set(state)
    if missing or not isinstance(state["settings"], Mapping):
        raise ValueError(f"the state of a loader is damaged: it lacks {', '.join(sorted(missing)) or 'settings'}")
    if state["dataset"] != plan.dataset:
        raise ValueError(
            f"the state belongs to a different dataset: {state['dataset']!s:.200}; this loader has {plan.dataset}. "
            "If samples were only added, a loader of a view without them can load the state"
        )
    for name in {**plan.settings, **state["settings"]}:
        saved, value = state["settings"].get(name), plan.settings.get(name)
        if saved != value:
            changed = ": its buckets, shards or window have changed" if name in ("streams", "order") else ""
            raise ValueError(
                f"the state belongs to a loader with {name}={saved!r:.200}, but this one has {name}={value!r:.200}{changed}"
            )
    position = _parse_position(plan, state["position"])
    plan.weights.load(state["weights"])
    return position


def _parse_position(plan: Plan, at: Any) -> Position:
    if isinstance(at, Mapping) and set(at) == set(Position.__slots__) and isinstance(at["counts"], (list, tuple)):
        position = Position(**{**at, "counts": tuple(at["counts"])})
        numbers = (position.epoch, position.used, position.step, position.began, *position.counts)
        is_valid = all(type(number) is int and 0 <= number < 1 << 62 for number in numbers)
        if is_valid and position.epoch < 2 * MAX_EPOCHS and plan.has(position):
            return position
    raise ValueError(f"the state has a position that this loader cannot have: {at!r:.200}")
