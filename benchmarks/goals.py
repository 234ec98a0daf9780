"""The goals of this library, as microseconds and ratios within a round; every run reports them, reached or not."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.harness import CEILING, Rounds, median, ratios
from benchmarks.peers import DECODED, LOADED, NAME, ONE_THREAD, TWO_THREADS, VIEWS
from benchmarks.scenarios.dali import NATIVE, NESTED, PYD_SOURCE, RAW
from benchmarks.scenarios.dali import OURS as NODES
from benchmarks.scenarios.gpu import AHEAD, PINNED_COPY
from benchmarks.scenarios.importing import IMPORT_CEILING, IMPORTED, KINDS
from benchmarks.scenarios.reading import COLD_CEILINGS
from benchmarks.scenarios.remote import ALL_BYTES, CACHED, CURLS, EPOCH, LOCAL, ONE, ONE_OF_PEERS, moved
from benchmarks.scenarios.shared import (
    ADDED,
    BATCH_CEILING,
    BATCHES,
    BLOCK_BATCHES,
    BLOCK_COPIES,
    BLOCK_VIEWS,
    FIRST,
    FLAT_BATCHES,
    FLAT_COPIES,
    FLAT_VIEWS,
    HIT,
    MEMORY,
)
from benchmarks.scenarios.shared import LOADED as SHARED_LOADED
from benchmarks.scenarios.shared import VIEWS as SHARED_VIEWS
from benchmarks.scenarios.verifying import READINTO, VERIFIED, VERIFIED_BY_ALL
from benchmarks.scenarios.wds_decode import FAST, FAST_RAW
from benchmarks.scenarios.worker_handoff import COLLATED, DEFAULT_COLLATED, LAZY, TENSORS
from benchmarks.scenarios.writing import PLAIN

PYD = "webdataset .pyd"


@dataclass(frozen=True, slots=True)
class _Goal:
    workload: str
    scenario: str
    text: str
    values: Callable[[Rounds], list[float]]  # by round; raises LookupError or ValueError if a row is missing
    limit: float
    at_least: bool = False


@dataclass(frozen=True, slots=True)
class Outcome:
    """A goal and its result in a run."""

    workload: str
    scenario: str
    goal: str
    value: float | None  # the median of the rounds; None: it was not measured
    least: float | None
    most: float | None
    reached: bool | None


def _over(name: str, base: str) -> Callable[[Rounds], list[float]]:
    return lambda rounds: ratios(rounds, name, base)


def _us(name: str) -> Callable[[Rounds], list[float]]:
    return lambda rounds: rounds[name]


def _fastest(rounds: Rounds, names: list[str]) -> str:
    return min(names, key=lambda name: median(rounds, name))


def _over_peers(name: str) -> Callable[[Rounds], list[float]]:
    """Return our row divided by the fastest peer's. DALI's undecoded bytes count as a peer."""
    return lambda rounds: ratios(
        rounds, name, _fastest(rounds, [row for row in rounds if not row.startswith((NAME, CEILING))])
    )


def _over_best(name: str, bases: tuple[str, ...]) -> Callable[[Rounds], list[float]]:
    return lambda rounds: ratios(rounds, name, _fastest(rounds, [base for base in bases if base in rounds]))


def _best_over(prefix: str, ours: str) -> Callable[[Rounds], list[float]]:
    """Return the fastest other row of times with this prefix, divided by ours."""
    return lambda rounds: ratios(
        rounds,
        _fastest(
            rounds,
            [row for row in rounds if row.startswith(prefix) and not row.startswith(ours) and row[-2:] != "MB"],
        ),
        ours,
    )


def _above_ceiling(rounds: Rounds) -> list[float]:
    """Return the microseconds of a copied sample beyond 1.2 times the ceiling."""
    return [a - 1.2 * b for a, b in zip(rounds[NAME], rounds[CEILING], strict=True)]


_GOALS = (
    _Goal("diffusion", "batch_random", "1 thread / ceiling", _over(ONE_THREAD, CEILING), 1.2),
    _Goal("diffusion", "batch_random", "2 threads / ceiling", _over(TWO_THREADS, CEILING), 0.9),
    _Goal("diffusion", "batch_random", f"{PYD} / 1 thread", _over(PYD, ONE_THREAD), 12, at_least=True),
    _Goal("diffusion", "batch_random", "1 thread / fastest peer", _over_peers(ONE_THREAD), 1.0),
    _Goal("diffusion", "batch_random", "1 thread, small values too / fastest peer", _over_peers(DECODED), 1.0),
    _Goal("diffusion", "batch_cold", "ours / best raw cold read", _over_best(NAME, COLD_CEILINGS), 1.3),
    _Goal("diffusion", "batch_cold", "ours / fastest peer", _over_peers(NAME), 1.0),
    _Goal("diffusion", "batch_cold", "Loader / best raw cold read", _over_best(LOADED, COLD_CEILINGS), 1.3),
    _Goal("diffusion", "batch_cold", "Loader / fastest peer", _over_peers(LOADED), 1.0),
    _Goal("features", "batch_random", "1 thread, tensors, us", _us(ONE_THREAD), 0.6),
    _Goal("features", "batch_random", "1 thread, small values too, us", _us(DECODED), 3.0),
    _Goal("features", "batch_random", f"{PYD} / tensors", _over(PYD, ONE_THREAD), 100, at_least=True),
    _Goal("features", "batch_random", f"{PYD} / small values too", _over(PYD, DECODED), 25, at_least=True),
    _Goal("features", "batch_random", "small values too / fastest peer", _over_peers(DECODED), 1.0),
    _Goal("diffusion", "iterate_lazy", "us", _us(NAME), 12),
    _Goal("diffusion", "iterate_lazy", f"{PYD} / ours", _over(PYD, NAME), 40, at_least=True),
    _Goal("diffusion", "one_tensor", f"{PYD} / ours", _over(PYD, NAME), 100, at_least=True),
    _Goal("diffusion", "random_get", "copies, us beyond 1.2 x ceiling", _above_ceiling, 15),
    _Goal("diffusion", "random_get", "views / fastest peer", _over_peers(VIEWS), 1.1),
    _Goal("diffusion", "write", f"ours / {PYD}", _over(NAME, PYD), 0.4),
    _Goal("diffusion", "write", "ours / plain write", _over(NAME, PLAIN), 2.0),
    *(
        _Goal(
            "diffusion",
            "import",
            f"raw read and write / import, {kind}",
            _over(IMPORT_CEILING + kind, IMPORTED + kind),
            0.6,
            at_least=True,
        )
        for kind in KINDS
    ),
    _Goal("diffusion", "worker_handoff", "samples of tensors / lazy", _over(TENSORS, LAZY), 5, at_least=True),
    _Goal("diffusion", "worker_handoff", "lazy / better collated", _over_best(LAZY, (COLLATED, DEFAULT_COLLATED)), 1.0),
    _Goal("diffusion", "loader", "read_batch / Loader", _over(TWO_THREADS, LOADED), 0.9, at_least=True),
    _Goal("diffusion", "loader", "litdata's best / Loader", _best_over("litdata", LOADED), 4, at_least=True),
    _Goal("diffusion", "loader", "MDS / Loader", _best_over("MDS", LOADED), 8, at_least=True),
    _Goal("diffusion", "loader", "webdataset .pyd / Loader", _best_over("webdataset .pyd", LOADED), 15, at_least=True),
    _Goal("diffusion", "loader", "tensordict / Loader", _best_over("tensordict", LOADED), 1, at_least=True),
    _Goal("diffusion", "verify", "readinto / 1 thread", _over(READINTO, VERIFIED), 0.6, at_least=True),
    _Goal("diffusion", "verify", "readinto / all cores", _over(READINTO, VERIFIED_BY_ALL), 0.6, at_least=True),
    _Goal("features", "many_shards", "10^7, first key, us", _us("10^7, first key, us"), 10_000),
    _Goal("features", "many_shards", "10^7, first key, MB", _us("10^7, first key, MB"), 1),
    _Goal("features", "many_shards", "10^7, schema, us", _us("10^7, schema, us"), 250_000),
    _Goal("features", "many_shards", "10^7, join with itself, MB", _us("10^7, join with itself, MB"), 1),
    _Goal("diffusion", "shared", "hit, lazy, us", _us(HIT), 12),
    _Goal("diffusion", "shared", "first hit of a process, lazy, us", _us(FIRST), 12),
    _Goal("diffusion", "shared", "views of all tensors / a copy", _over(SHARED_VIEWS, CEILING), 1.2),
    _Goal("diffusion", "shared", "all tensors loaded / a copy", _over(SHARED_LOADED, CEILING), 1.2),
    _Goal("diffusion", "shared", "read_batch / a copy", _over(BATCHES, BATCH_CEILING), 1.2),
    _Goal("diffusion", "shared", "flat views / block", _over(FLAT_VIEWS, BLOCK_VIEWS), 1.0),
    _Goal("diffusion", "shared", "flat copies / block", _over(FLAT_COPIES, BLOCK_COPIES), 1.0),
    _Goal("diffusion", "shared", "flat batches / block", _over(FLAT_BATCHES, BLOCK_BATCHES), 1.0),
    _Goal("diffusion", "shared", "8 processes with 1 GB, MB", _us(MEMORY), 1200),
    _Goal("diffusion", "shared", "8 processes, added by 1 GB, MB", _us(ADDED), 1200),
    _Goal("diffusion", "remote", "one tensor: bytes / all bytes", _over(moved(ONE), moved(ALL_BYTES)), 0.02),
    _Goal("diffusion", "remote", "all bytes by curl / one tensor", _over(ALL_BYTES, ONE), 8, at_least=True),
    _Goal("diffusion", "remote", "fastest peer / one tensor", _best_over(ONE_OF_PEERS, ONE), 1, at_least=True),
    _Goal("diffusion", "remote", "curls / shuffled epoch", _over(CURLS, EPOCH), 0.8, at_least=True),
    _Goal("diffusion", "remote", "local shards / node's cache", _over(LOCAL, CACHED), 0.9, at_least=True),
    _Goal("diffusion", "dali_cpu", "raw members / nested batches", _over(RAW, NESTED), 1.3, at_least=True),
    _Goal("diffusion", "dali_cpu", "raw members / native reader", _over(RAW, NATIVE), 1.3, at_least=True),
    _Goal("diffusion", "dali_cpu", "nodes / raw members", _over(NODES, RAW), 1.3),
    _Goal("diffusion", "dali_cpu", "native reader / raw members", _over(NATIVE, RAW), 1.0),
    _Goal("diffusion", "dali_gpu", "pinned copy / nodes", _over(PINNED_COPY, NESTED), 0.85, at_least=True),
    _Goal("diffusion", "dali_gpu", "pinned copy / native reader", _over(PINNED_COPY, NATIVE), 0.85, at_least=True),
    _Goal("diffusion", "loader_gpu", "pinned copy / Loader", _over(PINNED_COPY, AHEAD), 0.85, at_least=True),
    _Goal("diffusion", "dali_cpu", ".pyd source / nested batches", _over(PYD_SOURCE, NESTED), 4, at_least=True),
    _Goal("diffusion", "wds_decode", "lazy / raw members", _over("tensorcache, lazy", "raw members"), 1.15),
    _Goal("diffusion", "wds_decode", "raw members / ours", _over("raw members", FAST_RAW), 2.5, at_least=True),
    _Goal("diffusion", "wds_decode", ".pyd, touched / ours", _over(".pyd, touched", FAST), 5, at_least=True),
    _Goal("diffusion", "wds_decode", "eager / .pyd", _over("tensorcache, eager", ".pyd"), 0.6),
    _Goal(
        "diffusion",
        "wds_decode",
        "eager / .pyd, touched",
        _over("tensorcache, eager, touched", ".pyd, touched"),
        0.6,
    ),
)


def outcomes(results: dict[str, dict[str, Rounds]]) -> list[Outcome]:
    """Return the outcome of each goal whose scenario was measured, from results by workload and scenario."""
    found = []
    for goal in _GOALS:
        if goal.scenario not in results.get(goal.workload, {}):
            continue
        text = f"{goal.text}: at {'least' if goal.at_least else 'most'} {goal.limit:g}"
        try:
            values = goal.values(results[goal.workload][goal.scenario])
        except (LookupError, ValueError):
            found.append(Outcome(goal.workload, goal.scenario, text, None, None, None, None))
            continue
        value = statistics.median(values)
        reached = value >= goal.limit if goal.at_least else value <= goal.limit
        found.append(Outcome(goal.workload, goal.scenario, text, value, min(values), max(values), reached))
    return found
