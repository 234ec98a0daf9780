"""What is measured, one file for each scenario or for those that share their rows."""

from __future__ import annotations

from functools import partial

from benchmarks.harness import Scenario
from benchmarks.scenarios import (
    dali,
    gpu,
    importing,
    many_shards,
    reading,
    remote,
    shared,
    verifying,
    wds_decode,
    worker_handoff,
    writing,
)

SCENARIOS: dict[str, Scenario] = {
    # First: litdata, once read in order, keeps its files mapped until the process ends (its loaders stay in a
    # functools.lru_cache), and mapped files cannot be dropped from the page cache.
    "batch_cold": reading.batch_cold,
    "write": writing.write,
    "write_fsync": partial(writing.write, fsync=True),
    "import": importing.importing,
    "open": reading.opened,
    "iterate_lazy": reading.iterate_lazy,
    "iterate_touch": reading.iterate_touch,
    "random_get": reading.random_get,
    "batch_random": reading.batch_random,
    "one_tensor": reading.one_tensor,
    "wds_decode": wds_decode.wds_decode,
    "worker_handoff": worker_handoff.worker_handoff,
    "loader": reading.loader,
    "verify": verifying.verify,
    "many_shards": many_shards.many_shards,
    "shared": shared.shared,
    "remote": remote.remote,
    "dali_cpu": dali.dali_cpu,
    "dali_gpu": dali.dali_gpu,
    "loader_gpu": gpu.loader_gpu,
}

# Scenarios with one run in all, and those with batches that are not padded: their workloads.
ONLY = {
    **dict.fromkeys(("import", "shared", "remote"), ("diffusion",)),
    "many_shards": ("features",),
    **dict.fromkeys(("worker_handoff", "loader", "dali_cpu", "dali_gpu", "loader_gpu"), ("diffusion", "features")),
}
