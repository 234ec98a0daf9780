"""The goals of this library, as microseconds and ratios within a round; every run reports them, reached or not."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from benchmarks.harness import CEILING, Rounds, median, ratios
from benchmarks.peers import DECODED, LOADED, NAME, ONE_THREAD, TWO_THREADS, VIEWS
from benchmarks.scenarios import dali, gpu, importing, reading, remote, shared, verifying, wds_decode, worker_handoff
from benchmarks.scenarios.writing import PLAIN

PYD = "webdataset .pyd"
_Choice = str | Callable[[str], bool]  # a row, or the fastest of the rows for which this is true


@dataclass(frozen=True, slots=True)
class _Goal:
    workload: str
    scenario: str
    text: str
    values: Callable[[Rounds], list[float]]  # by round; raises LookupError or ValueError if a row is missing
    limit: float
    at_least: bool = False


def _over(name: _Choice, base: _Choice) -> Callable[[Rounds], list[float]]:
    return lambda rounds: ratios(rounds, _row(rounds, name), _row(rounds, base))


def _row(rounds: Rounds, choice: _Choice) -> str:
    if isinstance(choice, str):
        return choice
    return min(filter(choice, rounds), key=lambda name: median(rounds, name))


def _is_peer(row: str) -> bool:  # DALI's undecoded bytes count as a peer
    return not row.startswith((NAME, CEILING))


def _of_peer(prefix: str) -> Callable[[str], bool]:
    return lambda row: row.startswith(prefix) and NAME not in row and not row.endswith("MB")


def _us(name: str) -> Callable[[Rounds], list[float]]:
    return lambda rounds: rounds[name]


def _above_ceiling(rounds: Rounds) -> list[float]:
    """Return the microseconds of a copied sample beyond 1.2 times the ceiling."""
    return [a - 1.2 * b for a, b in zip(rounds[NAME], rounds[CEILING], strict=True)]


_GOALS = (
    _Goal("diffusion", "batch_random", "1 thread / ceiling", _over(ONE_THREAD, CEILING), 1.2),
    _Goal("diffusion", "batch_random", "2 threads / ceiling", _over(TWO_THREADS, CEILING), 0.9),
    _Goal("diffusion", "batch_random", f"{PYD} / 1 thread", _over(PYD, ONE_THREAD), 12, at_least=True),
    _Goal("diffusion", "batch_random", "1 thread / fastest peer", _over(ONE_THREAD, _is_peer), 1.0),
    _Goal("diffusion", "batch_random", "1 thread, small values too / fastest peer", _over(DECODED, _is_peer), 1.0),
    _Goal("diffusion", "batch_cold", "ours / best raw cold read", _over(NAME, reading.COLD_CEILINGS.__contains__), 1.3),
    _Goal("diffusion", "batch_cold", "ours / fastest peer", _over(NAME, _is_peer), 1.0),
    _Goal(
        "diffusion", "batch_cold", "Loader / best raw cold read", _over(LOADED, reading.COLD_CEILINGS.__contains__), 1.3
    ),
    _Goal("diffusion", "batch_cold", "Loader / fastest peer", _over(LOADED, _is_peer), 1.0),
    _Goal("features", "batch_random", "1 thread, tensors, us", _us(ONE_THREAD), 0.6),
    _Goal("features", "batch_random", "1 thread, small values too, us", _us(DECODED), 3.0),
    _Goal("features", "batch_random", f"{PYD} / tensors", _over(PYD, ONE_THREAD), 100, at_least=True),
    _Goal("features", "batch_random", f"{PYD} / small values too", _over(PYD, DECODED), 25, at_least=True),
    _Goal("features", "batch_random", "small values too / fastest peer", _over(DECODED, _is_peer), 1.0),
    _Goal("diffusion", "iterate_lazy", "us", _us(NAME), 12),
    _Goal("diffusion", "iterate_lazy", f"{PYD} / ours", _over(PYD, NAME), 40, at_least=True),
    _Goal("diffusion", "one_tensor", f"{PYD} / ours", _over(PYD, NAME), 100, at_least=True),
    _Goal("diffusion", "random_get", "copies, us beyond 1.2 x ceiling", _above_ceiling, 15),
    _Goal("diffusion", "random_get", "views / fastest peer", _over(VIEWS, _is_peer), 1.1),
    _Goal("diffusion", "write", f"ours / {PYD}", _over(NAME, PYD), 0.4),
    _Goal("diffusion", "write", "ours / plain write", _over(NAME, PLAIN), 2.0),
    *(
        _Goal(
            "diffusion",
            "import",
            f"raw read and write / import, {kind}",
            _over(importing.IMPORT_CEILING + kind, importing.IMPORTED + kind),
            0.6,
            at_least=True,
        )
        for kind in importing.KINDS
    ),
    _Goal(
        "diffusion",
        "worker_handoff",
        "samples of tensors / lazy",
        _over(worker_handoff.TENSORS, worker_handoff.LAZY),
        5,
        at_least=True,
    ),
    _Goal(
        "diffusion",
        "worker_handoff",
        "lazy / better collated",
        _over(worker_handoff.LAZY, (worker_handoff.COLLATED, worker_handoff.DEFAULT_COLLATED).__contains__),
        1.0,
    ),
    _Goal("diffusion", "loader", "read_batch / Loader", _over(TWO_THREADS, LOADED), 0.9, at_least=True),
    _Goal("diffusion", "loader", "litdata's best / Loader", _over(_of_peer("litdata"), LOADED), 4, at_least=True),
    _Goal("diffusion", "loader", "MDS / Loader", _over(_of_peer("MDS"), LOADED), 8, at_least=True),
    _Goal(
        "diffusion", "loader", "webdataset .pyd / Loader", _over(_of_peer("webdataset .pyd"), LOADED), 15, at_least=True
    ),
    _Goal("diffusion", "loader", "tensordict / Loader", _over(_of_peer("tensordict"), LOADED), 1, at_least=True),
    _Goal(
        "diffusion", "verify", "readinto / 1 thread", _over(verifying.READINTO, verifying.VERIFIED), 0.6, at_least=True
    ),
    _Goal(
        "diffusion",
        "verify",
        "readinto / all cores",
        _over(verifying.READINTO, verifying.VERIFIED_BY_ALL),
        0.6,
        at_least=True,
    ),
    _Goal("features", "many_shards", "10^7, first key, us", _us("10^7, first key, us"), 10_000),
    _Goal("features", "many_shards", "10^7, first key, MB", _us("10^7, first key, MB"), 1),
    _Goal("features", "many_shards", "10^7, schema, us", _us("10^7, schema, us"), 250_000),
    _Goal("features", "many_shards", "10^7, join with itself, MB", _us("10^7, join with itself, MB"), 1),
    _Goal("diffusion", "shared", "hit, lazy, us", _us(shared.HIT), 12),
    _Goal("diffusion", "shared", "first hit of a process, lazy, us", _us(shared.FIRST), 12),
    _Goal("diffusion", "shared", "views of all tensors / a copy", _over(shared.VIEWS, CEILING), 1.2),
    _Goal("diffusion", "shared", "all tensors loaded / a copy", _over(shared.LOADED, CEILING), 1.2),
    _Goal("diffusion", "shared", "read_batch / a copy", _over(shared.BATCHES, shared.BATCH_CEILING), 1.2),
    _Goal("diffusion", "shared", "flat views / block", _over(shared.FLAT_VIEWS, shared.BLOCK_VIEWS), 1.0),
    _Goal("diffusion", "shared", "flat copies / block", _over(shared.FLAT_COPIES, shared.BLOCK_COPIES), 1.0),
    _Goal("diffusion", "shared", "flat batches / block", _over(shared.FLAT_BATCHES, shared.BLOCK_BATCHES), 1.0),
    _Goal("diffusion", "shared", "8 processes with 1 GB, MB", _us(shared.MEMORY), 1200),
    _Goal("diffusion", "shared", "8 processes, added by 1 GB, MB", _us(shared.ADDED), 1200),
    _Goal(
        "diffusion",
        "remote",
        "one tensor: bytes / all bytes",
        _over(remote.moved(remote.ONE), remote.moved(remote.ALL_BYTES)),
        0.02,
    ),
    _Goal(
        "diffusion", "remote", "all bytes by curl / one tensor", _over(remote.ALL_BYTES, remote.ONE), 8, at_least=True
    ),
    _Goal(
        "diffusion",
        "remote",
        "fastest peer / one tensor",
        _over(_of_peer(remote.ONE_OF_PEERS), remote.ONE),
        1,
        at_least=True,
    ),
    _Goal("diffusion", "remote", "curls / shuffled epoch", _over(remote.CURLS, remote.EPOCH), 0.8, at_least=True),
    _Goal("diffusion", "remote", "local shards / node's cache", _over(remote.LOCAL, remote.CACHED), 0.9, at_least=True),
    _Goal("diffusion", "dali_cpu", "raw members / nested batches", _over(dali.RAW, dali.NESTED), 1.3, at_least=True),
    _Goal("diffusion", "dali_cpu", "raw members / native reader", _over(dali.RAW, dali.NATIVE), 1.3, at_least=True),
    _Goal("diffusion", "dali_cpu", "nodes / raw members", _over(dali.OURS, dali.RAW), 1.3),
    _Goal("diffusion", "dali_cpu", "native reader / raw members", _over(dali.NATIVE, dali.RAW), 1.0),
    _Goal("diffusion", "dali_gpu", "pinned copy / nodes", _over(gpu.PINNED_COPY, dali.NESTED), 0.85, at_least=True),
    _Goal(
        "diffusion", "dali_gpu", "pinned copy / native reader", _over(gpu.PINNED_COPY, dali.NATIVE), 0.85, at_least=True
    ),
    _Goal("diffusion", "loader_gpu", "pinned copy / Loader", _over(gpu.PINNED_COPY, gpu.AHEAD), 0.85, at_least=True),
    _Goal(
        "diffusion", "dali_cpu", ".pyd source / nested batches", _over(dali.PYD_SOURCE, dali.NESTED), 4, at_least=True
    ),
    _Goal("diffusion", "wds_decode", "lazy / raw members", _over("tensorcache, lazy", "raw members"), 1.15),
    _Goal(
        "diffusion", "wds_decode", "raw members / ours", _over("raw members", wds_decode.FAST_RAW), 2.5, at_least=True
    ),
    _Goal("diffusion", "wds_decode", ".pyd, touched / ours", _over(".pyd, touched", wds_decode.FAST), 5, at_least=True),
    _Goal("diffusion", "wds_decode", "eager / .pyd", _over("tensorcache, eager", ".pyd"), 0.6),
    _Goal(
        "diffusion",
        "wds_decode",
        "eager / .pyd, touched",
        _over("tensorcache, eager, touched", ".pyd, touched"),
        0.6,
    ),
)


def goal_lines(results: dict[str, dict[str, Rounds]]) -> Iterator[list[str]]:
    """Yield the head of a table, and the cells of each goal of a scenario that ran; keys are workloads, then scenarios."""
    yield ["workload", "scenario", "goal", "found", ""]
    for goal in _GOALS:
        if goal.scenario not in results.get(goal.workload, {}):
            continue
        cells = [goal.workload, goal.scenario, f"{goal.text}: at {'least' if goal.at_least else 'most'} {goal.limit:g}"]
        try:
            values = goal.values(results[goal.workload][goal.scenario])
        except (LookupError, ValueError):
            yield [*cells, "-", "not measured"]
            continue
        value = statistics.median(values)
        is_reached = value >= goal.limit if goal.at_least else value <= goal.limit
        figure = f"{value:.3g} ({min(values):.3g}..{max(values):.3g})"
        yield [*cells, figure, "reached" if is_reached else "**not reached**"]
