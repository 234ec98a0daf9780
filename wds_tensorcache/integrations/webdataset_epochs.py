"""Epochs of worker processes that may live for one epoch each: a log in a temporary file, which all of them append to."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
import time
import weakref
from collections.abc import Callable, Sequence
from multiprocessing.context import get_spawning_popen
from typing import Any

from wds_tensorcache.storage.locks import Held

__all__ = ["EpochLog"]

Record = tuple[int, Any, Any]  # epoch; iteration and worker, None for the main process


class EpochLog:
    """Which epoch each iteration has.

    torch starts the workers of an iteration one by one, and says nothing to a dataset of its epoch. So the first worker of an
    iteration to come appends the next epoch, and the others find it, by a number that torch gives to all of them. Workers
    of an iteration that was left may come when others of the next one have come already.

    Threads/fork/pickle: forked and spawned processes share it, under a lock on the file; a copy made otherwise is independent.
    """

    def __init__(self, records: Sequence[Record] = ()) -> None:
        fd, self._path = tempfile.mkstemp(prefix="tensorcache-epochs-")
        with os.fdopen(fd, "w") as file:
            file.writelines(json.dumps(record) + "\n" for record in records)
        weakref.finalize(self, _remove, self._path, os.getpid())

    def __reduce__(self) -> Any:
        if get_spawning_popen() is not None:
            return _opened, (self._path,)
        return EpochLog, (self.records(),)

    def records(self) -> list[Record]:
        """Return what was appended until now."""
        return self._append(lambda records: [])

    def begin(self, info: Any, turn: int, epoch: int | None = None) -> int:
        """Return the epoch that a worker begins.

        Args:
            info: torch's `WorkerInfo`.
            turn: Number of the iteration in this process.
            epoch: Epoch that is known, from a state; None for that of the other workers, or the next one.
        """
        # torch draws a seed for each iteration, unless the user seeds it: then a worker that comes again begins another one
        iteration = [info.seed - info.id, info.num_workers, turn]

        def choose(records: list[Record]) -> list[Record]:
            same = [(known, worker) for known, which, worker in records if which == iteration]
            latest = max((known for known, _ in same), default=None)
            if epoch is not None:
                return [(epoch, iteration, info.id)]
            if latest is not None and (latest, info.id) not in same:
                return [(latest, iteration, info.id)]
            return [(records[-1][0] + 1 if records else 0, iteration, info.id)]

        return self._append(choose)[-1][0]

    def put(self, epoch: int) -> None:
        """Note that the main process is in an epoch: the next iteration of workers begins the one after it."""
        self._append(lambda records: [(epoch, None, None)])

    def epoch_of_workers(self) -> int | None:
        """Return the epoch that workers were in last; None if the main process was in one since."""
        records = self.records()
        return records[-1][0] if records and records[-1][1] is not None else None

    def _append(self, choose: Callable[[list[Record]], list[Record]]) -> list[Record]:
        with Held(self._path, os.O_RDWR) as held:
            while held.lock() is False:  # only workers of this stream lock it, each for one record
                time.sleep(0.001)
            with open(held.fd, "r+", closefd=False) as file:
                records: list[Record] = [tuple(json.loads(line)) for line in file]
                new = choose(records)
                file.seek(0, os.SEEK_END)
                file.writelines(json.dumps(record) + "\n" for record in new)
        return [*records, *new]


def _opened(path: str) -> EpochLog:
    log = object.__new__(EpochLog)
    log._path = path
    return log


def _remove(path: str, pid: int) -> None:
    if pid == os.getpid():
        with contextlib.suppress(FileNotFoundError):
            os.remove(path)
