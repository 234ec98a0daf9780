"""webdataset: a tar with `.pyd`, `.pth` or `.npz`, read as a stream; a buffer of samples to shuffle."""

from __future__ import annotations

import io
import json
import random
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
import webdataset as wds
from torch.utils.data import default_collate

from benchmarks.peers.base import AS_INTEGERS, Batch, Peer, Reader, as_array, as_tensor, in_batches, one_in_batches
from benchmarks.workloads import Workload

SHARD = "000000.tar"
_SHUFFLED = 8  # batches in the buffer that shuffles


def write(folder: Path, workload: Workload, samples: Sequence[Any], *, field: str) -> None:
    """Write samples with webdataset's own writer, as its users do."""
    with wds.TarWriter(str(folder / SHARD), mtime=0) as sink:
        for index, sample in enumerate(samples):
            value = encode_npz(workload, sample) if field == "npz" else sample
            sink.write({"__key__": f"{index:08d}", field: value})


def encode_npz(workload: Workload, sample: Any) -> bytes:
    """Return a sample as the bytes of a `.npz`, its small values as JSON in an array of bytes."""
    tensors, small = workload.split(sample)
    stream = io.BytesIO()
    encoded = np.frombuffer(json.dumps(small).encode(), np.uint8)
    np.savez(stream, small=encoded, **{name: as_array(tensor) for name, tensor in tensors.items()})
    return stream.getvalue()


def decode_npz(workload: Workload, source: Any) -> Any:
    """Return the sample of a `.npz`, from a path or a stream."""
    with np.load(source) as arrays:
        tensors = {name: as_tensor(arrays[name], dtype) for name, dtype in workload.dtypes.items()}
        return workload.nest(tensors, json.loads(arrays["small"].tobytes()))


def _stream(folder: Path, decode: Callable[[Any], Any]) -> Iterator[Any]:
    shards = wds.SimpleShardList(str(folder / SHARD))
    return iter(wds.DataPipeline(shards, wds.tarfile_to_samples(), decode))


def _open(folder: Path, workload: Workload, *, field: str) -> Reader:
    if field == "npz":
        decode = wds.map(lambda sample: {"npz": decode_npz(workload, io.BytesIO(sample["npz"]))})
    else:
        decode = wds.decode()

    def samples() -> Iterator[Any]:
        return (sample[field] for sample in _stream(folder, decode))

    def batches(count: int) -> Iterator[Batch]:
        nbuffered = _SHUFFLED * workload.batch_size
        buffered = wds.shuffle(nbuffered, initial=nbuffered, rng=random.Random(0))(islice(samples(), count))
        return in_batches(workload, buffered, count)

    def ones(count: int) -> Iterator[torch.Tensor]:
        return one_in_batches(workload, samples(), count)

    def loaders() -> dict[str, Any]:
        size = workload.batch_size

        def collated(batch: list[Any]) -> Any:
            parts = [workload.split(sample[field]) for sample in batch]
            return default_collate([{**tensors, "small": small} for tensors, small in parts])

        buffered = wds.shuffle(_SHUFFLED * size, initial=_SHUFFLED * size, rng=random.Random(0))
        stages = (wds.tarfile_to_samples(), buffered, decode, wds.batched(size, collation_fn=collated))
        pipeline = wds.DataPipeline(wds.SimpleShardList(str(folder / SHARD)), *stages)
        return {"WebLoader, 0 workers": wds.WebLoader(pipeline, batch_size=None)} if field == "pyd" else {}

    return Reader(samples=samples, batches=batches, ones=ones, loaders=loaders)


def peers() -> list[Peer]:
    """Return webdataset's rows."""
    return [
        Peer(
            name=f"webdataset .{field}",
            open=partial(_open, field=field),
            write=partial(write, field=field),
            bf16=AS_INTEGERS if field == "npz" else None,
        )
        for field in ("pyd", "pth", "npz")
    ]
