"""MDS (mosaicml-streaming): an array column per tensor, the small values as JSON."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

from benchmarks.peers import Peer, Reader, as_arrays, as_tensors, by_index
from benchmarks.workloads import Workload

# The package's own __init__ imports what it has for pictures, and so torchvision, whose builds fit one build of torch.
_spec = importlib.util.find_spec("streaming")
if _spec is None:
    raise ModuleNotFoundError("No module named 'streaming'")
sys.modules["streaming"] = importlib.util.module_from_spec(_spec)  # not run
from streaming.base import MDSWriter, StreamingDataset  # noqa: E402
from streaming.base.util import clean_stale_shared_memory  # noqa: E402


def _write(folder: Path, workload: Workload, samples: Sequence[Any]) -> None:
    columns = {name: f"ndarray:{array.dtype}" for name, array in as_arrays(workload.split(samples[0])[0]).items()}
    with MDSWriter(out=str(folder), columns={**columns, "small": "json"}) as writer:
        for sample in samples:
            tensors, small = workload.split(sample)
            writer.write({**as_arrays(tensors), "small": small})


def _open(folder: Path, workload: Workload) -> Reader:
    dataset, size = StreamingDataset(local=str(folder), shuffle=False, batch_size=1), workload.batch_size

    def get(index: int) -> Any:
        item = dataset[index]
        return workload.nest(as_tensors({name: item[name] for name in workload.names}), item["small"])

    def loaders() -> dict[str, Any]:
        # With its default of 8 samples ahead, most of the time it sleeps.
        shuffled = StreamingDataset(local=str(folder), shuffle=True, batch_size=size, predownload=2 * workload.count)
        return {", DataLoader, 0 workers": DataLoader(shuffled, batch_size=size).__iter__}

    # In order by index, too: an iterator over the data set looks for samples that are ready every 7 ms, and sleeps in between.
    return by_index(workload, len(dataset), get, loaders=loaders, close=clean_stale_shared_memory)


def _over_http(url: str, store: Path, cache: Path, workload: Workload) -> Iterator[tuple[int, torch.Tensor]]:
    os.environ["S3_ENDPOINT_URL"] = url
    clean_stale_shared_memory()
    dataset = StreamingDataset(remote=f"s3://{store.name}", local=str(cache), shuffle=False, batch_size=1)
    for index in range(len(dataset)):
        yield index, torch.from_numpy(dataset[index][workload.one[0]])


PEERS = [Peer("MDS", _open, _write, over_http=_over_http)]
