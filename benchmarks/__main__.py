"""Run the scenarios for each workload: markdown tables of medians (least..most), the goals, JSON and a plot."""

from __future__ import annotations

import argparse
import gc
import sys
import tempfile
import time
import warnings
from pathlib import Path

import torch

from benchmarks import page_cache, peers, report
from benchmarks.context import CEILING, Context, Skipped
from benchmarks.goals import outcomes
from benchmarks.peers.base import Peer
from benchmarks.scenarios import SCENARIOS
from benchmarks.timing import Rounds
from benchmarks.workloads import WORKLOADS, Workload, quick


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    add = parser.add_argument
    add(
        "--quick",
        action="store_true",
        help="two batches, one round: tests that everything runs; the figures mean nothing",
    )
    add("--dry", action="store_true", help="as --quick, and scenarios of a GPU run on the CPU")
    add("--workload", action="append", choices=WORKLOADS, help="only this one; may be repeated")
    add("--scenario", action="append", choices=SCENARIOS, help="only this one; may be repeated")
    add("--peer", action="append", choices=peers.MODULES[1:], help="only this peer and our rows; may be repeated")
    add("--no-peers", action="store_true", help="only ours and the ceiling")
    add("--rounds", type=int, help="interleaved rounds (default: 7; quick: 1)")
    add("--folder", type=Path, help="where stores go, on a real disk for cold reads (default: the temporary folder)")
    add("--tmpfs", type=Path, default=Path("/dev/shm"), help="a folder in memory, for `write` (default: %(default)s)")
    add(
        "--out", type=Path, default=Path("bench_out"), help="for bench.json, bench.md, bench.png (default: %(default)s)"
    )
    return parser.parse_args()


def _settle_malloc() -> None:
    """Put glibc's malloc into the state of a process that has allocated and freed one batch.

    Before that, each freed block of 450 KB returns to the system and is zeroed when it is allocated again. Rows that
    allocate memory for each sample would be up to three times slower, depending on the rows before them.
    """
    torch.empty(30 << 20, dtype=torch.uint8)  # more than 32 MiB would not raise malloc's threshold


def _log(text: str) -> None:
    print(f"[{time.strftime('%H:%M:%S')}] {text}", file=sys.stderr, flush=True)


def _store(context: Context) -> report.Stored:
    """Let every peer write its store and sync it to disk; return the bytes per sample of each store."""
    workload, stored = context.workload, {}
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


def _measure(
    workload: Workload, everyone: list[Peer], options: argparse.Namespace, folder: Path, tmpfs: Path
) -> tuple[dict[str, Rounds], report.Stored, dict[str, str]]:
    """Return the rounds of each scenario, the size of each store, and the reason for each missing row."""
    _log(f"{workload.name}: {workload.count} samples, stored by each peer in {folder}")
    samples = [workload.sample(index) for index in range(workload.count)]
    expected = [workload.checksum(sample) for sample in samples]
    gc.freeze()  # the collector need not look at them in every round
    context = Context(
        workload,
        samples,
        expected,
        everyone,
        folder / "stores",
        folder,
        tmpfs,
        options.rounds,
        missing={},
        gpu="cpu" if options.dry else "cuda",
    )
    context.stores.mkdir()
    stored = _store(context)
    results: dict[str, Rounds] = {}
    for name in SCENARIOS:
        if options.scenario and name not in options.scenario:
            continue
        _log(f"{workload.name}: {name}")
        try:
            results[name] = SCENARIOS[name](context)
        except Skipped as reason:
            results[name] = {}
            context.missing[f"{workload.name}, {name}"] = str(reason)
    gc.unfreeze()
    return results, stored, context.missing


def main() -> None:
    """Entry point of `make bench`."""
    options = _arguments()
    options.quick |= options.dry
    options.rounds = options.rounds or (1 if options.quick else 7)
    warnings.filterwarnings("ignore", message=".*not writable.*")  # peers that hand over views of bytes
    torch.set_num_threads(1)
    _settle_malloc()
    modules = ["ours"] + ([] if options.no_peers else list(options.peer or peers.MODULES[1:]))
    if "dali" in modules and "webdataset" not in modules:
        modules.append("webdataset")  # DALI reads its shard
    everyone, missing = peers.load(modules)
    for name, reason in missing.items():
        _log(f"{name} is missing: {reason}")
    options.out.mkdir(parents=True, exist_ok=True)
    results, sizes, texts = {}, {}, []
    for workload in WORKLOADS.values():
        if options.workload and workload.name not in options.workload:
            continue
        workload = quick(workload) if options.quick else workload
        with (
            tempfile.TemporaryDirectory(prefix="bench-", dir=options.folder) as folder,
            tempfile.TemporaryDirectory(prefix="bench-", dir=options.tmpfs) as tmpfs,
        ):
            found, stored, absent = _measure(workload, everyone, options, Path(folder), Path(tmpfs))
        results[workload.name], sizes[workload.name] = found, stored
        missing |= absent
        texts.append(report.table(workload, found, stored))
        texts += report.notes(workload, everyone)
    reached = outcomes(results)
    described = {name: str(value) for name, value in vars(options).items()}
    report.write_json(options.out / "bench.json", results, sizes, reached, missing, described)
    texts.append(report.goal_table(reached))
    texts.append("\n".join(f"Missing: {name}: {reason}" for name, reason in missing.items()) or "Missing: none.")
    texts.append(
        f"Medians (least..most) of {options.rounds} interleaved rounds, each in another order. {report.machine_line()}"
    )
    (options.out / "bench.md").write_text("\n\n".join(texts) + "\n")
    print("\n\n".join(texts))
    try:
        report.draw_plot(options.out / "bench.png", results)
    except ImportError as error:
        _log(f"no plot: {error}")


if __name__ == "__main__":
    main()
