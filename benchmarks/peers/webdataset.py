"""webdataset: a tar with `.pyd`, `.pth` or `.npz`, read as a stream; a buffer of samples to shuffle."""

from __future__ import annotations

import io
import json
import random
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import torch
import webdataset as wds
from torch.utils.data import default_collate

from benchmarks.peers.base import SHUFFLED, Peer, Reader, as_tensors, by_stream
from benchmarks.workloads import Workload

SHARD = "000000.tar"


def write(folder: Path, workload: Workload, samples: Sequence[Any], *, field: str) -> None:
    """Write samples with webdataset's own writer, as its users do."""
    with wds.TarWriter(str(folder / SHARD), mtime=0) as sink:
        for index, sample in enumerate(samples):
            if field == "npz":
                stream = io.BytesIO()
                encode_npz(workload, sample, stream)
                sample = stream.getvalue()
            sink.write({"__key__": f"{index:08d}", field: sample})


def encode_npz(workload: Workload, sample: Any, target: Any) -> None:
    """Write a sample as a `.npz` into a path or a stream, its small values as JSON in an array of bytes."""
    tensors, small = workload.split(sample)
    encoded = np.frombuffer(json.dumps(small).encode(), np.uint8)
    np.savez(target, small=encoded, **{name: tensor.numpy() for name, tensor in tensors.items()})


def decode_npz(workload: Workload, source: Any) -> Any:
    """Return the sample of a `.npz`, from a path or a stream."""
    with np.load(source) as arrays:
        tensors = as_tensors({name: arrays[name] for name in workload.dtypes})
        return workload.nest(tensors, json.loads(arrays["small"].tobytes()))


def _open(folder: Path, workload: Workload, *, field: str) -> Reader:
    size = workload.batch_size
    shards = wds.SimpleShardList(str(folder / SHARD))
    if field == "npz":
        decode = wds.map(lambda sample: {"npz": decode_npz(workload, io.BytesIO(sample["npz"]))})
    else:
        decode = wds.decode()

    def samples() -> Iterator[Any]:
        return (sample[field] for sample in wds.DataPipeline(shards, wds.tarfile_to_samples(), decode))

    def shuffle() -> Any:
        return wds.shuffle(SHUFFLED * size, initial=SHUFFLED * size, rng=random.Random(0))

    def loaders() -> dict[str, Any]:
        def collated(batch: list[Any]) -> Any:
            return default_collate([workload.split(sample[field])[0] for sample in batch])

        if field != "pyd":
            return {}
        stages = (wds.tarfile_to_samples(), shuffle(), decode, wds.batched(size, collation_fn=collated))
        return {", WebLoader, 0 workers": wds.WebLoader(wds.DataPipeline(shards, *stages), batch_size=None).__iter__}

    return by_stream(workload, samples, lambda: shuffle()(islice(samples(), workload.timed)), loaders=loaders)


def _over_http(url: str, store: Path, cache: Path, workload: Workload) -> Iterator[tuple[int, torch.Tensor]]:
    shard = f"pipe:curl -sf {url}/{quote(store.name)}/{SHARD}"
    for sample in wds.DataPipeline(wds.SimpleShardList(shard), wds.tarfile_to_samples(), wds.decode()):
        tensors, small = workload.split(sample["pyd"])
        yield small["index"], tensors[workload.one[0]]


def peers() -> list[Peer]:
    """Return webdataset's rows."""
    return [
        Peer(
            name=f"webdataset .{field}",
            open=partial(_open, field=field),
            write=partial(write, field=field),
            over_http=_over_http if field == "pyd" else None,
        )
        for field in ("pyd", "pth", "npz")
    ]
