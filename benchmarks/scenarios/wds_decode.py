"""Scenario `wds_decode`: the same samples through webdataset's own pipeline, in our format and in the usual ones."""

from __future__ import annotations

import io
import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import webdataset as wds

import wds_tensorcache as tc
from benchmarks import page_cache
from benchmarks.context import Context
from benchmarks.peers.webdataset import SHARD, decode_npz, write
from benchmarks.timing import Rounds, Variant, interleaved

FAST_RAW = "raw members, tc.tarfile_to_samples"
FAST = "tensorcache, tc.tarfile_to_samples, lazy, touched"


def _write(context: Context, folder: Path) -> dict[str, str]:
    """Return shards with the samples of one pass."""
    samples = context.samples[: context.workload.timed]
    shards = {}
    for field in ("tensorcache", "pyd", "pth", "npz"):
        (folder / field).mkdir(parents=True)
        shards[field] = str(folder / field / SHARD)
        if field != "tensorcache":
            write(folder / field, context.workload, samples, field=field)
    with wds.TarWriter(shards["tensorcache"], mtime=0, encoder=tc.encoder()) as sink:
        for index, sample in enumerate(samples):
            sink.write({"__key__": f"{index:08d}", "tensorcache": sample})
    return shards


def wds_decode(context: Context) -> Rounds:
    """Measure one pass over a shard as a stream. "touched" uses one byte of each page of every tensor."""
    workload = context.workload
    folder = context.scratch / "wds_decode"
    shards = _write(context, folder)
    ours = shards["tensorcache"]
    decode = wds.map(lambda sample: {"npz": decode_npz(workload, io.BytesIO(sample["npz"]))})
    stock, fast = wds.tarfile_to_samples(), tc.tarfile_to_samples()
    # name: (shard, stages, field that holds the sample, whether its tensors are used)
    rows: dict[str, tuple[str, list[Any], str | None, bool]] = {
        "raw members": (ours, [stock], None, False),
        "tensorcache, lazy": (ours, [stock, tc.decode()], "tensorcache", False),
        "tensorcache, lazy, touched": (ours, [stock, tc.decode()], "tensorcache", True),
        "tensorcache, eager": (ours, [stock, tc.decode(lazy=False)], "tensorcache", False),
        "tensorcache, eager, touched": (ours, [stock, tc.decode(lazy=False)], "tensorcache", True),
        "tensorcache, verified, touched": (ours, [stock, tc.decode(verify=True)], "tensorcache", True),
        FAST_RAW: (ours, [fast], None, False),
        FAST: (ours, [fast, tc.decode()], "tensorcache", True),
        ".pyd": (shards["pyd"], [stock, wds.decode()], "pyd", False),
        ".pyd, touched": (shards["pyd"], [stock, wds.decode()], "pyd", True),
        ".pth, touched": (shards["pth"], [stock, wds.decode()], "pth", True),
        ".npz, touched": (shards["npz"], [stock, decode], "npz", True),
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
    variants = {
        name: Variant(partial(run, *row), workload.timed, partial(page_cache.load, folder))
        for name, row in rows.items()
    }
    try:
        return interleaved(variants, context.rounds)
    finally:
        shutil.rmtree(folder)
