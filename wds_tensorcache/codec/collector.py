"""Python's garbage collector, held back while one large sample is written or read."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["LARGE_NBYTES", "collector_paused"]

LARGE_NBYTES = 1 << 16
_pausing: set[object] = set()


@contextmanager
def collector_paused(when: bool) -> Iterator[None]:
    """Collect no garbage in this block: what it makes is kept, and a collection goes through all objects of the process.

    With 20,000 tensors in a sample, and torch's half a million objects beside them, that took half of the time. Threads may
    pause at the same time: the first that ends lets the collector run again, which costs the others nothing but time.
    """
    pauses, me = when and gc.isenabled(), object()
    if pauses:
        _pausing.add(me)
        gc.disable()
    try:
        yield
    finally:
        if pauses:
            gc.enable()
            _pausing.discard(me)


def _go_on_in_child() -> None:
    # Hazard: a child that is forked meanwhile has not the thread that would let the collector run again.
    if _pausing:
        _pausing.clear()
        gc.enable()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_go_on_in_child)
