"""Many positioned reads in one system call: Linux's native asynchronous I/O, `io_submit`.

One call replaces a loop of `preadv`. Between two calls of a loop, a thread waits for the GIL. With eight threads, that takes
longer than the copies. On most file systems, the kernel copies all bytes before `io_submit` returns; on FUSE, for example, it
may still be writing them later.

Source: io_submit(2), io_getevents(2), and linux/aio_abi.h.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import sys
from dataclasses import dataclass
from functools import partial
from time import monotonic
from typing import Any

import numpy as np

from wds_tensorcache.storage.threads import call_when_gone

__all__ = ["Reads", "address_of", "read_many"]

Array = np.ndarray[Any, Any]
_MAX_READS = 128  # of one system call; /proc/sys/fs/aio-max-nr limits their sum over all contexts of the machine
_QUICK_NBYTES = 1 << 16  # to read so few from the page cache takes less time than to get the GIL back
_PREADV = 7  # IOCB_CMD_PREADV
_IOCB = np.dtype(
    [("data", "<u8"), ("key", "<u4"), ("flags", "<u4"), ("opcode", "<u2"), ("priority", "<i2"), ("fd", "<u4")]
    + [("buffers", "<u8"), ("num_buffers", "<u8"), ("offset", "<i8"), ("unused", "<u8", 2)]
)
_EVENT = np.dtype([("data", "<u8"), ("iocb", "<u8"), ("result", "<i8"), ("unused", "<i8")])
# numbers of io_setup, io_submit, io_getevents and io_destroy
_NUMBERS = {"x86_64": (206, 209, 208, 207), "aarch64": (0, 2, 4, 1), "riscv64": (0, 2, 4, 1)}
_number = _NUMBERS.get(platform.machine()) if sys.platform == "linux" and sys.maxsize > 1 << 32 else None
_RETRY_S = 1.0
_idle: list[_Context] = []  # kept, because it takes the kernel up to 50 ms to destroy one
_nets: list[Any] = []  # destroy the contexts that are freed; cleared in a forked child, in which they are invalid
_refused_until = 0.0  # time of `monotonic`, after too many contexts on this machine


@dataclass(frozen=True, slots=True)
class Reads:
    """Positioned reads; each fills several buffers in turn, at most 1,024.

    Attributes:
        fd, offset: Descriptor of the file and offset of the first byte of each read, int64 `[n]`.
        flags: `RWF_NOWAIT` for reads that must not wait for a disk, else 0, int64 `[n]`.
        buffers: Address and length in bytes of all buffers, uint64 `[m, 2]`.
        first_buffer: Index of each read's first buffer, and last `m`, int64 `[n + 1]`.
        memory: Owner of the buffers.

    Memory: `memory` stays alive until the kernel writes no more, also after an interrupt.
    """

    fd: Array
    offset: Array
    flags: Array
    buffers: Array
    first_buffer: Array
    memory: Any = None


def read_many(reads: Reads, begin: int, end: int) -> Array:
    """Execute the reads `[begin, end)`, and return how many bytes each has read, int64; negative if it failed.

    All reads fail if the system has no `io_submit`, or does not allow it. The GIL is released while bytes are copied.
    """
    result = np.full(end - begin, -1, np.int64)
    numbers = _number  # another thread may find out that the system does not allow it
    if numbers is None or (not _idle and monotonic() < _refused_until):
        return result
    try:
        context = _take(numbers)
    except (IndexError, OSError):  # another thread took the last one, or the system does not allow another one
        return result
    for at in range(begin, end, _MAX_READS):
        if not context.read(reads, at, result[at - begin : at - begin + _MAX_READS]):
            return np.full(end - begin, -1, np.int64)
    _idle.append(context)
    return result


def _take(numbers: tuple[int, int, int, int]) -> _Context:
    while _idle:
        context = _idle.pop()
        if context.pid == os.getpid():  # else an interrupt handler has forked during its last read
            return context
    return _Context(numbers)


class _Context:
    """A context of the kernel, with memory for the arguments and results of its system calls.

    Hazard: the kernel may still be writing when an interrupt arrives. The context then keeps the memory of its reads; when it
    is freed, a call in C first waits for the kernel and destroys the context.

    Raises:
        OSError: The system does not allow a context.

    Threads/fork: one thread at a time; invalid in a forked child.
    """

    def __init__(self, numbers: tuple[int, int, int, int]) -> None:
        global _number, _refused_until
        self.pid, self._numbers = os.getpid(), numbers
        self._handle = ctypes.c_ulong(0)
        # bytes at first: numpy describes the address of a structured array in Python code, in which it loses interrupts
        memory = np.zeros(_MAX_READS * (_IOCB.itemsize + _EVENT.itemsize), np.uint8)
        iocbs_at = address_of(memory)
        events_at = iocbs_at + _MAX_READS * _IOCB.itemsize
        self._iocbs = memory[: _MAX_READS * _IOCB.itemsize].view(_IOCB)
        self._events = memory[_MAX_READS * _IOCB.itemsize :].view(_EVENT)
        self._iocbs["opcode"] = _PREADV
        self._iocbs["data"] = np.arange(_MAX_READS)
        self._pointers = (iocbs_at + np.arange(_MAX_READS) * _IOCB.itemsize).astype(np.uint64)
        self._pointers_at, self._events_at = ctypes.c_void_p(address_of(self._pointers)), ctypes.c_void_p(events_at)
        self._reads: Reads | None = None
        # made before the context, so that an interrupt cannot come between the two; a context of 0 does not exist
        _nets.append(call_when_gone(self, partial(_syscall, ctypes.c_long(numbers[3]), self._handle)))
        try:
            _call(numbers[0], ctypes.c_long(_MAX_READS), ctypes.byref(self._handle))
        except OSError as exc:
            if exc.errno in (errno.EAGAIN, errno.ENOMEM):  # other processes may give contexts back
                _refused_until = monotonic() + _RETRY_S
            else:
                _number = None
            raise

    def read(self, reads: Reads, begin: int, result: Array) -> bool:
        """Execute `len(result)` reads from `begin` on, and write how many bytes each has read into `result`.

        Return False if the context is invalid, as in a forked child.
        """
        count, some = len(result), slice(begin, begin + len(result))
        iocbs = self._iocbs[:count]
        iocbs["fd"], iocbs["offset"], iocbs["flags"] = reads.fd[some], reads.offset[some], reads.flags[some]
        first = reads.first_buffer[begin : begin + count + 1]
        iocbs["buffers"] = address_of(reads.buffers) + first[:-1] * reads.buffers.itemsize * 2
        iocbs["num_buffers"] = np.diff(first)
        sizes = reads.buffers[first[0] : first[-1], 1]
        is_quick = iocbs["flags"].all() and sizes.sum() <= _QUICK_NBYTES
        self._reads = reads
        try:
            # fewer than `count` if the kernel refuses one of them
            submit = _call_quickly if is_quick else _call
            count = submit(self._numbers[1], self._handle, ctypes.c_long(count), self._pointers_at)
        except OSError:
            self._reads = None
            return self.pid == os.getpid()
        left, call, least = count, _call_quickly, 0  # on most file systems, all reads are done
        while left:
            numbers = ctypes.c_long(least), ctypes.c_long(left)
            try:
                num = call(self._numbers[2], self._handle, *numbers, self._events_at, None)
            except InterruptedError:
                continue
            except OSError:
                return False
            events = self._events[:num]
            result[events["data"].astype(np.int64)] = events["result"]
            left -= num
            call, least = _call, left
        self._reads = None
        return True


def address_of(array: Array) -> int:
    """Return the address of an array's first byte."""
    address: int = array.__array_interface__["data"][0]
    return address


def _call(number: int, *arguments: Any) -> int:
    """Execute a system call; raise OSError if it fails."""
    return _checked(_syscall(ctypes.c_long(number), *arguments))


def _call_quickly(number: int, *arguments: Any) -> int:
    """Execute a system call that does not wait, as `_call` does, but keep the GIL."""
    return _checked(_quick_syscall(ctypes.c_long(number), *arguments))


def _checked(result: int) -> int:
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result


def _forget() -> None:
    _nets.clear()
    _idle.clear()


if _number is not None:
    _syscall: Any = ctypes.CDLL(None, use_errno=True).syscall
    _quick_syscall: Any = ctypes.PyDLL(None, use_errno=True).syscall
    _syscall.restype = _quick_syscall.restype = ctypes.c_long
    os.register_at_fork(after_in_child=_forget)
