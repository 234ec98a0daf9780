"""DALI's `fn.readers.webdataset`, on the CPU: the members' undecoded bytes, with an index and its own shuffle."""

from __future__ import annotations

import pickle
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from nvidia.dali import fn, pipeline_def

from benchmarks.peers import PYD, SHUFFLED, Batch, Batches, Peer, Reader
from benchmarks.peers.webdataset import SHARD
from benchmarks.workloads import Workload


def _open(folder: Path, workload: Workload) -> Reader:
    shard, index, size = folder / SHARD, folder / "000000.idx", workload.batch_size
    if not index.exists():
        with tarfile.open(shard, "r:") as tar:
            lines = [f"pyd {member.offset_data} {member.size} {member.name}\n" for member in tar]
        index.write_text(f"v1.2 {len(lines)}\n{''.join(lines)}")

    @pipeline_def(batch_size=size, num_threads=2, device_id=None)
    def pipeline() -> Any:
        files = {"paths": [str(shard)], "index_paths": [str(index)], "ext": ["pyd"]}
        shuffle = {"random_shuffle": True, "initial_fill": SHUFFLED * size}
        return fn.readers.webdataset(**files, **shuffle, missing_component_behavior="error")

    built: list[Any] = []

    def rewind() -> None:
        # A pipeline continues where it stopped, and begins to read at its first run.
        built[:] = [pipeline()]
        built[0].build()

    def batches(sizes: Batches) -> Iterator[Batch]:
        for _ in sizes:
            (members,) = built[0].run()
            arrays = [np.asarray(members[row]) for row in range(len(members))]
            yield Batch(len(arrays), lambda arrays=arrays: [pickle.loads(array.tobytes()) for array in arrays])

    return Reader(batches=batches, is_stream=True, rewind=rewind)


PEERS = [Peer("DALI, raw members", _open, store=PYD)]
