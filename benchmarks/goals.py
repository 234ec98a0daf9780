"""The goals of this library, as microseconds and ratios within a round; every run reports them, reached or not."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator

from benchmarks.harness import CEILING, Rounds
from benchmarks.peers import NAME, PYD
from benchmarks.peers.ours import DECODED, LOADED, ONE_THREAD, TWO_THREADS, VIEWS
from benchmarks.scenarios import dali, gpu, importing, reading, remote, shared, verifying, wds_decode, worker_handoff
from benchmarks.scenarios.writing import PLAIN

# a row, or a function that finds its figures by round; raises LookupError or ValueError if a row is missing
_Choice = str | Callable[[Rounds], list[float]]
# the scenario, what is compared, whether that should be at "most" or "least" a limit, the figure, and its divisor in each round
_Goal = tuple[str, str, str, float, _Choice] | tuple[str, str, str, float, _Choice, _Choice]


def _fastest(is_row: Callable[[str], bool]) -> _Choice:
    """Choose the fastest of the rows for which a function is true."""
    return lambda rounds: min((column for name, column in rounds.items() if is_row(name)), key=statistics.median)


def _of_peer(prefix: str) -> _Choice:
    return _fastest(lambda row: row.startswith(prefix) and NAME not in row and not row.endswith("MB"))


def _above_ceiling(rounds: Rounds) -> list[float]:
    """Return the microseconds of a copied sample beyond 1.2 times the ceiling."""
    return [a - 1.2 * b for a, b in zip(rounds[NAME], rounds[CEILING], strict=True)]


_PEER = _fastest(lambda row: not row.startswith((NAME, CEILING)))  # DALI's undecoded bytes count as a peer
_COLD_CEILING = _fastest(reading.COLD_CEILINGS.__contains__)
_BETTER_COLLATED = _fastest((worker_handoff.COLLATED, worker_handoff.DEFAULT_COLLATED).__contains__)

_GOALS: dict[str, list[_Goal]] = {  # by workload
    "diffusion": [
        ("batch_random", "1 thread / ceiling", "most", 1.2, ONE_THREAD, CEILING),
        ("batch_random", "2 threads / ceiling", "most", 0.9, TWO_THREADS, CEILING),
        ("batch_random", f"{PYD} / 1 thread", "least", 12, PYD, ONE_THREAD),
        ("batch_random", "1 thread / fastest peer", "most", 1.0, ONE_THREAD, _PEER),
        ("batch_random", "1 thread, small values too / fastest peer", "most", 1.0, DECODED, _PEER),
        ("batch_cold", "ours / best raw cold read", "most", 1.3, NAME, _COLD_CEILING),
        ("batch_cold", "ours / fastest peer", "most", 1.0, NAME, _PEER),
        ("batch_cold", "Loader / best raw cold read", "most", 1.3, LOADED, _COLD_CEILING),
        ("batch_cold", "Loader / fastest peer", "most", 1.0, LOADED, _PEER),
        ("iterate_lazy", "us", "most", 12, NAME),
        ("iterate_lazy", f"{PYD} / ours", "least", 40, PYD, NAME),
        ("one_tensor", f"{PYD} / ours", "least", 100, PYD, NAME),
        ("random_get", "copies, us beyond 1.2 x ceiling", "most", 15, _above_ceiling),
        ("random_get", "views / fastest peer", "most", 1.1, VIEWS, _PEER),
        ("write", f"ours / {PYD}", "most", 0.4, NAME, PYD),
        ("write", "ours / plain write", "most", 2.0, NAME, PLAIN),
        *(
            ("import", f"raw read and write / import, {kind}", "least", 0.6, *rows)
            for kind, rows in importing.ROWS.items()
        ),
        ("worker_handoff", "samples of tensors / lazy", "least", 5, worker_handoff.TENSORS, worker_handoff.LAZY),
        ("worker_handoff", "lazy / better collated", "most", 1.0, worker_handoff.LAZY, _BETTER_COLLATED),
        ("loader", "read_batch / Loader", "least", 0.9, TWO_THREADS, LOADED),
        ("loader", "litdata's best / Loader", "least", 4, _of_peer("litdata"), LOADED),
        ("loader", "MDS / Loader", "least", 8, _of_peer("MDS"), LOADED),
        ("loader", f"{PYD} / Loader", "least", 15, _of_peer(PYD), LOADED),
        ("loader", "tensordict / Loader", "least", 1, _of_peer("tensordict"), LOADED),
        ("verify", "readinto / 1 thread", "least", 0.6, verifying.READINTO, verifying.VERIFIED),
        ("verify", "readinto / all cores", "least", 0.6, verifying.READINTO, verifying.VERIFIED_BY_ALL),
        ("shared", "hit, lazy, us", "most", 12, shared.HIT),
        ("shared", "first hit of a process, lazy, us", "most", 12, shared.FIRST),
        ("shared", "views of all tensors / a copy", "most", 1.2, shared.VIEWS, CEILING),
        ("shared", "all tensors loaded / a copy", "most", 1.2, shared.LOADED, CEILING),
        ("shared", "read_batch / a copy", "most", 1.2, shared.BATCHES, shared.BATCH_CEILING),
        ("shared", "flat views / block", "most", 1.0, shared.FLAT_VIEWS, shared.BLOCK_VIEWS),
        ("shared", "flat copies / block", "most", 1.0, shared.FLAT_COPIES, shared.BLOCK_COPIES),
        ("shared", "flat batches / block", "most", 1.0, shared.FLAT_BATCHES, shared.BLOCK_BATCHES),
        ("shared", "8 processes with 1 GB, MB", "most", 1200, shared.MEMORY),
        ("shared", "8 processes, added by 1 GB, MB", "most", 1200, shared.ADDED),
        ("remote", "one tensor: bytes / all bytes", "most", 0.02, remote.ONE_MB, remote.ALL_MB),
        ("remote", "all bytes by curl / one tensor", "least", 8, remote.ALL_BYTES, remote.ONE),
        ("remote", "fastest peer / one tensor", "least", 1, _of_peer(remote.ONE_OF_PEERS), remote.ONE),
        ("remote", "curls / shuffled epoch", "least", 0.8, remote.CURLS, remote.EPOCH),
        ("remote", "local shards / node's cache", "least", 0.9, remote.LOCAL, remote.CACHED),
        ("dali_cpu", "raw members / nested batches", "least", 1.3, dali.RAW, dali.NESTED),
        ("dali_cpu", "raw members / native reader", "least", 1.3, dali.RAW, dali.NATIVE),
        ("dali_cpu", "nodes / raw members", "most", 1.3, dali.OURS, dali.RAW),
        ("dali_cpu", "native reader / raw members", "most", 1.0, dali.NATIVE, dali.RAW),
        ("dali_cpu", ".pyd source / nested batches", "least", 4, dali.PYD_SOURCE, dali.NESTED),
        ("dali_gpu", "pinned copy / nodes", "least", 0.85, gpu.PINNED_COPY, dali.NESTED),
        ("dali_gpu", "pinned copy / native reader", "least", 0.85, gpu.PINNED_COPY, dali.NATIVE),
        ("loader_gpu", "pinned copy / Loader", "least", 0.85, gpu.PINNED_COPY, gpu.AHEAD),
        ("wds_decode", "lazy / raw members", "most", 1.15, "tensorcache, lazy", "raw members"),
        ("wds_decode", "raw members / ours", "least", 2.5, "raw members", wds_decode.FAST_RAW),
        ("wds_decode", ".pyd, touched / ours", "least", 5, ".pyd, touched", wds_decode.FAST),
        ("wds_decode", "eager / .pyd", "most", 0.6, "tensorcache, eager", ".pyd"),
        ("wds_decode", "eager / .pyd, touched", "most", 0.6, "tensorcache, eager, touched", ".pyd, touched"),
    ],
    "features": [
        ("batch_random", "1 thread, tensors, us", "most", 0.6, ONE_THREAD),
        ("batch_random", "1 thread, small values too, us", "most", 3.0, DECODED),
        ("batch_random", f"{PYD} / tensors", "least", 100, PYD, ONE_THREAD),
        ("batch_random", f"{PYD} / small values too", "least", 25, PYD, DECODED),
        ("batch_random", "small values too / fastest peer", "most", 1.0, DECODED, _PEER),
        ("many_shards", "10^7, first key, us", "most", 10_000, "10^7, first key, us"),
        ("many_shards", "10^7, first key, MB", "most", 1, "10^7, first key, MB"),
        ("many_shards", "10^7, schema, us", "most", 250_000, "10^7, schema, us"),
        ("many_shards", "10^7, join with itself, MB", "most", 1, "10^7, join with itself, MB"),
    ],
}


def goal_lines(results: dict[str, dict[str, Rounds]]) -> Iterator[list[str]]:
    """Yield the head of a table, and the cells of each goal of a scenario that ran; keys are workloads, then scenarios."""
    yield ["workload", "scenario", "goal", "found", ""]
    for workload, scenario, text, side, limit, *choices in [(name, *goal) for name in _GOALS for goal in _GOALS[name]]:
        if (rounds := results.get(workload, {}).get(scenario)) is None:
            continue
        cells = [workload, scenario, f"{text}: at {side} {limit:g}"]
        try:
            column, *divisor = [rounds[choice] if isinstance(choice, str) else choice(rounds) for choice in choices]
        except (LookupError, ValueError):
            yield [*cells, "-", "not measured"]
            continue
        values = [a / b for a, b in zip(column, *divisor, strict=True)] if divisor else column
        value = statistics.median(values)
        is_reached = value >= limit if side == "least" else value <= limit
        figure = f"{value:.3g} ({min(values):.3g}..{max(values):.3g})"
        yield [*cells, figure, "reached" if is_reached else "**not reached**"]
