"""array_record: one pickle of numpy arrays per record, uncompressed, each its own group for random access."""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from array_record.python.array_record_module import ArrayRecordReader, ArrayRecordWriter

from benchmarks.peers.base import AS_INTEGERS, Batch, Peer, Reader, as_array, as_tensor, stack
from benchmarks.workloads import Workload

_FILE = "000000.array_record"


def _write(folder: Path, workload: Workload, samples: Sequence[Any]) -> None:
    writer = ArrayRecordWriter(str(folder / _FILE), "group_size:1,uncompressed")
    for sample in samples:
        tensors, small = workload.split(sample)
        arrays = {name: as_array(tensor) for name, tensor in tensors.items()}
        writer.write(pickle.dumps((arrays, small), protocol=5))
    writer.close()


def _open(folder: Path, workload: Workload) -> Reader:
    reader = ArrayRecordReader(str(folder / _FILE))

    def nested(record: bytes) -> Any:
        arrays, small = pickle.loads(record)
        tensors = {name: as_tensor(arrays[name], dtype) for name, dtype in workload.dtypes.items()}
        return workload.nest(tensors, small)

    def several(indices: Sequence[int]) -> list[Any]:
        return [nested(record) for record in reader.read(list(indices))]

    def get(index: int) -> Any:
        return several([index])[0]

    def samples() -> Iterator[Any]:
        for begin in range(0, reader.num_records(), workload.batch_size):
            yield from several(range(begin, min(begin + workload.batch_size, reader.num_records())))

    def batch(indices: Sequence[int]) -> Batch:
        return stack(workload, several(indices))

    def one(indices: Sequence[int]) -> torch.Tensor:
        return torch.stack([workload.split(sample)[0][workload.one[0]] for sample in several(indices)])

    return Reader(samples=samples, get=get, batch=batch, one=one, close=reader.close)


def peers() -> list[Peer]:
    """Return array_record's row."""
    return [Peer(name="array_record + pickle", open=_open, write=_write, bf16=AS_INTEGERS)]
