"""A worker process: converts samples, reports their sizes, and writes their bytes at the places that it is given."""

from __future__ import annotations

import os
import pickle
import select
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any

from wds_tensorcache.errors import FormatError
from wds_tensorcache.integrations.importers.conversion.convert import BAD_SAMPLE, Converted, Item
from wds_tensorcache.integrations.importers.conversion.messages import Places, Report, Target, Todo, receive, send
from wds_tensorcache.storage.system import MAX_BUFFERS, skip_bytes, start_writeback

# a report has at most so many samples, and at most one sample beyond so many bytes
_REPORT_SAMPLES, _REPORT_NBYTES = 8, 1 << 22
_MAX_SAMPLES, _MAX_NBYTES = 256, 1 << 25  # a worker that has so much in memory waits until it may write


def work(connection: Connection, convert: Callable[[Item], Converted | Exception]) -> None:
    """Do what the messages of the parent process say, until it closes the connection or ends.

    Args:
        connection: The connection to the parent process.
        convert: Function that converts a sample.
    """
    try:
        _Worker(connection, convert).run()
    except Exception as exc:
        send(connection, Report(fault=_portable(_with_traceback(exc))))


class _Worker:
    def __init__(self, connection: Connection, convert: Callable[[Item], Any]) -> None:
        self._connection, self._convert = connection, convert
        self._poll = select.poll()
        self._poll.register(connection.fileno(), select.POLLIN)
        self._todo: deque[Item] = deque()
        self._held: deque[tuple[list[Any], int]] = deque()  # parts and length of each sample that has no place yet
        self._nbytes_held = 0
        self._report, self._nbytes_reported = Report(), 0
        self._files: dict[int, int] = {}  # descriptors by the numbers of shards

    def run(self) -> None:
        """Convert and write, until the connection is closed."""
        while True:
            is_idle = not self._todo or len(self._held) >= _MAX_SAMPLES or self._nbytes_held >= _MAX_NBYTES
            if is_idle:
                self._send()
            while is_idle or self._poll.poll(0):
                try:
                    message = receive(self._connection)
                except (EOFError, OSError):
                    return
                is_idle = False
                if isinstance(message, Todo):
                    self._todo.extend(message.items)
                else:
                    self._write(message)
            if self._todo:
                self._convert_next()

    def _convert_next(self) -> None:
        result: Converted | Exception
        try:
            result = self._convert(self._todo.popleft())
        except Exception as exc:
            result = _with_traceback(exc)
        parts, nbytes = [], 0
        if isinstance(result, Converted):
            parts, nbytes, result.packed.parts = result.packed.parts, result.packed.nbytes, []
        else:
            result = _portable(result)
        self._held.append((parts, nbytes))
        self._nbytes_held += nbytes
        self._nbytes_reported += nbytes
        self._report.results.append(result)
        if len(self._report.results) >= _REPORT_SAMPLES or self._nbytes_reported >= _REPORT_NBYTES:
            self._send()

    def _send(self) -> None:
        if self._report != Report():
            send(self._connection, self._report)
            self._report, self._nbytes_reported = Report(), 0

    def _write(self, message: Places) -> None:
        """Write the samples that have a place now, and forget those that have none."""
        number = begin = end = 0  # the shard and the bytes that were written there
        for place in message.places:
            parts, nbytes = self._held.popleft()
            self._nbytes_held -= nbytes
            if place is None or self._report.failure is not None:
                continue
            if place != (number, end):
                self._flush(number, begin, end)
                number, begin = place
                end = begin
            try:
                if number not in self._files:
                    self._files[number] = _open(message.targets[number])
                _write_at(self._files[number], parts, end)
            except OSError as exc:  # the parent ends the import
                self._report.failure = number, exc
                self._send()
                return
            end += nbytes
        self._flush(number, begin, end)
        for known in sorted(self._files)[:-1]:  # later samples are in the last shard, or after it
            os.close(self._files.pop(known))

    def _flush(self, number: int, begin: int, end: int) -> None:
        """Report a range that was written, and let the disk begin to write it: the parent waits for the whole shard."""
        if end > begin:
            start_writeback(self._files[number], begin, end - begin)
            self._report.written[number] = self._report.written.get(number, 0) + end - begin


def _open(target: Target) -> int:
    file = os.open(target.path, os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    status = os.fstat(file)
    if (status.st_dev, status.st_ino) != target.identity:
        os.close(file)
        raise FileNotFoundError(f"{target.path} was replaced by another file")
    return file


def _write_at(file: int, parts: Sequence[Any], offset: int) -> None:
    # one call writes at most 1,024 buffers and 2 GiB, or less if the disk is almost full
    rest: Sequence[Any] = [memoryview(part).cast("B") for part in parts if len(part)]
    while rest:
        count = os.pwritev(file, rest[:MAX_BUFFERS], offset)
        rest = skip_bytes(rest, count)
        offset += count


def _with_traceback(error: Exception) -> Exception:
    """Add the traceback as a note, in Python 3.11, because the traceback itself stays in this process."""
    if hasattr(error, "add_note"):
        error.add_note(f"in a worker process:\n{traceback.format_exc()}")
    return error


def _portable(error: Exception) -> Exception:
    """Return an error that another process can unpickle, such as `error` itself."""
    try:
        pickle.loads(pickle.dumps(error))  # noqa: S301 (made here)
    except Exception:
        text = f"{type(error).__name__}: {error}"
        return FormatError(text) if isinstance(error, BAD_SAMPLE) else RuntimeError(text)
    return error
