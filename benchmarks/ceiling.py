"""The ceiling: the bytes that a scenario must read or write, moved by the plainest calls."""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import tarfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.peers.base import Batch
from benchmarks.workloads import tensor_at

IN_FLIGHT = 32  # reads that keep a cold disk busy
_PIECE_NBYTES = 1 << 20


@cache
def _tensors(path: Path) -> list[dict[str, tuple[int, int]]]:
    """Return where the tensors of each sample of our shard begin and end, in their order, found by `tarfile` alone."""
    found = []
    with tarfile.open(path, "r:") as tar, path.open("rb") as file:
        for member in tar:
            if member.name.endswith(".safetensors"):
                file.seek(member.offset_data)
                nbytes = int.from_bytes(file.read(8), "little")
                header, first = json.loads(file.read(nbytes)), member.offset_data + 8 + nbytes
                header.pop("__metadata__", None)
                places = sorted((*entry["data_offsets"], name) for name, entry in header.items())
                found.append({name: (first + begin, first + end) for begin, end, name in places})
    return found


def _nbytes(tensor: torch.Tensor) -> Any:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().data


class Ranges:
    """Plain reads of each sample's tensors out of our shards.

    Args:
        folder: Folder of the shards.
        num_slots: Samples in memory at a time, as many as the compared row holds.
        tensor: Path of the only tensor to read; None for all tensors.
    """

    def __init__(self, folder: Path, num_slots: int, tensor: str | None = None) -> None:
        self._files: list[int] = []
        self._names: list[list[str]] = []
        self._ranges: list[tuple[int, int, int]] = []  # of each sample: file, begin, length
        for path in sorted(folder.glob("*.tar")):
            self._files.append(os.open(path, os.O_RDONLY))
            for sample in _tensors(path):
                places = [sample[tensor]] if tensor else list(sample.values())
                self._names.append([tensor] if tensor else list(sample))
                self._ranges.append((self._files[-1], places[0][0], places[-1][1] - places[0][0]))
        self._most = max(nbytes for _, _, nbytes in self._ranges)
        self._slots = num_slots
        self._memory = memoryview(bytearray(self._slots * self._most))

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

    def check(self, order: Sequence[int], samples: Any) -> None:
        """Raise AssertionError unless the bytes read for each sample of `order` are those of its tensors."""
        for index in order:
            self._read(0, index)
            wanted = b"".join(_nbytes(tensor_at(samples[index], name)) for name in self._names[index])
            if self._memory[: len(wanted)] != wanted:
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

        def run() -> int:
            seen = 0
            for slot in range(-IN_FLIGHT, len(order)):
                if slot + IN_FLIGHT < len(order):
                    os.posix_fadvise(*self._ranges[order[slot + IN_FLIGHT]], os.POSIX_FADV_WILLNEED)
                seen += self._read(slot, order[slot]) if slot >= 0 else 0
            return seen

        return run


class WarmMaps:
    """Bare copies out of maps of our shards: one `memmove` for each tensor of a sample, into three batches in turn.

    Args:
        folder: Folder of the shards, whose tensors have equal shapes.
        batch_size: Samples of a batch.
        threads: 1 or 2, which share the samples of a batch.
    """

    def __init__(self, folder: Path, batch_size: int, threads: int) -> None:
        self._maps = []
        addresses: dict[str, list[int]] = {}
        nbytes = {}
        for path in sorted(folder.glob("*.tar")):
            with path.open("rb") as file:
                self._maps.append(np.frombuffer(mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ), np.uint8))
            for sample in _tensors(path):
                for name, (begin, end) in sample.items():
                    addresses.setdefault(name, []).append(self._maps[-1].ctypes.data + begin)
                    nbytes[name] = end - begin
        self._addresses = {name: np.array(each) for name, each in addresses.items()}
        self._batches = [{name: np.empty((batch_size, n), np.uint8) for name, n in nbytes.items()} for _ in range(3)]
        self._turn = cycle(self._batches)
        self._pool = ThreadPoolExecutor(1) if threads == 2 else None

    def copy(self, indices: Sequence[int]) -> Batch:
        """Copy the tensors of a batch."""
        batch, numbers, half = next(self._turn), np.array(indices), len(indices) // 2

        def part(first: int, last: int) -> None:
            for name, rows in batch.items():
                nbytes = rows.shape[1]
                target = rows.ctypes.data + first * nbytes
                for source in self._addresses[name][numbers[first:last]].tolist():
                    ctypes.memmove(target, source, nbytes)
                    target += nbytes

        if self._pool is None:
            part(0, len(indices))
        else:
            other = self._pool.submit(part, half, len(indices))
            part(0, half)
            other.result()
        return Batch(len(indices), list)

    def check(self, indices: Sequence[int], samples: Sequence[Any]) -> None:
        """Raise AssertionError unless a copied batch has the bytes of the tensors of its samples."""
        self._turn = cycle(self._batches)
        self.copy(indices)
        for name, rows in self._batches[0].items():
            for row, sample in zip(rows, samples, strict=False):
                if row.data != _nbytes(tensor_at(sample, name)):
                    raise AssertionError(f"{name}: the bare copy's bytes are not those of the tensors")


def plain_write(path: Path, content: memoryview, *, fsync: bool) -> None:
    """Write bytes to a new file, a mebibyte at a time."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for begin in range(0, len(content), _PIECE_NBYTES):
        os.write(file, content[begin : begin + _PIECE_NBYTES])
    if fsync:
        os.fsync(file)
    os.close(file)
