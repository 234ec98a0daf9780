"""Measure how fast this machine reads a cache, and how fast it copies and reads the same bytes without decoding them."""

from __future__ import annotations

import glob
import io
import statistics
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial
from itertools import cycle, repeat
from time import perf_counter
from typing import Any

import numpy as np

from wds_tensorcache.arguments import as_int
from wds_tensorcache.codec.binding import tensors_digest
from wds_tensorcache.codec.lazy import Lazy
from wds_tensorcache.codec.sample import encode_sample
from wds_tensorcache.codec.tree import DICTS, flatten
from wds_tensorcache.errors import FormatError
from wds_tensorcache.progress import Progress, ProgressOption
from wds_tensorcache.reading.cache import TensorCache
from wds_tensorcache.reading.find_shards import CachePaths, find_shards
from wds_tensorcache.reading.open_cache import open as open_cache
from wds_tensorcache.reading.positions import spread
from wds_tensorcache.storage.system import memory_nbytes, num_cores
from wds_tensorcache.storage.threads import Threads
from wds_tensorcache.training.loader import Loader

COPY, RAW, BATCH, LOADER = "copies in memory", "raw reads", "read_batch", "Loader"
_ROUNDS = 3
_SOURCE_NBYTES = 1 << 26  # more than a processor's caches hold
_MIN_COPY_NBYTES = 1 << 14  # shorter copies would measure the calls
_MAX_SAMPLES = 1 << 18  # to read; each takes some hundred bytes of memory
_SMALL_NBYTES = 1 << 16  # a smaller sample takes more time for its own work than for its bytes
_NEAR = 0.7  # of a ceiling
_Run = Callable[[float], float]  # takes seconds; returns bytes per second
# yields the bytes of each step, and a function that checks the step
_Steps = Generator[tuple[int, Callable[[], object]], None, None]


@dataclass(frozen=True, slots=True)
class Rate:
    """One measured rate.

    Attributes:
        name: `"copies in memory"`, `"raw reads"`, `"read_batch"` or `"Loader"`.
        num_threads: Number of threads that read at the same time.
        nbytes_per_s: Bytes of tensors per second, the median of the rounds.
        samples_per_s: Bytes per second divided by the mean size of a sample.
        rounds: Bytes per second of each round.
    """

    name: str
    num_threads: int
    nbytes_per_s: float
    samples_per_s: float
    rounds: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class BenchReport:
    """The rates at which this machine reads a cache.

    Attributes:
        num_samples: Number of samples in the cache.
        num_used: Number of these samples that were read.
        nbytes_used: Bytes of the tensors in these samples.
        batch_size: Number of samples in a batch.
        num_cores: Number of cores that this process may use.
        rates: The four rates.
        limit: A sentence that says what limits the rate of the loader here.
    """

    num_samples: int
    num_used: int
    nbytes_used: int
    batch_size: int
    num_cores: int
    rates: tuple[Rate, ...]
    limit: str


def measure_rates(
    source: CachePaths,
    *,
    cache: str | None = None,
    batch_size: int = 32,
    seconds: float = 1.0,
    max_nbytes: int = 1 << 30,
    num_threads: int | None = None,
    progress: ProgressOption = None,
) -> BenchReport:
    """Measure rates of reading samples in random order from the page cache.

    First, all these samples are read and compared with their digests. This also puts them into the page cache. After each run
    of `read_batch` and the loader, its last batch is compared bit for bit with the samples, outside of the measured time.

    Args:
        source, cache: As in `tc.open`.
        batch_size: Number of samples in a batch.
        seconds: Time of one run; each rate is the median of three, which take turns.
        max_nbytes: Maximum bytes of the samples that are read, and at most a quarter of the memory: a larger cache is
            represented by samples at equal distances from each other.
        num_threads: Number of threads; by default the number of cores. Copies in memory have one.
        progress: As in `tc.build`; counts runs.

    Raises:
        FormatError: A shard is damaged, or a run has read wrong bytes.
        FileNotFoundError, KeyError: As in `tc.open`.
        BatchError: The samples cannot form batches.
        ValueError: There are no samples with tensors; an argument is not positive; or the shards are at a url.
    """
    batch_size, max_nbytes = as_int("batch_size", batch_size), as_int("max_nbytes", max_nbytes)
    threads = num_cores() if num_threads is None else as_int("num_threads", num_threads)
    if min(batch_size, max_nbytes, threads) < 1 or not seconds >= 0:
        raise ValueError(f"{batch_size=}, {max_nbytes=}, {num_threads=}, {seconds=}, expected positive numbers")
    find_shards(source, local_for="measured")  # the raw reads are those of files in the page cache
    with ExitStack() as stack:
        whole = stack.enter_context(open_cache(source, cache=cache, num_threads=threads))
        used = whole[_choose(whole, min(max_nbytes, (memory_nbytes() or 1 << 62) // 4))]
        extents = [_check_sample(used, index) for index in range(len(used))]
        sizes = np.array([end - begin for _, begin, end in extents])
        order = np.random.default_rng(0).permutation(len(used)).tolist()
        batches = [order[at : at + batch_size] for at in range(0, len(order), batch_size)]
        pool = stack.enter_context(Threads(threads, "tensorcache-bench"))
        collate = _collate(used)
        runs: dict[str, _Run] = {
            COPY: _Loop(lambda: _copy(max(_MIN_COPY_NBYTES, min(_SOURCE_NBYTES, int(sizes.mean()) * batch_size)))),
            RAW: _raw_run(used, extents, batches, pool, threads),
            BATCH: _Loop(lambda: _read_batches(used, sizes, batches, collate)),
            LOADER: _Loop(lambda: _load_batches(used, sizes, batch_size, collate, threads)),
        }
        rounds: dict[str, list[float]] = {name: [] for name in runs}
        with closing(Progress(progress, _ROUNDS * len(runs), unit=" runs", smoothing=0)) as bar:
            for _ in range(_ROUNDS):
                for name, run in runs.items():
                    rounds[name].append(run(seconds))
                    bar.show(sum(map(len, rounds.values())))
        mean = float(sizes.mean())
        rates = []
        for name, values in rounds.items():
            rate = statistics.median(values)
            rates.append(Rate(name, 1 if name == COPY else threads, rate, rate / mean, tuple(values)))
        limit = describe_limit({rate.name: rate.nbytes_per_s for rate in rates}, int(mean))
        return BenchReport(
            len(whole), len(used), int(sizes.sum()), min(batch_size, len(used)), num_cores(), tuple(rates), limit
        )


def describe_limit(rates: dict[str, float], sample_nbytes: int) -> str:
    """Return a sentence that says what limits the loader, from rates in bytes per second by name."""
    copies, raw, batch, loader = (rates[name] for name in (COPY, RAW, BATCH, LOADER))
    text = f"the loader reaches {loader / raw:.0%} of what positioned reads of the same bytes reach"
    if loader >= _NEAR * raw:
        return f"The limit here is reading itself: {text}, and these reach {raw / copies:.0%} of the rate of a copy in memory."
    if sample_nbytes < _SMALL_NBYTES:
        work = f"{1e6 * sample_nbytes / loader:.1f} us for {sample_nbytes:,} bytes"
        return f"The limit here is the work for each sample, {work}, and not the bytes: {text}."
    return f"The limit here is putting samples together in batches: {text}, and read_batch alone {batch / raw:.0%}."


def plot_rates(report: BenchReport, format: str) -> bytes:
    """Return a bar chart of the rates as an image file of this format, such as `"png"`; it needs matplotlib."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 3.4), layout="constrained")
    axes = figure.subplots()
    rates = [rate.nbytes_per_s / 1e9 for rate in report.rates[::-1]]
    names = [f"{rate.name}, {rate.num_threads} thread{'s' * (rate.num_threads > 1)}" for rate in report.rates[::-1]]
    axes.bar_label(axes.barh(names, rates), [f"{rate:.2f}" for rate in rates], padding=3)
    axes.set_xlabel(f"GB/s of tensors, from the page cache; {report.num_used:,} samples in random order")
    stream = io.BytesIO()
    figure.savefig(stream, format=format, dpi=150)
    return stream.getvalue()


def _choose(cache: TensorCache, max_nbytes: int) -> np.ndarray[Any, Any]:
    """Return the indices of samples to read: all of them, or some at equal distances from each other."""
    total = sum(schema.nbytes for schema in cache.schema.values())
    if not total:
        raise ValueError("there are no samples with tensors")
    count = len(cache) if total <= max_nbytes else max(1, int(len(cache) * max_nbytes / total))
    return np.array(spread(len(cache), min(count, _MAX_SAMPLES)), np.int64)


def _check_sample(cache: TensorCache, index: int) -> tuple[str, int, int]:
    """Return the shard, begin and end of a sample's tensors, after comparing their member with its digest."""
    shard, row = cache._store.locate(cache._at(index))
    layout, begin = shard.layout(row), shard.columns.tensors_begin.item(row)
    digest = shard.columns.digest.item(row)
    if tensors_digest(shard.file.read(begin, begin + layout.nbytes)) != digest and digest:
        what = "the safetensors member is damaged: its digest does not match its bytes"
        raise FormatError(what, kind="damaged").at(f"{shard.path}: sample {shard.key(row)!r}")
    return shard.path, begin + layout.data_begin, begin + layout.nbytes


def _collate(cache: TensorCache) -> Any:
    """Return how to collate: tensors that not all samples have in one shape and dtype are lists."""
    ways = {}
    for tensor in cache.schema.values():
        forms = (tensor.dtype, *(tensor.shape or ()))
        is_uneven = tensor.shape is None or any(isinstance(form, tuple) for form in forms)
        if is_uneven or tensor.num_samples < len(cache):
            ways[glob.escape(tensor.name)] = "list"
    return ways or "stack"


class _Loop:
    """A run that takes steps until its time is over, and then checks the last one."""

    def __init__(self, begin: Callable[[], _Steps]) -> None:
        self._begin = begin

    def __call__(self, seconds: float) -> float:
        total = 0
        with closing(self._begin()) as steps:
            began = perf_counter()
            for nbytes, check in steps:
                total += nbytes
                elapsed = perf_counter() - began
                if elapsed >= seconds:
                    check()
                    break
        return total / elapsed


def _copy(nbytes: int) -> _Steps:
    # like the page cache, the source is larger than the processor's caches; like a batch, the target is used again
    source, target = np.ones(_SOURCE_NBYTES, np.uint8), np.empty(nbytes, np.uint8)
    parts = cycle([source[begin : begin + nbytes] for begin in range(0, _SOURCE_NBYTES - nbytes + 1, nbytes)])
    target[:] = 0  # maps its memory

    def steps() -> _Steps:
        for part in parts:
            np.copyto(target, part)
            yield nbytes, target.all

    return steps()


def _raw_run(
    cache: TensorCache, extents: list[tuple[str, int, int]], batches: list[list[int]], pool: Threads, threads: int
) -> _Run:
    files = cache._store.files
    longest = max(end - begin for _, begin, end in extents)
    buffers = [memoryview(bytearray(longest)) for _ in range(threads)]

    def read(thread: int, deadline: float) -> int:
        """Read every `threads`-th batch, one positioned read a sample, until a time; return the bytes."""
        nbytes = 0
        for batch in cycle(batches[thread::threads] or batches):
            for index in batch:
                path, begin, end = extents[index]
                files.get(path).read_into([buffers[thread][: end - begin]], begin)
                nbytes += end - begin
            if perf_counter() >= deadline:
                break
        return nbytes

    def run(seconds: float) -> float:
        began = perf_counter()
        total = sum(pool.map(read, range(threads), repeat(began + seconds)))
        return total / (perf_counter() - began)

    return run


def _read_batches(cache: TensorCache, sizes: np.ndarray[Any, Any], batches: list[list[int]], collate: Any) -> _Steps:
    for indices in cycle(batches):
        batch = cache.read_batch(indices, collate=collate)
        yield int(sizes[indices].sum()), partial(_check_batch, cache, indices, batch)


def _load_batches(
    cache: TensorCache, sizes: np.ndarray[Any, Any], batch_size: int, collate: Any, threads: int
) -> _Steps:
    options: dict[str, Any] = {"num_threads": threads, "prefetch_batches": threads + 1}
    with closing(Loader(cache, batch_size, collate=collate, shuffle=True, rank=0, world_size=1, **options)) as loader:
        while True:
            for batch, info in loader.with_info():
                yield int(sizes[info.indices].sum()), partial(_check_batch, cache, info.indices.tolist(), batch)


def _check_batch(cache: TensorCache, indices: list[int], batch: Any) -> None:
    """Raise FormatError unless a batch has the tensors of samples that are read one by one, bit for bit."""
    for row, index in enumerate(indices):
        for lazy, value in _pairs(cache[index], batch, row):
            if encode_sample(value) != encode_sample(lazy.load()):
                what = f"tensor {lazy.name!r} in a batch differs from that in its sample"
                raise FormatError(what, kind="damaged").at(f"sample {cache.keys()[index]!r}")


def _pairs(sample: Any, batch: Any, row: int) -> Iterator[tuple[Lazy, Any]]:
    """Yield each tensor of a sample, and its row of the tensor or list in the same place of a batch."""
    if isinstance(sample, Lazy):
        yield sample, batch[row]
    elif flatten(sample):
        keys = sample if type(sample) in DICTS else range(len(sample))
        for key in keys:
            yield from _pairs(sample[key], batch[key], row)
