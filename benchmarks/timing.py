"""Interleaved rounds: machines drift, so what is compared runs in turn, and ratios come from one run."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

__all__ = ["Rounds", "interleaved", "ratio"]

Rounds = dict[str, list[float]]  # microseconds per sample of each variant, round by round


def interleaved(variants: dict[str, Callable[[], int]], count: int, rounds: int) -> Rounds:
    """Return each variant's microseconds per sample in each of `rounds`; one round more, not counted, warms up.

    Raises:
        AssertionError: A variant read another number of samples than `count`.
    """
    times: Rounds = {name: [] for name in variants}
    for number in range(rounds + 1):
        for name, variant in variants.items():
            started = time.perf_counter()
            seen = variant()
            elapsed = time.perf_counter() - started
            if seen != count:
                raise AssertionError(f"{name} read {seen} samples of {count}")
            if number:
                times[name].append(elapsed / count * 1e6)
    return times


def ratio(rounds: Rounds, name: str, base: str) -> float:
    """Return the median over the rounds of `name` divided by `base` in the same round."""
    return statistics.median(a / b for a, b in zip(rounds[name], rounds[base], strict=True))
