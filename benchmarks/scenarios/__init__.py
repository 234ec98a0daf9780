"""The scenarios in the order in which they run."""

from __future__ import annotations

from collections.abc import Callable

from benchmarks.context import Context
from benchmarks.scenarios.batches import batch_cold, batch_random, one_tensor
from benchmarks.scenarios.dali_cpu import dali_cpu
from benchmarks.scenarios.gpu import dali_gpu, loader_gpu
from benchmarks.scenarios.importing import importing
from benchmarks.scenarios.loaders.loader import loader
from benchmarks.scenarios.loaders.random_draws import random_draws
from benchmarks.scenarios.loaders.worker_handoff import worker_handoff
from benchmarks.scenarios.many_shards import many_shards
from benchmarks.scenarios.remote import remote
from benchmarks.scenarios.samples import iterate_lazy, iterate_touch, opened, random_get
from benchmarks.scenarios.shared import shared
from benchmarks.scenarios.verifying import verify
from benchmarks.scenarios.wds_decode import wds_decode
from benchmarks.scenarios.writing import write, write_fsync
from benchmarks.timing import Rounds

SCENARIOS: dict[str, Callable[[Context], Rounds]] = {
    # First: litdata, once read in order, keeps its files mapped until the process ends (its loaders stay in a
    # functools.lru_cache), and mapped files cannot be dropped from the page cache.
    "batch_cold": batch_cold,
    "write": write,
    "write_fsync": write_fsync,
    "import": importing,
    "open": opened,
    "iterate_lazy": iterate_lazy,
    "iterate_touch": iterate_touch,
    "random_get": random_get,
    "batch_random": batch_random,
    "one_tensor": one_tensor,
    "wds_decode": wds_decode,
    "worker_handoff": worker_handoff,
    "loader": loader,
    "random_draws": random_draws,
    "verify": verify,
    "many_shards": many_shards,
    "shared": shared,
    "remote": remote,
    "dali_cpu": dali_cpu,
    "dali_gpu": dali_gpu,
    "loader_gpu": loader_gpu,
}
