"""Progress of long calls: a bar, or calls of a function."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, TypeAlias

ProgressOption: TypeAlias = "bool | Callable[[int, int], object] | None"  # the argument `progress=`


class Progress:
    """The progress of a long call.

    Args:
        show: Function `show(done, total)`, or True to show a bar and False to show nothing. None shows the bar if `tqdm` is
            installed and stderr is a terminal.
        total: Total amount of work; None if unknown.
        options: Options of the bar.

    Raises:
        ImportError: `show` is True, and `tqdm` is not installed.

    Threads: not safe; call all methods from one thread.
    """

    def __init__(self, show: bool | Callable[[int, Any], object] | None, total: int | None, **options: Any) -> None:
        self._function = show if callable(show) else None
        self._bar = None if callable(show) else _open_bar(show, total=total, **options)
        self._total = total
        self._shown = -1
        self.is_shown = self._function is not None or self._bar is not None

    def show(self, done: int, initial: int = 0) -> None:
        """Show the amount of finished work, `done`, if it has changed.

        `initial` is the part of `done` that was finished before the long call; it does not count for the rate.
        """
        if done == self._shown:
            return
        self._shown = done
        if self._function is not None:
            self._function(done, self._total)
        elif self._bar is not None:
            # `update` would count `initial` for the rate of the last seconds, which the bar shows until it closes
            moved, self._bar.initial = initial - self._bar.initial, initial
            self._bar.n += moved
            self._bar.last_print_n += moved
            self._bar.update(done - self._bar.n)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()


def _open_bar(show: bool | None, **options: Any) -> Any:
    if not (sys.stderr.isatty() if show is None else show):
        return None
    try:
        from tqdm import tqdm
    except ImportError as exc:
        if show:
            raise ImportError("progress=True needs tqdm: pip install tqdm") from exc
        return None
    return tqdm(**options)
