"""DALI's `fn.readers.webdataset`, on the CPU: the members' undecoded bytes, with an index and its own shuffle."""

from __future__ import annotations

import pickle
import tarfile
from collections.abc import Iterator
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from nvidia.dali import fn, pipeline_def

from benchmarks.peers.base import SHUFFLED, Batch, Batches, Peer, Reader
from benchmarks.peers.webdataset import SHARD
from benchmarks.workloads import Workload

_THREADS = 2
_UNMAPPED_AHEAD = 4  # batches; DALI's default is 2


@pipeline_def
def _pipeline(shard: Path, shuffled: int, mapped: bool) -> Any:
    options: dict[str, Any] = {"random_shuffle": True, "initial_fill": shuffled} if shuffled else {}
    options["dont_use_mmap"] = not mapped
    paths = {"paths": [str(shard)], "index_paths": [str(shard.with_suffix(".idx"))]}
    return fn.readers.webdataset(**paths, ext=["pyd"], missing_component_behavior="error", **options)


def _index(shard: Path) -> None:
    with tarfile.open(shard, "r:") as tar:
        lines = [f"pyd {member.offset_data} {member.size} {member.name}\n" for member in tar]
    shard.with_suffix(".idx").write_text(f"v1.2 {len(lines)}\n{''.join(lines)}")


def _open(folder: Path, workload: Workload, *, mapped: bool = True) -> Reader:
    shard = folder / SHARD
    if not shard.with_suffix(".idx").exists():
        _index(shard)
    pipelines: dict[int, Any] = {}  # by the size of the buffer that shuffles, or 0

    def build(shuffled: int) -> None:
        pipelines[shuffled] = _pipeline(
            shard,
            shuffled,
            mapped,
            batch_size=workload.batch_size,
            num_threads=_THREADS,
            device_id=None,
            prefetch_queue_depth=2 if mapped else _UNMAPPED_AHEAD,
        )
        pipelines[shuffled].build()

    def rewind() -> None:
        # A pipeline continues where it stopped, and begins to read at its first run.
        for shuffled in list(pipelines):
            build(shuffled)

    def runs(shuffled: int, count: int) -> Iterator[list[Any]]:
        if shuffled not in pipelines:
            build(shuffled)
        for _ in range(count // workload.batch_size):
            (members,) = pipelines[shuffled].run()
            yield [np.asarray(members[row]) for row in range(len(members))]

    def samples() -> Iterator[Any]:
        return chain.from_iterable(runs(0, workload.timed))

    def batches(sizes: Batches) -> Iterator[Batch]:
        for members in runs(SHUFFLED * workload.batch_size, sum(map(len, sizes))):
            yield Batch(len(members), lambda members=members: list(map(_decode, members)))

    return Reader(
        samples=samples if mapped else None,
        batches=batches,
        is_stream=True,
        decode=_decode,
        touch=lambda member: int(member[::4096].sum()),
        rewind=rewind,
    )


def _decode(member: Any) -> Any:
    return pickle.loads(member.tobytes())


def peers() -> list[Peer]:
    """Return DALI's rows: one with its defaults, one with the options that are faster for cold files."""
    return [
        Peer(name="DALI, raw members", open=_open, store="webdataset .pyd"),
        Peer(name="DALI, raw members, not mapped", open=partial(_open, mapped=False), store="webdataset .pyd"),
    ]
