"""An iteration of a loader, which another one, `close`, or a fork ends."""

from __future__ import annotations

import atexit
import inspect
import os
import weakref
from collections.abc import Callable, Generator, Iterator
from typing import Any

__all__ = ["Iteration", "close_at_exit"]

_OPEN: weakref.WeakSet[Any] = weakref.WeakSet()


class Iteration(Iterator[Any]):
    """The items of a generator, until it is closed.

    Args:
        make: Called with a function that says whether the generator is to end, where it cannot be closed because it runs.
        number, current: This iteration's number, and a function that returns that of the loader's last one.
    """

    def __init__(
        self, make: Callable[[Callable[[], bool]], Generator[Any]], number: int, current: Callable[[], int]
    ) -> None:
        closing: list[bool] = []  # no reference to self: it is to go when the caller lets go of it
        self._closing = closing
        self._generator = make(lambda: bool(closing))
        self._number, self._current = number, current
        self._pid = os.getpid()

    def __next__(self) -> Any:
        if self._number != self._current():
            raise RuntimeError("another iteration of this loader has begun, which ended this one")
        if self._pid != os.getpid():
            raise RuntimeError("this iteration is of another process, whose threads a fork does not have")
        return next(self._generator)

    def close(self) -> None:
        """End it; where it is waiting in another thread, or in a collate function, when that has its batch."""
        self._closing.append(True)
        if inspect.getgeneratorstate(self._generator) != inspect.GEN_RUNNING:
            self._generator.close()


def close_at_exit(closable: Any) -> None:
    """Call its `close` when the interpreter ends, while there is one for its threads to end in."""
    _OPEN.add(closable)


@atexit.register
def _close_all() -> None:
    for closable in list(_OPEN):
        closable.close()
