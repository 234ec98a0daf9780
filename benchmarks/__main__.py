"""Run the scenarios for each workload: markdown tables of medians (least..most), and the goals.

Stores go into the temporary folder (TMPDIR), which must be on a real disk for cold reads.
"""

from __future__ import annotations

import argparse
import gc
import sys
import tempfile
import warnings
from pathlib import Path

from benchmarks import page_cache, peers, report
from benchmarks.goals import goal_lines
from benchmarks.harness import CEILING, Context, Rounds, Skipped, interleaved, settle
from benchmarks.peers import NAME
from benchmarks.scenarios import ONLY, SCENARIOS
from benchmarks.workloads import QUICK, WORKLOADS


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
    add("--out", type=Path, default=Path("bench_out"), help="for bench.md (default: %(default)s)")
    options = parser.parse_args()
    options.quick |= options.dry
    options.rounds = options.rounds or (1 if options.quick else 7)
    return options


def _store(context: Context) -> dict[str, float]:
    """Let every peer write its store and sync it to disk; return the bytes per sample of each store."""
    workload = context.workload
    tensors = (tensor for sample in context.samples for tensor in workload.split(sample)[0].values())
    stored = {CEILING: sum(tensor.nbytes for tensor in tensors) / workload.count}
    for peer in context.peers:
        if peer.write is None:
            continue
        folder = context.store(peer)
        folder.mkdir(parents=True)
        with context.attempt(peer.name):
            peer.write(folder, workload, context.samples)
            page_cache.sync(folder)
            nbytes = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
            stored[peer.name] = nbytes / workload.count
    return stored


def _measure(context: Context, scenarios: list[str] | None, rounds: int) -> dict[str, Rounds]:
    name = context.workload.name
    results: dict[str, Rounds] = {}
    for scenario in scenarios or SCENARIOS:
        if name not in ONLY.get(scenario, WORKLOADS):
            continue
        print(f"{name}: {scenario}", file=sys.stderr)
        try:
            with context.stack:
                results[scenario] = interleaved(SCENARIOS[scenario](context), rounds)
        except (Skipped, ImportError) as reason:
            results[scenario] = {}
            context.missing[f"{name}, {scenario}"] = str(reason)
    return results


def main() -> None:
    options = _arguments()
    warnings.filterwarnings("ignore", message=".*not writable.*")  # peers that hand over views of bytes
    settle()
    modules = ["ours"] + ([] if options.no_peers else list(options.peer or peers.MODULES[1:]))
    if "dali" in modules and "webdataset" not in modules:
        modules.append("webdataset")  # DALI reads its shard
    everyone, missing = peers.load(modules)
    for name, reason in missing.items():
        print(f"{name} is missing: {reason}", file=sys.stderr)
    options.out.mkdir(parents=True, exist_ok=True)
    results, texts = {}, []
    for name in options.workload or WORKLOADS:
        workload = (QUICK if options.quick else WORKLOADS)[name]
        samples = [workload.sample(index) for index in range(workload.count)]
        compared = [peer for peer in everyone if peer.name.startswith(NAME) or not workload.ragged]
        gpu = "cpu" if options.dry else "cuda"
        with tempfile.TemporaryDirectory(prefix="bench-") as folder:
            print(f"{name}: {workload.count} samples, stored by each peer in {folder}", file=sys.stderr)
            context = Context(workload, samples, compared, Path(folder, "stores"), missing, options.quick, gpu=gpu)
            gc.freeze()  # the collector need not look at the samples in every round
            stored = _store(context)
            results[name] = _measure(context, options.scenario, options.rounds)
            gc.unfreeze()
        texts += report.tables(workload, results[name], stored)
    texts.append(report.markdown(list(goal_lines(results))))
    texts.append("\n".join(f"Missing: {name}: {reason}" for name, reason in missing.items()) or "Missing: none.")
    note = "Quick: these figures mean nothing. " if options.quick else ""
    rounds = f"Medians (least..most) of {options.rounds} interleaved rounds, each in another order."
    texts.append(f"{note}{rounds} {report.machine_line()}")
    (options.out / "bench.md").write_text("\n\n".join(texts) + "\n")
    print("\n\n".join(texts))


if __name__ == "__main__":
    main()
