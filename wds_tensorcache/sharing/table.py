"""The table of samples and segments, which all processes map.

The file contains 64-bit unsigned integers in native byte order. The first of `_HEAD` numbers is the number of segments. A slot
of `_WIDTH` numbers for each segment follows, then an entry for each sample. An entry is 0 if the sample is absent, otherwise
`segment << 30 | offset // 16`, with the byte offset of the sample's record in the segment. One aligned store publishes a
sample, after its bytes were written. An entry never changes again.
"""

from __future__ import annotations

import mmap
import os
from typing import Any, NamedTuple

import numpy as np

from wds_tensorcache.errors import FormatError
from wds_tensorcache.storage.owned import open_owned, write_file

Array = np.ndarray[Any, Any]
TABLE = "table"  # name of the file
ALIGN = 16  # the offset of each record is a multiple of this number of bytes
_OFFSET_BITS = 30
MAX_SEGMENT_NBYTES = ALIGN << _OFFSET_BITS
_HEAD = 16  # earlier versions had another number, so their tables have another length
_MAX_SEGMENTS = 4096
_CAPACITY, _END, _RESERVED, _WIDTH = range(4)  # positions in a slot, and its width
_ENTRIES = _HEAD + _WIDTH * _MAX_SEGMENTS  # position of the first entry


class Segment(NamedTuple):
    """A segment, a file of `capacity` bytes. Its records end at byte `end`; it takes up to `reserved` bytes of memory.

    `reserved` is rounded up to whole pages. It includes a record that is being written, or that a killed process was writing.
    Segments are numbered from 1 on.
    """

    number: int
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

    Threads/fork: safe everywhere. Callers of `publish` hold the lock of the sample. Callers of `reserve` and `extend` hold the
        lock of the segment. Callers of `add` hold the lock `_SPACE` of `Segments`. Other methods need no lock.

    Attributes:
        entries: Entry of each sample, uint64 `[num_samples]`.

    Raises:
        FormatError: The file is missing, or has another length. `segments` raises it, too, for impossible numbers.
        PermissionError: The file is not a regular file, or other users can access it.
    """

    def __init__(self, path: str, num_samples: int) -> None:
        self._path = path
        try:
            fd, status = open_owned(path, os.O_RDWR)
        except FileNotFoundError as exc:
            raise self._damaged("the table is missing") from exc
        try:
            expected = 8 * (_ENTRIES + num_samples)
            if status.st_size != expected:
                raise self._damaged(f"the table has {status.st_size} bytes, expected {expected}")
            numbers = memoryview(mmap.mmap(fd, 0)).cast("Q")
        finally:
            os.close(fd)
        self._head = numbers[:_HEAD]
        self._slots = numbers[_HEAD:_ENTRIES]
        self.entries = numbers[_ENTRIES:]

    def _damaged(self, problem: str) -> FormatError:
        return FormatError(f"{problem}; call tc.shared_clear", kind="damaged").at(self._path)

    def publish(self, index: int, segment: int, offset: int) -> None:
        """Make a sample, whose bytes are written, visible to all processes."""
        self.entries[index] = segment << _OFFSET_BITS | offset // ALIGN

    def place(self, index: int) -> tuple[int, int]:
        """Return a sample's segment and byte offset; (0, 0) if absent."""
        entry = self.entries[index]
        return entry >> _OFFSET_BITS, (entry & (1 << _OFFSET_BITS) - 1) * ALIGN

    def segments(self) -> list[Segment]:
        slots = np.array(self._slots, np.uint64).reshape(_MAX_SEGMENTS, _WIDTH)[: self._head[0]]
        if self._head[0] > _MAX_SEGMENTS or (slots > MAX_SEGMENT_NBYTES).any():
            raise self._damaged("the table has impossible numbers")
        return [Segment(number, *slot) for number, slot in enumerate(slots.tolist(), 1)]

    def segment(self, number: int) -> Segment:
        at = _slot(number)
        return Segment(number, *self._slots[at : at + _WIDTH].tolist())

    def next_number(self) -> int | None:
        """Return the next segment's number, or None without a free slot."""
        count = self._head[0]
        return count + 1 if count < _MAX_SEGMENTS else None

    def add(self, number: int, capacity: int) -> Segment:
        """Add the next segment, whose file exists, and return it."""
        at = _slot(number)
        for position, value in ((_CAPACITY, capacity), (_END, 0), (_RESERVED, 0)):
            self._slots[at + position] = value
        self._head[0] = number
        return Segment(number, capacity, 0, 0)

    def reserve(self, number: int, end: int) -> None:
        """Record that a segment takes memory up to `end`, a page's end. A process may be writing there."""
        self._slots[_slot(number) + _RESERVED] = end

    def extend(self, number: int, end: int) -> None:
        """Record that all bytes of a segment up to `end` were written."""
        self._slots[_slot(number) + _END] = end

    def find_present(self) -> Array:
        """Return the mask of the present samples, bool `[num_samples]`."""
        present: Array = np.array(self.entries, np.uint64) > 0
        return present


def _slot(number: int) -> int:
    return _WIDTH * (number - 1)
