"""Write and read datasets on a cluster of Ray while one of its workers is killed, and look for lost and doubled samples."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator
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
        warnings.simplefilter("ignore")
        options: dict[str, Any] = {"include_dashboard": False, "log_to_driver": False, "logging_level": "ERROR"}
        ray.init(num_cpus=2, object_store_memory=200_000_000, **options)
        import ray.data

        ray.data.DataContext.get_current().enable_progress_bars = False
        try:
            yield
        finally:
            ray.shutdown()


class Noting:
    """A function of blocks that changes nothing, and notes its process and each of its calls in a folder."""

    def __init__(self, notes: Path) -> None:
        self._notes = notes

    def __call__(self, table: Any) -> Any:
        with open(self._notes / f"{os.getpid()}", "a") as file:
            file.write(f"{table.num_rows}\n")
        time.sleep(_BLOCK_S)
        return table


class Killer(threading.Thread):
    """A thread that waits for a worker's first note, and kills a worker that has noted something a moment later."""

    def __init__(self, notes: Path, pause_s: float, chance: random.Random) -> None:
        super().__init__()
        self._notes, self._pause_s, self._chance = notes, pause_s, chance
        self._is_over = threading.Event()

    def run(self) -> None:
        while not (pids := os.listdir(self._notes)) and not self._is_over.wait(0.001):
            pass
        if not self._is_over.wait(self._pause_s):
            pids = os.listdir(self._notes)
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(self._chance.choice(pids)), signal.SIGKILL)

    def end(self) -> None:
        self._is_over.set()
        self.join()


def _attempt(notes: Path, pause_s: float, chance: random.Random, run: Callable[[Noting], None]) -> bool:
    """Run a dataset with a `Noting` while a worker is killed; return whether a block had to be made again."""
    notes.mkdir()
    killer = Killer(notes, pause_s, chance)
    killer.start()
    try:
        run(Noting(notes))
    finally:
        killer.end()
    return sum(len(path.read_text().splitlines()) for path in notes.iterdir()) > _NUM_BLOCKS


def check_cache(folder: Path) -> None:
    """Assert that a cache has each sample once, and that the folder has no other shard."""
    with tc.open(folder) as cache:
        assert sorted(cache.keys()) == [f"{i:04d}" for i in range(COUNT)]
        for i in range(COUNT):
            assert_same(sample(i), cache[f"{i:04d}"])
        names = {name for name in os.listdir(folder) if name.endswith(".tar")}
        assert len(names) == cache.num_shards
        assert not any(name.startswith(".") for name in os.listdir(folder))


def check_rows(rows: list[dict[str, Any]]) -> None:
    """Assert that a dataset has each sample once."""
    assert sorted(row["__key__"] for row in rows) == [f"{i:04d}" for i in range(COUNT)]
    for row in rows:
        assert_same(sample(int(row["__key__"])), tc.ray.ray_sample(row))


def write_and_read(folder: Path, rounds: int, seed: int) -> tuple[int, int]:
    """Write and read all samples `rounds` times each; a worker that runs a task is killed each time.

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
            place = folder / f"{kind}-{counts[kind]}"
            place.mkdir()
            pause_s = chance.uniform(0, _BLOCK_S * _NUM_BLOCKS / 2)

            def write(noting: Noting, out: Path = place / "out") -> None:
                dataset = tc.ray.read_ray(folder / "source", override_num_blocks=_NUM_BLOCKS)
                tc.ray.write_ray(
                    dataset.map_batches(noting, batch_format="pyarrow", batch_size=None), out, max_samples=50
                )
                check_cache(out)

            def read(noting: Noting) -> None:
                dataset = tc.ray.read_ray(folder / "source", override_num_blocks=_NUM_BLOCKS)
                check_rows(dataset.map_batches(noting, batch_format="pyarrow", batch_size=None).take_all())

            hits += _attempt(place / "notes", pause_s, chance, read if kind else write)
    return counts[0], counts[1]


if __name__ == "__main__":
    kills = int(sys.argv[1]) if len(sys.argv) > 1 else 20
    with tempfile.TemporaryDirectory() as made, cluster():
        writes, reads = write_and_read(Path(made), kills, seed=random.randrange(1 << 30))
    print(
        f"{kills} of {writes} writes and {kills} of {reads} reads of {COUNT} samples had a worker killed in a task: "
        "each sample was there once, bit for bit"
    )
