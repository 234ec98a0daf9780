"""Run the scenarios for each workload: markdown tables of medians (least..most), the goals, and JSON."""

from __future__ import annotations

import argparse
import gc
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks import page_cache, peers, report
from benchmarks.context import CEILING, Context, Skipped
from benchmarks.goals import outcomes
from benchmarks.scenarios.batches import batch_cold, batch_random, one_tensor
from benchmarks.scenarios.dali import dali_cpu, dali_gpu
from benchmarks.scenarios.gpu import loader_gpu
from benchmarks.scenarios.importing import importing
from benchmarks.scenarios.loader import loader
from benchmarks.scenarios.many_shards import many_shards
from benchmarks.scenarios.remote import remote
from benchmarks.scenarios.samples import iterate_lazy, iterate_touch, opened, random_get
from benchmarks.scenarios.shared import shared
from benchmarks.scenarios.verifying import verify
from benchmarks.scenarios.wds_decode import wds_decode
from benchmarks.scenarios.worker_handoff import worker_handoff
from benchmarks.scenarios.writing import write, write_fsync
from benchmarks.timing import Rounds
from benchmarks.workloads import WORKLOADS, quick

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
    "verify": verify,
    "many_shards": many_shards,
    "shared": shared,
    "remote": remote,
    "dali_cpu": dali_cpu,
    "dali_gpu": dali_gpu,
    "loader_gpu": loader_gpu,
}


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    add = parser.add_argument
    add("--quick", action="store_true", help="two batches, one round: tests that it runs; the figures mean nothing")
    add("--dry", action="store_true", help="as --quick, and scenarios of a GPU run on the CPU")
    add("--workload", action="append", choices=WORKLOADS, help="only this one; may be repeated")
    add("--scenario", action="append", choices=SCENARIOS, help="only this one; may be repeated")
    add("--peer", action="append", choices=peers.MODULES[1:], help="only this peer and our rows; may be repeated")
    add("--no-peers", action="store_true", help="only ours and the ceiling")
    add("--rounds", type=int, help="interleaved rounds (default: 7; quick: 1)")
    add("--folder", type=Path, help="where stores go, on a real disk for cold reads (default: the temporary folder)")
    add("--tmpfs", type=Path, default=Path("/dev/shm"), help="a folder in memory, for `write` (default: %(default)s)")
    add("--out", type=Path, default=Path("bench_out"), help="for bench.json, bench.md (default: %(default)s)")
    options = parser.parse_args()
    options.quick |= options.dry
    options.rounds = options.rounds or (1 if options.quick else 7)
    return options


def settle_malloc() -> None:
    """Put glibc's malloc into the state of a process that has allocated and freed one batch.

    Before that, each freed block of 450 KB returns to the system and is zeroed when it is allocated again. Rows that
    allocate memory for each sample would be up to three times slower, depending on the rows before them.
    """
    torch.empty(30 << 20, dtype=torch.uint8)  # more than 32 MiB would not raise malloc's threshold


def _log(text: str) -> None:
    print(f"[{time.strftime('%H:%M:%S')}] {text}", file=sys.stderr, flush=True)


def _store(context: Context) -> dict[str, float]:
    """Let every peer write its store and sync it to disk; return the bytes per sample of each store."""
    workload, stored = context.workload, {}
    context.stores.mkdir()
    for peer in context.peers:
        if peer.write is None:
            continue
        folder = context.store(peer)
        folder.mkdir()
        with context.attempt(peer.name):
            peer.write(folder, workload, context.samples)
            page_cache.sync(folder)
            nbytes = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
            stored[peer.name] = nbytes / workload.count
    tensors = (tensor for sample in context.samples for tensor in workload.split(sample)[0].values())
    return {CEILING: sum(tensor.nbytes for tensor in tensors) / workload.count, **stored}


def _measure(context: Context, scenarios: list[str] | None) -> tuple[dict[str, Rounds], dict[str, float]]:
    """Return the rounds of each scenario, and the size of each store."""
    name = context.workload.name
    _log(f"{name}: {context.workload.count} samples, stored by each peer in {context.scratch}")
    gc.freeze()  # the collector need not look at the samples in every round
    stored = _store(context)
    results: dict[str, Rounds] = {}
    for scenario in scenarios or SCENARIOS:
        _log(f"{name}: {scenario}")
        try:
            results[scenario] = SCENARIOS[scenario](context)
        except Skipped as reason:
            results[scenario] = {}
            context.missing[f"{name}, {scenario}"] = str(reason)
    gc.unfreeze()
    return results, stored


def main() -> None:
    """Entry point of `make bench`."""
    options = _arguments()
    warnings.filterwarnings("ignore", message=".*not writable.*")  # peers that hand over views of bytes
    torch.set_num_threads(1)
    settle_malloc()
    modules = ["ours"] + ([] if options.no_peers else list(options.peer or peers.MODULES[1:]))
    if "dali" in modules and "webdataset" not in modules:
        modules.append("webdataset")  # DALI reads its shard
    everyone, missing = peers.load(modules)
    for name, reason in missing.items():
        _log(f"{name} is missing: {reason}")
    options.out.mkdir(parents=True, exist_ok=True)
    results, sizes, texts = {}, {}, []
    for name in options.workload or WORKLOADS:
        workload = quick(WORKLOADS[name]) if options.quick else WORKLOADS[name]
        samples = [workload.sample(index) for index in range(workload.count)]
        with (
            tempfile.TemporaryDirectory(prefix="bench-", dir=options.folder) as folder,
            tempfile.TemporaryDirectory(prefix="bench-", dir=options.tmpfs) as tmpfs,
        ):
            context = Context(
                workload,
                samples,
                [workload.checksum(sample) for sample in samples],
                everyone,
                Path(folder, "stores"),
                Path(folder),
                Path(tmpfs),
                options.rounds,
                missing,
                is_quick=options.quick,
                gpu="cpu" if options.dry else "cuda",
            )
            results[name], sizes[name] = _measure(context, options.scenario)
        texts += report.tables(workload, results[name], sizes[name], everyone)
    reached = outcomes(results)
    described = {name: str(value) for name, value in vars(options).items()}
    measured = {"us_per_sample": results, "stored_bytes_per_sample": sizes}
    report.write_json(options.out / "bench.json", reached, options=described, missing=missing, **measured)
    texts.append(report.goal_table(reached))
    texts.append("\n".join(f"Missing: {name}: {reason}" for name, reason in missing.items()) or "Missing: none.")
    rounds = f"Medians (least..most) of {options.rounds} interleaved rounds, each in another order."
    texts.append(f"{rounds} {report.machine_line()}")
    (options.out / "bench.md").write_text("\n\n".join(texts) + "\n")
    print("\n\n".join(texts))


if __name__ == "__main__":
    main()
