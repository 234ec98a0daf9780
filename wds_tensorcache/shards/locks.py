"""Locks on files and folders that say that a living process writes them; the system takes them back when it ends."""

from __future__ import annotations

from typing import Any

__all__ = ["lock"]

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]


def lock(file: Any, *, wait: bool = False) -> bool | None:
    """Take the lock of an open file or folder, which is kept until it is closed.

    Args:
        file: A file, or its descriptor.
        wait: Until nobody else has it.

    Returns:
        Whether it was free; None where nobody can tell, since the system or the file system has no locks.
    """
    if fcntl is None:
        return None
    try:
        fcntl.flock(file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True
