"""The table that all processes map: where each sample is, and how full each segment is.

The file contains 64-bit unsigned integers in native byte order: `_HEAD` numbers, a slot of `_WIDTH` numbers for each segment,
and an entry for each sample. An entry is `serial << 30 | offset // 16`, with the serial number of the segment and the byte
offset of the sample's record in it. It is 0 if the sample was never added; an entry of a removed segment is stale. One aligned
store publishes a sample, after its bytes were written.
"""

from __future__ import annotations

import mmap
import os
import stat
import time
from typing import Any, NamedTuple

import numpy as np

from wds_tensorcache.errors import FormatError
from wds_tensorcache.sharing.owned_files import check_owner, write_file

Array = np.ndarray[Any, Any]
TABLE = "table"  # name of the file
ALIGN = 16  # the offset of each record is a multiple of this number of bytes
_OFFSET_BITS = 30
_MAX_SERIAL = (1 << 64 - _OFFSET_BITS) - 1
MAX_SEGMENT_NBYTES = ALIGN << _OFFSET_BITS
_HEAD = 8  # numbers before the slots
_GENERATION, _NEXT_SERIAL = 0, 1  # positions in the head
_NUM_SLOTS = 4096
# positions in a slot, and its width; `_SERIAL` is 0 in a free slot, and `_USED` is a time in nanoseconds
_SERIAL, _CAPACITY, _END, _RESERVED, _USED, _WIDTH = range(6)
_ENTRIES = _HEAD + _WIDTH * _NUM_SLOTS  # position of the first entry


class Segment(NamedTuple):
    """A segment, a file of `capacity` bytes. Its records end at byte `end`; it takes up to `reserved` bytes of memory.

    `reserved` is rounded up to whole pages. It includes a record that is being written.
    """

    serial: int
    capacity: int
    end: int
    reserved: int


def create_table(path: str, num_samples: int) -> None:
    """Create the file of a table.

    Raises:
        OSError: The file system is full. The memory is reserved now, since a lack of it would later kill a process (SIGBUS).
    """
    write_file(path, nbytes=8 * (_ENTRIES + num_samples))


class Table:
    """A map of the table for `num_samples` samples.

    Threads/fork: safe everywhere. A caller of `publish` holds the sample's lock, a caller of `reserve` and `extend` the
        segment's, and a caller of `add` and `remove` the lock `_SPACE` of `Segments`. All other methods need no lock.

    Attributes:
        entries: Entry of each sample, uint64 `[num_samples]`.

    Raises:
        FormatError: The file is missing, or has another length. `segments`, `present` and `next_serial` raise it, too, for
            impossible numbers.
        PermissionError: The file is not a regular file of this user alone.
    """

    def __init__(self, path: str, num_samples: int) -> None:
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except FileNotFoundError as exc:
            raise FormatError("the table is missing; call tc.shared_clear", kind="damaged").at(path) from exc
        try:
            status = os.fstat(fd)
            check_owner(path, status, stat.S_ISREG)
            if status.st_size != 8 * (_ENTRIES + num_samples):
                what = f"the table has {status.st_size} bytes, expected {8 * (_ENTRIES + num_samples)}; call tc.shared_clear"
                raise FormatError(what, kind="damaged").at(path)
            self._map = mmap.mmap(fd, 0)
        finally:
            os.close(fd)
        numbers = memoryview(self._map).cast("Q")
        self._head = numbers[:_HEAD]
        self._slots = numbers[_HEAD:_ENTRIES]
        self.entries = numbers[_ENTRIES:]
        self._path = path

    @property
    def generation(self) -> int:
        """Number of segments removed so far."""
        return self._head[_GENERATION]

    def place(self, entry: int) -> tuple[int, int]:
        """Return the serial number of the segment and the byte offset of the record that an entry stands for."""
        return entry >> _OFFSET_BITS, (entry & (1 << _OFFSET_BITS) - 1) * ALIGN

    def publish(self, index: int, serial: int, offset: int) -> None:
        """Make a sample visible to all processes; its bytes were written before."""
        self.entries[index] = serial << _OFFSET_BITS | offset // ALIGN

    def is_alive(self, serial: int) -> bool:
        """Return whether a segment was added and not removed since."""
        return self._slots[_slot(serial)] == serial

    def note_use(self, serial: int) -> None:
        """Record that a sample of a segment was used now."""
        self._slots[_slot(serial) + _USED] = time.time_ns()

    def segments(self) -> list[Segment]:
        """Return all segments, the least recently used first."""
        slots = np.array(self._slots, np.uint64).reshape(_NUM_SLOTS, _WIDTH)
        alive = slots[slots[:, _SERIAL] > 0]
        if (alive[:, _SERIAL] > _MAX_SERIAL).any() or (alive[:, _CAPACITY:_USED] > MAX_SEGMENT_NBYTES).any():
            raise self._damaged()
        return [Segment(*row) for row in alive[np.argsort(alive[:, _USED])][:, :_USED].tolist()]

    def segment(self, serial: int) -> Segment:
        """Return a segment."""
        at = _slot(serial)
        return Segment(*self._slots[at : at + _USED].tolist())

    def next_serial(self) -> int | None:
        """Return the serial number of the next segment; None if there are as many segments as slots."""
        first = max(1, self._head[_NEXT_SERIAL])
        if first > _MAX_SERIAL - _NUM_SLOTS:
            raise self._damaged()
        free = (serial for serial in range(first, first + _NUM_SLOTS) if not self._slots[_slot(serial)])
        return next(free, None)

    def _damaged(self) -> FormatError:
        return FormatError("the table has impossible numbers; call tc.shared_clear", kind="damaged").at(self._path)

    def add(self, serial: int, capacity: int) -> Segment:
        """Add a segment, whose file exists, and return it."""
        at = _slot(serial)
        for number, value in ((_CAPACITY, capacity), (_END, 0), (_RESERVED, 0), (_USED, time.time_ns())):
            self._slots[at + number] = value
        # First: even if this process is killed after this line, no serial number is used twice.
        self._head[_NEXT_SERIAL] = serial + 1
        self._slots[at] = serial
        return Segment(serial, capacity, 0, 0)

    def reserve(self, serial: int, end: int) -> None:
        """Record that a segment takes memory up to byte `end`, the end of a page; a process may be writing there."""
        self._slots[_slot(serial) + _RESERVED] = end

    def extend(self, serial: int, end: int) -> None:
        """Record that all bytes of a segment up to `end` were written."""
        self._slots[_slot(serial) + _END] = end

    def remove(self, serial: int) -> None:
        """Remove a segment; its samples are then absent."""
        self._slots[_slot(serial)] = 0
        self._head[_GENERATION] += 1

    def present(self) -> Array:
        """Return which samples are present, bool `[num_samples]`."""
        serials = np.array(self.entries, np.uint64) >> np.uint64(_OFFSET_BITS)
        alive = np.array([segment.serial for segment in self.segments()], np.uint64)
        return np.isin(serials, alive)


def _slot(serial: int) -> int:
    return _WIDTH * (serial % _NUM_SLOTS)
