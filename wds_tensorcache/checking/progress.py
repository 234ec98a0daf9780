"""The progress of `verify` and `repair`, in bytes of the shards."""

from __future__ import annotations

from collections.abc import Mapping

from wds_tensorcache.progress import Progress, ProgressOption


class ByteProgress:
    """The progress of a call that goes over all shards once, or several times.

    Args:
        show: As for `Progress`, in bytes.
        title: Name of the call, for the bar.
        rounds: Number of times that the call goes over each shard.

    Threads: one thread calls `begin`, `finish` and `show`; only `show` shows. Another thread may call `reach` for each shard.
    """

    def __init__(self, show: ProgressOption, title: str, rounds: int = 1) -> None:
        self._show, self._title, self._rounds = show, title, rounds
        self._progress: Progress | None = None
        self._nbytes: Mapping[str, int] = {}
        self._reached: dict[str, int] = {}  # bytes done of each shard in this round
        self._before = 0  # bytes of earlier rounds

    @property
    def is_shown(self) -> bool:
        """True if there is a function or a bar; False before `begin`."""
        return self._progress is not None and self._progress.is_shown

    def begin(self, nbytes: Mapping[str, int]) -> None:
        """Begin the first round, and show it; `nbytes` contains the length of each shard in bytes, by path.

        Raises:
            ImportError: The caller wants a bar, and `tqdm` is not installed.
        """
        self._nbytes = nbytes
        total = self._rounds * sum(nbytes.values())
        self._progress = Progress(self._show, total, desc=self._title, unit="B", unit_scale=True)
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
        if self._progress is not None:
            self._progress.show(self._before + sum(self._reached.values()))

    def __enter__(self) -> ByteProgress:
        return self

    def __exit__(self, *exc: object) -> None:
        if self._progress is not None:
            self._progress.close()
