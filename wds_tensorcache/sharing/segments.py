"""The bytes of the samples: append-only files, which every process maps privately, so that views are copied on write.

A segment is a file of records. A record is the header `_RECORD`, a skeleton, padding, and a `.safetensors` member.
"""

from __future__ import annotations

import mmap
import os
import stat
import weakref
from collections.abc import Sequence
from contextlib import suppress
from struct import Struct
from typing import Any

import numpy as np

from wds_tensorcache.codec.reference import MemorySource
from wds_tensorcache.codec.sample import EncodedSample
from wds_tensorcache.errors import FormatError
from wds_tensorcache.sharing.owned_files import check_owner, explained_no_space, write_file
from wds_tensorcache.sharing.table import ALIGN, MAX_SEGMENT_NBYTES, Segment, Table
from wds_tensorcache.storage.memory_pool import Pool
from wds_tensorcache.storage.range_locks import RangeLocks
from wds_tensorcache.storage.system import MAX_BUFFERS, skip_bytes

# Bytes of the file `locks`. Byte `i` is the lock of sample `i`; these follow.
_SPACE = 1 << 60  # the lock for adding and removing segments, and for reserving bytes in them
_WRITING = 1 << 61  # plus its serial number: the lock of a segment, held while a record is appended to it

_RECORD = Struct("<QQQ8x")  # index of the sample, bytes of the skeleton, bytes of the `.safetensors` member
_DATA_ALIGN = 64
_PAGE_NBYTES = mmap.PAGESIZE
# A process that writes into a view gets private copies of its pages, which hide what is appended to them later.
# So a `.safetensors` member of this size or more shares no page with other samples, and every hit copies smaller ones.
LARGE_NBYTES = 1 << 16
# A new segment has 1/16 of `max_nbytes`. Without a limit, it has 1/16 of the bytes in use, but at least 64 MiB. One that is
# added for a larger sample has the length of that sample.
_MIN_SEGMENT_NBYTES = 1 << 26
_MAX_PART = 16
_MAX_KEPT = 1 << 14  # objects of up to tens of KB each

Array = np.ndarray[Any, Any]
Members = tuple[bytes, MemorySource]  # the skeleton, and the source of the `.safetensors` member
_NOTHING = (0, None)


class Full(Exception):
    """There is no room for a sample within `max_nbytes`."""


class SegmentSource(MemorySource):
    """A `.safetensors` member in a segment.

    Memory: `view` aliases this process's private map, so that writing into it copies its pages for this process alone. `read`
        copies, large parts into recycled memory.
    """

    __slots__ = ("_array", "_pool", "entry")

    def __init__(self, array: Array, pool: Pool, entry: int) -> None:
        super().__init__(array.data)
        self._array, self._pool = array, pool
        self.entry = entry  # the sample's entry in the table

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
        evicts: When there is no room, remove the least recently used segments instead of raising Full.
        pool: Memory for copies of large tensors.

    Threads/fork: safe everywhere, if each `append` has its own locks.
    """

    def __init__(self, folder: str, table: Table, max_nbytes: int | None, evicts: bool, pool: Pool) -> None:
        self._folder, self._table, self._pool = folder, table, pool
        # After the folder is removed, another folder may have its path. So files are opened relative to this one.
        self._dir = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self._dir).atexit = False
        self._max_nbytes, self._evicts = max_nbytes, evicts
        self._maps: dict[int, tuple[memoryview, Array]] = {}  # by serial number; both have the same bytes
        self._kept: dict[int, tuple[int, Any]] = {}
        self._generation = table.generation
        self._mine = 0  # serial number of the segment to which this process wrote last

    @property
    def nbytes(self) -> int:
        """Number of bytes in all segments, including those that are being written."""
        return sum(segment.reserved for segment in self._table.segments())

    def find(self, index: int, *, is_remapped: bool = False) -> Members | None:
        """Return the skeleton of a sample and the source of its tensors; None if the sample is absent. Takes no lock.

        Args:
            index: Index of the sample.
            is_remapped: Map the segment again. If a sample seems damaged, this is tried first: a writer may have been
                shortening the file while it was mapped.

        Raises:
            FormatError: The segment is damaged.
            PermissionError: The segment is not a regular file of this user alone.
        """
        table = self._table
        entry = table.entries[index]
        if not entry:
            return None
        serial, offset = table.place(entry)
        if table.generation != self._generation:
            self._forget()
        mapped = (None if is_remapped else self._maps.get(serial)) or self._map(serial)
        if mapped is None:
            return None
        segment, array = mapped
        if self._evicts:
            table.note_use(serial)
        begin = offset + _RECORD.size
        if begin > len(segment):
            if not is_remapped:
                return self.find(index, is_remapped=True)
            what = f"sample {index} starts at byte {offset} of {len(segment)} bytes; call tc.shared_clear"
            raise FormatError(what, kind="damaged").at(self._where(serial))
        found, skeleton_nbytes, nbytes = _RECORD.unpack_from(segment, offset)
        tensors = _align(begin + skeleton_nbytes, _DATA_ALIGN)
        if nbytes >= LARGE_NBYTES:
            tensors = _align(begin + skeleton_nbytes, _PAGE_NBYTES)
        if found != index or tensors + nbytes > len(segment):
            if not is_remapped:
                return self.find(index, is_remapped=True)
            what = f"the record of sample {index} at byte {offset} is damaged; call tc.shared_clear"
            raise FormatError(what, kind="damaged").at(self._where(serial))
        skeleton = bytes(segment[begin : begin + skeleton_nbytes])
        if nbytes >= LARGE_NBYTES:
            return skeleton, SegmentSource(array[tensors : tensors + nbytes], self._pool, entry)
        return skeleton, MemorySource(memoryview(bytearray(segment[tensors : tensors + nbytes])))

    def keep(self, index: int, source: SegmentSource, thing: Any) -> None:
        """Keep an object made from a sample until the sample is evicted, unless too many are kept; `source` has its tensors."""
        if len(self._kept) < _MAX_KEPT:
            self._kept[index] = source.entry, thing
            if self._table.generation != self._generation:  # another thread or process has evicted a segment meanwhile
                self._kept.pop(index, None)

    def kept(self, index: int) -> Any:
        """Return the object that `keep` kept for a sample; None if there is none, or the sample is absent. Takes no lock."""
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

    def close(self) -> None:
        """Give up all maps and kept objects. Tensors in use keep their maps alive."""
        self._kept.clear()
        self._maps.clear()

    def _map(self, serial: int) -> tuple[memoryview, Array] | None:
        if not self._table.is_alive(serial):
            return None
        try:
            fd = self._open(serial, os.O_RDONLY)
        except FileNotFoundError:
            return None  # evicted by another process since `is_alive`
        try:
            status = os.fstat(fd)
            check_owner(self._where(serial), status, stat.S_ISREG)
            if not status.st_size:
                raise FormatError("the segment is empty; call tc.shared_clear", kind="damaged").at(self._where(serial))
            array = np.frombuffer(mmap.mmap(fd, 0, access=mmap.ACCESS_COPY), np.uint8)
        finally:
            os.close(fd)
        mapped = self._maps[serial] = array.data, array
        return mapped

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
        """Drop the maps of segments that were removed. Tensors in use keep their maps alive."""
        self._generation = self._table.generation
        self._kept.clear()
        for serial in list(self._maps):
            if not self._table.is_alive(serial):
                self._maps.pop(serial, None)

    def append(self, index: int, sample: EncodedSample, locks: RangeLocks) -> None:
        """Write a sample, then publish it.

        The caller holds the sample's lock in `locks`. No other thread uses this `RangeLocks` object.

        Raises:
            Full: There is no room, or the sample is too large for a segment.
            OSError: The file system is full.
        """
        skeleton, nbytes = sample.skeleton, sample.layout.nbytes
        is_large = nbytes >= LARGE_NBYTES
        to_tensors = _RECORD.size + len(skeleton)
        # large members begin and end at page boundaries
        align, end_align = (_PAGE_NBYTES, _PAGE_NBYTES) if is_large else (_DATA_ALIGN, ALIGN)
        length = to_tensors + align + nbytes + end_align  # the most that it can take, wherever it begins
        if length > MAX_SEGMENT_NBYTES:
            raise Full(f"a sample of {nbytes:,} bytes is too large")
        try:
            with locks.held(_SPACE):
                segment = self._with_room(length, locks)
            begin = segment.end
            tensors = _align(begin + to_tensors, align)
            end = _align(tensors + nbytes, end_align)
            record = _RECORD.pack(index, len(skeleton), nbytes)
            padding = bytes(tensors - begin - to_tensors)
            self._write(segment, begin, end, [record, skeleton, padding, sample.header, *sample.buffers])
            self._table.reserve(segment.serial, _align(end, _PAGE_NBYTES))
            self._table.extend(segment.serial, end)
            self._table.publish(index, segment.serial, begin)
        finally:
            locks.unlock(_WRITING, 0)

    def _write(self, segment: Segment, begin: int, end: int, parts: list[Any]) -> None:
        """Write `parts` from byte `begin` on, after reserving memory up to byte `end`."""
        fd = self._open(segment.serial, os.O_WRONLY)
        try:
            with explained_no_space(self._where(segment.serial), f"a sample of {end - begin:,} bytes"):
                # SIGBUS. Reading a mapped page for which the system has no memory kills the process.
                os.posix_fallocate(fd, begin, end - begin)
            rest: Sequence[memoryview] = [memoryview(part).cast("B") for part in parts if len(part)]
            while rest:
                count = os.pwritev(fd, rest[:MAX_BUFFERS], begin)
                begin += count
                rest = skip_bytes(rest, count)
        finally:
            os.close(fd)

    def _with_room(self, nbytes: int, locks: RangeLocks) -> Segment:
        """Reserve `nbytes` bytes in a segment; return it, locked in `locks`. The caller holds `_SPACE`.

        Raises:
            Full: There is no room.
        """
        segments = self._settle(self._table.segments(), locks)
        limit = self._max_nbytes
        if limit is not None:
            needed = _align(nbytes, _PAGE_NBYTES)
            excess = sum(segment.reserved for segment in segments) + needed - limit
            if excess > 0 and (needed > limit or not self._evicts):
                raise Full(f"no room for {nbytes:,} bytes more")
            while excess > 0:
                excess -= self._evict(segments, locks)
        for segment in sorted(segments, key=lambda each: each.serial != self._mine):
            if segment.end + nbytes <= segment.capacity and locks.lock(_WRITING + segment.serial):
                # another writer may have appended to it before this lock was taken
                segment = self._table.segment(segment.serial)
                if segment.end + nbytes <= segment.capacity:
                    break
                locks.unlock(_WRITING + segment.serial)
        else:
            segment = self._add(nbytes, sum(each.reserved for each in segments) if limit is None else limit, locks)
        self._mine = segment.serial
        self._table.reserve(segment.serial, _align(segment.end + nbytes, _PAGE_NBYTES))
        return segment

    def _settle(self, segments: list[Segment], locks: RangeLocks) -> list[Segment]:
        """Free what interrupted or killed writers had reserved, and remove segments without files; return the rest."""
        kept = []
        for segment in segments:
            try:
                os.stat(segment_name(segment.serial), dir_fd=self._dir)
            except FileNotFoundError:
                self._remove(segment.serial)
                continue
            if segment.reserved > _align(segment.end, _PAGE_NBYTES) and locks.lock(_WRITING + segment.serial):
                self._give_up(self._table.segment(segment.serial))
                locks.unlock(_WRITING + segment.serial)
                if not self._table.is_alive(segment.serial):
                    continue
            kept.append(self._table.segment(segment.serial))
        return kept

    def _give_up(self, segment: Segment) -> None:
        """Free bytes that were reserved in a segment which no process is writing; remove the segment if it is empty."""
        if not segment.end:
            self._remove(segment.serial)
            return
        fd = self._open(segment.serial, os.O_WRONLY)
        try:
            # the system frees the pages after the new end
            os.ftruncate(fd, segment.end)
            os.ftruncate(fd, segment.capacity)
        finally:
            os.close(fd)
        self._table.reserve(segment.serial, _align(segment.end, _PAGE_NBYTES))

    def _add(self, nbytes: int, limit: int, locks: RangeLocks) -> Segment:
        """Add a segment for at least `nbytes` bytes, locked in `locks`; `_MAX_PART` bounds its size by a part of `limit`."""
        capacity = min(max(_MIN_SEGMENT_NBYTES, limit // _MAX_PART), MAX_SEGMENT_NBYTES)
        if self._max_nbytes is not None:
            capacity = min(capacity, self._max_nbytes // _MAX_PART)
        serial = self._table.next_serial()
        if serial is None:
            raise Full("there are too many segments")
        name = segment_name(serial)
        with suppress(FileNotFoundError):
            os.unlink(name, dir_fd=self._dir)  # abandoned by a process that was killed before it could add the segment
        write_file(name, dir_fd=self._dir)
        fd = self._open(serial, os.O_WRONLY)
        try:
            os.ftruncate(fd, capacity := _align(max(capacity, nbytes), _PAGE_NBYTES))
        finally:
            os.close(fd)
        locks.lock(_WRITING + serial, wait=True)
        return self._table.add(serial, capacity)

    def _evict(self, segments: list[Segment], locks: RangeLocks) -> int:
        """Remove the least recently used segment that no process is writing; return its number of bytes, or raise Full."""
        for segment in segments:
            if locks.lock(_WRITING + segment.serial):
                self._remove(segment.serial)
                segments.remove(segment)
                locks.unlock(_WRITING + segment.serial)
                return segment.reserved
        raise Full("all segments are being written")

    def _remove(self, serial: int) -> None:
        # the file first: if this process is killed in between, the next writer removes the segment without a file
        with suppress(FileNotFoundError):
            os.unlink(segment_name(serial), dir_fd=self._dir)
        self._table.remove(serial)


def _align(offset: int, align: int) -> int:
    return offset + -offset % align
