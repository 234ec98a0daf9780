"""Control of the page cache, so that cold reads are cold, and of free memory pages."""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

_LIBC = ctypes.CDLL(None, use_errno=True)


def _files(folder: Path) -> Iterator[Path]:
    return (path for path in folder.rglob("*") if path.is_file())


def sync(folder: Path) -> None:
    """Wait until every file of a folder, and the folders themselves, are on disk."""
    for path in (folder, *folder.rglob("*")):
        number = os.open(path, os.O_RDONLY)
        os.fsync(number)
        os.close(number)


def load(folder: Path) -> int:
    """Read a folder's files into the page cache; return their bytes. Some systems drop pages that were idle for a minute."""
    buffer, nbytes = bytearray(1 << 20), 0
    for path in _files(folder):
        with path.open("rb", buffering=0) as file:
            while read := file.readinto(buffer):
                nbytes += read
    return nbytes


def drop(folder: Path) -> float:
    """Drop a folder's files, which must be synced and not mapped, from the page cache; return which part of it has stayed.

    The part is that of the 16 largest files; 1.0 for a file system in memory.
    """
    gc.collect()  # maps that are garbage hold their pages
    for path in _files(folder):
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    cached = pages = 0
    for path in sorted(_files(folder), key=lambda path: path.stat().st_size)[-16:]:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
            flags = np.zeros(-(-len(mapped) // mmap.PAGESIZE), np.uint8)
            address = ctypes.c_void_p(np.frombuffer(mapped, np.uint8).ctypes.data)
            if _LIBC.mincore(address, ctypes.c_size_t(len(mapped)), flags.ctypes):
                raise OSError(ctypes.get_errno(), f"mincore of {path}")
        cached += int((flags & 1).sum())
        pages += len(flags)
    return cached / max(pages, 1)


def refill(folder: Path, by: str) -> None:
    """Bring a folder's shards into the page cache anew, by "large writes", "small writes" or "cold reads".

    The kernel keeps in larger pages what comes in larger pieces, and copies faster out of these.
    """
    for path in folder.glob("*.tar"):
        content, status = path.read_bytes(), path.stat()
        piece_nbytes = {"large writes": len(content), "small writes": 4096, "cold reads": 450_000}[by]
        begins = range(0, len(content), piece_nbytes)
        if by == "cold reads":
            drop(folder)
            with path.open("rb", buffering=0) as file:
                for begin in random.Random(0).sample(begins, len(begins)):
                    os.pread(file.fileno(), piece_nbytes, begin)
            continue
        path.unlink()
        with path.open("wb", buffering=0) as file:
            for begin in begins:
                file.write(content[begin : begin + piece_nbytes])
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def back_memory(path: Path, content: memoryview) -> None:
    """Write `content` to a file in memory from each CPU and delete it, so that all free pages are backed by memory.

    On a virtual machine, the first write to a free page may cost ten times as much as the next one. Each CPU has its own
    list of pages that were freed last, so without this only rows that write on another thread would pay.
    """

    def write(cpu: int) -> None:
        os.sched_setaffinity(0, {cpu})  # of this thread alone
        path.write_bytes(content)
        path.unlink()

    for cpu in os.sched_getaffinity(0):
        with ThreadPoolExecutor(1) as thread:
            thread.submit(write, cpu).result()
