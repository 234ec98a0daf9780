"""Compare this checkout with an older one on the same stores: each operation runs in both, in turn, in the same rounds.

    python -m benchmarks.versus OLDER_CHECKOUT [--rounds 15] [--only PATTERN]

Each checkout runs in its own process. The older one writes the stores. Every operation returns a digest of what it read,
which must be equal in both. Ratios below 1 mean that this checkout is faster.
"""

from __future__ import annotations

import argparse
import fnmatch
import gc
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any

import torch

from benchmarks.workloads import WORKLOADS, Workload

Operation = Callable[[], Any]
COUNTS = {"diffusion": 128, "features": 8192, "text": 256}
LIMIT = 1.05  # a larger ratio is marked


def _batch(read: Any) -> Any:
    """Return the batch of what `read_batch` or `Loader` gives; older checkouts put it into one or two pairs."""
    while isinstance(read, tuple):
        read = read[0]
    return read


def _digest(workload: Workload, read: Any) -> float:
    """Return a number that depends on which samples were read: one value of each row of each tensor, and the indices."""
    tensors, small = workload.split(read)
    total = float(sum(map(int, small["index"])))
    for tensor in tensors.values():
        total += float(torch.stack([row.reshape(-1)[0] for row in tensor]).double().sum())
    return total


def operations(stores: Path, scratch: Path, name: str) -> Iterator[tuple[str, Operation]]:
    """Yield the operations on one workload, each by its name."""
    import wds_tensorcache as tc

    workload, count = WORKLOADS[name], COUNTS[name]
    samples = [workload.sample(index) for index in range(min(count, 256))]
    folder, other = stores / name, stores / f"{name}-other"
    order = random.Random(0).sample(range(count), count)
    size = min(workload.batch_size, count // 4)
    batches = [order[begin : begin + size] for begin in range(0, count, size)]
    collate = "pad" if workload.ragged else "stack"
    cache, single, pread = tc.open(folder), _open(folder, threads=1), _open(folder, threads=1, io="pread")
    joined = tc.join([folder, other]) if hasattr(tc, "join") else tc.open([folder, other], join="key")

    def write() -> int:
        out = scratch / f"{os.getpid()}"
        with tc.ShardWriter(out / "%06d.tar", fsync=False, max_samples=50_000) as writer:
            for index, sample in enumerate(samples):
                writer.write(f"{index:08d}", sample)
        nbytes = sum(path.stat().st_size for path in out.glob("*.tar"))
        shutil.rmtree(out)
        return nbytes

    def in_batches(opened: Any, **options: Any) -> Operation:
        def run() -> float:
            return sum(_digest(workload, _batch(opened.read_batch(batch, **options))) for batch in batches)

        return run

    def in_batches_alone(opened: Any) -> Operation:
        def run() -> int:
            return sum(len(workload.split(_batch(opened.read_batch(batch, collate=collate)))[1]) for batch in batches)

        return run

    def get() -> int:
        return sum(workload.split(cache[index])[1]["index"] for index in order[:1024])

    def load() -> float:
        total = 0.0
        for index in order[:256]:
            for lazy in workload.split(cache[index])[0].values():
                total += float(lazy.load().reshape(-1)[0])
        return total

    def iterate() -> int:
        return sum(workload.split(sample)[1]["index"] for sample in cache)

    loaders: list[Any] = []

    def load_epoch() -> float:
        if not loaders:
            loaders.append(tc.Loader(cache, size, shuffle=True, seed=0, collate=collate))
        # every epoch has another order: what depends on the samples alone is compared
        return sum(len(workload.split(_batch(read))[1]["index"]) for read in loaders[0])

    encoded = [tc.encode_sample(sample) for sample in samples]
    yield "write", write
    yield "encode", lambda: sum(len(member) for sample in samples for member in tc.encode_sample(sample))
    yield "decode", lambda: sum(workload.split(tc.decode_sample(*pair))[1]["index"] for pair in encoded)
    yield "get", get
    yield "load", load
    yield "iterate", iterate
    yield "read_batch", in_batches_alone(cache)
    yield "read_batch, 1 thread", in_batches_alone(single)
    yield "read_batch, 1 thread, pread", in_batches_alone(pread)
    yield "read_batch, values read", in_batches(cache, collate=collate)
    yield "read_batch, list", in_batches(cache, collate="list")
    yield "joined read_batch", in_batches_alone(joined)
    yield "loader", load_epoch
    yield "open", lambda: len(_closed(tc.open(folder)))
    yield "verify", lambda: len(tc.verify(folder).faults)


def _open(folder: Path, threads: int, **options: Any) -> Any:
    import inspect

    import wds_tensorcache as tc

    name = "num_threads" if "num_threads" in inspect.signature(tc.open).parameters else "threads"
    return tc.open(folder, **{name: threads}, **options)


def _closed(cache: Any) -> Any:
    keys = list(cache.keys()[:3])
    cache.close()
    return keys


def _write_stores(stores: Path) -> None:
    import wds_tensorcache as tc

    for name, count in COUNTS.items():
        workload = WORKLOADS[name]
        for folder in (stores / name, stores / f"{name}-other"):
            with tc.ShardWriter(folder / "%06d.tar", fsync=False, max_samples=count // 2) as writer:
                for index in range(count):
                    sample = workload.sample(index)
                    writer.write(f"{index:08d}", sample if folder.name == name else {"other": torch.full((8,), index)})


def serve(address: str, stores: Path, scratch: Path, *, write: bool) -> None:
    """Run operations for the parent process: receives (workload, operation), sends seconds and the digest."""
    torch.set_num_threads(1)
    torch.empty(30 << 20, dtype=torch.uint8)  # settles malloc, as `python -m benchmarks` does
    if write:
        _write_stores(stores)
    connection = Client(address)
    known = {name: dict(operations(stores, scratch, name)) for name in COUNTS}
    gc.collect()
    gc.freeze()
    connection.send({name: list(each) for name, each in known.items()})
    while request := connection.recv():
        operation = known[request[0]][request[1]]
        gc.collect()
        begun = time.perf_counter()
        digest = operation()
        connection.send((time.perf_counter() - begun, digest))


def _start(listener: Listener, checkout: Path, stores: Path, scratch: Path, *, write: bool) -> Connection:
    # this checkout's `benchmarks` and the other one's packages
    here = scratch / "benchmarks-of-this-checkout"
    here.mkdir(exist_ok=True)
    if not (here / "benchmarks").exists():
        (here / "benchmarks").symlink_to(Path(__file__).resolve().parent)
    environment = {**os.environ, "PYTHONPATH": f"{here}{os.pathsep}{checkout.resolve()}"}
    arguments = ["--serve", listener.address, str(stores), str(scratch), *(["--write"] if write else [])]
    subprocess.Popen([sys.executable, "-m", "benchmarks.versus", *arguments], env=environment, cwd=scratch)
    return listener.accept()


def compare(older: Path, rounds: int, only: str) -> list[tuple[str, list[float], list[float]]]:
    """Return the seconds of each round for every operation, of the older checkout and of this one.

    Raises:
        AssertionError: The two checkouts read different samples.
    """
    results = []
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder, Listener(family="AF_UNIX") as listener:
        stores, scratch = Path(folder) / "stores", Path(folder) / "scratch"
        stores.mkdir()
        scratch.mkdir()
        checkouts = {"older": older, "this": Path(__file__).parents[1]}
        sides = {
            side: _start(listener, checkout, stores, scratch, write=side == "older")
            for side, checkout in checkouts.items()
        }
        names = {side: connection.recv() for side, connection in sides.items()}
        for workload, known in names["this"].items():
            for operation in known:
                title = f"{workload}: {operation}"
                if not fnmatch.fnmatch(title, only):
                    continue
                times: dict[str, list[float]] = {side: [] for side in sides}
                for number in range(rounds + 1):  # the first one warms up
                    digests = {}
                    for side in random.Random(number).sample(list(sides), 2):
                        sides[side].send((workload, operation))
                        seconds, digests[side] = sides[side].recv()
                        times[side].append(seconds)
                    if digests["older"] != digests["this"]:
                        raise AssertionError(f"{title}: the checkouts read different samples: {digests}")
                results.append((title, times["older"][1:], times["this"][1:]))
        for connection in sides.values():
            connection.send(None)
    return results


def main() -> None:
    """Print a row for each operation: milliseconds of both checkouts and their ratio."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.versus", description=__doc__)
    parser.add_argument("older", type=Path)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--only", default="*", help="pattern of `WORKLOAD: OPERATION` (default: all)")
    options = parser.parse_args()
    print("| operation | older, ms (min) | this, ms (min) | ratio of minima | median ratio of the rounds |")
    print("|---|---|---|---|---|")
    for title, older, this in compare(options.older, options.rounds, options.only):
        ratio = statistics.median(b / a for a, b in zip(older, this, strict=True))
        mark = " (slower)" if min(ratio, min(this) / min(older)) > LIMIT else ""
        print(
            f"| {title} | {min(older) * 1e3:.2f} | {min(this) * 1e3:.2f} | {min(this) / min(older):.2f} "
            f"| {ratio:.2f}{mark} |",
            flush=True,
        )


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        serve(sys.argv[2], Path(sys.argv[3]), Path(sys.argv[4]), write="--write" in sys.argv)
    else:
        main()
