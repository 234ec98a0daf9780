"""The harness: rows in turns, and the input of every scenario: the samples, the stores and the peers."""

from __future__ import annotations

import gc
import multiprocessing
import random
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch

import wds_tensorcache as tc
from benchmarks import page_cache
from benchmarks.ceiling import Ranges
from benchmarks.peers import NAME
from benchmarks.peers.base import Peer
from benchmarks.workloads import Workload

CEILING = "ceiling"  # its rows start with this word

# measures once; the keys are endings of the row's name, "" for microseconds per sample
Row = Callable[[], dict[str, float]]
Rows = dict[str, Row]
Rounds = dict[str, list[float]]  # the figures of each row, round by round


class Skipped(Exception):
    """This machine cannot run a scenario; the message says why."""


@dataclass(frozen=True, slots=True)
class Timed:
    """A row with microseconds per sample.

    Attributes:
        run: The timed function, which returns the number of samples that it read.
        count: Expected number of samples.
        prepare: Runs before it each time, and is not timed.
    """

    run: Callable[[], int]
    count: int
    prepare: Callable[[], object] = lambda: None

    def __call__(self) -> dict[str, float]:
        """Measure one run; raise AssertionError if it read another number of samples."""
        self.prepare()
        gc.collect()
        started = time.perf_counter()
        count = self.run()
        elapsed = time.perf_counter() - started
        if count != self.count:
            raise AssertionError(f"read {count} samples of {self.count}")
        return {"": elapsed / count * 1e6}


def interleaved(rows: Mapping[str, Row], rounds: int) -> Rounds:
    """Return the figures of each row in each round, after one round that only warms up.

    Machines drift, so the rows take turns, and ratios come from the same round.
    """
    figures: dict[str, dict[str, list[float]]] = {name: {} for name in rows}
    for index in range(rounds + 1):
        # Another order in each round: no row always runs after the same neighbor.
        for name in random.Random(index).sample(list(rows), len(rows)):
            for ending, figure in rows[name]().items():
                if index:
                    figures[name].setdefault(ending, []).append(figure)
    return {name + ending: column for name, by_ending in figures.items() for ending, column in by_ending.items()}


def settle() -> None:
    """Let torch use one thread, and put glibc's malloc into the state of a process that has allocated and freed one batch.

    Before that, each freed block of 450 KB returns to the system and is zeroed when it is allocated again. Rows that
    allocate memory for each sample would be up to three times slower, depending on the rows before them.
    """
    torch.set_num_threads(1)
    torch.empty(30 << 20, dtype=torch.uint8)  # more than 32 MiB would not raise malloc's threshold


def in_new_process(function: Callable[..., Any], *args: Any) -> Any:
    """Return what a function of a module returns in a new process with one thread, which has imported all public names."""
    forkserver = multiprocessing.get_context("forkserver")
    forkserver.set_forkserver_preload([__name__, *sorted({getattr(tc, name).__module__ for name in tc.__all__})])
    with ProcessPoolExecutor(1, mp_context=forkserver) as pool:
        return pool.submit(function, *args).result()


@dataclass(frozen=True, slots=True)
class Context:
    """One workload, which every peer has stored once."""

    workload: Workload
    samples: Sequence[Any]
    peers: list[Peer]
    stores: Path  # a folder in it for each peer that writes
    scratch: Path  # for writing, on the same disk
    tmpfs: Path  # for writing, in memory
    missing: dict[str, str]  # filled as peers fail: why, by workload and peer
    is_quick: bool = False  # few samples, only to test that everything runs
    has_ceilings: bool = True  # they open each shard
    gpu: str = "cuda"  # the device of the GPU scenarios; "cpu" only tests that they run
    checksums: dict[int, Any] = field(default_factory=dict)  # of the samples as written, when first needed

    @property
    def order(self) -> list[int]:
        """The sample indices of one pass, in the same order for every row and round."""
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

    def rows(
        self,
        runs: Mapping[str, Callable[[], int]],
        count: int | None = None,
        stores: Mapping[str, Path] | None = None,
        rewinds: Mapping[str, Callable[[], object]] | None = None,
    ) -> Rows:
        """Return rows that each see `count` samples (one pass) from the page cache.

        Args:
            stores: What is loaded into the page cache before a row, by its name; our shards by default.
            rewinds: What else is prepared.
        """
        stores = {peer.name: self.store(peer) for peer in self.peers} | dict(stores or {})

        def prepare(name: str) -> None:
            page_cache.load(stores.get(name, self.ours))
            if rewinds and name in rewinds:
                rewinds[name]()

        return {name: Timed(run, count or self.workload.timed, partial(prepare, name)) for name, run in runs.items()}

    def refuse_ragged(self) -> None:
        """Raise Skipped if samples of this workload need padding in batches."""
        if self.workload.ragged:
            raise Skipped("samples of different shapes need padding")

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
    def ceilings(
        self,
        reads: dict[str, Callable[[Ranges, Sequence[int]], Callable[[], int]]],
        num_slots: int,
        order: Sequence[int] | None = None,
        tensor: str | None = None,
    ) -> Iterator[dict[str, Callable[[], int]]]:
        """Yield functions that read our shards plainly into memory for `num_slots` samples, after a check of what they read."""
        if not self.has_ceilings or not reads:
            yield {}
            return
        order = self.order if order is None else order
        with Ranges(self.ours, num_slots, tensor) as ranges:
            runs = {name: read(ranges, order) for name, read in reads.items()}
            ranges.check(order, self.samples)
            yield runs

    def drop(self, store: Path) -> None:
        """Drop a store from the page cache."""
        page_cache.drop(store)
        if (part := page_cache.resident(store)) > 0.05:
            raise Skipped(f"{part:.0%} of {store.name} stayed in the page cache; --folder must be on a real disk")

    def _checksum(self, index: int) -> Any:
        if index not in self.checksums:
            self.checksums[index] = self.workload.checksum(self.samples[index])
        return self.checksums[index]

    def check(self, name: str, samples: Iterable[Any], indices: Iterable[int]) -> None:
        """Raise AssertionError unless `samples` are those of `indices`, in this order."""
        expected = [self._checksum(index) for index in indices]
        if [self.workload.checksum(sample) for sample in islice(samples, len(expected))] != expected:
            raise AssertionError(f"{name}: what was read is not what was written")

    def check_any(self, name: str, samples: Iterable[Any]) -> list[int]:
        """Return the indices of samples in any order; raise AssertionError unless these have what was written."""
        indices = []
        for sample in samples:
            indices.append(self.workload.split(sample)[1]["index"])
            self.check(name, [sample], indices[-1:])
        return indices

    def check_shuffled(self, name: str, samples: Iterable[Any]) -> None:
        """Raise AssertionError unless these are the samples of one pass, each once, shuffled."""
        indices = self.check_any(name, samples)
        if not len(indices) == len(set(indices)) == self.workload.timed or indices == sorted(indices):
            raise AssertionError(f"{name}: a sample was read twice, or nothing was shuffled")


Scenario = Callable[[Context], AbstractContextManager[Rows]]
