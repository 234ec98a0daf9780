"""A file that is written under a temporary name, by a thread of its own, and gets its name when it is complete."""

from __future__ import annotations

import contextlib
import errno
import os
from collections import deque
from collections.abc import Sequence
from typing import Any

from wds_tensorcache.storage.atomic import create_temporary, fsync_folder
from wds_tensorcache.storage.pool import Pool
from wds_tensorcache.storage.threads import Job, ThreadPool

__all__ = ["Output"]

_STAGE_NBYTES = 1 << 22
_LARGE_NBYTES = 1 << 21  # from here on, a copy costs more than it hides
_MAX_STAGES = 2  # being written, while a third is filled
_POOL = Pool(_STAGE_NBYTES * (_MAX_STAGES + 1))
_MAX_BUFFERS = 1024  # IOV_MAX


class Output:
    """Appends bytes to a file.

    Small pieces are copied into recycled memory, which a thread writes while the next samples are encoded: on a memory file
    system the copy takes 40 us for 450 KB, the system call 130. Large ones are written where they lie.

    Threads/fork: one caller; nothing of it may be used in a forked child.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._pid = os.getpid()
        self._made = contextlib.ExitStack()  # closed by finish and drop
        self._file = self._made.enter_context(create_temporary(path))
        self.temporary = self._file.path  # what was appended can be read there after `flush`
        self._thread = ThreadPool(1, "tensorcache-output")
        self._writing: deque[Job[None]] = deque()
        self._stage: Any = None
        self._filled = 0
        self._failure: BaseException | None = None

    def append(self, parts: Sequence[Any], nbytes: int) -> None:
        """Append `parts`, bytes-like, `nbytes` in all; they may be changed as soon as this returns.

        Raises:
            OSError: This or an earlier piece could not be written.
        """
        self._check()
        if nbytes >= _LARGE_NBYTES:
            self.flush()
            self._write([memoryview(part).cast("B") for part in parts if len(part)])
            self._check()
            return
        if self._filled + nbytes > _STAGE_NBYTES:
            self._hand_over()
        if self._stage is None:
            self._stage = _POOL.lease(_STAGE_NBYTES).data
        stage, position = self._stage, self._filled
        for part in parts:
            stage[position : position + len(part)] = part
            position += len(part)
        self._filled = position

    def _hand_over(self) -> None:
        self._wait(_MAX_STAGES - 1)
        if self._filled:
            self._writing.append(self._thread.submit(self._write, [self._stage[: self._filled]]))
        self._stage, self._filled = None, 0

    def _wait(self, remaining: int) -> None:
        """Return when no more than `remaining` stages are being written."""
        while len(self._writing) > remaining:
            self._writing.popleft().result()
        self._check()

    def flush(self) -> None:
        """Return when everything appended was handed to the system."""
        self._hand_over()
        self._wait(0)

    def _check(self) -> None:
        if self._failure is not None:
            what = f"{self.path}: a part of it could not be written: {self._failure}"
            raise OSError(getattr(self._failure, "errno", None) or errno.EIO, what) from self._failure

    def _write(self, parts: list[memoryview]) -> None:
        if self._failure is not None:
            return  # what follows would be at another place than the index says
        try:
            self._write_all(parts)
        except OSError as exc:
            self._failure = exc  # whoever waits for it, or appends more, is told
        except BaseException as exc:  # an interrupt of the caller, who writes large parts itself
            self._failure = exc
            raise

    def _write_all(self, parts: list[memoryview]) -> None:
        if not hasattr(os, "writev"):
            for part in parts:
                while len(part):
                    part = part[os.write(self._file.fd, part) :]
            return
        # one call per 1,024 buffers; a disk that is almost full, and 2 GiB, make it take less than all
        first = 0
        while first < len(parts):
            count = os.writev(self._file.fd, parts[first : first + _MAX_BUFFERS])
            while first < len(parts) and count >= len(parts[first]):
                count -= len(parts[first])
                first += 1
            if count:
                parts[first] = parts[first][count:]

    def finish(self, fsync: bool) -> None:
        """Give the file its name; with `fsync` after it is on disk, else a crash may leave the name with other bytes."""
        self.flush()
        if fsync:
            os.fsync(self._file.fd)
        self._close()
        with self._made:
            os.replace(self.temporary, self.path)
        if fsync:
            fsync_folder(os.path.dirname(self.path))

    def drop(self) -> None:
        """Delete what was written; what cannot be deleted is left to the next writer, since there was another error before."""
        if self._pid != os.getpid():
            return  # a forked child, which leaves a `with` block as its parent will
        try:
            self._close()
        finally:
            self._made.close()

    def _close(self) -> None:
        self._thread.close(cancel=True)
        self._file.close()
        self._stage = None
