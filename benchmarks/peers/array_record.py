"""array_record: one pickle of numpy arrays per record, uncompressed, each its own group for random access."""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from array_record.python.array_record_module import ArrayRecordReader, ArrayRecordWriter

from benchmarks.peers import Peer, Reader, as_arrays, as_tensors, by_index
from benchmarks.workloads import Workload

_FILE = "000000.array_record"


def _write(folder: Path, workload: Workload, samples: Sequence[Any]) -> None:
    writer = ArrayRecordWriter(str(folder / _FILE), "group_size:1,uncompressed")
    for sample in samples:
        tensors, small = workload.split(sample)
        writer.write(pickle.dumps((as_arrays(tensors), small), protocol=5))
    writer.close()


def _open(folder: Path, workload: Workload) -> Reader:
    reader = ArrayRecordReader(str(folder / _FILE))
    count, size = reader.num_records(), workload.batch_size

    def several(indices: Sequence[int]) -> list[Any]:
        parts = map(pickle.loads, reader.read(list(indices)))
        return [workload.nest(as_tensors(arrays), small) for arrays, small in parts]

    def samples() -> Iterator[Any]:
        for begin in range(0, count, size):
            yield from several(range(begin, min(begin + size, count)))

    operations = {"several": several, "samples": samples, "close": reader.close}
    return by_index(workload, count, lambda index: several([index])[0], **operations)


PEERS = [Peer("array_record + pickle", _open, _write)]
