"""The progress of `verify` and `repair`, in bytes of the shards: shown as a bar, or passed to a function."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from wds_tensorcache.storage.progress import open_bar

__all__ = ["ByteProgress", "ProgressOption"]

ProgressOption: TypeAlias = "bool | Callable[[int, int], object] | None"


class ByteProgress:
    """The progress of a call that goes over all shards once, or several times.

    Args:
        show: A function of the bytes that are done and the bytes in all; or, for a `tqdm` bar, as in `open_bar`.
        title: Name of the call, for the bar.
        rounds: Number of times that the call goes over each shard.

    Threads: one thread calls `begin`, `finish` and `show`; only `show` shows. Another thread may call `reach` for each shard.
    """

    def __init__(self, show: ProgressOption, title: str, rounds: int = 1) -> None:
        self._show, self._title, self._rounds = show, title, rounds
        self._bar: Any = None
        self._nbytes: Mapping[str, int] = {}
        self._reached: dict[str, int] = {}  # bytes done of each shard in this round
        self._before = 0  # bytes of earlier rounds
        self._total = 0
        self._shown = -1

    @property
    def is_shown(self) -> bool:
        """True if there is a function or, after `begin`, a bar."""
        return callable(self._show) or self._bar is not None

    def begin(self, nbytes: Mapping[str, int]) -> None:
        """Begin the first round, and show it; `nbytes` contains the length of each shard in bytes, by path.

        Raises:
            ImportError: The caller wants a bar, and `tqdm` is not installed.
        """
        self._nbytes = nbytes
        self._total = self._rounds * sum(nbytes.values())
        if not callable(self._show):
            self._bar = open_bar(self._show, desc=self._title, total=self._total, unit="B", unit_scale=True)
        self._reached = dict.fromkeys(nbytes, 0)
        self.show()

    def begin_next(self) -> None:
        """Begin the next round."""
        self._before += sum(self._nbytes.values())
        self._reached = dict.fromkeys(self._nbytes, 0)

    def reach(self, path: str, offset: int) -> None:
        """Note that the bytes of a shard are done up to an offset; a second pass over the shard does not count."""
        self._reached[path] = max(self._reached[path], min(offset, self._nbytes[path]))

    def finish(self, path: str) -> None:
        """Note that a shard is done, and show it."""
        self._reached[path] = self._nbytes[path]
        self.show()

    def finish_round(self) -> None:
        """Note that all shards are done, even those that the round left out, and show it."""
        self._reached = dict(self._nbytes)
        self.show()

    def show(self) -> None:
        """Show the bytes that are done, if there are more than before."""
        if not self.is_shown:
            return
        done = self._before + sum(self._reached.values())
        if done == self._shown:
            return
        self._shown = done
        if callable(self._show):
            self._show(done, self._total)
        else:
            self._bar.update(done - self._bar.n)

    def __enter__(self) -> ByteProgress:
        return self

    def __exit__(self, *exc: object) -> None:
        if self._bar is not None:
            self._bar.close()
