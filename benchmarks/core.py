"""Two states of this package on the same stores, in turns: `python -m benchmarks.core --base CHECKOUT`.

A case is a scenario of this benchmark on a store, with a row for each way to read that is compared. Each state runs in a
process of its own; ceilings and tuned tensordict run in the same rounds, in the process of this checkout. The stores take 5 GB
of a real disk, in the temporary folder (TMPDIR). Each process may open 1,024 files.
"""

from __future__ import annotations

import argparse
import atexit
import fnmatch
import multiprocessing
import os
import resource
import statistics
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import page_cache, peers
from benchmarks.harness import CEILING, Context, Rows, interleaved, settle
from benchmarks.peers import NAME
from benchmarks.peers.ours import write
from benchmarks.scenarios import SCENARIOS
from benchmarks.workloads import WORKLOADS, Generated, Workload

HERE = Path(__file__).resolve().parents[1]
FILLS = ("large writes", "small writes", "cold reads")  # how a store came into the page cache
LIMIT_NBYTES = 300 << 20  # of memory, for a store of 460 MB
SLOWER = 1.05  # a larger ratio is marked
_TENSORDICT = "tensordict"

LARGE = WORKLOADS["diffusion"]
SMALL = replace(WORKLOADS["features"], count=40_000)
STORES: dict[str, tuple[Workload, int]] = {  # the samples, and in how many shards
    **dict.fromkeys(FILLS, (LARGE, 2)),
    "1.5 KB": (SMALL, 2),
    **{f"450 KB, {n} shards": (replace(LARGE, count=max(LARGE.count, n)), n) for n in (300, 2000)},
    **{f"1.5 KB, {n} shards": (SMALL, n) for n in (300, 2000)},
    "ragged": (WORKLOADS["text"], 4),
}


@dataclass(frozen=True, slots=True)
class Case:
    scenario: str
    store: str
    batch_size: int = 32
    is_pair: bool = False  # two processes of a state run each row at the same time
    is_limited: bool = False  # the processes have `LIMIT_NBYTES` of memory, with the page cache


CASES: dict[str, Case] = {
    **{f"450 KB x 32, {fill}": Case("batch_random", fill) for fill in FILLS},
    **{f"padded x {size}": Case("batch_random", "ragged", size) for size in (32, 256)},
    **{f"450 KB x 32, {n} shards": Case("batch_random", f"450 KB, {n} shards") for n in (300, 2000)},
    **{f"1.5 KB x 256, {n} shards": Case("batch_random", f"1.5 KB, {n} shards", 256) for n in (300, 2000)},
    **{f"1.5 KB x {size}": Case("batch_random", "1.5 KB", size) for size in (32, 256, 1024)},
    **{
        f"{scenario}, {title}": Case(scenario, store, size)
        for scenario in ("random_get", "iterate_lazy", "one_tensor", "loader", "write", "verify", "batch_cold")
        for title, store, size in (("450 KB", FILLS[0], 32), ("1.5 KB", "1.5 KB", 1024))
    },
    f"batch_cold, 450 KB, {LIMIT_NBYTES >> 20} MB of memory": Case("batch_cold", FILLS[0], is_limited=True),
    "450 KB x 32, two processes": Case("batch_random", FILLS[0], is_pair=True),
    "open 2,000 shards": Case("open", "1.5 KB, 2000 shards"),
    "many_shards": Case("many_shards", "1.5 KB"),
    "worker_handoff, 450 KB": Case("worker_handoff", FILLS[0]),
    "shared, 450 KB": Case("shared", FILLS[0]),
}


def _samples(store: str, part: int) -> tuple[Workload, Generated]:
    workload, _ = STORES[store]
    workload = replace(workload, count=workload.count // part)
    return workload, Generated(workload.sample, workload.count)


def _write(folder: Path, store: str, part: int) -> None:
    """Write a store, and bring it into the page cache as its name says."""
    workload, samples = _samples(store, part)
    num_shards = STORES[store][1]
    write(folder / NAME, workload, samples, max_samples=-(-workload.count // num_shards))
    if store in FILLS:
        page_cache.sync(folder)
        page_cache.refill(folder / NAME, store)
        for peer in peers.load([_TENSORDICT])[0][:1]:
            (folder / _TENSORDICT).mkdir()
            peer.write(folder / _TENSORDICT, workload, samples)
    if num_shards == 2:  # of cold reads, and a sync of 2,000 files takes long
        page_cache.sync(folder)


# --- in a process of a state ---

_rows: Rows = {}  # of its case


def _open(title: str, stores: Path, part: int) -> list[str]:
    """Open a case; return the names of its rows."""
    settle()
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    everyone, _ = peers.load(["ours", _TENSORDICT])
    case = CASES[title]
    if case.is_limited:  # Hazard: the system would kill a process with limited memory that still loads its packages.
        _limit_memory()
    workload, samples = _samples(case.store, part)
    size = min(case.batch_size, workload.count)
    workload = replace(workload, timed=workload.count // size * size, batch_size=size)
    is_many = STORES[case.store][1] > 4  # ceilings open each shard, and each cache of 3968093 up to 512 descriptors
    context = Context(workload, samples, [], stores / case.store, {}, is_quick=part > 1, has_ceilings=not is_many)
    chosen = [peer for peer in everyone if peer.name == NAME] if is_many else everyone
    context.peers += [peer for peer in chosen if context.store(peer).exists() and peer.name != _TENSORDICT]
    atexit.register(context.stack.close)
    _rows.update(SCENARIOS[case.scenario](context))
    return list(_rows)


def _limit_memory() -> None:
    """Stay in a new control group until the end of the process; raise OSError where that is not allowed."""
    root, limit = Path("/sys/fs/cgroup"), "memory.max"
    if (root / "memory").exists():  # version 1
        root, limit = root / "memory", "memory.limit_in_bytes"
    group = root / f"benchmarks-{os.getpid()}"
    group.mkdir()
    (group / limit).write_text(str(LIMIT_NBYTES))
    (group / "cgroup.procs").write_text(str(os.getpid()))
    atexit.register(group.rmdir)
    atexit.register((root / "cgroup.procs").write_text, str(os.getpid()))  # runs first


def _measure(name: str) -> dict[str, float]:
    return _rows[name]()


# --- in the process that compares them ---


def _start(checkout: Path, title: str, stores: Path, part: int, stack: ExitStack) -> tuple[list[Any], list[str]]:
    """Start the processes of a state, and open a case; return the processes, and the names of the case's rows."""
    spawn, before = multiprocessing.get_context("spawn"), sys.path[:]
    pools = [stack.enter_context(ProcessPoolExecutor(1, spawn)) for _ in range(1 + CASES[title].is_pair)]
    sys.path[:0] = [str(stores / "code"), str(checkout)]  # of the new processes
    opened = [pool.submit(_open, title, stores, part) for pool in pools]
    sys.path[:] = before
    names, *_ = [future.result() for future in opened]
    return pools, names


def _slower(pools: list[Any], row: str) -> dict[str, float]:
    """Measure a row; return the figures of the slower one of two processes."""
    futures = [pool.submit(_measure, row) for pool in pools]
    return max((future.result() for future in futures), key=lambda figures: max(figures.values()))


def _lines(title: str, checkout: Path, stores: Path, part: int, rounds: int) -> Iterator[str]:
    """Yield a line for each row: least microseconds per sample, ratios of the least, and medians of the rounds' ratios."""
    with ExitStack() as stack:
        # this state first, since a scenario may write what both read
        (now, names), (base, base_names) = (_start(path, title, stores, part, stack) for path in (HERE, checkout))
        both = [name for name in base_names if name in names and not name.startswith((CEILING, _TENSORDICT))]
        rows = {f"now {name}": partial(_slower, now, name) for name in names}
        figures = interleaved(rows | {f"base {name}": partial(_slower, base, name) for name in both}, rounds)
    for name, column in figures.items():
        state, _, row = name.partition(" ")
        if state == "now":
            cells = ["-", f"{min(column):.2f}", "-"]
            if before := figures.get(f"base {row}"):
                least = min(column) / min(before)
                middle = statistics.median(a / b for a, b in zip(column, before, strict=True))
                slower = " (slower)" if min(least, middle) > SLOWER else ""
                cells = [f"{min(before):.2f}", f"{min(column):.2f}", f"{least:.2f}, {middle:.2f}{slower}"]
            yield f"| {title} | {row} | {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.core", description=__doc__)
    parser.add_argument("--base", type=Path, required=True, help="a checkout of the state to compare with")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--only", default="*", help="pattern of the cases' titles")
    parser.add_argument("--quick", action="store_true", help="a sixteenth of the samples, one round: does it run")
    options = parser.parse_args()
    part, rounds = (16, 1) if options.quick else (1, options.rounds)
    settle()
    with tempfile.TemporaryDirectory(prefix="core-") as folder:
        stores = Path(folder)
        (stores / "code").mkdir()
        for name in ("benchmarks", "tests"):
            (stores / "code" / name).symlink_to(HERE / name)
        titles = fnmatch.filter(CASES, options.only)
        for store in dict.fromkeys(CASES[title].store for title in titles):
            _write(stores / store, store, part)
        print("| case | us/sample | base | now | now / base: least, median |", flush=True)
        print("|---|---|---|---|---|")
        for title in titles:
            try:
                lines = [*_lines(title, options.base.resolve(), stores, part, rounds)]
            except Exception as error:
                lines = [f"| {title} | {type(error).__name__}: {error} | - | - | - |".replace("\n", " ")]
            print(*lines, sep="\n", flush=True)


if __name__ == "__main__":
    main()
