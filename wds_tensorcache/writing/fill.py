"""Compute what a cache does not have yet, batch by batch, while another thread writes what came before."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from wds_tensorcache.storage.threads import Job, ThreadPool
from wds_tensorcache.writing.build_batch import Batch
from wds_tensorcache.writing.build_items import Item, Source
from wds_tensorcache.writing.progress import Progress
from wds_tensorcache.writing.writer import ShardWriter

__all__ = ["fill"]

DIGEST = "digest.txt"  # the member that says of what a sample was made
_MAX_WRITING = 2  # batches on their way to the shards, while the next one is computed


def fill(
    sink: ShardWriter, source: Source, fn: Callable[[list[Any]], Any], batch_size: int, has_digests: bool, bar: Progress
) -> int:
    """Write the samples that are not there, or were made of something else; return how many items there are.

    Batches are the same however often this is broken off, since what they consist of does not depend on what was finished:

    - Items without any sample: the source's own batches, whole, of which only those items are written.
    - Items that changed: batches of these alone, in the source's order. An item whose new sample is finished, beside the old
      one, is still one of them, and is not written again.
    """
    with ThreadPool(1, "tensorcache-build") as thread:
        writing = _Writing(sink, bar, thread)
        seen: set[str] = set()
        changed: list[Item] = []
        done: set[str] = set()  # of those that changed

        def compute(batch: list[Item], wanted: list[bool]) -> None:
            if any(wanted):
                writing.add(fn([item.value for item in batch]), batch, wanted)

        try:
            for batch in source.batches(lambda key: not has_digests and key in sink):
                are_new = []
                for item in batch:
                    if item.key in seen:
                        raise ValueError(f"two items have the key {item.key!r}")
                    seen.add(item.key)
                    places = sink.finished.find(item.key)
                    are_new.append(not places)
                    is_right = bool(places) and _is_right(sink, places[-1], item)
                    if is_right:
                        bar.skip()
                    elif places:
                        sink.replace(item.key)
                    if is_right and len(places) > 1:
                        sink.keep_newest(item.key)
                        done.add(item.key)
                    if places and (not is_right or len(places) > 1):
                        changed.append(item)
                compute(batch, are_new)
                while len(changed) >= batch_size:
                    some, changed = changed[:batch_size], changed[batch_size:]
                    compute(some, [item.key not in done for item in some])
            compute(changed, [item.key not in done for item in changed])
            writing.wait(0)
        except BaseException as exc:
            if writing.failed and exc is not writing.failed[0]:
                raise writing.failed[0] from exc
            raise
    return len(seen)


def _is_right(sink: ShardWriter, place: tuple[str, int], item: Item) -> bool:
    return item.digest is None or sink.finished.read_member(*place, DIGEST) == item.digest.encode()


class _Writing:
    """Batches on their way to the shards."""

    def __init__(self, sink: ShardWriter, bar: Progress, thread: ThreadPool) -> None:
        self.failed: list[BaseException] = []
        self._sink, self._bar, self._thread = sink, bar, thread
        self._waiting: deque[Job[None]] = deque()

    def add(self, made: Any, items: list[Item], wanted: list[bool]) -> None:
        """Write the samples that are wanted of what `fn` made; wait while two batches are on their way."""
        self.wait(_MAX_WRITING - 1)
        names = [(item.key, item.digest) if want else None for item, want in zip(items, wanted, strict=True)]
        self._waiting.append(self._thread.submit(self._write, Batch(made, len(items)), names))

    def wait(self, count: int) -> None:
        """Wait until so many batches are left.

        Raises:
            BaseException: One could not be written.
        """
        while len(self._waiting) > count:
            self._waiting.popleft().result()

    def _write(self, batch: Batch, names: list[tuple[str, str | None] | None]) -> None:
        if self.failed:
            return  # a sample before these is not there: shards are to end in front of it
        try:
            for name, sample in zip(names, batch.rows(), strict=True):
                if name is not None:
                    key, digest = name
                    self._sink.write(key, sample, **({} if digest is None else {DIGEST: digest}))
                    self._bar.step()
        except BaseException as exc:
            self.failed.append(exc)
            raise
