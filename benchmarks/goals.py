"""The goals of this library, as microseconds and ratios within a round; every run reports them, reached or not."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

from benchmarks.harness import CEILING, Rounds
from benchmarks.peers import DECODED, LOADED, NAME, ONE_THREAD, TWO_THREADS, VIEWS
from benchmarks.scenarios import dali, gpu, importing, reading, remote, shared, verifying, wds_decode, worker_handoff
from benchmarks.scenarios.writing import PLAIN

PYD = "webdataset .pyd"
_Choice = str | Callable[[str], bool]  # a row, or the fastest of the rows for which this is true


@dataclass(frozen=True, slots=True)
class _Goal:
    text: str
    values: Callable[[Rounds], list[float]]  # by round; raises LookupError or ValueError if a row is missing
    limit: float
    is_least: bool


_at_most, _at_least = partial(_Goal, is_least=False), partial(_Goal, is_least=True)


def _over(name: _Choice, base: _Choice) -> Callable[[Rounds], list[float]]:
    """Return `name` divided by `base` in each round."""
    return lambda rounds: [a / b for a, b in zip(_column(rounds, name), _column(rounds, base), strict=True)]


def _column(rounds: Rounds, choice: _Choice) -> list[float]:
    if isinstance(choice, str):
        return rounds[choice]
    return min((column for name, column in rounds.items() if choice(name)), key=statistics.median)


def _is_peer(row: str) -> bool:  # DALI's undecoded bytes count as a peer
    return not row.startswith((NAME, CEILING))


def _of_peer(prefix: str) -> Callable[[str], bool]:
    return lambda row: row.startswith(prefix) and NAME not in row and not row.endswith("MB")


def _us(name: str) -> Callable[[Rounds], list[float]]:
    return lambda rounds: rounds[name]


def _above_ceiling(rounds: Rounds) -> list[float]:
    """Return the microseconds of a copied sample beyond 1.2 times the ceiling."""
    return [a - 1.2 * b for a, b in zip(rounds[NAME], rounds[CEILING], strict=True)]


_GOALS: dict[tuple[str, str], tuple[_Goal, ...]] = {  # by workload and scenario
    ("diffusion", "batch_random"): (
        _at_most("1 thread / ceiling", _over(ONE_THREAD, CEILING), 1.2),
        _at_most("2 threads / ceiling", _over(TWO_THREADS, CEILING), 0.9),
        _at_least(f"{PYD} / 1 thread", _over(PYD, ONE_THREAD), 12),
        _at_most("1 thread / fastest peer", _over(ONE_THREAD, _is_peer), 1.0),
        _at_most("1 thread, small values too / fastest peer", _over(DECODED, _is_peer), 1.0),
    ),
    ("diffusion", "batch_cold"): (
        _at_most("ours / best raw cold read", _over(NAME, reading.COLD_CEILINGS.__contains__), 1.3),
        _at_most("ours / fastest peer", _over(NAME, _is_peer), 1.0),
        _at_most("Loader / best raw cold read", _over(LOADED, reading.COLD_CEILINGS.__contains__), 1.3),
        _at_most("Loader / fastest peer", _over(LOADED, _is_peer), 1.0),
    ),
    ("features", "batch_random"): (
        _at_most("1 thread, tensors, us", _us(ONE_THREAD), 0.6),
        _at_most("1 thread, small values too, us", _us(DECODED), 3.0),
        _at_least(f"{PYD} / tensors", _over(PYD, ONE_THREAD), 100),
        _at_least(f"{PYD} / small values too", _over(PYD, DECODED), 25),
        _at_most("small values too / fastest peer", _over(DECODED, _is_peer), 1.0),
    ),
    ("diffusion", "iterate_lazy"): (
        _at_most("us", _us(NAME), 12),
        _at_least(f"{PYD} / ours", _over(PYD, NAME), 40),
    ),
    ("diffusion", "one_tensor"): (_at_least(f"{PYD} / ours", _over(PYD, NAME), 100),),
    ("diffusion", "random_get"): (
        _at_most("copies, us beyond 1.2 x ceiling", _above_ceiling, 15),
        _at_most("views / fastest peer", _over(VIEWS, _is_peer), 1.1),
    ),
    ("diffusion", "write"): (
        _at_most(f"ours / {PYD}", _over(NAME, PYD), 0.4),
        _at_most("ours / plain write", _over(NAME, PLAIN), 2.0),
    ),
    ("diffusion", "import"): (
        *(
            _at_least(
                f"raw read and write / import, {kind}",
                _over(importing.IMPORT_CEILING + kind, importing.IMPORTED + kind),
                0.6,
            )
            for kind in importing.KINDS
        ),
    ),
    ("diffusion", "worker_handoff"): (
        _at_least("samples of tensors / lazy", _over(worker_handoff.TENSORS, worker_handoff.LAZY), 5),
        _at_most(
            "lazy / better collated",
            _over(worker_handoff.LAZY, (worker_handoff.COLLATED, worker_handoff.DEFAULT_COLLATED).__contains__),
            1.0,
        ),
    ),
    ("diffusion", "loader"): (
        _at_least("read_batch / Loader", _over(TWO_THREADS, LOADED), 0.9),
        _at_least("litdata's best / Loader", _over(_of_peer("litdata"), LOADED), 4),
        _at_least("MDS / Loader", _over(_of_peer("MDS"), LOADED), 8),
        _at_least("webdataset .pyd / Loader", _over(_of_peer("webdataset .pyd"), LOADED), 15),
        _at_least("tensordict / Loader", _over(_of_peer("tensordict"), LOADED), 1),
    ),
    ("diffusion", "verify"): (
        _at_least("readinto / 1 thread", _over(verifying.READINTO, verifying.VERIFIED), 0.6),
        _at_least("readinto / all cores", _over(verifying.READINTO, verifying.VERIFIED_BY_ALL), 0.6),
    ),
    ("features", "many_shards"): (
        _at_most("10^7, first key, us", _us("10^7, first key, us"), 10_000),
        _at_most("10^7, first key, MB", _us("10^7, first key, MB"), 1),
        _at_most("10^7, schema, us", _us("10^7, schema, us"), 250_000),
        _at_most("10^7, join with itself, MB", _us("10^7, join with itself, MB"), 1),
    ),
    ("diffusion", "shared"): (
        _at_most("hit, lazy, us", _us(shared.HIT), 12),
        _at_most("first hit of a process, lazy, us", _us(shared.FIRST), 12),
        _at_most("views of all tensors / a copy", _over(shared.VIEWS, CEILING), 1.2),
        _at_most("all tensors loaded / a copy", _over(shared.LOADED, CEILING), 1.2),
        _at_most("read_batch / a copy", _over(shared.BATCHES, shared.BATCH_CEILING), 1.2),
        _at_most("flat views / block", _over(shared.FLAT_VIEWS, shared.BLOCK_VIEWS), 1.0),
        _at_most("flat copies / block", _over(shared.FLAT_COPIES, shared.BLOCK_COPIES), 1.0),
        _at_most("flat batches / block", _over(shared.FLAT_BATCHES, shared.BLOCK_BATCHES), 1.0),
        _at_most("8 processes with 1 GB, MB", _us(shared.MEMORY), 1200),
        _at_most("8 processes, added by 1 GB, MB", _us(shared.ADDED), 1200),
    ),
    ("diffusion", "remote"): (
        _at_most(
            "one tensor: bytes / all bytes", _over(remote.ONE + remote.MOVED, remote.ALL_BYTES + remote.MOVED), 0.02
        ),
        _at_least("all bytes by curl / one tensor", _over(remote.ALL_BYTES, remote.ONE), 8),
        _at_least("fastest peer / one tensor", _over(_of_peer(remote.ONE_OF_PEERS), remote.ONE), 1),
        _at_least("curls / shuffled epoch", _over(remote.CURLS, remote.EPOCH), 0.8),
        _at_least("local shards / node's cache", _over(remote.LOCAL, remote.CACHED), 0.9),
    ),
    ("diffusion", "dali_cpu"): (
        _at_least("raw members / nested batches", _over(dali.RAW, dali.NESTED), 1.3),
        _at_least("raw members / native reader", _over(dali.RAW, dali.NATIVE), 1.3),
        _at_most("nodes / raw members", _over(dali.OURS, dali.RAW), 1.3),
        _at_most("native reader / raw members", _over(dali.NATIVE, dali.RAW), 1.0),
        _at_least(".pyd source / nested batches", _over(dali.PYD_SOURCE, dali.NESTED), 4),
    ),
    ("diffusion", "dali_gpu"): (
        _at_least("pinned copy / nodes", _over(gpu.PINNED_COPY, dali.NESTED), 0.85),
        _at_least("pinned copy / native reader", _over(gpu.PINNED_COPY, dali.NATIVE), 0.85),
    ),
    ("diffusion", "loader_gpu"): (_at_least("pinned copy / Loader", _over(gpu.PINNED_COPY, gpu.AHEAD), 0.85),),
    ("diffusion", "wds_decode"): (
        _at_most("lazy / raw members", _over("tensorcache, lazy", "raw members"), 1.15),
        _at_least("raw members / ours", _over("raw members", wds_decode.FAST_RAW), 2.5),
        _at_least(".pyd, touched / ours", _over(".pyd, touched", wds_decode.FAST), 5),
        _at_most("eager / .pyd", _over("tensorcache, eager", ".pyd"), 0.6),
        _at_most("eager / .pyd, touched", _over("tensorcache, eager, touched", ".pyd, touched"), 0.6),
    ),
}


def goal_lines(results: dict[str, dict[str, Rounds]]) -> Iterator[list[str]]:
    """Yield the head of a table, and the cells of each goal of a scenario that ran; keys are workloads, then scenarios."""
    yield ["workload", "scenario", "goal", "found", ""]
    for (workload, scenario), goals in _GOALS.items():
        for goal in goals if scenario in results.get(workload, {}) else ():
            cells = [workload, scenario, f"{goal.text}: at {'least' if goal.is_least else 'most'} {goal.limit:g}"]
            try:
                values = goal.values(results[workload][scenario])
            except (LookupError, ValueError):
                yield [*cells, "-", "not measured"]
                continue
            value = statistics.median(values)
            is_reached = value >= goal.limit if goal.is_least else value <= goal.limit
            figure = f"{value:.3g} ({min(values):.3g}..{max(values):.3g})"
            yield [*cells, figure, "reached" if is_reached else "**not reached**"]
