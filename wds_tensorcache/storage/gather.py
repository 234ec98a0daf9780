"""Copies of many byte ranges of files into one block of memory.

Measured per sample of 3 tensors and 450 KB, in batches of 32, by one and two threads on two cores. One call of torch for each
tensor takes 38 and 21 us, and `memmove` 40 and 25 us. `preadv` takes 33 to 72 and 25 to 40 us, depending on the pages of the
page cache. Long copies release the GIL.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future
from contextlib import suppress
from ctypes import PYFUNCTYPE, PyDLL, c_size_t, c_void_p, cast, memmove
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from time import monotonic
from typing import Any, Protocol

import numpy as np
import torch

from wds_tensorcache.codec.views import view_address
from wds_tensorcache.storage.files import announce, are_resident

Array = np.ndarray[Any, Any]
# With fewer rows, `memmove` takes less time: 0.5 us a row, beside the copy. torch takes 20 us a tensor and 0.03 us a row.
_FEW = 8
_DTYPES = {np.dtype(name).itemsize: np.dtype(name) for name in ("u1", "i2", "i4", "i8", "c16")}
_MAX_UNIT = max(_DTYPES)
_SMALL_NBYTES = 1 << 16  # up to here, numpy takes less time than torch, although it copies twice
# For smaller rows, to release the GIL and to wait for it takes longer than the copy.
_LONG_NBYTES = 1 << 16
_memmove_with_gil = PYFUNCTYPE(c_void_p, c_void_p, c_void_p, c_size_t)(cast(memmove, c_void_p).value or 0)
# private functions of torch; a release without them counts as without modes and transforms
_num_modes: Callable[[], int] = getattr(torch._C, "_len_torch_dispatch_stack", lambda: 0)
_innermost_transform = getattr(getattr(torch._C, "_functorch", None), "peek_interpreter_stack", lambda: None)
# numpy and torch count the bytes of all windows, which overlap, in 63 bits
_MAX_WINDOWS_NBYTES = 1 << 62
_Rows = tuple[Array, Array, Array]  # all windows of memory that may be rows, the numbers of the rows, and their targets
# A thread for less than 1 MiB costs more than it saves.
_PART_NBYTES = 1 << 20
_LEAD_NBYTES = 1 << 19  # the caller's thread copies this much until the other threads have started
# Samples of this size are probed one by one, which takes 1 us each; to announce 450 KB that are in memory takes 7 us.
_LARGE_NBYTES = 1 << 16
_NUM_PROBES = 4
# To look at all pages of a sample takes 3 us, and 30 us after a large copy, which empties the CPU's caches. So unless pages
# were missing lately, few samples of few batches are looked at.
_NUM_LOOKS = 8
_LOOK_S = 0.02
_SHORT_S = 1.0
_next_look = _short_until = 0.0  # by `monotonic`; memory counts as short until `_short_until`
_IN_FLIGHT = 32  # the number of announced samples that keeps a disk busy
# Bytes before the first tensor of a sample that are announced, too: its skeleton is often there.
_BEFORE_NBYTES = 1 << 12
_GAP_NBYTES = 1 << 14  # reading a gap of up to this many bytes is cheaper than another system call


class RangeFile(Protocol):
    """A file or memory that `gather` copies from, such as `ShardFile`."""

    def address(self) -> int: ...
    def read_into(self, buffers: Sequence[memoryview], begin: int, /) -> None: ...
    def is_resident(self, begin: int, /) -> bool: ...
    def will_need(self, begin: int, end: int, /) -> None: ...
    def check_unchanged(self) -> None: ...
    @property
    def shows_pages(self) -> bool: ...


@dataclass(frozen=True, slots=True)
class Ranges:
    """The tensors of samples, each a range of bytes, as int64 arrays."""

    file: Array  # number of the file of each sample, `[B]`
    begin: Array  # offset in the file of each tensor of each sample, `[T, B]`
    nbytes: Array  # length of each tensor of each sample, `[T, B]`
    target: Array  # offset in memory of each tensor of each sample, `[T, B]`; ascending for a tensor

    def select(self, samples: Array | slice) -> Ranges:
        return Ranges(self.file[samples], *(part[:, samples] for part in (self.begin, self.nbytes, self.target)))


def gather(
    files: Mapping[int, RangeFile],
    ranges: Ranges,
    memory: Array,
    num_threads: int = 1,
    executor: Callable[[], Executor | None] = lambda: None,
) -> None:
    """Copy ranges of files into `memory`, 1-D uint8. Files without a map are read.

    Args:
        files: The files, by their numbers in `ranges`.
        num_threads: Maximum number of threads that copy, including the caller's thread.
        executor: Function that returns the executor for all threads but the caller's thread.

    Raises:
        FormatError: A file is too short, or it has changed since it was opened.
    """
    # SIGBUS: if a mapped file is truncated in place between this check and the copy, the copy kills the process.
    for file in files.values():  # one system call for each file, and one after the copy
        file.check_unchanged()
    if not ranges.nbytes.any():
        return
    addresses = {number: file.address() for number, file in files.items()}
    if all(addresses.values()):
        _copy(files, addresses, ranges, memory, num_threads, executor)
    else:
        is_mapped = np.isin(ranges.file, [number for number, address in addresses.items() if address])
        if is_mapped.any():
            _copy(files, addresses, ranges.select(np.flatnonzero(is_mapped)), memory, num_threads, executor)
        _read(files, ranges.select(np.flatnonzero(~is_mapped)), memory, num_threads, executor)
    for file in files.values():
        file.check_unchanged()


def _copy(
    files: Mapping[int, RangeFile],
    addresses: Mapping[int, int],
    ranges: Ranges,
    memory: Array,
    num_threads: int,
    executor: Callable[[], Executor | None],
) -> None:
    bases = np.zeros(max(addresses) + 1, np.int64)
    bases[list(addresses)] = list(addresses.values())
    base = bases[ranges.file]
    source = ranges.begin + base
    target, nbytes = ranges.target, ranges.nbytes
    is_short = monotonic() < _short_until  # a fault on a missing page may read megabytes: samples are announced first
    if is_short:
        cold = _find_cold(files, ranges, base)
    # Distances of targets differ if other samples of the batch are read in another way.
    pitches = target[:, 1:] - target[:, :-1]
    is_equal = (nbytes == nbytes[:, :1]).all(1) & (nbytes[:, 0] > 0) & (pitches == pitches[:, :1]).all(1)
    # within `functionalize`, `make_fx` or `FakeTensorMode`, a call of torch may copy nothing
    runs_as_called = not _num_modes() and _innermost_transform() is None
    is_equal &= len(ranges.file) >= _FEW and runs_as_called and _openmp_setter() is not None
    lowest, highest = int(source.min()), int(source.max())
    is_equal &= nbytes[:, 0] < _MAX_WINDOWS_NBYTES // (highest - lowest + 2 * _MAX_UNIT)
    alike, unequal = (slice(None), ()) if is_equal.all() else (is_equal, np.flatnonzero(~is_equal))
    firsts, pitches = target[alike, 0], pitches[alike, :1].reshape(-1)
    equal = _as_rows(memory, source[alike], lowest, highest, nbytes[alike, 0], firsts, pitches)
    move: Callable[..., Any] = memmove
    moved = nbytes
    if len(unequal):
        rows = np.stack([target[unequal] + memory.__array_interface__["data"][0], source[unequal], nbytes[unequal]])
        if rows[2].sum() < _LONG_NBYTES * rows[2].size:
            move, moved = _memmove_with_gil, nbytes[alike]

    def announce_some(samples: Array) -> None:
        if len(samples):
            samples, first, last = _extents(ranges, samples)
            announce(base[samples] + first, last - first)

    # `owners` stay alive while a thread copies, also after an interrupt
    def copy(begin: int, end: int, owners: Any = (memory, files)) -> None:
        if is_short:
            announce_some(cold[(cold >= begin) & (cold < end)])
        _select(equal, begin, end)
        if len(unequal):
            deque(map(move, *rows[:, :, begin:end].reshape(3, -1).tolist()), 0)

    def announce_cold() -> None:
        if not is_short:  # while other threads copy
            announce_some(_find_cold(files, ranges, base))

    _run(copy, moved.sum(0), num_threads, executor, announce_cold)  # bytes that are copied with the GIL need no thread


def _as_rows(
    memory: Array, sources: Array, lowest: int, highest: int, widths: Array, firsts: Array, pitches: Array
) -> list[_Rows]:
    """Return the rows of tensors, for `_select`.

    Args:
        sources: Addresses of the rows, int64 `[T, B]`.
        lowest, highest: Least and greatest address, also among rows of other tensors.
        widths: Row length of each tensor in bytes, int64 `[T]`.
        firsts: Offset in `memory` of each tensor's first row, int64 `[T]`.
        pitches: Distance between a tensor's rows in bytes, int64 `[T]`.
    """
    if not len(widths):
        return []
    origin = lowest & -_MAX_UNIT
    offsets = sources - origin
    end, count = highest - origin, sources.shape[1]
    span = view_address(origin, end + int(widths.max()) + _MAX_UNIT, None)
    # torch copies large elements faster: their length is the largest power of two that divides all lengths and offsets
    bits = np.bitwise_or.reduce(offsets, 1) | widths | firsts | pitches | _MAX_UNIT
    tensors = []
    units = (bits & -bits).tolist()
    for numbers, width, first, pitch, unit in zip(
        offsets, widths.tolist(), firsts.tolist(), pitches.tolist(), units, strict=True
    ):
        dtype, length = _DTYPES[unit], width // unit
        windows = np.ndarray((end // unit + 1, length), dtype, span, 0, (unit, unit))
        rows = np.ndarray((count, length), dtype, memory, first, (pitch, unit))
        tensors.append((windows, numbers // unit, rows))
    return tensors


def _select(tensors: Sequence[_Rows], begin: int, end: int) -> None:
    """Copy rows `[begin, end)` of tensors, by one call for each."""
    set_num_threads, num_threads = _openmp_setter(), torch.get_num_threads()
    if not tensors or set_num_threads is None:
        return
    set_num_threads(1)  # threads of OpenMP wait for each other, and do not exist in a forked child
    try:
        for windows, numbers, rows in tensors:
            out, chosen = rows[begin:end], numbers[begin:end]
            if out.nbytes <= _SMALL_NBYTES:
                out[:] = windows[chosen]
            else:  # releases the GIL
                torch.index_select(torch.from_numpy(windows), 0, torch.from_numpy(chosen), out=torch.from_numpy(out))
    finally:
        set_num_threads(num_threads)


@cache
def _openmp_setter() -> Callable[[int], object] | None:
    """Return the function that sets this thread's number of OpenMP threads."""
    num_threads = torch.get_num_threads()
    for library in (None, torch._C.__file__):  # a preloaded library comes before torch's own
        with suppress(OSError, AttributeError):
            set_num_threads: Callable[[int], object] = PyDLL(library).omp_set_num_threads
            set_num_threads(num_threads + 1)
            is_used = torch.get_num_threads() == num_threads + 1
            set_num_threads(num_threads)
            if is_used:
                return set_num_threads
    return None


def _find_cold(files: Mapping[int, RangeFile], ranges: Ranges, base: Array | None) -> Array:
    """Return the ascending positions of samples to announce. `base` has their maps' addresses."""
    global _short_until, _next_look
    now, count = monotonic(), len(ranges.file)
    is_short = now < _short_until
    if now < _next_look and not is_short:
        return np.arange(0)
    _next_look = now + _LOOK_S
    is_large = ranges.nbytes.sum() >= _LARGE_NBYTES * count
    if is_large and base is not None and all(file.shows_pages for file in files.values()):
        cold = _find_incomplete(ranges, base, np.arange(0, count, 1 if is_short else max(1, count // _NUM_LOOKS)))
        if len(cold) and not is_short:
            cold = _find_incomplete(ranges, base, np.arange(count))
    else:
        probed = range(0, count, 1 if is_large else max(1, count // _NUM_PROBES))
        last = (ranges.begin[:, probed] + ranges.nbytes[:, probed]).max(0) - 1
        sources = [files[number] for number in ranges.file[probed].tolist()]  # closed files are opened again
        missing = [i for i, file, at in zip(probed, sources, last.tolist(), strict=True) if not file.is_resident(at)]
        # each large sample that is missing, or all small samples if a probed one is missing
        cold = np.array(missing, np.int64) if is_large or not missing else np.arange(count)
    if len(cold):
        _short_until = now + _SHORT_S
    return cold


def _find_incomplete(ranges: Ranges, base: Array, samples: Array) -> Array:
    samples, first, last = _extents(ranges, samples)
    return np.unique(samples[~are_resident(base[samples] + first, last - first)])


def _extents(ranges: Ranges, samples: Array) -> tuple[Array, Array, Array]:
    """Return the ranges to announce: the sample, begin and end of each."""
    begins = ranges.begin[:, samples]
    ends = begins + ranges.nbytes[:, samples]
    first, last = begins.min(0), ends.max(0)
    if (last - first).sum() > 2 * (ends - begins).sum():  # most bytes between the tensors are not needed
        samples, first, last = np.tile(samples, len(begins)), begins.reshape(-1), ends.reshape(-1)
    return samples, np.maximum(first - _BEFORE_NBYTES, 0), last


def _read(
    files: Mapping[int, RangeFile],
    ranges: Ranges,
    memory: Array,
    num_threads: int,
    executor: Callable[[], Executor | None],
) -> None:
    """Read ranges, by one system call for each of `runs`."""
    ranges = ranges.select(np.lexsort((ranges.begin[0], ranges.file)))  # in the order in which a disk has them
    cold, numbers = _find_cold(files, ranges, None), ranges.file.tolist()

    def read(begin: int, end: int) -> None:
        step = _IN_FLIGHT if len(cold) else max(1, end - begin)
        for at in range(begin, end, step):
            stop = min(end, at + step)
            if len(part := cold[(cold >= at) & (cold < stop)]):
                for sample, first, last in zip(*(column.tolist() for column in _extents(ranges, part)), strict=True):
                    files[numbers[sample]].will_need(first, last)
            for number, offset, buffers in runs(ranges.select(slice(at, stop)), memory, _GAP_NBYTES):
                files[number].read_into(buffers, offset)

    _run(read, ranges.nbytes.sum(0), num_threads, executor)


def runs(ranges: Ranges, memory: Array, gap_nbytes: int = 0) -> Iterator[tuple[int, int, list[memoryview]]]:
    """Yield file number, offset and buffers of each run of tensors.

    A run contains tensors of one sample with gaps of at most `gap_nbytes` bytes. Gaps are read into unused memory.
    """
    order = ranges.begin.argsort(0, kind="stable")
    columns = (np.take_along_axis(part, order, 0).T.tolist() for part in (ranges.begin, ranges.nbytes, ranges.target))
    view, scratch = memory.data, memoryview(bytearray(gap_nbytes))
    for number, *rows in zip(ranges.file.tolist(), *columns, strict=True):
        first = end = 0
        buffers: list[memoryview] = []
        for begin, nbytes, target in zip(*rows, strict=True):
            if not nbytes:
                continue
            if not buffers or not 0 <= begin - end <= gap_nbytes:
                if buffers:
                    yield number, first, buffers
                first = end = begin
                buffers = []
            if begin > end:
                buffers.append(scratch[: begin - end])
            buffers.append(view[target : target + nbytes])
            end = begin + nbytes
        if buffers:
            yield number, first, buffers


def _run(
    call: Callable[[int, int], None],
    nbytes: Array,
    num_threads: int,
    executor: Callable[[], Executor | None],
    prepare: Callable[[], None] = lambda: None,
) -> None:
    """Run `call` on ranges of the samples, on several threads."""
    count = len(nbytes)
    parts = max(1, min(num_threads, count, int(nbytes.sum()) // _PART_NBYTES))
    pool = executor() if parts > 1 else None
    if pool is None:
        prepare()
        call(0, count)
        return
    ends = nbytes.cumsum()
    shares = _LEAD_NBYTES + (ends[-1] - _LEAD_NBYTES) * np.arange(1, parts) // parts
    edges = [*np.searchsorted(ends, shares).tolist(), count]
    futures: list[Future[None]] = []
    try:
        futures.extend(pool.submit(call, begin, end) for begin, end in pairwise(edges))
        prepare()  # while the other threads run
        call(0, edges[0])
    finally:
        # A thread that still runs would write into memory that another batch may use.
        deque(map(Future.exception, futures), 0)  # waits, in a third of the time that `concurrent.futures.wait` takes
    # An error refers to this frame. If the frame kept the future, the two would form a cycle.
    while futures:
        futures.pop(0).result()
