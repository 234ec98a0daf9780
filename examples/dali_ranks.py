"""Two processes with a GPU each share every epoch: each sample goes to one of them.

    torchrun --nproc-per-node 2 examples/dali_ranks.py [--out demo_out]

Without GPUs the same runs on the CPU. Needs: wds_tensorcache, DALI.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from nvidia.dali import pipeline_def

import dali_plugin
import wds_tensorcache as tc

COUNT, BATCH = 1000, 32


def write_cache(out: Path) -> None:
    """Write samples that a rank can count."""
    with tc.ShardWriter(out / "ranks-%03d.tar", max_samples=300, overwrite=True) as sink:
        for i in range(COUNT):
            sink.write(f"{i:06d}", {"latent": torch.full((4, 16, 16), i, dtype=torch.bfloat16), "index": i})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("demo_out"), help="folder for shards")
    out = parser.parse_args().out / "ranks"
    on_gpu = torch.cuda.is_available()
    if "LOCAL_RANK" not in os.environ:
        parser.error("run it with torchrun, as above")
    local = int(os.environ["LOCAL_RANK"])
    if on_gpu:
        torch.cuda.set_device(local)
    dist.init_process_group("nccl" if on_gpu else "gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if rank == 0:
        write_cache(out)
    dist.barrier()

    @pipeline_def(batch_size=BATCH, num_threads=2, device_id=local if on_gpu else None)
    def pipeline() -> Any:
        # the order is a permutation of all samples, the same on all ranks; each rank gets every `world_size`-th sample
        return dali_plugin.fn.tensorcache(
            out, shuffle=True, rank=rank, world_size=world_size, last_batch="drop", device="gpu" if on_gpu else "cpu"
        )

    iterator = dali_plugin.TensorCacheIterator(pipeline())
    for epoch in range(2):
        seen = torch.zeros(COUNT, device="cuda" if on_gpu else "cpu")
        for batch in iterator:  # the same number of batches on every rank
            seen[torch.tensor(list(batch["index"]))] += 1
            # a step of training would be here
        dist.all_reduce(seen)
        if rank == 0:
            print(f"epoch {epoch}: {len(iterator)} batches on each of {world_size} ranks")
            print(
                f"  {int((seen == 1).sum())} samples came once, {int((seen > 1).sum())} twice, {int((seen == 0).sum())} not"
            )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
