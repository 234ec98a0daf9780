"""Convert samples by several threads or worker processes at once, and write them in the order of the source."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import islice
from multiprocessing.connection import wait
from typing import Protocol

from wds_tensorcache.integrations.importers.conversion.children import Child, may_fork
from wds_tensorcache.integrations.importers.conversion.convert import Conversion, Converted, Item
from wds_tensorcache.integrations.importers.conversion.messages import (
    Place,
    Places,
    Report,
    Target,
    Todo,
    receive,
    send,
)
from wds_tensorcache.integrations.importers.conversion.worker import work
from wds_tensorcache.storage.threads import Threads, run_in_order
from wds_tensorcache.writing.unfinished_shard import UnfinishedShard
from wds_tensorcache.writing.writer import ShardWriter

_CHUNK = 8  # samples that a worker process gets at a time
_MIN_SAMPLES = 4 * _CHUNK  # starting processes takes longer than converting fewer samples


class Pool(Protocol):
    """Workers that convert samples."""

    def convert(self, items: Sequence[Item]) -> Iterator[Converted | Exception]:
        """Yield a converted sample or its error for each item, in order. The caller stores a sample before the next one.

        Raises:
            OSError: Bytes could not be written, or a worker process was killed.
        """

    def store(self, converted: Converted) -> None:
        """Write a sample that `convert` has just yielded."""

    def close(self) -> None:
        """End the workers. Samples that are not written yet are lost, unless `convert` has yielded its last item."""


def open_pool(num_workers: int, conversion: Conversion, writer: ShardWriter, items: Sequence[Item]) -> Pool:
    """Return worker processes if a fork is safe and worth its time; otherwise threads, which write the same bytes.

    Threads take turns for the GIL, so that two convert hardly more than one.
    """
    num_files = len({name for index, _ in items for name in conversion.samples[index].files})
    # Samples that share a file are converted by threads, which share what they have read of it.
    if writer._can_reserve and len(items) >= _MIN_SAMPLES and 2 * num_files >= len(items) and may_fork():
        children: list[Child] = []
        try:
            for _ in range(num_workers):
                Child(partial(work, convert=conversion), children)
            return _Processes(children, writer)
        except BaseException as exc:
            for child in children:
                child.close()
            if not isinstance(exc, OSError):  # the system allows no more processes
                raise
    return _Threads(num_workers, conversion, writer)


class _Threads:
    def __init__(self, num_workers: int, convert: Callable[[Item], Converted | Exception], writer: ShardWriter) -> None:
        self._num_workers, self._convert, self._writer = num_workers, convert, writer
        self._pool = Threads(num_workers, "import")

    def convert(self, items: Sequence[Item]) -> Iterator[Converted | Exception]:
        return run_in_order(items, self._convert, self._pool, self._num_workers)

    def store(self, converted: Converted) -> None:
        self._writer._place(converted.packed)

    def close(self) -> None:
        self._pool.shutdown()


class _Worker:
    """A worker process, as its parent sees it."""

    def __init__(self, child: Child) -> None:
        self.child = child
        self.connection = child.connection
        self.num_todo = 0  # items without a result
        self.results: deque[Converted | Exception] = deque()  # in the order of its items
        self.places: list[Place | None] = []  # of results that were taken, not sent yet
        self.targets: set[int] = set()  # numbers of the shards that it knows


class _Processes:
    """Workers that write the bytes themselves, at places that this process reserves in the order of the source."""

    def __init__(self, children: list[Child], writer: ShardWriter) -> None:
        self._writer = writer
        self._workers = [_Worker(child) for child in children]
        self._by_connection = {worker.connection: worker for worker in self._workers}
        self._shards: dict[int, UnfinishedShard] = {}  # that have awaited bytes
        self._num_shards = 0
        self._current: UnfinishedShard | None = None
        self._place: Place | None = None  # of the sample that `convert` has yielded

    def convert(self, items: Sequence[Item]) -> Iterator[Converted | Exception]:
        todo = iter(items)
        assigned: deque[_Worker] = deque()  # the worker of each item that was not yielded, in the order of the items
        while True:
            self._assign(todo, assigned)
            if not assigned:
                break
            worker = assigned[0]
            if not worker.results:
                self._send_places(worker)
                self._receive()
                continue
            assigned.popleft()
            self._place = None
            yield worker.results.popleft()
            worker.places.append(self._place)
            if not worker.results or not assigned or assigned[0] is not worker:
                self._send_places(worker)
        while self._shards:
            self._receive()

    def _assign(self, todo: Iterator[Item], assigned: deque[_Worker]) -> None:
        """Give each worker its next samples early, so that it never waits for them."""
        while (worker := min(self._workers, key=lambda each: each.num_todo)).num_todo <= _CHUNK:
            items = list(islice(todo, _CHUNK))
            if not items:
                return
            self._send(worker, Todo(items))
            worker.num_todo += len(items)
            assigned.extend([worker] * len(items))

    def store(self, converted: Converted) -> None:
        shard, offset = self._writer._reserve(converted.packed)
        if shard is not self._current:
            self._current = shard
            self._num_shards += 1
        self._shards[self._num_shards] = shard
        self._place = self._num_shards, offset

    def _send_places(self, worker: _Worker) -> None:
        if worker.places:
            numbers = {place[0] for place in worker.places if place is not None} - worker.targets
            targets = {}
            for number in sorted(numbers):
                path = self._shards[number].temporary
                status = os.stat(path)
                targets[number] = Target(os.path.abspath(path), (status.st_dev, status.st_ino))
            self._send(worker, Places(worker.places, targets))
            worker.targets |= numbers
            worker.places = []

    def _send(self, worker: _Worker, message: Todo | Places) -> None:
        try:
            send(worker.connection, message)
        except OSError:
            self._fail(worker)

    def _receive(self) -> None:
        """Wait for a message of any worker."""
        for connection in wait(list(self._by_connection)):
            worker = self._by_connection[connection]  # type: ignore[index]
            try:
                report: Report = receive(worker.connection)
            except (EOFError, OSError):
                self._fail(worker)
            if report.fault is not None:
                raise report.fault
            worker.num_todo -= len(report.results)
            worker.results.extend(report.results)
            if report.failure is not None:
                number, error = report.failure
                self._shards[number].fail(error)
            for number, nbytes in report.written.items():
                shard = self._shards[number]
                self._writer._acknowledge(shard, nbytes)
                if not shard.num_awaited:
                    del self._shards[number]

    def _fail(self, worker: _Worker) -> None:
        raise ChildProcessError(f"{worker.child.describe_end()}; finished shards stay, and the import can resume")

    def close(self) -> None:
        for worker in self._workers:
            worker.child.kill()
        for worker in self._workers:  # the system frees the memory of all at once
            worker.child.close()
