"""Many positioned reads in one system call: Linux's native asynchronous I/O, `io_submit`.

For ordinary files, the kernel copies all bytes before `io_submit` returns, so one call replaces a loop of `preadv`. Between
two calls of a loop, a thread waits for the GIL. With eight threads, that takes longer than the copies.

Source: io_submit(2), io_getevents(2), and linux/aio_abi.h.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import sys
from dataclasses import dataclass
from typing import Any

import numpy as np

__all__ = ["Reads", "address_of", "read_many"]

Array = np.ndarray[Any, Any]
_MAX_READS = 128  # of one system call; /proc/sys/fs/aio-max-nr limits their sum over all contexts of the machine
_PREADV = 7  # IOCB_CMD_PREADV
_IOCB = np.dtype(
    [("data", "<u8"), ("key", "<u4"), ("flags", "<u4"), ("opcode", "<u2"), ("priority", "<i2"), ("fd", "<u4")]
    + [("buffers", "<u8"), ("num_buffers", "<u8"), ("offset", "<i8"), ("unused", "<u8", 2)]
)
_EVENT = np.dtype([("data", "<u8"), ("iocb", "<u8"), ("result", "<i8"), ("unused", "<i8")])
# numbers of io_setup, io_submit, io_getevents and io_destroy
_NUMBERS = {"x86_64": (206, 209, 208, 207), "aarch64": (0, 2, 4, 1), "riscv64": (0, 2, 4, 1)}
_number = _NUMBERS.get(platform.machine()) if sys.platform == "linux" and sys.maxsize > 1 << 32 else None
_idle: list[_Context] = []  # kept, because it takes the kernel up to 50 ms to destroy one


@dataclass(frozen=True, slots=True)
class Reads:
    """Positioned reads; each fills several buffers in turn, at most 1,024.

    Attributes:
        fd, offset: Descriptor of the file and offset of the first byte of each read, int64 `[n]`.
        flags: `RWF_NOWAIT` for reads that must not wait for a disk, else 0, int64 `[n]`.
        buffers: Address and length in bytes of all buffers, uint64 `[m, 2]`.
        first_buffer: Index of each read's first buffer, and last `m`, int64 `[n + 1]`.
    """

    fd: Array
    offset: Array
    flags: Array
    buffers: Array
    first_buffer: Array


def read_many(reads: Reads, begin: int, end: int) -> Array:
    """Execute the reads `[begin, end)`, and return how many bytes each has read, int64; negative if it failed.

    All reads fail if the system has no `io_submit`, or does not allow it. The GIL is released while bytes are copied.
    """
    result = np.full(end - begin, -1, np.int64)
    if _number is None:
        return result
    try:
        context = _idle.pop() if _idle else _Context()
    except IndexError:  # another thread took the last one
        context = _Context()
    except OSError:
        return result
    try:
        for at in range(begin, end, _MAX_READS):
            context.read(reads, at, result[at - begin : at - begin + _MAX_READS])
    except BaseException:  # an interrupt
        context.close()
        raise
    _idle.append(context)
    return result


class _Context:
    """A context of the kernel, with memory for the arguments and results of its system calls.

    Raises:
        OSError: The system does not allow a context.

    Threads/fork: one thread at a time; invalid in a forked child.
    """

    _handle: ctypes.c_ulong | None = None
    _pid = -1

    def __init__(self) -> None:
        global _number
        self._handle, self._pid = ctypes.c_ulong(0), os.getpid()
        try:
            _call(0, _MAX_READS, ctypes.byref(self._handle))
        except OSError as exc:
            if exc.errno not in (errno.EAGAIN, errno.ENOMEM):  # other processes may give contexts back
                _number = None
            raise
        self._iocbs = np.zeros(_MAX_READS, _IOCB)
        self._iocbs["opcode"] = _PREADV
        self._iocbs["data"] = np.arange(_MAX_READS)
        self._pointers = (address_of(self._iocbs) + np.arange(_MAX_READS) * _IOCB.itemsize).astype(np.uint64)
        self._events = np.zeros(_MAX_READS, _EVENT)
        self._pointers_at, self._events_at = (
            ctypes.c_void_p(address_of(each)) for each in (self._pointers, self._events)
        )

    def read(self, reads: Reads, begin: int, result: Array) -> None:
        """Execute `len(result)` reads from `begin` on, and write how many bytes each has read into `result`."""
        count, some = len(result), slice(begin, begin + len(result))
        iocbs = self._iocbs[:count]
        iocbs["fd"], iocbs["offset"], iocbs["flags"] = reads.fd[some], reads.offset[some], reads.flags[some]
        first = reads.first_buffer[begin : begin + count + 1]
        iocbs["buffers"] = address_of(reads.buffers) + first[:-1] * reads.buffers.itemsize * 2
        iocbs["num_buffers"] = np.diff(first)
        try:
            # fewer than `count` if the kernel refuses one of them
            count = _call(1, self._handle, count, self._pointers_at)
        except OSError:
            return
        left = count
        while left:
            try:
                num = _call(2, self._handle, left, left, self._events_at, None)
            except InterruptedError:
                continue
            events = self._events[:num]
            result[events["data"].astype(np.int64)] = events["result"]
            left -= num

    def close(self) -> None:
        """Wait for all reads that are being executed, and destroy the context."""
        handle, self._handle = self._handle, None
        if handle and self._pid == os.getpid():
            _call(3, handle)

    def __del__(self) -> None:
        if not sys.is_finalizing():  # the end of the process destroys all contexts, and faster
            self.close()


def address_of(array: Array) -> int:
    """Return the address of an array's first byte."""
    address: int = array.__array_interface__["data"][0]
    return address


def _call(which: int, *arguments: Any) -> int:
    """Execute a system call; raise OSError if it fails."""
    numbers = (ctypes.c_long(each) if isinstance(each, int) else each for each in (_number[which], *arguments))  # type: ignore[index]
    result: int = _syscall(*numbers)
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result


if _number is not None:
    _syscall: Any = ctypes.CDLL(None, use_errno=True).syscall
    _syscall.restype = ctypes.c_long
    os.register_at_fork(after_in_child=_idle.clear)
