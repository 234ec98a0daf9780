"""Scenario `wds_decode`: the same samples through webdataset's own pipeline, in our format and in the usual ones."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import webdataset as wds

import wds_tensorcache as tc
from benchmarks.harness import Context, Rows
from benchmarks.peers.webdataset import SHARD, write

FAST_RAW = "raw members, tc.tarfile_to_samples"
FAST = "tensorcache, tc.tarfile_to_samples, lazy, touched"


def _write(context: Context, folder: Path) -> dict[str, str]:
    """Return shards with the samples of one pass."""
    samples = context.samples[: context.workload.timed]
    shards = {}
    for field in ("tensorcache", "pyd"):
        (folder / field).mkdir(parents=True)
        shards[field] = str(folder / field / SHARD)
    write(folder / "pyd", context.workload, samples, field="pyd")
    with wds.TarWriter(shards["tensorcache"], mtime=0, encoder=tc.encoder()) as sink:
        for index, sample in enumerate(samples):
            sink.write({"__key__": f"{index:08d}", "tensorcache": sample})
    return shards


@contextmanager
def wds_decode(context: Context) -> Iterator[Rows]:
    """Measure one pass over a shard as a stream. "touched" uses one byte of each page of every tensor."""
    workload = context.workload
    folder = context.scratch / "wds_decode"
    shards = _write(context, folder)
    ours = shards["tensorcache"]
    stock, fast = wds.tarfile_to_samples(), tc.tarfile_to_samples()
    # name: (shard, stages, field that holds the sample, whether its tensors are used)
    rows: dict[str, tuple[str, list[Any], str | None, bool]] = {
        "raw members": (ours, [stock], None, False),
        "tensorcache, lazy": (ours, [stock, tc.decode()], "tensorcache", False),
        "tensorcache, eager": (ours, [stock, tc.decode(lazy=False)], "tensorcache", False),
        "tensorcache, eager, touched": (ours, [stock, tc.decode(lazy=False)], "tensorcache", True),
        FAST_RAW: (ours, [fast], None, False),
        FAST: (ours, [fast, tc.decode()], "tensorcache", True),
        ".pyd": (shards["pyd"], [stock, wds.decode()], "pyd", False),
        ".pyd, touched": (shards["pyd"], [stock, wds.decode()], "pyd", True),
    }

    def samples(shard: str, stages: list[Any]) -> Iterator[dict[str, Any]]:
        return iter(wds.DataPipeline(wds.SimpleShardList(shard), *stages))

    def run(shard: str, stages: list[Any], field: str | None, touched: bool) -> int:
        seen = 0
        for sample in samples(shard, stages):
            if touched:
                workload.touch(sample[field])
            seen += 1
        return seen

    def decoded(sample: dict[str, Any], field: str | None) -> Any:
        return sample[field] if field else tc.decode_sample(sample["skel.pyd"], sample["safetensors"])

    for name, (shard, stages, field, _) in rows.items():
        context.check(name, (decoded(sample, field) for sample in samples(shard, stages)), range(workload.timed))
    try:
        runs = {name: partial(run, *row) for name, row in rows.items()}
        yield context.rows(runs, stores=dict.fromkeys(runs, folder))
    finally:
        shutil.rmtree(folder)
