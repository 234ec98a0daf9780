"""The ceiling: the bytes that a scenario must read or write, moved by the plainest calls."""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import tarfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.workloads import flat_bytes, tensor_at

IN_FLIGHT = 32  # reads that keep a cold disk busy


def _tensors(path: Path) -> Iterator[dict[str, tuple[int, int]]]:
    """Yield where the tensors of each sample of our shard begin and end, in their order, found by `tarfile` alone."""
    with tarfile.open(path, "r:") as tar, path.open("rb") as file:
        for member in tar:
            if member.name.endswith(".safetensors"):
                file.seek(member.offset_data)
                nbytes = int.from_bytes(file.read(8), "little")
                header, first = json.loads(file.read(nbytes)), member.offset_data + 8 + nbytes
                header.pop("__metadata__", None)
                places = sorted((*entry["data_offsets"], name) for name, entry in header.items())
                yield {name: (first + begin, first + end) for begin, end, name in places}


class Ranges(AbstractContextManager["Ranges"]):
    """Plain reads of each sample's tensors, or of one, out of our shards, and plain copies out of maps of these.

    `num_slots` samples are in memory at a time, as many as the compared row holds.
    """

    def __init__(self, folder: Path, num_slots: int, tensor: str | None = None) -> None:
        self._files: list[int] = []
        self._maps: dict[int, Any] = {}  # by `copy` alone: mapped pages cannot be dropped from the page cache
        self._names: list[list[str]] = []
        self._ranges: list[tuple[int, int, int]] = []  # of each sample: file, begin, length
        for path in sorted(folder.glob("*.tar")):
            self._files.append(os.open(path, os.O_RDONLY))
            for sample in _tensors(path):
                names = [tensor] if tensor else list(sample)
                begin, end = sample[names[0]][0], sample[names[-1]][1]
                self._names.append(names)
                self._ranges.append((self._files[-1], begin, end - begin))
        self._most = max(nbytes for _, _, nbytes in self._ranges)
        self._slots = num_slots
        array = np.zeros(num_slots * self._most, np.uint8)
        self._memory, self._target = memoryview(array), array.ctypes.data

    def __exit__(self, *exc: object) -> None:
        self._maps.clear()
        for file in self._files:
            os.close(file)

    def _read(self, slot: int, index: int) -> int:
        file, begin, nbytes = self._ranges[index]
        row = slot % self._slots * self._most
        if os.preadv(file, [self._memory[row : row + nbytes]], begin) != nbytes:
            raise AssertionError(f"short read of {nbytes} bytes at {begin}")
        return 1

    def _copy(self, slot: int, index: int) -> int:
        file, begin, nbytes = self._ranges[index]
        ctypes.memmove(self._target + slot % self._slots * self._most, self._maps[file][1] + begin, nbytes)
        return 1

    def check(self, order: Sequence[int], samples: Any) -> None:
        """Raise AssertionError unless the bytes read for each sample of `order` are those of its tensors."""
        for index in order:
            wanted = b"".join(flat_bytes(tensor_at(samples[index], name)) for name in self._names[index])
            for move in (self._read, self._copy)[: 1 + bool(self._maps)]:
                self._memory[: len(wanted)] = bytes(len(wanted))
                move(0, index)
                if self._memory[: len(wanted)] != wanted:
                    raise AssertionError(f"the ceiling's bytes of sample {index} are not those of its tensors")

    def read(self, order: Sequence[int], threads: int = 1) -> Callable[[], int]:
        """Return a function that reads the samples of `order`, one `preadv` each."""
        return partial(_move, self._read, order, threads)

    def copy(self, order: Sequence[int], threads: int = 1) -> Callable[[], int]:
        """Return a function that copies the same samples out of maps, one `memmove` each."""
        for file in self._files:
            array = np.frombuffer(mmap.mmap(file, 0, prot=mmap.PROT_READ), np.uint8)
            self._maps[file] = array, array.ctypes.data
        return partial(_move, self._copy, order, threads)

    def read_ahead(self, order: Sequence[int]) -> Callable[[], int]:
        """Return a function that reads the same samples on one thread and requests each range `IN_FLIGHT` reads ahead."""

        def run() -> int:
            for slot in range(-IN_FLIGHT, len(order)):
                if slot + IN_FLIGHT < len(order):
                    os.posix_fadvise(*self._ranges[order[slot + IN_FLIGHT]], os.POSIX_FADV_WILLNEED)
                if slot >= 0:
                    self._read(slot, order[slot])
            return len(order)

        return run


def _move(move: Callable[[int, int], int], order: Sequence[int], threads: int) -> int:
    def part(thread: int) -> int:
        return sum(move(slot, order[slot]) for slot in range(thread, len(order), threads))

    if threads == 1:
        return sum(map(move, range(len(order)), order))
    with ThreadPoolExecutor(threads) as pool:
        return sum(pool.map(part, range(threads)))
