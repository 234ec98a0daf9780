"""New files, written under a temporary name, partly by another thread."""

from __future__ import annotations

import contextlib
import errno
import io
import os
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

from wds_tensorcache.storage.atomic import fsync_folder, publish, temporary_path
from wds_tensorcache.storage.memory_pool import Pool
from wds_tensorcache.storage.system import MAX_BUFFERS, skip_bytes, start_writeback
from wds_tensorcache.storage.threads import Threads

_STAGE_NBYTES = 1 << 22  # a stage is recycled memory that collects pieces
_large_nbytes = 1 << 21  # pieces of this size or more are not copied, since the copy would cost more time than it saves
# The parts of a piece below this size are joined first: one more copy takes less time than many short copies.
_SMALL_NBYTES = 1 << 14
_MAX_STAGES = 2  # the most stages that are being written while the caller fills another
_POOL = Pool(_STAGE_NBYTES * (_MAX_STAGES + 1))


def write_at_once(nbytes: int) -> None:
    """Make this process write pieces of `nbytes` or more without a copy. This spares cores for other processes."""
    global _large_nbytes
    _large_nbytes = nbytes


class Output:
    """A new file to which the caller appends bytes.

    Pieces are copied into a stage, which a thread writes while the caller encodes the next samples. On a memory file system,
    the copy of 450 KB takes 40 us, and the system call 130 us. Large pieces are written by the caller, without a copy.

    With `fsync`, the file is flushed to disk before it gets its final path, so that a crash cannot leave wrong bytes.

    Threads/fork: one thread at a time; not usable in a forked child.
    """

    def __init__(self, path: str, fsync: bool) -> None:
        self.path = path
        self._fsync = fsync
        self._pid = os.getpid()
        self.temporary = ""  # path of the temporary file; after `flush`, it contains all appended bytes
        self._file = self._create()
        self._thread = Threads(1, "tensorcache-output")
        self._writing: deque[Future[None]] = deque()
        self._stage: Any = None
        self._filled = 0
        self._position = 0  # offset in the file at which the next bytes are written
        self._is_small = True  # whether all pieces in the stage are small
        self._failure: BaseException | None = None

    def _create(self) -> io.RawIOBase:
        self.temporary = temporary_path(self.path)
        return open(self.temporary, "xb", buffering=0)

    def append(self, parts: Sequence[Any], nbytes: int) -> None:
        """Append bytes-like `parts` of `nbytes` bytes, which the caller may then change. Raise OSError as `check` does."""
        self.check()
        if nbytes >= _large_nbytes:
            self.flush()
            self._write([memoryview(part).cast("B") for part in parts if len(part)])
            self.check()
            return
        if self._filled + nbytes > _STAGE_NBYTES:
            self._hand_over()
        if self._stage is None:
            self._stage = _POOL.lease(_STAGE_NBYTES).data
        stage, position = self._stage, self._filled
        if nbytes < _SMALL_NBYTES:
            parts = (b"".join(parts),)
        else:
            self._is_small = False
        for part in parts:
            stage[position : position + len(part)] = part
            position += len(part)
        self._filled = position

    def fail(self, failure: BaseException) -> None:
        """Make later calls of `append`, `flush` and `finish` raise OSError. An earlier failure stays the reason."""
        self._failure = self._failure or failure

    def _hand_over(self) -> None:
        """Write the stage, or let the thread write it."""
        # GIL: after a write, the thread waits for it. Each torch call of the caller releases it for an instant, which wakes the
        # thread in vain: encoding samples of 4 KB takes 1.3 times as long. So the caller itself writes a stage of small pieces,
        # which takes far less time than encoding them.
        self._wait(0 if self._is_small else _MAX_STAGES - 1)
        if self._filled and self._is_small:
            self._write([self._stage[: self._filled]])
            self.check()
        elif self._filled:
            self._writing.append(self._thread.submit(self._write, [self._stage[: self._filled]]))
            self._stage = None
        self._filled, self._is_small = 0, True

    def _wait(self, remaining: int) -> None:
        while len(self._writing) > remaining:
            self._writing.popleft().result()
        self.check()

    def flush(self) -> None:
        """Wait until the operating system has all bytes. Raise OSError as `check` does."""
        self._hand_over()
        self._wait(0)

    def check(self) -> None:
        """Raise OSError if earlier bytes could not be written."""
        if self._failure is not None:
            problem = f"{self.path}: the file could not be written: {self._failure}"
            raise OSError(getattr(self._failure, "errno", None) or errno.EIO, problem) from self._failure

    def _write(self, parts: list[memoryview]) -> None:
        if self._failure is not None:
            return  # bytes were lost, so later bytes would be at wrong offsets
        try:
            self._write_all(parts)
        except BaseException as exc:
            self._failure = exc  # for `check`
            if not isinstance(exc, OSError):  # an interrupt of the caller, which writes small and large pieces itself
                raise

    def _write_all(self, parts: Sequence[memoryview]) -> None:
        fd = self._file.fileno()
        begin, nbytes = self._position, sum(map(len, parts))
        # one call writes at most 1,024 buffers and 2 GiB, or less if the disk is almost full
        while parts:
            parts = skip_bytes(parts, os.writev(fd, parts[:MAX_BUFFERS]))
        self._position += nbytes
        if self._fsync:
            # otherwise `finish` would wait for the whole file
            start_writeback(fd, begin, nbytes)

    def finish(self) -> None:
        """Give the file its final path. Raise FileExistsError if the path exists, OSError as `check` does."""
        self.flush()
        if self._fsync:
            os.fsync(self._file.fileno())
        self._close()
        publish(self.temporary, self.path)
        if self._fsync:
            fsync_folder(os.path.dirname(self.path))

    def drop(self) -> None:
        """Delete the temporary file. Do nothing in a forked child."""
        if self._pid != os.getpid():
            return  # a forked child also exits the `with` block that it inherited
        self._close()
        with contextlib.suppress(OSError):  # the file was renamed, has no name, or stays for the next writer to delete
            os.remove(self.temporary)

    def _close(self) -> None:
        self._thread.shutdown(cancel_futures=True)
        self._file.close()
        self._stage = None
