"""Two states of this package on the same stores, in turns: `python -m benchmarks.core --base CHECKOUT`.

Each state runs in a process of its own. In the same rounds, the process of this checkout also runs what a case is compared
with: a bare copy out of warm maps, plain reads, tuned tensordict, or another way of reading. Each row's values are compared
with the samples before its first round. The stores take 5 GB of a disk. Each process may open 1,024 files.
"""

from __future__ import annotations

import argparse
import fnmatch
import gc
import os
import random
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import islice
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any

import torch

from benchmarks import page_cache
from benchmarks.ceiling import Ranges, WarmMaps
from benchmarks.peers.base import Batch, Reader
from benchmarks.timing import Variant
from benchmarks.workloads import WORKLOADS, Workload

HERE = Path(__file__).resolve().parents[1]
BASE, NOW = "base", "now"
FILLS = ("large writes", "small writes", "cold reads")  # how a store came into the page cache
KEYS = "10^6 keys"
LIMIT_NBYTES = 300 << 20  # of memory, for a store of 460 MB
SLOWER = 1.05  # a larger ratio is marked


def _caption(index: int) -> dict[str, Any]:
    tokens = 20 + index % 57
    states = torch.randn(tokens, 256, generator=torch.Generator().manual_seed(index)).bfloat16()
    encoded = {"states": states, "pooled": states.mean(0), "tokens": tokens}
    return {"text": encoded, "prompt": f"caption number {index}", "index": index}


LARGE = WORKLOADS["diffusion"]
SMALL = replace(WORKLOADS["features"], count=40_000)
RAGGED = replace(WORKLOADS["text"], count=4096, sample=_caption)
STORES: dict[str, tuple[Workload, int]] = {  # the samples, and in how many shards
    **dict.fromkeys(FILLS, (LARGE, 2)),
    "450 KB, dropped": (LARGE, 2),  # from the page cache, before each pass
    "1.5 KB": (SMALL, 2),
    "1.5 KB, dropped": (SMALL, 2),
    **{f"450 KB, {n} shards": (replace(LARGE, count=max(LARGE.count, n)), n) for n in (300, 2000)},
    **{f"1.5 KB, {n} shards": (SMALL, n) for n in (300, 2000)},
    "ragged": (RAGGED, 4),
}


@dataclass(frozen=True, slots=True)
class Case:
    """What is compared.

    Attributes:
        ours: Opens what runs in both states, and checks it.
        beside: The same for what runs beside it, in this state alone, by name.
        is_pair: Two processes of a state run `ours` at the same time.
        is_limited: The processes have `LIMIT_NBYTES` of memory, with the page cache.
    """

    ours: Callable[[], Variant]
    beside: dict[str, Callable[[], Variant]]
    is_pair: bool = False
    is_limited: bool = False


class _Cases:
    """The cases on the stores of a folder, for a process of one state."""

    def __init__(self, folder: Path, part: int) -> None:
        self._folder, self._part = folder, part
        self.opened = ExitStack()

    def all(self) -> dict[str, Case]:
        """Return the cases by title."""
        found: dict[str, Case] = {}

        def add(
            title: str,
            ours: Callable[[], Variant],
            beside: dict[str, Callable[[], Variant]] | None = None,
            **options: bool,
        ) -> None:
            found[title] = Case(ours, beside or {}, **options)

        def read(*args: Any) -> Callable[[], Variant]:
            return partial(self._batches, *args)

        warm, cold = FILLS[0], "450 KB, dropped"
        for fill in FILLS:
            for n in (1, 2):
                beside = {"bare copy": partial(self._bare, fill, n), "tensordict, tuned": partial(self._tuned, n)}
                title = f"450 KB x 32, {fill}, {n} thread{'s' * (n > 1)}"
                add(title, read(fill, 32, n), beside)
                add(f"{title}, small values read", read(fill, 32, n, True), beside)
        for size in (32, 256):
            for n in (1, 2, 8):
                add(f"padded x {size}, {n} thread{'s' * (n > 1)}", read("ragged", size, n))
        for n in (300, 2000):
            add(f"450 KB x 32, {n} shards", read(f"450 KB, {n} shards", 32, 1))
            add(f"1.5 KB x 256, {n} shards", read(f"1.5 KB, {n} shards", 256, 1))
        for size in (32, 256, 1024):
            add(f"1.5 KB x {size}", read("1.5 KB", size, 1))
            add(f"1.5 KB x {size}, small values read", read("1.5 KB", size, 1, True))
        for title, store, size, num_written in (("450 KB", warm, 32, 200), ("1.5 KB", "1.5 KB", 256, 4000)):
            add(f"tc.realize(cache[i]), {title}", partial(self._samples, store, True))
            add(f"cache[i], {title}", partial(self._samples, store, False))
            add(f"Loader, {title} x {size}", partial(self._loader, store, size), {"read_batch": read(store, size, 2)})
            add(f"write, {title}", partial(self._write, store, num_written))
        for store, size in ((cold, 32), ("1.5 KB, dropped", 1024)):
            plain = {"plain reads": partial(self._plain_epochs, store, 1)}
            for is_loader, name in enumerate(("read_batch", "Loader")):
                title = f"open and first epoch, cold, {store[:6]} x {size}, {name}"
                add(title, partial(self._epochs, store, size, 1, bool(is_loader)), plain)
        title = f"450 KB x 32, two epochs, {LIMIT_NBYTES >> 20} MB of memory"
        plain = {"plain reads": partial(self._plain_epochs, cold, 2)}
        add(title, partial(self._epochs, cold, 32, 2, False), plain, is_limited=True)
        alone = {"one process, 1 thread": read(warm, 32, 1)}
        add("450 KB x 32, two processes, default threads", read(warm, 32, None), alone, is_pair=True)
        add("open 2,000 shards, us in all", partial(self._open, "1.5 KB, 2000 shards"))
        add("first look-up of 10^6 ascending keys, us in all", self._look_up)
        return found

    def count(self, store: str) -> int:
        """Return the number of samples of a store."""
        return STORES[store][0].count // self._part

    def write(self) -> None:
        """Write all stores, and bring them into the page cache as their names say."""
        import wds_tensorcache as tc
        from benchmarks import sparse

        written: dict[Any, str] = {}
        for store, (workload, num_shards) in STORES.items():
            key, count = (workload.sample, workload.count, num_shards), self.count(store)
            if key in written:
                shutil.copytree(self._folder / written[key], self._folder / store)
            else:
                per_shard = -(-count // num_shards)
                with tc.ShardWriter(self._folder / store / "%06d.tar", max_samples=per_shard, fsync=False) as writer:
                    for index in range(count):
                        writer.write(f"{index:08d}", workload.sample(index))
                written[key] = store
            if store in FILLS or store.endswith("dropped"):
                page_cache.sync(self._folder / store)
        for fill in FILLS:
            page_cache.refill(self._folder / fill, fill)
        sparse.write_shards(self._folder / KEYS, 100, 10_000 // self._part)
        with suppress(ImportError):
            from benchmarks.peers import tensordict

            (self._folder / "tensordict").mkdir()
            tensordict.write(self._folder / "tensordict", LARGE, [*map(LARGE.sample, range(self.count(FILLS[0])))])

    def _order(self, store: str, size: int, most: int | None = None) -> list[list[int]]:
        """Return random batches: `most` samples in all, by default enough for some 50 ms."""
        count = self.count(store)
        most = most or (1024 if STORES[store][0].name == LARGE.name else max(8192, 20 * size))
        size = min(size, count)
        order = random.Random(1).sample(range(count), min(count, most) // size * size)
        return [order[begin : begin + size] for begin in range(0, len(order), size)]

    def _reading(self, store: str, reader: Reader, size: int) -> Variant:
        self.opened.callback(reader.close)
        batches = self._order(store, size)
        read: Any = reader.batch
        _check(STORES[store][0], map(read, batches), batches)
        return Variant(lambda: _count(map(read, batches)), sum(map(len, batches)))

    def _batches(self, store: str, size: int, threads: int | None, decoded: bool = False) -> Variant:
        from benchmarks.peers import ours

        reader = ours.open_cache(self._folder / store, STORES[store][0], threads=threads, decoded=decoded)
        return self._reading(store, reader, size)

    def _tuned(self, threads: int) -> Variant:
        from benchmarks.peers import tensordict

        return self._reading(FILLS[0], tensordict.open_tuned(self._folder / "tensordict", LARGE, threads=threads), 32)

    def _bare(self, store: str, threads: int) -> Variant:
        maps, batches = WarmMaps(self._folder / store, 32, threads), self._order(store, 32)
        for indices in batches[:2]:
            maps.check(indices, [LARGE.sample(index) for index in indices])
        return Variant(lambda: _count(map(maps.copy, batches)), sum(map(len, batches)))

    def _samples(self, store: str, is_whole: bool) -> Variant:
        import wds_tensorcache as tc

        cache = self.opened.enter_context(tc.open(self._folder / store, num_threads=1))
        order = [index for (index,) in self._order(store, 1, 3000)]

        def read() -> Iterator[Any]:
            samples = map(cache.__getitem__, order)
            return map(tc.realize, samples) if is_whole else samples

        _check(STORES[store][0], [Batch(64, lambda: list(islice(read(), 64)))], [order[:64]])
        return Variant(lambda: sum(1 for _ in read()), len(order))

    def _loader(self, store: str, size: int) -> Variant:
        from benchmarks.peers import ours

        reader, count = ours.open_loader(self._folder / store, STORES[store][0], size), self.count(store) // size * size
        self.opened.callback(reader.close)
        read: Any = reader.batches
        _check(STORES[store][0], read(count))
        return Variant(lambda: _count(read(count)), count)

    def _epochs(self, store: str, size: int, epochs: int, is_loader: bool) -> Variant:
        """Open the store, read whole epochs, and close it."""
        from benchmarks.peers import ours

        folder, workload, batches = self._folder / store, STORES[store][0], self._order(store, size, 10**9)
        count = epochs * sum(map(len, batches))

        def opened() -> Any:
            return closing(ours.open_loader(folder, workload, size) if is_loader else ours.open_cache(folder, workload))

        def read(reader: Any) -> Iterator[Batch]:
            return reader.batches(count) if is_loader else map(reader.batch, batches * epochs)

        def run() -> int:
            with opened() as reader:
                return _count(read(reader))

        with opened() as reader:
            _check(workload, read(reader), None if is_loader else batches)
        return Variant(run, count, partial(_drop, folder))

    def _plain_epochs(self, store: str, epochs: int) -> Variant:
        folder, order = self._folder / store, [index for (index,) in self._order(store, 1, 10**9)]

        def run() -> int:
            with Ranges(folder, 32) as ranges:
                return sum(ranges.read_by_threads(order)() for _ in range(epochs))

        with Ranges(folder, 32) as ranges:
            ranges.check(order[:64], {index: STORES[store][0].sample(index) for index in order[:64]})
        return Variant(run, epochs * len(order), partial(_drop, folder))

    def _write(self, store: str, count: int) -> Variant:
        import wds_tensorcache as tc

        workload = STORES[store][0]
        samples = [workload.sample(index) for index in range(32)]

        def run(is_checked: bool = False) -> int:
            with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
                with tc.ShardWriter(Path(folder) / "%06d.tar", max_samples=1000, fsync=False) as writer:
                    for index in range(count):
                        writer.write(f"{index:08d}", samples[index % 32])
                if is_checked:
                    with tc.open(folder) as cache:
                        _check(workload, [Batch(32, lambda: list(cache[32:64]))], [list(range(32))])
            return count

        run(is_checked=True)
        return Variant(run, count)

    def _open(self, store: str) -> Variant:
        import wds_tensorcache as tc

        def run() -> int:
            with tc.open(self._folder / store) as cache:
                return len(cache) // self.count(store)

        return Variant(run, 1)

    def _look_up(self) -> Variant:
        import wds_tensorcache as tc

        key = f"{10**6 // self._part - 1:08d}"

        def run() -> int:
            with tc.open(self._folder / KEYS) as cache:
                return int(cache[key]["key"] == key)

        return Variant(run, 1)


def _count(batches: Iterator[Batch]) -> int:
    """Return the number of samples; three batches are alive at a time, as in a loop that trains."""
    alive: deque[Batch] = deque(maxlen=3)
    total = 0
    for batch in batches:
        alive.append(batch)
        total += batch.count
    return total


def _check(workload: Workload, read: Any, batches: list[list[int]] | None = None) -> None:
    """Raise AssertionError unless the first batches have the values of their samples."""
    for number, batch in enumerate(islice(read, 2 if batches is None else min(2, len(batches)))):
        samples = batch.samples()
        indices = batches[number] if batches else [workload.split(sample)[1]["index"] for sample in samples]
        if [*map(workload.checksum, samples)] != [_expected(workload.name, workload.sample, i) for i in indices]:
            raise AssertionError(f"{workload.name}: what was read is not what was written")


@cache
def _expected(name: str, sample: Callable[[int], Any], index: int) -> Any:
    return WORKLOADS[name].checksum(sample(index))


def _drop(folder: Path) -> None:
    page_cache.drop(folder)
    if (part := page_cache.resident(folder)) > 0.05:
        raise AssertionError(f"{part:.0%} of {folder.name} stayed in the page cache")


def _serve(address: str, stores: Path, part: int) -> None:
    """Answer requests of the parent process: a case and the row beside it, or None for ours."""
    torch.set_num_threads(1)
    torch.empty(30 << 20, dtype=torch.uint8)  # settles malloc, as `python -m benchmarks` does
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, hard))
    connection, cases, rows, last = Client(address), _Cases(stores, part), {}, None
    while True:
        try:
            title, row = connection.recv()
        except EOFError:
            return
        if title != last:
            rows, last = {}, title
            cases.opened.close()
        try:
            if row not in rows:
                case = cases.all()[title]
                rows[row] = case.beside[row]() if row else case.ours()
                rows[row].prepare()
                rows[row].run()
            rows[row].prepare()
            gc.collect()
            begun = time.perf_counter()
            if rows[row].run() != rows[row].count:
                raise AssertionError("another number of samples")
            connection.send((time.perf_counter() - begun) / rows[row].count * 1e6)
        except ImportError:
            connection.send("not installed")
        except Exception as error:
            connection.send(f"{type(error).__name__}: {error}".partition("\n")[0])


class _Parent:
    """Starts the processes when they are needed."""

    def __init__(self, base: Path, stores: Path, part: int, stack: ExitStack) -> None:
        self._checkouts, self._stores, self._part, self._stack = {BASE: base, NOW: HERE}, stores, part, stack
        self._listener = stack.enter_context(Listener(family="AF_UNIX"))
        self._children: dict[tuple[str, str], Connection] = {}
        (stores / "code").mkdir()
        (stores / "code" / "benchmarks").symlink_to(HERE / "benchmarks")

    def command(self, state: str, *arguments: str) -> subprocess.Popen[bytes]:
        """Start this module with a state's package."""
        environment = {**os.environ, "PYTHONPATH": f"{self._stores / 'code'}{os.pathsep}{self._checkouts[state]}"}
        command = [sys.executable, "-m", "benchmarks.core", *arguments, str(self._stores), str(self._part)]
        return subprocess.Popen(command, env=environment, cwd=self._stores)

    def _child(self, state: str, place: str) -> Connection:
        if (state, place) not in self._children:
            process = self.command(state, "--serve", str(self._listener.address))
            connection = self._stack.enter_context(self._listener.accept())
            if place == "limited":
                self._stack.callback(_limit_memory(process.pid).rmdir)
            self._stack.callback(process.wait)
            self._stack.callback(connection.close)  # which ends the process
            self._children[state, place] = connection
        return self._children[state, place]

    def measure(self, title: str, case: Case, rounds: int) -> dict[str, list[Any]]:
        """Return microseconds per sample of each row in each round, or what failed."""
        rows = [(BASE, None), (NOW, None), *((NOW, name) for name in case.beside)]
        found: dict[str, list[Any]] = {row or state: [] for state, row in rows}
        for number in range(rounds):
            for state, row in random.Random(number).sample(rows, len(rows)):
                if isinstance((found[row or state] or [0])[-1], str):
                    continue  # it failed
                places = ["a", "b"] if case.is_pair and not row else ["limited" if case.is_limited else "a"]
                try:
                    children = [self._child(state, place) for place in places]
                    for child in children:
                        child.send((title, row))
                    answers = [child.recv() for child in children]
                except (OSError, EOFError) as error:
                    answers = [f"{type(error).__name__}: {error}"]
                failed = [answer for answer in answers if isinstance(answer, str)]
                found[row or state].append(failed[0] if failed else max(answers))
        return found


def _limit_memory(pid: int) -> Path:
    """Move a process into a new control group, which is returned; raise OSError where that is not allowed."""
    is_old = Path("/sys/fs/cgroup/memory").exists()
    group = Path("/sys/fs/cgroup", "memory" if is_old else "", f"benchmarks-{pid}")
    group.mkdir()
    (group / ("memory.limit_in_bytes" if is_old else "memory.max")).write_text(str(LIMIT_NBYTES))
    (group / "cgroup.procs").write_text(str(pid))
    return group


def _cells(found: dict[str, list[Any]]) -> list[str]:
    def time_of(name: str) -> str:
        failed = [each for each in found[name] if isinstance(each, str)]
        return failed[0] if failed else f"{min(found[name]):.2f}"

    def ratio(name: str) -> str:
        try:
            least = min(found[NOW]) / min(found[name])
            middle = statistics.median(a / b for a, b in zip(found[NOW], found[name], strict=True))
        except TypeError:
            return "-"
        return f"{least:.2f}, {middle:.2f}{' (slower)' if name == BASE and min(least, middle) > SLOWER else ''}"

    beside = [f"{name} {time_of(name)}: {ratio(name)}" for name in found if name not in (BASE, NOW)]
    return [time_of(BASE), time_of(NOW), ratio(BASE), "; ".join(beside) or "-"]


def main() -> None:
    """Print a row for each case: least microseconds per sample, and ratios of the least and medians of the rounds' ratios."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.core", description=__doc__)
    parser.add_argument("--base", type=Path, required=True, help="a checkout of the state to compare with")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--only", default="*", help="pattern of the cases' titles")
    parser.add_argument("--folder", type=Path, help="on a real disk (default: the temporary folder)")
    parser.add_argument("--quick", action="store_true", help="a sixteenth of the samples, one round: does it run")
    options = parser.parse_args()
    part, rounds = (16, 1) if options.quick else (1, options.rounds)
    with tempfile.TemporaryDirectory(prefix="core-", dir=options.folder) as folder, ExitStack() as stack:
        parent = _Parent(options.base.resolve(), Path(folder), part, stack)
        if parent.command(NOW, "--write").wait():
            raise SystemExit("the stores could not be written")
        print("| us/sample | base | now | now / base: least, median | beside it, and now / it: least, median |")
        print("|---|---|---|---|---|")
        for title, case in _Cases(Path(folder), part).all().items():
            if fnmatch.fnmatch(title, options.only):
                cells = _cells(parent.measure(title, case, rounds))
                print(f"| {title} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        _serve(sys.argv[2], Path(sys.argv[3]), int(sys.argv[4]))
    elif sys.argv[1:2] == ["--write"]:
        _Cases(Path(sys.argv[2]), int(sys.argv[3])).write()
    else:
        main()
