"""Python's garbage collector, held back while one large sample is written or read."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["LARGE_NBYTES", "collector_paused"]

LARGE_NBYTES = 1 << 16


@contextmanager
def collector_paused(when: bool) -> Iterator[None]:
    """Collect no garbage in this block: what it makes is kept, and a collection goes through all objects of the process.

    With 20,000 tensors in a sample, and torch's half a million objects beside them, that took half of the time. Threads may
    pause at the same time: the first that ends lets the collector run again, which costs the others nothing but time.
    """
    pauses = when and gc.isenabled()
    if pauses:
        gc.disable()
    try:
        yield
    finally:
        if pauses:
            gc.enable()
