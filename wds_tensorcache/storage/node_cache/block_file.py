"""The file of one cached object: bytes, header, and map of blocks.

The bytes are at their own offsets in the sparse file. The map has a byte for each block, which becomes 1 after the block was
written. A crash of the machine may lose blocks and keep the map. So the header names the boot, and files of an earlier boot are
not used. The map is at the end, so a truncated file has no valid map.

Eviction removes the name of a file, and truncates the file unless a process has mapped it into memory: reading the truncated
file there would kill the process. A reader that has the file open detects eviction with `is_current`. A process holds a lock
on each file that it has mapped.
"""

from __future__ import annotations

import os
import re
import stat
from contextlib import suppress

from wds_tensorcache.storage.files import Descriptor, ShardFile
from wds_tensorcache.storage.locks import lock_range
from wds_tensorcache.storage.owned import OTHERS_MAY_WRITE, is_owned
from wds_tensorcache.storage.system import SHORTAGES, boot_id

# bytes of a block: the unit in which file systems allocate, so that no block needs more than its own bytes
BLOCK = 4096
SUFFIX = ".blocks"
# the byte that processes lock while they have mapped a file; smaller bytes are the locks of blocks
MAPPED = 1 << 62
_MAGIC = b"wds_tensorcache node cache 1\n".ljust(32, b"\0")
_PRESENT = b"\1"  # bytes of the map
_KNOWN = bytes(value == 1 for value in range(256))
_next_present = re.compile(rb"[^\0]").search
_FLAGS = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK

BlockRuns = list[tuple[int, int]]  # half-open ranges of blocks, ascending


class Evicted(Exception):
    """A file that was evicted or removed while it was read."""


def _num_blocks(nbytes: int) -> int:
    return -(-nbytes // BLOCK)


def _header(digest: bytes) -> bytes:
    return (_MAGIC + digest + boot_id().encode()).ljust(BLOCK, b"\0")


def write_layout(path: str, digest: bytes, nbytes: int) -> None:
    """Give an empty file the layout of an object of `nbytes` bytes. The file has no block yet."""
    begin, count = _num_blocks(nbytes) * BLOCK, _num_blocks(nbytes)
    with open(path, "r+b", buffering=0) as file:
        file.truncate(begin + BLOCK + count)
        os.posix_fallocate(file.fileno(), begin, BLOCK + count)
        os.pwrite(file.fileno(), _header(digest), begin)  # last: a file without a header is not valid


def open_block_file(path: str, digest: bytes, nbytes: int) -> BlockFile | None:
    """Open the file of an object. Return None if there is no valid file of this user, object and boot."""
    try:
        file = BlockFile(path, os.open(path, _FLAGS), nbytes)
    except OSError as exc:
        if exc.errno in SHORTAGES:
            raise  # the file itself may be good, so it must not be replaced
        return None
    is_ours = is_owned(file.status, stat.S_ISREG, OTHERS_MAY_WRITE) and file.is_current()
    return file if is_ours and os.pread(file.fd, BLOCK, _num_blocks(nbytes) * BLOCK) == _header(digest) else None


class BlockFile(ShardFile):
    """An open file of one object, read like a local shard. Only `allow_map` lets readers map it.

    Threads/fork: any thread; a forked child shares the open file.

    Attributes:
        fd: Descriptor, open for reading and writing as long as this object exists.
        nbytes: Length of the object.
        status: Status of the file when it was opened.
    """

    def __init__(self, path: str, fd: int, nbytes: int) -> None:
        self.fd = fd
        self.status = os.fstat(fd)
        self._begin(path, self.status, may_map=False)
        self._descriptor = Descriptor(fd)
        self.nbytes = nbytes
        self._map_at = (_num_blocks(nbytes) + 1) * BLOCK
        # Blocks that are known to be present.
        self._present = bytearray(_num_blocks(nbytes))
        # `find_absent(0, first, last)` returns the first of these blocks that is not known to be present, or -1.
        self.find_absent = self._present.find
        self._num_leading = 0  # blocks at the beginning of the file, all known to be present
        self._used_s = 0.0

    def is_current(self) -> bool:
        """Return whether the file was neither evicted nor removed. Cost: one system call.

        If it returns True, all bytes that were read from present blocks before this call are valid.
        """
        status = os.fstat(self.fd)
        is_whole = status.st_nlink > 0 and status.st_size == self._map_at + len(self._present)
        return is_whole and status.st_mode == self.status.st_mode

    def check_unchanged(self) -> None:
        """Raise Evicted if `is_current` returns False."""
        if not self.is_current():
            raise Evicted

    def _cut_short(self, nbytes: int) -> Exception:
        return Evicted()

    def allow_map(self) -> None:
        """Let readers map the file, unless it is being evicted. All blocks that they need must be present."""
        self._may_map = lock_range(self.fd, MAPPED, shared=True)

    def absent(self, runs: BlockRuns) -> BlockRuns:
        """Return the parts of runs of blocks, each `[first, last)`, that are absent.

        Cost: one system call for each run that seems incomplete, to see the blocks of other processes.
        """
        present, absent_runs = self._present, []
        for first, last in runs:
            at = present.find(0, first, last)
            if at >= 0:
                content = os.pread(self.fd, last - at, self._map_at + at).translate(_KNOWN)
                if len(content) == last - at:  # shorter if the file was evicted
                    present[at:last] = content
                at = present.find(0, at, last)
            while at >= 0:
                match = _next_present(present, at, last)
                end = match.start() if match else last
                absent_runs.append((at, end))
                at = present.find(0, end, last)
        return absent_runs

    def leading_nbytes(self) -> int:
        """Return the length of the leading blocks known to be present."""
        first = self.find_absent(0, self._num_leading)  # a block that is known to be present stays so
        self._num_leading = first if first >= 0 else len(self._present)
        return self._num_leading * BLOCK

    def extent(self, run: tuple[int, int]) -> tuple[int, int]:
        """Return the byte range `[begin, end)` of a run of blocks."""
        return run[0] * BLOCK, min(run[1] * BLOCK, self.nbytes)

    def publish(self, run: tuple[int, int], content: memoryview) -> None:
        """Write absent blocks, which the caller has locked. They remain absent after an OSError."""
        begin, _ = self.extent(run)
        while len(content):
            count = os.pwrite(self.fd, content, begin)
            begin, content = begin + count, content[count:]
        # torn write: blocks are marked as present only after their bytes
        marks = _PRESENT * (run[1] - run[0])
        os.pwrite(self.fd, marks, self._map_at + run[0])
        self._present[run[0] : run[1]] = marks

    def note_use(self, now_s: float) -> None:
        """Record the use in the file's mtime, at most once a second."""
        if now_s - self._used_s >= 1:
            self._used_s = now_s
            with suppress(OSError):  # the file system has become read-only, or is full
                os.utime(self.fd)
