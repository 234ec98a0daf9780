"""webdataset: a tar with `.pyd` or `.pth`, read as a stream; a buffer of samples to shuffle."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any
from urllib.parse import quote

import torch
import webdataset as wds
from torch.utils.data import default_collate

from benchmarks.peers.base import SHUFFLED, Peer, Reader, by_stream
from benchmarks.workloads import Workload

SHARD = "000000.tar"


def write(folder: Path, workload: Workload, samples: Sequence[Any], *, field: str) -> None:
    """Write samples with webdataset's own writer, as its users do."""
    with wds.TarWriter(str(folder / SHARD), mtime=0) as sink:
        for index, sample in enumerate(samples):
            sink.write({"__key__": f"{index:08d}", field: sample})


def _open(folder: Path, workload: Workload, *, field: str) -> Reader:
    size = workload.batch_size
    shards, decode = wds.SimpleShardList(str(folder / SHARD)), wds.decode()

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
        for field in ("pyd", "pth")
    ]
