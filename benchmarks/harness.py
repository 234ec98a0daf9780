"""The harness: rows in turns, and the input of every scenario: the samples, the stores and the peers."""

from __future__ import annotations

import gc
import multiprocessing
import random
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

import wds_tensorcache as tc
from benchmarks import page_cache
from benchmarks.ceiling import Ranges
from benchmarks.peers import NAME, Peer
from benchmarks.workloads import Workload

CEILING = "ceiling"  # its rows start with this word

Run = Callable[[], int]  # returns the number of samples that it read
# measures once; the keys are endings of the row's name, "" for microseconds per sample
Row = Callable[[], dict[str, float]]
Rows = dict[str, Row]
Rounds = dict[str, list[float]]  # the figures of each row, round by round


class Skipped(Exception):
    """This machine cannot run a scenario; the message says why."""


def require(is_right: bool, name: str, problem: str = "what was read is not what was written") -> None:
    """Raise AssertionError for a row, unless it is right."""
    if not is_right:
        raise AssertionError(f"{name}: {problem}")


@dataclass(frozen=True, slots=True)
class Timed:
    """A row with microseconds per sample."""

    run: Run
    count: int  # samples that it should read
    prepare: Callable[[], object] = lambda: None  # runs before it each time, and is not timed

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
    figures: Rounds = {name + ending: [] for name, row in rows.items() for ending in row()}
    for index in range(rounds):
        # Another order in each round: no row always runs after the same neighbor.
        for name in random.Random(index).sample(list(rows), len(rows)):
            for ending, figure in rows[name]().items():
                figures[name + ending].append(figure)
    return figures


def settle() -> None:
    """Let torch use one thread, and put glibc's malloc into the state of a process that has allocated and freed one batch."""
    torch.set_num_threads(1)
    # Before that, each freed block of 450 KB returns to the system and is zeroed when it is allocated again. Rows that
    # allocate memory for each sample would be up to three times slower, depending on the rows before them.
    torch.empty(30 << 20, dtype=torch.uint8)  # more than 32 MiB would not raise malloc's threshold


def in_new_process(function: Callable[..., Any], *args: Any) -> Any:
    """Return what a function of a module returns in a new process with one thread, which has imported all public names."""
    forkserver = multiprocessing.get_context("forkserver")
    forkserver.set_forkserver_preload([__name__, *sorted({getattr(tc, name).__module__ for name in tc.__all__})])
    with ProcessPoolExecutor(1, mp_context=forkserver) as pool:
        return pool.submit(function, *args).result()


def memory_mb(file: str, name: str) -> float:
    """Return a figure of a process's memory from a file in /proc, in MB."""
    lines = Path("/proc", file).read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name)) * 1024 / 1e6


@dataclass
class Context:
    """One workload, which every peer has stored once."""

    workload: Workload
    samples: Sequence[Any]
    peers: list[Peer]
    stores: Path  # a folder in it for each peer that writes
    missing: dict[str, str]  # filled as peers fail: why, by workload and peer
    is_quick: bool = False  # few samples, only to test that everything runs
    has_ceilings: bool = True  # they open each shard
    gpu: str = "cuda"  # the device of the GPU scenarios; "cpu" only tests that they run
    stack: ExitStack = field(default_factory=ExitStack)  # closes what a scenario has opened

    def __post_init__(self) -> None:
        count, timed, size = self.workload.count, self.workload.timed, self.workload.batch_size
        # the sample indices of one pass, in the same order for every row and round
        self.order = random.Random(0).sample(range(count), timed)
        self.batches = [self.order[begin : begin + size] for begin in range(0, timed, size)]
        self.ours = self.stores / NAME  # our shards, which the ceiling reads
        self._checksum = cache(lambda index: self.workload.checksum(self.samples[index]))  # as written

    def store(self, peer: Peer) -> Path:
        return self.stores / (peer.store or peer.name)

    def enter(self, manager: AbstractContextManager[Any]) -> Any:
        """Enter a context manager until the end of the scenario."""
        return self.stack.enter_context(manager)

    def new_folder(self, parent: str | Path | None = None) -> Path:
        """Make a folder for the scenario, on the disk of the stores by default."""
        return Path(self.enter(TemporaryDirectory(prefix="bench-", dir=parent or self.stores.parent)))

    def rows(
        self, runs: Mapping[str, Run], count: int = 0, store: Path | None = None, rewinds: Mapping[str, Any] = {}
    ) -> Rows:
        """Return rows that each see `count` samples (one pass by default) from the page cache.

        Before a row, `store` is loaded there (by default its peer's store, or our shards), and its stream is rewound.
        """
        stores = {peer.name: self.store(peer) for peer in self.peers}

        def prepare(name: str) -> None:
            page_cache.load(store or stores.get(name, self.ours))
            if name in rewinds:
                rewinds[name]()

        return {name: Timed(run, count or self.workload.timed, partial(prepare, name)) for name, run in runs.items()}

    @contextmanager
    def attempt(self, name: str) -> Iterator[None]:
        """List a peer that fails as missing and continue without it; our rows must not fail."""
        try:
            yield
        except Exception as error:
            if name.startswith(NAME):
                raise
            self.missing[f"{self.workload.name}, {name}"] = f"{type(error).__name__}: {error}"

    def ceilings(
        self, reads: Mapping[str, Any], num_slots: int, order: Sequence[int] = (), tensor: str | None = None
    ) -> dict[str, Run]:
        """Return methods of `Ranges` that read our shards into memory for `num_slots` samples; check what they read."""
        if not self.has_ceilings or not reads:
            return {}
        ranges, order = self.enter(Ranges(self.ours, num_slots, tensor)), order or self.order
        runs = {name: read(ranges, order) for name, read in reads.items()}
        ranges.check(order, self.samples)
        return runs

    def check(self, name: str, samples: Iterable[Any], indices: Iterable[int]) -> None:
        """Raise AssertionError unless `samples` are those of `indices`, in this order."""
        expected = [self._checksum(index) for index in indices]
        require([self.workload.checksum(sample) for sample in islice(samples, len(expected))] == expected, name)

    def check_any(self, name: str, samples: Iterable[Any]) -> list[int]:
        """Return the indices of samples in any order; raise AssertionError unless these have what was written."""
        indices = []
        for sample in samples:
            indices.append(self.workload.split(sample)[1]["index"])
            self.check(name, [sample], indices[-1:])
        return indices


Scenario = Callable[[Context], Rows]
