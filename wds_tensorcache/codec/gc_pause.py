"""Pause Python's garbage collector while one large sample is written or read."""

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
    """Pause the garbage collector during the `with` block if `when` is True.

    A block that creates many lasting objects triggers collections, and each visits all objects of the process: for a sample
    with 20,000 tensors, collections took half of the time. If several threads pause the collector, the first thread to
    leave its block resumes the collector, which only slows the other threads.
    """
    if not when or not gc.isenabled():
        yield
        return
    _pausing.add(me := object())
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        _pausing.discard(me)


def _resume_in_child() -> None:
    # Hazard: a process forked during a pause lacks the thread that would resume the collector, so it would never collect.
    if _pausing:
        _pausing.clear()
        gc.enable()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_resume_in_child)
