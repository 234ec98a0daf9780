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

from benchmarks.peers import PYD, SHUFFLED, Peer, Reader, by_stream
from benchmarks.workloads import Workload

SHARD = "000000.tar"


def write(folder: Path, workload: Workload, samples: Sequence[Any], *, field: str, **options: Any) -> None:
    """Write samples with webdataset's own writer, as its users do."""
    with wds.TarWriter(str(folder / SHARD), mtime=0, **options) as sink:
        for index, sample in enumerate(samples):
            sink.write({"__key__": f"{index:08d}", field: sample})


def stream(shard: Path | str, *stages: Any) -> Any:
    return wds.DataPipeline(wds.SimpleShardList(str(shard)), *stages)


def shuffle(workload: Workload) -> Any:
    buffered = SHUFFLED * workload.batch_size
    return wds.shuffle(buffered, initial=buffered, rng=random.Random(0))


def _open(folder: Path, workload: Workload, *, field: str) -> Reader:
    read, decode = partial(stream, folder / SHARD, wds.tarfile_to_samples()), wds.decode()

    def samples() -> Iterator[Any]:
        return (sample[field] for sample in read(decode))

    def collated(batch: list[Any]) -> Any:
        return default_collate([workload.split(sample[field])[0] for sample in batch])

    def loaders() -> dict[str, Any]:
        if field != "pyd":
            return {}
        batched = wds.batched(workload.batch_size, collation_fn=collated)
        loader = wds.WebLoader(read(shuffle(workload), decode, batched), batch_size=None)
        return {", WebLoader, 0 workers": loader.__iter__}

    return by_stream(workload, samples, lambda: shuffle(workload)(islice(samples(), workload.timed)), loaders=loaders)


def _over_http(url: str, store: Path, cache: Path, workload: Workload) -> Iterator[tuple[int, torch.Tensor]]:
    shard = f"pipe:curl -sf {url}/{quote(store.name)}/{SHARD}"
    for sample in stream(shard, wds.tarfile_to_samples(), wds.decode()):
        tensors, small = workload.split(sample["pyd"])
        yield small["index"], tensors[workload.one[0]]


PEERS = [
    Peer(PYD, partial(_open, field="pyd"), partial(write, field="pyd"), over_http=_over_http),
    Peer("webdataset .pth", partial(_open, field="pth"), partial(write, field="pth")),
]
