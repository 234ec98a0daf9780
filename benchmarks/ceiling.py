"""The ceiling: the bytes that a scenario must read or write, moved by the plainest system calls."""

from __future__ import annotations

import json
import os
import tarfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.workloads import tensor_at

IN_FLIGHT = 32  # reads that keep a cold disk busy
_PIECE_NBYTES = 1 << 20


class Range(NamedTuple):
    """The bytes of one sample: [begin, begin + nbytes) of the open shard `file`."""

    file: int
    begin: int
    nbytes: int


@lru_cache
def _members(path: Path) -> list[tuple[int, int]]:
    with tarfile.open(path, "r:") as tar:
        return [(member.offset_data, member.size) for member in tar if member.name.endswith(".safetensors")]


class Ranges:
    """The byte ranges of each sample's tensors in our shards, found by `tarfile` alone.

    Args:
        folder: Folder of the shards.
        num_slots: Samples in memory at a time, as many as the compared row holds.
        tensor: Path of the only tensor to read; None for all tensors.
    """

    def __init__(self, folder: Path, num_slots: int, tensor: str | None = None) -> None:
        self._files: list[int] = []
        self._ranges: list[Range] = []
        self._headers: list[tuple[int, int]] = []  # where the JSON of each range's member is: begin and length
        self._tensor = tensor
        for path in sorted(folder.glob("*.tar")):
            self._files.append(os.open(path, os.O_RDONLY))
            self._ranges += [self._tensors(begin, nbytes, tensor) for begin, nbytes in _members(path)]
        self._most = max(found.nbytes for found in self._ranges)
        self._slots = num_slots
        self._memory = memoryview(bytearray(self._slots * self._most))

    def _tensors(self, begin: int, nbytes: int, tensor: str | None) -> Range:
        file = self._files[-1]
        header_nbytes = int.from_bytes(os.pread(file, 8, begin), "little")
        self._headers.append((begin + 8, header_nbytes))
        start, stop = 0, nbytes - 8 - header_nbytes
        if tensor is not None:
            start, stop = json.loads(os.pread(file, header_nbytes, begin + 8))[tensor]["data_offsets"]
        return Range(file, begin + 8 + header_nbytes + start, stop - start)

    def __enter__(self) -> Ranges:
        return self

    def __exit__(self, *exc: object) -> None:
        for file in self._files:
            os.close(file)

    def _read(self, slot: int, index: int) -> int:
        file, begin, nbytes = self._ranges[index]
        row = slot % self._slots * self._most
        if os.preadv(file, [self._memory[row : row + nbytes]], begin) != nbytes:
            raise AssertionError(f"short read of {nbytes} bytes at {begin}")
        return 1

    def check(self, order: Sequence[int], samples: Sequence[Any]) -> None:
        """Raise AssertionError unless the bytes read for each sample of `order` are those of its tensors."""
        for index in order:
            self._read(0, index)
            file, _, nbytes = self._ranges[index]
            begin, header_nbytes = self._headers[index]
            entries = json.loads(os.pread(file, header_nbytes, begin))
            entries.pop("__metadata__", None)
            names = sorted(entries, key=lambda name: entries[name]["data_offsets"])
            tensors = [tensor_at(samples[index], name) for name in names if self._tensor in (None, name)]
            wanted = b"".join(tensor.contiguous().view(-1).view(torch.uint8).numpy().data for tensor in tensors)
            if self._memory[:nbytes] != wanted:
                raise AssertionError(f"the ceiling's bytes of sample {index} are not those of its tensors")

    def read(self, order: Sequence[int]) -> Callable[[], int]:
        """Return a function that reads the samples of `order`, one `preadv` each, on one thread."""
        return lambda: sum(map(self._read, range(len(order)), order))

    def read_by_threads(self, order: Sequence[int]) -> Callable[[], int]:
        """Return a function that reads the same samples with one thread for each read in flight."""

        def part(thread: int) -> int:
            return sum(self._read(slot, order[slot]) for slot in range(thread, len(order), IN_FLIGHT))

        def run() -> int:
            with ThreadPoolExecutor(IN_FLIGHT) as pool:
                return sum(pool.map(part, range(IN_FLIGHT)))

        return run

    def read_ahead(self, order: Sequence[int]) -> Callable[[], int]:
        """Return a function that reads the same samples on one thread and requests each range `IN_FLIGHT` reads ahead."""

        def ask(index: int) -> None:
            os.posix_fadvise(*self._ranges[index], os.POSIX_FADV_WILLNEED)

        def run() -> int:
            seen = 0
            for index in order[:IN_FLIGHT]:
                ask(index)
            for slot, index in enumerate(order):
                if slot + IN_FLIGHT < len(order):
                    ask(order[slot + IN_FLIGHT])
                seen += self._read(slot, index)
            return seen

        return run


def plain_write(path: Path, content: memoryview, *, fsync: bool) -> None:
    """Write bytes to a new file, a mebibyte at a time."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for begin in range(0, len(content), _PIECE_NBYTES):
        os.write(file, content[begin : begin + _PIECE_NBYTES])
    if fsync:
        os.fsync(file)
    os.close(file)
