"""The bytes of the samples in append-only files. Every process maps the files privately, so that views are copied on write.

A segment is a file of records. A record is the header `_RECORD`, a skeleton, padding, and a `.safetensors` member. No record is
freed by itself: `reaper.py` removes the whole folder.
"""

from __future__ import annotations

import mmap
import os
import weakref
from collections.abc import Sequence
from contextlib import suppress
from struct import Struct
from typing import Any

import numpy as np

from wds_tensorcache.codec.reference import MemorySource
from wds_tensorcache.codec.sample import EncodedSample
from wds_tensorcache.errors import FormatError
from wds_tensorcache.sharing.table import ALIGN, MAX_SEGMENT_NBYTES, Segment, Table
from wds_tensorcache.storage.locks import RangeLocks
from wds_tensorcache.storage.memory_pool import Pool
from wds_tensorcache.storage.owned import explain_no_space, open_owned
from wds_tensorcache.storage.system import MAX_BUFFERS, skip_bytes

# Bytes of the file `locks`. Byte `i` is the lock of sample `i`; other locks follow.
_SPACE = 1 << 60  # the lock for adding segments, and for reserving bytes in them
_WRITING = 1 << 61  # plus a segment's number: the lock of the segment, held while a record is appended

_RECORD = Struct("<QQQ8x")  # index of the sample, bytes of the skeleton, bytes of the `.safetensors` member
_DATA_ALIGN = 64
_PAGE_NBYTES = mmap.PAGESIZE
# Hazard: a process that writes into a view gets private copies of its pages, and never sees bytes appended to them later. So a
# `.safetensors` member of this size or more shares no page with other samples, and every hit copies smaller members.
LARGE_NBYTES = 1 << 16
# A new segment has 1/16 of `max_nbytes`. Without a limit, it has 1/16 of the bytes in use, but at least 64 MiB. A segment that
# is added for a larger sample has the length of that sample.
_MIN_SEGMENT_NBYTES = 1 << 26
_MAX_PART = 16

Array = np.ndarray[Any, Any]
Members = tuple[bytes, MemorySource]  # the skeleton, and the source of the `.safetensors` member


class Full(Exception):
    """A signal that the shared memory has no room for a sample."""


class SegmentSource(MemorySource):
    """A `.safetensors` member in a segment.

    Memory: `view` aliases this process's private map, so that writing into it copies its pages for this process alone. `read`
        copies, large parts into recycled memory.
    """

    __slots__ = ("_array", "_pool")

    def __init__(self, array: Array, pool: Pool) -> None:
        super().__init__(array.data)
        self._array, self._pool = array, pool

    def read(self, begin: int, end: int) -> Any:
        if end - begin < LARGE_NBYTES:
            return bytearray(self.member[begin:end])
        copied = self._pool.lease(end - begin)
        copied[:] = self._array[begin:end]
        return copied

    def allocate(self, nbytes: int) -> Any:
        return bytearray(nbytes) if nbytes < LARGE_NBYTES else self._pool.lease(nbytes)

    def read_into(self, buffers: Sequence[Any], begin: int) -> None:
        for buffer in buffers:
            np.frombuffer(buffer, np.uint8)[:] = self._array[begin : begin + len(buffer)]
            begin += len(buffer)

    def view(self, begin: int, end: int) -> Array:
        return self._array[begin:end]


class Segments:
    """The segments of a folder, which have at most `max_nbytes` bytes together.

    Threads/fork: safe everywhere, if each `append` has its own locks.
    """

    def __init__(self, folder: str, table: Table, max_nbytes: int | None, pool: Pool) -> None:
        self._folder, self._table, self._pool, self._max_nbytes = folder, table, pool, max_nbytes
        # Another program may delete the folder, and a process may make it again. So files are opened through this descriptor.
        self._dir = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self._dir).atexit = False
        self._maps: dict[int, tuple[memoryview, Array]] = {}  # by number of the segment; both have the same bytes
        self._last = 0  # number of the segment to which this process wrote last

    @property
    def nbytes(self) -> int:
        """Number of bytes in all segments, including bytes that are being written."""
        return sum(segment.reserved for segment in self._table.segments())

    def find(self, index: int) -> Members | None:
        """Return a sample's skeleton and tensor source, or None if absent. This takes no lock.

        Raises:
            FormatError: The segment is damaged.
            PermissionError: The segment is not a regular file, or other users can access it.
        """
        number, offset = self._table.place(index)
        if not number:
            return None
        segment, array = self._maps.get(number) or self._map(number)
        begin = offset + _RECORD.size
        recorded, skeleton_nbytes, nbytes = (
            _RECORD.unpack_from(segment, offset) if begin <= len(segment) else (-1, 0, 0)
        )
        tensors = _align(begin + skeleton_nbytes, _PAGE_NBYTES if nbytes >= LARGE_NBYTES else _DATA_ALIGN)
        if recorded != index or tensors + nbytes > len(segment):
            raise self._damaged(number, f"the record of sample {index} at byte {offset} is damaged")
        skeleton = bytes(segment[begin : begin + skeleton_nbytes])
        if nbytes >= LARGE_NBYTES:
            return skeleton, SegmentSource(array[tensors : tensors + nbytes], self._pool)
        return skeleton, MemorySource(memoryview(bytearray(segment[tensors : tensors + nbytes])))

    def close(self) -> None:
        """Give up all maps. Tensors in use keep their maps alive."""
        self._maps.clear()

    def _map(self, number: int) -> tuple[memoryview, Array]:
        try:
            fd, status = self._open(number, os.O_RDONLY)
        except FileNotFoundError as exc:
            raise self._damaged(number, "the segment is missing") from exc
        try:
            if not status.st_size:
                raise self._damaged(number, "the segment is empty")
            array = np.frombuffer(mmap.mmap(fd, 0, access=mmap.ACCESS_COPY), np.uint8)
        finally:
            os.close(fd)
        mapped = self._maps[number] = array.data, array
        return mapped

    def _path(self, number: int) -> str:
        return os.path.join(self._folder, f"segment-{number}")

    def _open(self, number: int, flags: int) -> tuple[int, os.stat_result]:
        return open_owned(self._path(number), flags, self._dir)

    def _damaged(self, number: int, problem: str) -> FormatError:
        return FormatError(f"{problem}; call tc.shared_clear", kind="damaged").at(self._path(number))

    def append(self, index: int, sample: EncodedSample, locks: RangeLocks) -> None:
        """Write a sample, then publish it.

        The caller holds the sample's lock in `locks`. No other thread uses this `RangeLocks` object.

        Raises:
            Full: There is no room, or the sample is too large for a segment.
            OSError: The file system is full.
        """
        skeleton, nbytes = sample.skeleton, sample.layout.nbytes
        to_tensors = _RECORD.size + len(skeleton)
        # large members begin and end at page boundaries
        align, end_align = (_PAGE_NBYTES, _PAGE_NBYTES) if nbytes >= LARGE_NBYTES else (_DATA_ALIGN, ALIGN)
        length = to_tensors + align + nbytes + end_align  # the most that the record can take, wherever it begins
        if length > MAX_SEGMENT_NBYTES:
            raise Full(f"a sample of {nbytes:,} bytes is too large")
        try:
            with locks.held(_SPACE):
                segment = self._reserve(length, locks)
            begin = segment.end
            tensors = _align(begin + to_tensors, align)
            end = _align(tensors + nbytes, end_align)
            record = _RECORD.pack(index, len(skeleton), nbytes)
            padding = bytes(tensors - begin - to_tensors)
            self._write(segment, begin, end, [record, skeleton, padding, sample.header, *sample.buffers])
            self._table.reserve(segment.number, max(segment.reserved, _align(end, _PAGE_NBYTES)))
            self._table.extend(segment.number, end)
            self._table.publish(index, segment.number, begin)
        finally:
            locks.unlock(_WRITING, 0)

    def _write(self, segment: Segment, begin: int, end: int, parts: list[Any]) -> None:
        """Reserve memory up to byte `end`, then write `parts` at `begin`."""
        fd, _ = self._open(segment.number, os.O_WRONLY)
        try:
            with explain_no_space(self._path(segment.number), f"a sample of {end - begin:,} bytes"):
                # SIGBUS. Reading a mapped page for which the system has no memory kills the process.
                os.posix_fallocate(fd, begin, end - begin)
            rest: Sequence[memoryview] = [memoryview(part).cast("B") for part in parts if len(part)]
            while rest:
                count = os.pwritev(fd, rest[:MAX_BUFFERS], begin)
                begin += count
                rest = skip_bytes(rest, count)
        finally:
            os.close(fd)

    def _reserve(self, nbytes: int, locks: RangeLocks) -> Segment:
        """Reserve bytes in a segment, locked in `locks`; return its earlier state."""
        # The caller holds `_SPACE`. The bytes that a killed writer had reserved in a segment are reserved again here.
        segments = self._table.segments()
        free = np.inf if self._max_nbytes is None else self._max_nbytes - sum(segment.reserved for segment in segments)
        for segment in sorted(segments, key=lambda segment: segment.number != self._last):
            if segment.end + nbytes <= segment.capacity and locks.lock(_WRITING + segment.number):
                # another writer may have appended to it before this lock was taken
                segment = self._table.segment(segment.number)
                reserved = max(segment.reserved, _align(segment.end + nbytes, _PAGE_NBYTES))
                if segment.end + nbytes <= segment.capacity and reserved - segment.reserved <= free:
                    break
                locks.unlock(_WRITING + segment.number)
        else:
            reserved = _align(nbytes, _PAGE_NBYTES)
            if reserved > free:
                raise Full(f"no room for {nbytes:,} bytes more")
            segment = self._add(nbytes, sum(segment.reserved for segment in segments), locks)
        self._last = segment.number
        self._table.reserve(segment.number, reserved)
        return segment

    def _add(self, nbytes: int, in_use: int, locks: RangeLocks) -> Segment:
        """Add a segment for at least `nbytes` bytes, locked in `locks`."""
        limit = self._max_nbytes
        capacity = max(_MIN_SEGMENT_NBYTES, in_use // _MAX_PART) if limit is None else limit // _MAX_PART
        capacity = _align(max(min(capacity, MAX_SEGMENT_NBYTES), nbytes), _PAGE_NBYTES)
        number = self._table.next_number()
        if number is None:
            raise Full("there are too many segments")
        with suppress(FileNotFoundError):
            # abandoned by a process that was killed before it could add the segment
            os.unlink(os.path.basename(self._path(number)), dir_fd=self._dir)
        fd, _ = self._open(number, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        try:
            os.fchmod(fd, 0o600)  # a umask may have removed permissions
            os.ftruncate(fd, capacity)
        finally:
            os.close(fd)
        locks.lock(_WRITING + number, wait=True)
        return self._table.add(number, capacity)


def _align(offset: int, align: int) -> int:
    return offset + -offset % align
