"""Copy many small ranges of bytes out of memory-mapped shards, safe from SIGBUS unless the caller asks for unprotected maps.

Truncating a shard in place removes pages from its map; the next access to such a page kills the process. Two mechanisms
prevent that. While a process holds a read lease, the shard cannot be truncated. The system call `process_vm_readv`, with
which a process can copy from its own memory, returns EFAULT for a missing page. The kernel revokes a lease after
`lease-break-time` (45 s), so a process that is suspended for longer during a copy may still crash. A lease costs 5 us per
shard, and then each sample 0.1 us; with the system call, each sample costs 0.6 us.
"""

from __future__ import annotations

import ctypes
import errno
import os
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from wds_tensorcache.codec.views import view_address, view_windows
from wds_tensorcache.storage.files import ShardFile
from wds_tensorcache.storage.lease import Leases

__all__ = ["CAN_COPY", "MapLost", "Maps", "gather", "read_ranges"]

Array = np.ndarray[Any, Any]
CAN_COPY = sys.platform == "linux"  # other systems have neither leases nor process_vm_readv
LEASED_SAMPLES = 16  # for this many samples of a shard or more, a lease is faster; measured: from 14 to 20 on
_CHUNK_NBYTES = 1 << 22  # a process that wants to write waits for the copy of at most one chunk
_MAX_RANGES = 1024  # IOV_MAX
_refused: set[int] = set()  # errors of process_vm_readv, for example in a sandbox that forbids it


class MapLost(Exception):
    """The maps cannot be copied safely now. The caller reads the files instead, and that read reports damage."""


class Maps:
    """Maps of several shards, addressed as one range of bytes during one copy.

    Args:
        files: Shards to copy from.
        num_samples: Number of samples to copy.
        io: "auto" copies safely. "mmap" copies as fast as possible, but if a shard is truncated meanwhile, SIGBUS kills
            the process.

    Attributes:
        bases: Offset of each shard's first byte in the range that addresses all maps.

    Raises (at the beginning of the `with` block, in it, and at its end):
        MapLost: A process wants to write to a shard, a page cannot be read, or this system has no safe way to copy.
        FormatError: A shard was written to since it was opened.
    """

    bases: list[int]

    def __init__(self, files: Sequence[ShardFile], num_samples: int, io: str) -> None:
        self._files = files
        self._is_bare = io == "mmap"
        self._is_leasable = not self._is_bare and num_samples >= LEASED_SAMPLES * len(files)
        self._leases: Leases | None = None

    def __enter__(self) -> Maps:
        if not self._is_bare and not CAN_COPY:
            raise MapLost
        leases = Leases() if self._is_leasable else None
        try:
            if leases is not None and leases.take(self._files):
                self._leases = leases
            for file in self._files:
                # Hazard: the shard may have been truncated before the lease was taken. After this check, the lease prevents it.
                file.check_unchanged()
            addresses = self._addresses()
        except BaseException:
            if leases is not None:
                leases.release()
            raise
        self._first = min(addresses)
        self.bases = [address - self._first for address in addresses]
        return self

    def _addresses(self) -> list[int]:
        try:
            return [file.address() for file in self._files]
        except OSError as exc:
            if self._is_bare:
                raise
            raise MapLost from exc  # not enough memory for a map, or a file system without maps

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
        if self._leases is not None:
            self._leases.release()
        if error is None:
            for file in self._files:
                file.check_unchanged()

    def _whole(self) -> Array:
        files = self._files
        if len(files) == 1:
            return files[0].array()
        # spans all maps, from the lowest address to the highest; the bytes between the maps are never read
        nbytes = max(base + file.nbytes for base, file in zip(self.bases, files, strict=True))
        return view_address(self._first, nbytes, files)

    def _check_leases(self) -> None:
        if self._leases is not None and not self._leases.are_held():
            raise MapLost

    def gather(self, begins: Array, width: int, out: Array | None = None) -> Array:
        """Copy `width` bytes from each offset in `begins` into `out`, or into a new array; return it, uint8 `[n, width]`.

        Hazard: with `out`, torch may use threads, which a forked process does not have. Without `out`, numpy copies alone.
        """
        result = np.empty((len(begins), width), np.uint8) if out is None else out
        if self._leases is None and not self._is_bare:
            _copy(self._first + begins, np.full(len(begins), width), result.reshape(-1))
            return result
        whole = self._whole()
        memory = None if out is None else self._files[0].tensor() if len(self._files) == 1 else torch.from_numpy(whole)
        step = max(1, len(begins) if self._is_bare else min(_MAX_RANGES, _CHUNK_NBYTES // width))
        for at in range(0, len(begins), step):
            self._check_leases()
            some = begins[at : at + step]
            if memory is None:
                result[at : at + step].view(f"V{width}")[:, 0] = view_windows(whole, width)[some]
            else:
                gather(memory, some, width, result[at : at + step])
        return result

    def slices(self, begins: Array, ends: Array) -> list[bytes]:
        """Return a copy of the bytes `[begin, end)` of the first shard for each pair in `begins` and `ends`."""
        found: list[bytes] = []
        longest = int((ends - begins).max(initial=1))
        step = max(1, min(_MAX_RANGES, _CHUNK_NBYTES // longest))
        for at in range(0, len(begins), step):
            some = slice(at, at + step)
            if self._leases is None and not self._is_bare:
                sizes = ends[some] - begins[some]
                bounds = sizes.cumsum()
                copied = np.empty(int(bounds[-1]), np.uint8)
                _copy(self._first + begins[some], sizes, copied)
                whole: Any = copied.tobytes()
                extents = zip((bounds - sizes).tolist(), bounds.tolist(), strict=True)
            else:
                self._check_leases()
                whole = self._files[0].map()
                extents = zip(begins[some].tolist(), ends[some].tolist(), strict=True)
            found += [whole[begin:end] for begin, end in extents]
        return found


def gather(memory: torch.Tensor, begins: Array, width: int, out: Array) -> None:
    """Copy `width` bytes from each offset in `begins` into `out`, uint8 `[n, width]`, with one torch call."""
    windows = memory.as_strided((len(memory) - width + 1, width), (1, 1))
    torch.index_select(windows, 0, torch.from_numpy(begins), out=torch.from_numpy(out))


def read_ranges(file: ShardFile, begins: Array, ends: Array, io: str) -> Iterator[bytes]:
    """Return an iterator over the bytes of each range of a shard. Read the file if `io` is "pread" or `Maps` raises MapLost."""
    if io != "pread":
        try:
            with Maps([file], len(begins), io) as maps:
                return iter(maps.slices(begins, ends))
        except MapLost:
            return read_ranges(file, begins, ends, "pread")
    return map(file.read, begins.tolist(), ends.tolist())


def _copy(addresses: Array, sizes: Array, out: Array) -> None:
    """Fill `out` with the bytes at `addresses` of this process; raise MapLost if one is unmapped, or the call is forbidden."""
    ranges = np.stack([addresses, sizes], 1).astype(np.uint64)
    target = out.__array_interface__["data"][0]
    # one system call per 1,024 ranges
    for at in range(0, len(ranges), _MAX_RANGES):
        some = ranges[at : at + _MAX_RANGES]
        nbytes = int(some[:, 1].sum())
        if _refused:
            raise MapLost
        local = (ctypes.c_size_t * 2)(target, nbytes)
        count: int = _process_vm_readv(os.getpid(), local, 1, some.ctypes.data, len(some), 0)
        if count < 0 and ctypes.get_errno() not in (errno.EFAULT, errno.ENOMEM):
            _refused.add(ctypes.get_errno())
        if count != nbytes:
            raise MapLost
        target += nbytes


if CAN_COPY:
    _process_vm_readv: Any = ctypes.CDLL(None, use_errno=True).process_vm_readv
    _process_vm_readv.argtypes = [
        *(ctypes.c_int, ctypes.c_void_p, ctypes.c_ulong),
        *(ctypes.c_void_p, ctypes.c_ulong, ctypes.c_ulong),
    ]
    _process_vm_readv.restype = ctypes.c_ssize_t
