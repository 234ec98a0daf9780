"""Scenario `wds_decode`: the same samples through webdataset's own pipeline, in our format and in the usual ones."""

from __future__ import annotations

from functools import partial
from typing import Any

import webdataset as wds

import wds_tensorcache as tc
from benchmarks.harness import Context, Rows
from benchmarks.peers.webdataset import SHARD, stream, write

FAST_RAW = "raw members, tc.tarfile_to_samples"
FAST = "tensorcache, tc.tarfile_to_samples, lazy, touched"


def wds_decode(context: Context) -> Rows:
    """Measure one pass over a shard as a stream. "touched" uses one byte of each page of every tensor."""
    workload, folder = context.workload, context.new_folder()
    for field, options in {"tensorcache": {"encoder": tc.encoder()}, "pyd": {}}.items():
        (folder / field).mkdir()
        write(folder / field, workload, context.samples[: workload.timed], field=field, **options)
    ours, pyd = (partial(stream, folder / field / SHARD) for field in ("tensorcache", "pyd"))
    stock, fast = wds.tarfile_to_samples(), tc.tarfile_to_samples()
    # name: (pipeline, field that holds the sample, whether its tensors are used)
    rows: dict[str, tuple[Any, str | None, bool]] = {
        "raw members": (ours(stock), None, False),
        "tensorcache, lazy": (ours(stock, tc.decode()), "tensorcache", False),
        "tensorcache, eager": (ours(stock, tc.decode(lazy=False)), "tensorcache", False),
        "tensorcache, eager, touched": (ours(stock, tc.decode(lazy=False)), "tensorcache", True),
        FAST_RAW: (ours(fast), None, False),
        FAST: (ours(fast, tc.decode()), "tensorcache", True),
        ".pyd": (pyd(stock, wds.decode()), "pyd", False),
        ".pyd, touched": (pyd(stock, wds.decode()), "pyd", True),
    }

    def run(pipeline: Any, field: str | None, is_touched: bool) -> int:
        count = 0
        for sample in pipeline:
            if is_touched:
                workload.touch(sample[field])
            count += 1
        return count

    def decoded(sample: dict[str, Any], field: str | None) -> Any:
        return sample[field] if field else tc.decode_sample(sample["skel.pyd"], sample["safetensors"])

    for name, (pipeline, field, _) in rows.items():
        context.check(name, (decoded(sample, field) for sample in pipeline), range(workload.timed))
    return context.rows({name: partial(run, *row) for name, row in rows.items()}, store=folder)
