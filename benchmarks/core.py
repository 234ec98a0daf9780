"""Two states of this package on the same stores, in turns: `python -m benchmarks.core --base CHECKOUT`.

A case is a scenario of this benchmark on a store, with a row for each way to read that is compared. Each state runs in a
process of its own; ceilings and tuned tensordict run in the same rounds, in the process of this checkout. The stores take 5 GB
of a disk. Each process may open 1,024 files.
"""

from __future__ import annotations

import argparse
import fnmatch
import multiprocessing
import resource
import statistics
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import wds_tensorcache as tc
from benchmarks import page_cache, peers
from benchmarks.harness import CEILING, Context, Row, interleaved, settle
from benchmarks.peers import NAME
from benchmarks.peers.base import Peer
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
    """A scenario on a store.

    Attributes:
        is_pair: Two processes of a state run each row at the same time.
        is_limited: The processes have `LIMIT_NBYTES` of memory, with the page cache.
    """

    scenario: str
    store: str
    batch_size: int
    is_pair: bool = False
    is_limited: bool = False


_BOTH = (("450 KB", FILLS[0], 32), ("1.5 KB", "1.5 KB", 1024))
CASES: dict[str, Case] = {
    **{f"450 KB x 32, {fill}": Case("batch_random", fill, 32) for fill in FILLS},
    **{f"padded x {size}": Case("batch_random", "ragged", size) for size in (32, 256)},
    **{f"450 KB x 32, {n} shards": Case("batch_random", f"450 KB, {n} shards", 32) for n in (300, 2000)},
    **{f"1.5 KB x 256, {n} shards": Case("batch_random", f"1.5 KB, {n} shards", 256) for n in (300, 2000)},
    **{f"1.5 KB x {size}": Case("batch_random", "1.5 KB", size) for size in (32, 256, 1024)},
    **{
        f"{scenario}, {title}": Case(scenario, store, size)
        for scenario in ("random_get", "iterate_lazy", "one_tensor", "loader", "write", "verify", "batch_cold")
        for title, store, size in _BOTH
    },
    f"batch_cold, 450 KB, {LIMIT_NBYTES >> 20} MB of memory": Case("batch_cold", FILLS[0], 32, is_limited=True),
    "450 KB x 32, two processes": Case("batch_random", FILLS[0], 32, is_pair=True),
    "open 2,000 shards": Case("open", "1.5 KB, 2000 shards", 32),
    "many_shards": Case("many_shards", "1.5 KB", 32),
    "worker_handoff, 450 KB": Case("worker_handoff", FILLS[0], 32),
    "shared, 450 KB": Case("shared", FILLS[0], 32),
}


def _write(folder: Path, store: str, part: int) -> None:
    """Write a store, and bring it into the page cache as its name says."""
    workload, num_shards = STORES[store]
    count = workload.count // part
    with tc.ShardWriter(folder / store / NAME / "%06d.tar", max_samples=-(-count // num_shards), fsync=False) as writer:
        for index in range(count):
            writer.write(f"{index:08d}", workload.sample(index))
    if num_shards == 2:  # of cold reads, and a sync of 2,000 files takes long
        page_cache.sync(folder / store)
    if store in FILLS:
        page_cache.refill(folder / store / NAME, store)
        for peer in peers.load([_TENSORDICT])[0][:1]:
            (folder / store / _TENSORDICT).mkdir()
            peer.write(folder / store / _TENSORDICT, workload, Generated(workload.sample, count))
        page_cache.sync(folder / store)


def _context(case: Case, everyone: list[Peer], folder: Path, part: int, scratch: str, tmpfs: str) -> Context:
    stored, num_shards = STORES[case.store]
    count = stored.count // part
    size = min(case.batch_size, count)
    context = Context(
        replace(stored, count=count, timed=count // size * size, batch_size=size),
        Generated(stored.sample, count),
        [],
        folder / case.store,
        Path(scratch),
        Path(tmpfs),
        {},
        is_quick=part > 1,
        has_ceilings=num_shards <= 300,  # each shard is an open file
    )
    context.peers.extend(peer for peer in everyone if context.store(peer).exists() and peer.name != _TENSORDICT)
    return context


def _serve(connection: Connection, title: str, stores: Path, part: int) -> None:
    """Open a case, send the names of its rows, and measure those that the parent process names."""
    settle()
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    everyone, _ = peers.load(["ours", _TENSORDICT])
    connection.send("loaded")
    with (
        tempfile.TemporaryDirectory(dir=stores) as scratch,
        tempfile.TemporaryDirectory(dir="/dev/shm") as tmpfs,
        ExitStack() as stack,
    ):
        try:
            connection.recv()
            context = _context(CASES[title], everyone, stores, part, scratch, tmpfs)
            rows = stack.enter_context(SCENARIOS[CASES[title].scenario](context))
            connection.send(list(rows))
            while True:
                connection.send(rows[connection.recv()]())
        except EOFError:
            pass
        except Exception as error:
            connection.send(f"{type(error).__name__}: {error}".partition("\n")[0])


class _State:
    """The processes of a checkout that run a case."""

    def __init__(self, checkout: Path, title: str, stores: Path, part: int, stack: ExitStack) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._connections: list[Any] = []
        for _ in range(1 + CASES[title].is_pair):
            ours, theirs = spawn.Pipe()
            process = spawn.Process(target=_serve, args=(theirs, title, stores, part))
            before = sys.path[:]
            sys.path[:0] = [str(stores / "code"), str(checkout)]  # of the new process
            process.start()
            sys.path[:] = before
            theirs.close()
            ours.recv()  # Hazard: with limited memory, the system would kill a process that still loads its packages.
            if CASES[title].is_limited:
                stack.callback(_limit_memory(process.pid).rmdir)
            stack.callback(process.join)
            self._connections.append(stack.enter_context(ours))  # when it is closed, the process ends
        self.rows: list[str] = self._ask("")[0]

    def _ask(self, message: str) -> list[Any]:
        for connection in self._connections:
            connection.send(message)
        answers = [connection.recv() for connection in self._connections]
        for answer in answers:
            if isinstance(answer, str):
                raise RuntimeError(answer)
        return answers

    def row(self, name: str) -> Row:
        """Return the row of the slower one of two processes."""
        return lambda: max(self._ask(name), key=lambda figures: max(figures.values()))


def _limit_memory(pid: int | None) -> Path:
    """Move a process into a new control group, which is returned; raise OSError where that is not allowed."""
    is_old = Path("/sys/fs/cgroup/memory").exists()
    group = Path("/sys/fs/cgroup", "memory" if is_old else "", f"benchmarks-{pid}")
    group.mkdir()
    (group / ("memory.limit_in_bytes" if is_old else "memory.max")).write_text(str(LIMIT_NBYTES))
    (group / "cgroup.procs").write_text(str(pid))
    return group


def _lines(title: str, checkout: Path, stores: Path, part: int, rounds: int) -> Iterator[str]:
    with ExitStack() as stack:
        now = _State(HERE, title, stores, part, stack)  # first, since a scenario may write what both read
        base = _State(checkout, title, stores, part, stack)
        rows = {f"now {name}": now.row(name) for name in now.rows}
        both = [name for name in base.rows if name in now.rows and not name.startswith((CEILING, _TENSORDICT))]
        figures = interleaved(rows | {f"base {name}": base.row(name) for name in both}, rounds)
    for name, column in figures.items():
        state, _, row = name.partition(" ")
        if state == "now":
            yield f"| {title} | {row} | {' | '.join(_cells(column, figures.get(f'base {row}')))} |"


def _cells(now: list[float], base: list[float] | None) -> list[str]:
    if base is None:
        return ["-", f"{min(now):.2f}", "-"]
    least, middle = min(now) / min(base), statistics.median(a / b for a, b in zip(now, base, strict=True))
    slower = " (slower)" if min(least, middle) > SLOWER else ""
    return [f"{min(base):.2f}", f"{min(now):.2f}", f"{least:.2f}, {middle:.2f}{slower}"]


def main() -> None:
    """Print a line for each row: least microseconds per sample, and ratios of the least and medians of the rounds' ratios."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.core", description=__doc__)
    parser.add_argument("--base", type=Path, required=True, help="a checkout of the state to compare with")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--only", default="*", help="pattern of the cases' titles")
    parser.add_argument("--folder", type=Path, help="on a real disk (default: the temporary folder)")
    parser.add_argument("--quick", action="store_true", help="a sixteenth of the samples, one round: does it run")
    options = parser.parse_args()
    part, rounds = (16, 1) if options.quick else (1, options.rounds)
    settle()
    with tempfile.TemporaryDirectory(prefix="core-", dir=options.folder) as folder:
        stores = Path(folder)
        (stores / "code").mkdir()
        for name in ("benchmarks", "tests"):
            (stores / "code" / name).symlink_to(HERE / name)
        titles = fnmatch.filter(CASES, options.only)
        for store in dict.fromkeys(CASES[title].store for title in titles):
            _write(stores, store, part)
        print("| case | us/sample | base | now | now / base: least, median |", flush=True)
        print("|---|---|---|---|---|")
        for title in titles:
            try:
                lines = [*_lines(title, options.base.resolve(), stores, part, rounds)]
            except (OSError, EOFError, RuntimeError) as error:
                lines = [f"| {title} | {type(error).__name__}: {error} | - | - | - |"]
            print(*lines, sep="\n", flush=True)


if __name__ == "__main__":
    main()
