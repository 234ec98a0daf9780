"""Write and read datasets on a cluster of Ray while one of its workers is killed, and look for lost and doubled samples."""

from __future__ import annotations

import contextlib
import logging
import os
import random
import signal
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

import wds_tensorcache as tc
from tests.same import assert_same

COUNT = 2000
_NUM_BLOCKS = 16
_BLOCK_S = 0.05  # how long a task pauses at least, so that there is time to kill it


def sample(i: int) -> dict[str, Any]:
    return {"x": torch.full((3 + i % 5, 4), i).bfloat16(), "i": i, "text": "é" * (i % 9)}


@contextlib.contextmanager
def cluster() -> Iterator[None]:
    """Start a cluster with two CPUs on this machine, and end it."""
    import ray

    with warnings.catch_warnings():
        # Ray leaves pipes and files of its processes to the garbage collector, and uses names that it has deprecated
        warnings.simplefilter("ignore")
        options: dict[str, Any] = {"include_dashboard": False, "log_to_driver": False, "logging_level": "ERROR"}
        ray.init(num_cpus=2, object_store_memory=200_000_000, **options)
        import ray.data

        ray.data.DataContext.get_current().enable_progress_bars = False
        logging.getLogger("ray.data").setLevel(logging.ERROR)
    try:
        yield
    finally:
        ray.shutdown()


def note(table: Any, notes: Path) -> Any:
    """Return a block, and note this process in a folder, once for each of its blocks."""
    with open(notes / f"{os.getpid()}", "a") as file:
        file.write("x")
    time.sleep(_BLOCK_S)
    return table


@contextlib.contextmanager
def killer(notes: Path, pause_s: float, chance: random.Random) -> Iterator[None]:
    """Wait for a worker's first note, and kill a worker that has noted something a moment later."""
    is_over = threading.Event()

    def kill() -> None:
        while not os.listdir(notes) and not is_over.wait(0.001):
            pass
        if not is_over.wait(pause_s):
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(chance.choice(os.listdir(notes))), signal.SIGKILL)

    thread = threading.Thread(target=kill)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def write_and_read(folder: Path, rounds: int, seed: int) -> tuple[int, int]:
    """Write and read all samples `rounds` times each, while a worker that runs a task is killed; check that each is there once.

    Returns:
        The number of writes and of reads, perhaps more than `rounds`: a kill between two tasks, or after the last one, does not
        count, but the samples are checked.
    """
    chance = random.Random(seed)
    with tc.ShardWriter(folder / "source", max_samples=300, fsync=False) as sink:
        for i in range(COUNT):
            sink.write(f"{i:04d}", sample(i))

    counts = [0, 0]
    for kind in range(2):
        hits = 0
        while hits < rounds:
            counts[kind] += 1
            out, notes = folder / f"{kind}-{counts[kind]}", folder / f"notes-{kind}-{counts[kind]}"
            notes.mkdir()
            dataset = tc.ray.read_ray(folder / "source", exact=bool(hits % 2), override_num_blocks=_NUM_BLOCKS)
            noting = dataset.map_batches(note, batch_format="pyarrow", batch_size=None, fn_args=(notes,))
            with killer(notes, chance.uniform(0, _BLOCK_S * _NUM_BLOCKS / 2), chance):
                samples = _read(noting) if kind else _write(noting, out)
            assert sorted(key for key, _ in samples) == [f"{i:04d}" for i in range(COUNT)]
            for key, value in samples:
                assert_same(sample(int(key)), value)
            # otherwise no block had to be made again
            hits += sum(path.stat().st_size for path in notes.iterdir()) > _NUM_BLOCKS
    return counts[0], counts[1]


def _write(dataset: Any, out: Path) -> list[tuple[str, Any]]:
    with tc.ray.write_ray(dataset, out, max_samples=50) as cache:
        assert len([name for name in os.listdir(out) if name.endswith(".tar")]) == cache.num_shards
        assert not any(name.startswith(".") for name in os.listdir(out))
        return [(key, tc.realize(cache[key])) for key in cache.keys()]  # noqa: SIM118


def _read(dataset: Any) -> list[tuple[str, Any]]:
    return [(row["__key__"], tc.ray.ray_sample(row)) for row in dataset.take_all()]


if __name__ == "__main__":
    kills = int(sys.argv[1]) if len(sys.argv) > 1 else 20
    with tempfile.TemporaryDirectory() as directory, cluster():
        writes, reads = write_and_read(Path(directory), kills, seed=random.randrange(1 << 30))
    print(
        f"{kills} of {writes} writes and {kills} of {reads} reads of {COUNT} samples had a worker killed in a task: "
        "each sample was there once, bit for bit"
    )
