"""Hugging Face `datasets`: one tensor of every sample, streamed from our shards on a server. It has no other row."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import safetensors.torch
import torch
from datasets import disable_progress_bars, load_dataset

from benchmarks.peers import NAME, Peer
from benchmarks.workloads import Workload


def _over_http(url: str, store: Path, cache: Path, workload: Workload) -> Iterator[tuple[int, torch.Tensor]]:
    disable_progress_bars()
    files = [f"{url}/{store.name}/{path.name}" for path in sorted(store.glob("*.tar"))]
    for sample in load_dataset("webdataset", data_files={"train": files}, split="train", streaming=True):
        yield int(sample["__key__"]), safetensors.torch.load(sample["safetensors"])[workload.one[1]]


PEERS = [Peer("HF datasets", over_http=_over_http, store=NAME)]
