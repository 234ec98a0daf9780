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

from benchmarks.peers import Peer, Reader, by_stream
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

    def shuffled() -> Any:
        return StreamingDataset(str(folder), shuffle=True, batch_decode=1)

    def nested(item: Any) -> Any:
        return workload.nest({name: item[name] for name in workload.names}, item["small"])

    def loader(count: int) -> Any:
        workers = {"num_workers": count, "persistent_workers": count > 0}
        return StreamingDataLoader(shuffled(), batch_size=workload.batch_size, shuffle=True, **workers).__iter__

    stream = shuffled()
    operations = {
        "get": lambda index: nested(by_index[index]),
        "loaders": lambda: {f", StreamingDataLoader, {count} workers": loader(count) for count in (0, 2)},
        "close": _close,
    }
    return by_stream(workload, lambda: map(nested, in_order), lambda: map(nested, stream), **operations)


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
    for index, sample in enumerate(dataset):  # at random, each sample would wait for a chunk
        yield index, sample[workload.one[0]]


PEERS = [Peer("litdata", _open, _write, over_http=_over_http)]
