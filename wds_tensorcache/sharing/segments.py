"""The bytes of the samples: append-only files, which every process maps privately, so that views are copied on write."""

from __future__ import annotations

import mmap
import os
import stat
from collections import deque
from contextlib import suppress
from functools import partial
from struct import Struct
from typing import Any

import numpy as np

from wds_tensorcache.codec.reference import MemorySource
from wds_tensorcache.codec.sample import EncodedSample
from wds_tensorcache.errors import FormatError
from wds_tensorcache.sharing.folder import check_owner, explained_no_space, write_file
from wds_tensorcache.sharing.table import ALIGN, MAX_SEGMENT_NBYTES, Segment, Table
from wds_tensorcache.storage.memory_pool import Pool
from wds_tensorcache.storage.range_locks import RangeLocks
from wds_tensorcache.storage.threads import call_when_gone

__all__ = ["LARGE_NBYTES", "Full", "Members", "SegmentSource", "Segments", "members_in_memory"]

# Bytes of the file `locks`: one for each sample, these, and one for each serial number of a segment from `_WRITING` on.
_SPACE = 1 << 60
_WRITING = 1 << 61

_RECORD = Struct("<QQQ8x")  # index of the sample, length of the skeleton, length of the tensors
_DATA_ALIGN = 64
_PAGE_NBYTES = mmap.PAGESIZE
# A process that writes into a view gets a private copy of its pages. Large tensors share no page with other samples,
# so that such a page never contains the beginning of a sample that is appended later. Small tensors are copied by every hit.
LARGE_NBYTES = 1 << 16
_MIN_SEGMENT_NBYTES = 1 << 26
_MAX_PART = 16  # a segment has at most this part of all bytes that may be in use
_MAX_KEPT = 1 << 14  # things of about 1 KB each

Array = np.ndarray[Any, Any]
Members = tuple[bytes, MemorySource]  # the skeleton, and the source of the tensors


_NOTHING = (0, None)


class Full(Exception):
    """There is no room for a sample within `max_nbytes`."""


class SegmentSource(MemorySource):
    """Tensors in a segment. Views are private: writing into them copies their pages for this process alone."""

    __slots__ = ("_array", "_pool", "entry")

    def __init__(self, array: Array, pool: Pool, entry: int) -> None:
        super().__init__(array.data)
        self._array, self._pool = array, pool
        self.entry = entry  # the sample's number in the table

    def read(self, begin: int, end: int) -> Any:
        if end - begin < LARGE_NBYTES:
            return bytearray(self.member[begin:end])
        copied = self._pool.lease(end - begin)
        copied[:] = self._array[begin:end]
        return copied

    def read_into(self, buffer: memoryview, begin: int) -> None:
        np.frombuffer(buffer, np.uint8)[:] = self._array[begin : begin + len(buffer)]

    def view(self, begin: int, end: int) -> Array:
        return self._array[begin:end]


def members_in_memory(sample: EncodedSample) -> Members:
    """Return the members of a sample in memory of this process."""
    return sample.skeleton, MemorySource(b"".join((sample.header, *sample.buffers)))


def segment_name(serial: int) -> str:
    """Return the name of a segment's file."""
    return f"segment-{serial}"


class Segments:
    """The segments of a folder.

    Args:
        folder: Path of the folder.
        table: Table of the folder.
        max_nbytes: Maximum number of bytes in all segments; None for no limit.
        evicts: Remove the least recently used segments when there is no room, instead of raising Full.
        pool: Memory for copies of tensors.

    Threads/fork: safe everywhere, if each `append` has its own locks.
    """

    def __init__(self, folder: str, table: Table, max_nbytes: int | None, evicts: bool, pool: Pool) -> None:
        self._folder, self._table, self._pool = folder, table, pool
        # Hazard: after the folder is removed, its path may be that of another one.
        self._dir = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self._net = call_when_gone(self, partial(deque, map(os.close, [self._dir]), 0))
        self._max_nbytes, self._evicts = max_nbytes, evicts
        self._maps: dict[int, tuple[memoryview, Array]] = {}  # both are of the same bytes
        self._kept: dict[int, tuple[int, Any]] = {}
        self._generation = table.generation
        self._mine = 0  # serial number of the segment to which this process wrote last

    @property
    def nbytes(self) -> int:
        """Number of bytes in all segments."""
        return sum(segment.reserved for segment in self._table.segments())

    def find(self, index: int) -> Members | None:
        """Return the skeleton of a sample and the source of its tensors; None if the sample is absent. Takes no lock."""
        table = self._table
        entry = table.entries[index]
        if not entry:
            return None
        serial, offset = table.place(entry)
        if table.generation != self._generation:
            self._forget()
        mapped = self._maps.get(serial) or self._map(serial)
        if mapped is None:
            return None
        segment, array = mapped
        if self._evicts:
            table.note_use(serial)
        begin = offset + _RECORD.size
        if begin > len(segment):
            what = f"sample {index} is beyond its end; call tc.shared_clear"
            raise FormatError(what, kind="damaged").at(self._where(serial))
        found, skeleton_nbytes, nbytes = _RECORD.unpack_from(segment, offset)
        tensors = _align(begin + skeleton_nbytes, _DATA_ALIGN)
        if nbytes >= LARGE_NBYTES:
            tensors = _align(begin + skeleton_nbytes, _PAGE_NBYTES)
        if found != index or tensors + nbytes > len(segment):
            what = f"the record of sample {index} at byte {offset} is damaged"
            raise FormatError(what, kind="damaged").at(self._where(serial))
        skeleton = bytes(segment[begin : begin + skeleton_nbytes])
        if nbytes >= LARGE_NBYTES:
            return skeleton, SegmentSource(array[tensors : tensors + nbytes], self._pool, entry)
        return skeleton, MemorySource(memoryview(bytearray(segment[tensors : tensors + nbytes])))

    def keep(self, index: int, source: SegmentSource, thing: Any) -> None:
        """Keep anything for a sample as long as it is in shared memory; its tensors are in `source`."""
        if len(self._kept) < _MAX_KEPT:
            self._kept[index] = source.entry, thing

    def kept(self, index: int) -> Any:
        """Return what `keep` kept for a sample; None if there is nothing, or the sample is absent. Takes no lock."""
        entry, thing = self._kept.get(index, _NOTHING)
        if thing is None:
            return None
        table = self._table
        if table.generation != self._generation:
            self._forget()
        serial, _ = table.place(entry)
        if table.entries[index] != entry or not table.is_alive(serial):
            self._kept.pop(index, None)
            return None
        if self._evicts:
            table.note_use(serial)
        return thing

    def _map(self, serial: int) -> tuple[memoryview, Array] | None:
        if not self._table.is_alive(serial):
            return None
        try:
            fd = self._open(serial, os.O_RDONLY)
        except FileNotFoundError:
            return None  # removed just now
        try:
            status = os.fstat(fd)
            check_owner(self._where(serial), status, stat.S_ISREG)
            if not status.st_size:
                raise FormatError("the segment is empty; call tc.shared_clear", kind="damaged").at(self._where(serial))
            array = np.frombuffer(mmap.mmap(fd, 0, access=mmap.ACCESS_COPY), np.uint8)
        finally:
            os.close(fd)
        return self._maps.setdefault(serial, (array.data, array))

    def _open(self, serial: int, flags: int) -> int:
        flags |= os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        try:
            return os.open(segment_name(serial), flags, dir_fd=self._dir)
        except OSError as exc:
            exc.filename = self._where(serial)
            raise

    def _where(self, serial: int) -> str:
        return os.path.join(self._folder, segment_name(serial))

    def _forget(self) -> None:
        """Drop the maps of segments that were removed; live tensors keep theirs."""
        self._generation = self._table.generation
        self._kept.clear()
        for serial in list(self._maps):
            if not self._table.is_alive(serial):
                self._maps.pop(serial, None)

    def append(self, index: int, sample: EncodedSample, locks: RangeLocks) -> None:
        """Write a sample, then publish it. `locks` are of the file `locks`, opened for this call.

        Raises:
            Full: There is no room.
            OSError: The file system is full.
        """
        skeleton, nbytes = sample.skeleton, sample.layout.nbytes
        is_large = nbytes >= LARGE_NBYTES
        to_tensors = _RECORD.size + len(skeleton)
        # of large tensors, the first byte begins a page, and so does what follows the last one
        gap = -to_tensors % _DATA_ALIGN
        length = to_tensors + (_PAGE_NBYTES if is_large else gap) + nbytes + (_PAGE_NBYTES if is_large else ALIGN)
        if length > MAX_SEGMENT_NBYTES:
            raise Full(f"a sample of {nbytes:,} bytes is too large")
        try:
            with locks.held(_SPACE):
                segment = self._with_room(length, locks)
            begin = segment.end
            tensors = _align(begin + to_tensors, _PAGE_NBYTES if is_large else _DATA_ALIGN)
            end = _align(tensors + nbytes, _PAGE_NBYTES if is_large else ALIGN)
            record = _RECORD.pack(index, len(skeleton), nbytes)
            padding = bytes(tensors - begin - to_tensors)
            self._write(segment, begin, end, [record, skeleton, padding, sample.header, *sample.buffers])
            self._table.reserve(segment.serial, end)
            self._table.extend(segment.serial, end)
            self._table.publish(index, segment.serial, begin)
        finally:
            locks.unlock(_WRITING, 0)

    def _write(self, segment: Segment, begin: int, end: int, parts: list[Any]) -> None:
        fd = self._open(segment.serial, os.O_WRONLY)
        try:
            what = f"a sample of {end - begin:,} bytes"
            with explained_no_space(self._where(segment.serial), what):
                os.posix_fallocate(
                    fd, begin, end - begin
                )  # a map of memory that the system does not have kills (SIGBUS)
            views = [view for part in parts if len(view := memoryview(part).cast("B"))]
            while views:
                done = os.pwritev(fd, views[:1024], begin)
                begin += done
                while views and done >= len(views[0]):
                    done -= len(views.pop(0))
                if done:
                    views[0] = views[0][done:]
        finally:
            os.close(fd)

    def _with_room(self, nbytes: int, locks: RangeLocks) -> Segment:
        """Return a segment with room for `nbytes` bytes, locked for this writer. The caller holds the lock of the space."""
        segments = self._settle(self._table.segments(), locks)
        limit = self._max_nbytes
        if limit is not None:
            excess = sum(segment.reserved for segment in segments) + nbytes - limit
            if excess > 0 and (nbytes > limit or not self._evicts):
                raise Full(f"no room for {nbytes:,} bytes more")
            while excess > 0:
                excess -= self._evict(segments, locks)
        for segment in sorted(segments, key=lambda each: each.serial != self._mine):
            if segment.end + nbytes <= segment.capacity and locks.lock(_WRITING + segment.serial):
                # another process may have appended before this one locked it
                segment = self._table.segment(segment.serial)
                if segment.end + nbytes <= segment.capacity:
                    break
                locks.unlock(_WRITING + segment.serial)
        else:
            segment = self._add(nbytes, sum(each.reserved for each in segments) if limit is None else limit, locks)
        self._mine = segment.serial
        self._table.reserve(segment.serial, segment.end + nbytes)
        return segment

    def _settle(self, segments: list[Segment], locks: RangeLocks) -> list[Segment]:
        """Give up bytes that killed processes have reserved, and segments whose files they have removed."""
        kept = []
        for segment in segments:
            try:
                os.stat(segment_name(segment.serial), dir_fd=self._dir)
            except FileNotFoundError:
                self._remove(segment.serial)
                continue
            if segment.reserved > segment.end and locks.lock(_WRITING + segment.serial):
                self._table.reserve(segment.serial, self._table.segment(segment.serial).end)
                locks.unlock(_WRITING + segment.serial)
            kept.append(self._table.segment(segment.serial))
        return kept

    def _add(self, nbytes: int, limit: int, locks: RangeLocks) -> Segment:
        """Add a segment for at least `nbytes` bytes, locked for this writer; its size is a fraction of `limit`."""
        capacity = min(max(_MIN_SEGMENT_NBYTES, limit // _MAX_PART), MAX_SEGMENT_NBYTES)
        if self._max_nbytes is not None:
            capacity = min(capacity, self._max_nbytes // _MAX_PART)
        serial = self._table.next_serial()
        if serial is None:
            raise Full("there are too many segments")
        name = segment_name(serial)
        with suppress(FileNotFoundError):
            os.unlink(name, dir_fd=self._dir)  # of a process that was killed before it could add the segment
        write_file(name, dir_fd=self._dir)
        fd = self._open(serial, os.O_WRONLY)
        try:
            os.ftruncate(fd, capacity := _align(max(capacity, nbytes), _PAGE_NBYTES))
        finally:
            os.close(fd)
        locks.lock(_WRITING + serial, wait=True)
        return self._table.add(serial, capacity)

    def _evict(self, segments: list[Segment], locks: RangeLocks) -> int:
        """Remove the least recently used segment that no process is writing; return its length, or raise Full."""
        for segment in segments:
            if segment.end and locks.lock(_WRITING + segment.serial):
                self._remove(segment.serial)
                segments.remove(segment)
                locks.unlock(_WRITING + segment.serial)
                return segment.reserved
        raise Full("all segments are being written")

    def _remove(self, serial: int) -> None:
        # the file first: if this process is killed now, a segment without a file remains, which the next writer removes
        with suppress(FileNotFoundError):
            os.unlink(segment_name(serial), dir_fd=self._dir)
        self._table.remove(serial)


def _align(offset: int, align: int) -> int:
    return offset + -offset % align
