"""Interleaved rounds: machines drift, so compared rows take turns, and ratios come from the same run."""

from __future__ import annotations

import gc
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

Rounds = dict[str, list[float]]  # microseconds per sample of each variant, round by round


@dataclass(frozen=True, slots=True)
class Variant:
    """One row of a scenario: the timed function, and an untimed one that runs before it each time."""

    run: Callable[[], int]  # returns the number of samples it saw
    count: int  # expected number of samples
    prepare: Callable[[], object] = lambda: None


def interleaved(variants: dict[str, Variant], rounds: int) -> Rounds:
    """Return each variant's microseconds per sample in each of `rounds`, after one uncounted round that warms up.

    Raises:
        AssertionError: A variant read another number of samples than its `count`.
    """
    times: Rounds = {name: [] for name in variants}
    for number in range(rounds + 1):
        # Another order in each round: no variant always runs after the same neighbor.
        for name in random.Random(number).sample(list(variants), len(variants)):
            variant = variants[name]
            variant.prepare()
            gc.collect()
            started = time.perf_counter()
            seen = variant.run()
            elapsed = time.perf_counter() - started
            if seen != variant.count:
                raise AssertionError(f"{name} read {seen} samples of {variant.count}")
            if number:
                times[name].append(elapsed / variant.count * 1e6)
    return times


def median(rounds: Rounds, name: str) -> float:
    """Return the median of a variant's microseconds per sample."""
    return statistics.median(rounds[name])


def ratios(rounds: Rounds, name: str, base: str) -> list[float]:
    """Return `name` divided by `base` in each round."""
    return [a / b for a, b in zip(rounds[name], rounds[base], strict=True)]
