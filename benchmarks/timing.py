"""Interleaved rounds: machines drift, so what is compared runs in turn, and ratios come from one run."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

__all__ = ["interleaved"]


def interleaved(variants: dict[str, Callable[[], int]], count: int, rounds: int) -> dict[str, float]:
    """Return each variant's median microseconds per sample over `rounds`; one round more, not counted, warms up.

    Raises:
        AssertionError: A variant read another number of samples than `count`.
    """
    times: dict[str, list[float]] = {name: [] for name in variants}
    for number in range(rounds + 1):
        for name, variant in variants.items():
            started = time.perf_counter()
            seen = variant()
            elapsed = time.perf_counter() - started
            if seen != count:
                raise AssertionError(f"{name} read {seen} samples of {count}")
            if number:
                times[name].append(elapsed / count * 1e6)
    return {name: statistics.median(values) for name, values in times.items()}
