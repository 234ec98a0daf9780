"""litdata: chunks by its own writer, read by `StreamingDataset`: in order, by index, and in its own shuffled order."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from litdata import StreamingDataLoader, StreamingDataset
from litdata.streaming import downloader
from litdata.streaming.item_loader import PyTreeLoader
from litdata.streaming.writer import BinaryWriter

from benchmarks.peers.base import Peer, Reader, by_stream
from benchmarks.workloads import Workload


def _write(folder: Path, workload: Workload, samples: Sequence[Any]) -> None:
    # The function that litdata.optimize runs in each worker; starting the workers is not counted.
    writer = BinaryWriter(str(folder), chunk_bytes="64MB")
    for index, sample in enumerate(samples):
        tensors, small = workload.split(sample)
        writer.add_item(index, {**tensors, "small": small})
    writer.done()
    writer.merge()


def _open(folder: Path, workload: Workload) -> Reader:
    # By default it decodes eight large samples at a time, which helps in order alone.
    in_order = StreamingDataset(str(folder), shuffle=False)
    by_index = StreamingDataset(str(folder), shuffle=False, batch_decode=1)
    shuffled = StreamingDataset(str(folder), shuffle=True, batch_decode=1)

    def nested(item: Any) -> Any:
        return workload.nest({name: item[name] for name in workload.dtypes}, item["small"])

    def loaders() -> dict[str, Any]:
        options = {"batch_size": workload.batch_size, "shuffle": True}
        return {
            f", StreamingDataLoader, {count} workers": StreamingDataLoader(
                StreamingDataset(str(folder), shuffle=True, batch_decode=1),
                num_workers=count,
                persistent_workers=count > 0,
                **options,
            ).__iter__
            for count in (0, 2)
        }

    return by_stream(
        workload,
        lambda: map(nested, in_order),
        lambda: map(nested, shuffled),
        get=lambda index: nested(by_index[index]),
        loaders=loaders,
        close=_close,
    )


def _close() -> None:
    # Each pass leaves two loaders that nothing frees, and their maps: what is mapped cannot leave the page cache.
    for loader in gc.get_objects():
        if type(loader) is PyTreeLoader:
            loader.close(0)


def _over_http(url: str, store: Path, cache: Path, workload: Workload) -> Iterator[tuple[int, torch.Tensor]]:
    # its client refuses servers without TLS, and has no option for it
    downloader._OBSTORE_CLIENT_OPTIONS["allow_http"] = True
    options = {"endpoint_url": url, "aws_access_key_id": "a", "aws_secret_access_key": "b"}
    bucket = f"s3://{store.name}"
    dataset = StreamingDataset(bucket, cache_dir=str(cache), storage_options=options, batch_decode=1)
    name, _ = workload.one
    for index, sample in enumerate(dataset):  # at random, each sample would wait for a chunk
        yield index, sample[name]


def peers() -> list[Peer]:
    """Return litdata's row."""
    return [Peer(name="litdata", open=_open, write=_write, over_http=_over_http)]
