"""Compute samples batch by batch, while another thread writes those of the batches before, and show the progress."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

from wds_tensorcache.storage.threads import Job, ThreadPool
from wds_tensorcache.writing.build_batch import Batch
from wds_tensorcache.writing.build_items import Item
from wds_tensorcache.writing.writer import ShardWriter

__all__ = ["DIGEST", "Progress", "Target", "fill"]

DIGEST = "digest.txt"  # the member that says what a sample was made of
Target = tuple[Item, "ShardWriter | None"]  # an item of a batch, and the writer of its sample; None if that is finished
_MAX_WRITING = 2  # batches that are written or wait for it, while the next one is computed


def fill(batches: Iterable[list[Target]], fn: Callable[[list[Any]], Any], bar: Progress) -> None:
    """Compute the batches of which a sample is missing, and write those samples.

    Raises:
        BaseException: Whatever `batches`, `fn` or a writer raises first.
    """
    with ThreadPool(1, "tensorcache-build") as thread:
        writing = _Writing(bar, thread)
        try:
            for batch in batches:
                if any(sink is not None for _, sink in batch):
                    writing.add(fn([item.value for item, _ in batch]), batch)
            writing.wait(0)
        except BaseException as exc:
            if writing.failed and exc is not writing.failed[0]:
                raise writing.failed[0] from exc
            raise


class _Writing:
    """Batches that a thread writes."""

    def __init__(self, bar: Progress, thread: ThreadPool) -> None:
        self.failed: list[BaseException] = []
        self._bar, self._thread = bar, thread
        self._waiting: deque[Job[None]] = deque()

    def add(self, made: Any, batch: list[Target]) -> None:
        """Write the missing samples of what `fn` made; wait while two batches are being written."""
        self.wait(_MAX_WRITING - 1)
        # not the items: their values may be large
        targets = [None if sink is None else (item.key, item.digest, sink) for item, sink in batch]
        self._waiting.append(self._thread.submit(self._write, Batch(made, len(batch)), targets))

    def wait(self, count: int) -> None:
        """Wait until so many batches are left.

        Raises:
            BaseException: One could not be written.
        """
        while len(self._waiting) > count:
            self._waiting.popleft().result()

    def _write(self, batch: Batch, targets: list[tuple[str, str | None, ShardWriter] | None]) -> None:
        if self.failed:
            return  # a sample before these is missing: shards are to end before it
        try:
            for target, sample in zip(targets, batch.rows(), strict=True):
                if target is not None:
                    key, digest, sink = target
                    sink.write(key, sample, **({} if digest is None else {DIGEST: digest}))
                    self._bar.step()
        except BaseException as exc:
            self.failed.append(exc)
            raise


class Progress:
    """A bar of `tqdm`, or nothing.

    Args:
        total: Number of items; None if it is not known.
        show: None shows it where `tqdm` is installed and stderr is a terminal.

    Raises:
        ImportError: It is to be shown, and `tqdm` is not installed.
    """

    def __init__(self, total: int | None, show: bool | None) -> None:
        self._bar: Any = None
        if show is None and not sys.stderr.isatty():
            return
        if show is not False:
            try:
                from tqdm import tqdm
            except ImportError as exc:
                if show:
                    raise ImportError("progress=True needs tqdm: pip install tqdm") from exc
                return
            self._bar = tqdm(total=total, unit=" samples", smoothing=0.05)

    def step(self) -> None:
        """Count a sample that was written."""
        if self._bar is not None:
            self._bar.update()

    def skip(self) -> None:
        """Count a sample that was there; it says nothing of the rate."""
        if self._bar is not None:
            self._bar.initial += 1
            self._bar.update()

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *exc: object) -> None:
        if self._bar is not None:
            self._bar.close()
