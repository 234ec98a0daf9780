"""The input of every scenario: the samples, the stores and the peers."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from benchmarks import page_cache
from benchmarks.ceiling import Ranges
from benchmarks.peers import NAME
from benchmarks.peers.base import Peer, Reader
from benchmarks.timing import Rounds, Variant, interleaved
from benchmarks.workloads import Workload

CEILING = "ceiling"  # its rows start with this word


class Skipped(Exception):
    """This machine cannot run a scenario; the message says why."""


@dataclass(frozen=True, slots=True)
class Context:
    """One workload, which every peer has stored once."""

    workload: Workload
    samples: list[Any]
    expected: list[tuple[Any, ...]]  # the checksum of each
    peers: list[Peer]
    stores: Path  # a folder in it for each peer that writes
    scratch: Path  # for writing, on the same disk
    tmpfs: Path  # for writing, in memory
    rounds: int
    missing: dict[str, str]  # filled as peers fail: why, by workload and peer
    is_quick: bool = False  # few samples, only to test that everything runs
    gpu: str = "cuda"  # the device of the GPU scenarios; "cpu" only tests that they run

    @property
    def order(self) -> list[int]:
        """The sample indices of one pass, in the same order for every variant and round."""
        return random.Random(0).sample(range(self.workload.count), self.workload.timed)

    @property
    def batches(self) -> list[list[int]]:
        """The sample indices of one pass, in batches."""
        order, size = self.order, self.workload.batch_size
        return [order[begin : begin + size] for begin in range(0, len(order), size)]

    @property
    def ours(self) -> Path:
        """The folder of our shards, which the ceiling reads."""
        return self.stores / NAME

    def store(self, peer: Peer) -> Path:
        """Return the folder that a peer reads."""
        return self.stores / (peer.store or peer.name)

    def warm(self, name: str, rewind: Callable[[], object] = lambda: None) -> None:
        """Load a row's store into the page cache, and prepare its stream for another pass."""
        stores = {peer.name: self.store(peer) for peer in self.peers}
        page_cache.load(stores.get(name, self.ours))
        rewind()

    def measure(
        self, runs: dict[str, Callable[[], int]], count: int | None = None, readers: dict[str, Reader] | None = None
    ) -> Rounds:
        """Return the rounds of rows that each see `count` samples (one pass), from the page cache."""
        variants = {}
        for name, run in runs.items():
            rewind = readers[name].rewind if readers and name in readers else lambda: None
            variants[name] = Variant(run, count or self.workload.timed, partial(self.warm, name, rewind))
        return interleaved(variants, self.rounds)

    @contextmanager
    def readers(self, ability: Callable[[Reader], object]) -> Iterator[dict[str, Reader]]:
        """Open each peer that has an ability until the block ends."""
        opened: dict[str, Reader] = {}
        try:
            for peer in self.peers:
                with self.attempt(peer.name):
                    reader = peer.open(self.store(peer), self.workload)
                    if ability(reader):
                        opened[peer.name] = reader
                    else:
                        reader.close()
            yield opened
        finally:
            for reader in opened.values():
                reader.close()

    @contextmanager
    def attempt(self, name: str) -> Iterator[None]:
        """List a peer that fails as missing and continue without it; our rows must not fail."""
        try:
            yield
        except Exception as error:
            if name.startswith(NAME):
                raise
            self.missing[f"{self.workload.name}, {name}"] = f"{type(error).__name__}: {error}"

    @contextmanager
    def ceiling(self, num_slots: int, tensor: str | None = None) -> Iterator[Ranges]:
        """Open our shards for plain reads into memory for `num_slots` samples, and check what is read."""
        with Ranges(self.ours, num_slots, tensor) as ranges:
            ranges.check(self.order, self.samples)
            yield ranges

    def check(self, name: str, samples: Iterable[Any], indices: Iterable[int]) -> None:
        """Raise AssertionError unless `samples` are those of `indices`, in this order."""
        expected = [self.expected[index] for index in indices]
        found = [self.workload.checksum(sample) for sample in islice(samples, len(expected))]
        if found != expected:
            raise AssertionError(f"{name}: what was read is not what was written")

    def check_shuffled(self, name: str, samples: Iterable[Any]) -> None:
        """Raise AssertionError unless `samples` are the samples of one pass, each once, shuffled."""
        samples = list(samples)
        indices = [self.workload.split(sample)[1]["index"] for sample in samples]
        self.check(name, samples, indices)
        if len(set(indices)) != self.workload.timed or indices == sorted(indices):
            raise AssertionError(f"{name}: a sample was read twice, or nothing was shuffled")
