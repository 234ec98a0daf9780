"""Measure how fast this machine reads a cache, and how fast it copies and reads the same bytes without decoding them."""

from __future__ import annotations

import glob
import io
import statistics
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import wait
from contextlib import ExitStack, closing
from dataclasses import dataclass
from itertools import cycle
from time import perf_counter
from typing import Any

import numpy as np
import torch
import xxhash

from wds_tensorcache.arguments import as_int
from wds_tensorcache.codec.binding import tensors_digest
from wds_tensorcache.codec.lazy import Lazy
from wds_tensorcache.codec.tree import DICTS, SEQUENCES, flatten
from wds_tensorcache.errors import FormatError
from wds_tensorcache.progress import Progress, ProgressOption
from wds_tensorcache.reading.cache import TensorCache
from wds_tensorcache.reading.find_shards import CachePaths, find_shards
from wds_tensorcache.reading.open_cache import open as open_cache
from wds_tensorcache.reading.positions import spread
from wds_tensorcache.storage.files import Files
from wds_tensorcache.storage.system import memory_nbytes, num_cores
from wds_tensorcache.storage.threads import Threads
from wds_tensorcache.training.loader import Loader

COPY, RAW, BATCH, LOADER = "copies in memory", "raw reads", "read_batch", "Loader"
_ROUNDS = 3
_COPY_NBYTES = 1 << 26  # more than a processor's caches hold
_MIN_COPY_NBYTES = 1 << 14  # shorter copies would measure the calls, and have millions of targets
_MAX_SAMPLES = 1 << 18  # to read; each takes some hundred bytes of memory
_SMALL_NBYTES = 1 << 16  # a smaller sample takes more time for its own work than for its bytes
_NEAR = 0.7  # of a ceiling
_Run = Callable[[float], tuple[float, int, int]]  # takes seconds; returns elapsed seconds, bytes and samples


@dataclass(frozen=True, slots=True)
class Rate:
    """One measured rate.

    Attributes:
        name: `"copies in memory"`, `"raw reads"`, `"read_batch"` or `"Loader"`.
        num_threads: Number of threads that read at the same time.
        nbytes_per_s: Bytes of tensors per second, the median of the rounds.
        samples_per_s: Samples per second; for copies in memory, bytes per second divided by the mean size of a sample.
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
        rates: Measured rates: copies in memory, raw reads, `read_batch`, `Loader`.
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
    """Measure rates of reading samples in random order from the page cache, with one thread and with several.

    First, all these samples are read and compared with their digests. This also puts them into the page cache. After each
    measured run, its last batch is compared bit for bit with the samples, outside of the measured time.

    Samples in which a tensor has another dtype than in most samples, or a list has other tensors, are left out, because no
    batch can have both.

    Args:
        source, cache: As in `tc.open`.
        batch_size: Number of samples in a batch.
        seconds: Time of one run; each rate is the median of three, which take turns.
        max_nbytes: Maximum bytes of the samples that are read, and at most a quarter of the memory: a larger cache is
            represented by samples at equal distances from each other.
        num_threads: Number of threads of the runs with several threads; by default the number of cores.
        progress: As in `tc.build`; counts runs.

    Raises:
        FormatError: A shard is damaged, or a run has read wrong bytes.
        FileNotFoundError, KeyError: As in `tc.open`.
        BatchError: The samples cannot form batches.
        ValueError: There are no samples with tensors; an argument is not positive; or the shards are at a url.
    """
    batch_size, max_nbytes = as_int("batch_size", batch_size), as_int("max_nbytes", max_nbytes)
    many = num_cores() if num_threads is None else as_int("num_threads", num_threads)
    if min(batch_size, max_nbytes, many) < 1 or not seconds >= 0:
        raise ValueError(f"{batch_size=}, {max_nbytes=}, {num_threads=}, {seconds=}, expected positive numbers")
    find_shards(source, local_for="measured")  # the raw reads are those of files in the page cache
    counts = sorted({1, many})
    with ExitStack() as stack:
        caches = {count: stack.enter_context(open_cache(source, cache=cache, num_threads=count)) for count in counts}
        whole = caches[1]
        numbers = _alike(whole, _choose(whole, min(max_nbytes, (memory_nbytes() or 1 << 62) // 4)))
        places = _Places(whole, numbers)
        batch_size = min(batch_size, len(numbers))
        views = {count: each[numbers] for count, each in caches.items()}
        ways = _collate(views[1])
        runs: list[tuple[str, int, _Run]] = [(COPY, 1, _copy_run(places, batch_size))]
        for count in counts:
            pool = stack.enter_context(Threads(count, "tensorcache-bench"))
            runs.append((RAW, count, _raw_run(places, batch_size, pool, count)))
        runs += ((BATCH, count, _batch_run(views[count], places, batch_size, ways)) for count in counts)
        runs += ((LOADER, count, _loader_run(views[1], places, batch_size, ways, count)) for count in counts)
        rates = _measure(runs, seconds, progress)
        limit = describe_limit(rates, int(places.sizes.mean()))
        return BenchReport(len(whole), len(numbers), int(places.sizes.sum()), batch_size, num_cores(), rates, limit)


def _measure(runs: list[tuple[str, int, _Run]], seconds: float, progress: ProgressOption) -> tuple[Rate, ...]:
    """Measure each run, given by name, number of threads and function, three times; they take turns."""
    found: list[list[tuple[float, float]]] = [[] for _ in runs]
    with closing(Progress(progress, _ROUNDS * len(runs), unit=" runs", smoothing=0)) as bar:
        for at in range(_ROUNDS * len(runs)):
            elapsed, nbytes, num_samples = runs[at % len(runs)][2](seconds)
            found[at % len(runs)].append((nbytes / elapsed, num_samples / elapsed))
            bar.show(at + 1)
    return tuple(
        Rate(
            name,
            count,
            statistics.median(each[0] for each in rounds),
            statistics.median(each[1] for each in rounds),
            tuple(each[0] for each in rounds),
        )
        for (name, count, _), rounds in zip(runs, found, strict=True)
    )


def describe_limit(rates: Iterable[Rate], sample_nbytes: int) -> str:
    """Return a sentence that says what limits the loader, given the rates and the bytes of a sample."""
    best: dict[str, Rate] = {}
    for rate in rates:
        if rate.name not in best or rate.nbytes_per_s > best[rate.name].nbytes_per_s:
            best[rate.name] = rate
    raw, batch, loader = best[RAW], best[BATCH], best[LOADER]
    share = loader.nbytes_per_s / raw.nbytes_per_s
    text = f"the loader reaches {share:.0%} of what positioned reads of the same bytes reach"
    if share >= _NEAR:
        copies = raw.nbytes_per_s / best[COPY].nbytes_per_s
        return (
            f"The limit here is reading itself: {text}, and these reach {copies:.0%} of the rate of a copy in memory."
        )
    if sample_nbytes < _SMALL_NBYTES:
        each = 1e6 / loader.samples_per_s
        work = f"the work for each sample, {each:.1f} us for {sample_nbytes:,} bytes, and not the bytes"
        return f"The limit here is {work}: {text}."
    if batch.nbytes_per_s >= loader.nbytes_per_s / _NEAR:
        alone = batch.nbytes_per_s / raw.nbytes_per_s
        return f"The limit here is what the loader's threads cost: {text}, and read_batch in the caller's thread {alone:.0%}."
    return f"The limit here is the work of putting samples together in batches: {text}."


def plot_rates(report: BenchReport, format: str) -> bytes:
    """Return a bar chart of the rates as an image file of this format, such as `"png"`.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: matplotlib does not know the format.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as exc:
        raise ImportError("--plot needs matplotlib: pip install matplotlib") from exc
    figure = Figure(figsize=(8, 0.45 * len(report.rates) + 1.6), layout="constrained")
    axes = figure.subplots()
    rates = report.rates[::-1]
    labels = [_label(rate) for rate in rates]
    colors = ["#9aa5b1" if rate.name in (COPY, RAW) else "#2f6db5" for rate in rates]
    bars = axes.barh(labels, [rate.nbytes_per_s / 1e9 for rate in rates], color=colors)
    axes.bar_label(bars, [f"{rate.nbytes_per_s / 1e9:.2f}" for rate in rates], padding=3)
    axes.margins(x=0.1)
    axes.set_xlabel(f"GB/s of tensors, from the page cache; {report.num_used:,} samples in random order")
    axes.spines[["top", "right"]].set_visible(False)
    stream = io.BytesIO()
    figure.savefig(stream, format=format, dpi=150)
    return stream.getvalue()


def _label(rate: Rate) -> str:
    return f"{rate.name}, {rate.num_threads} thread{'s' * (rate.num_threads > 1)}"


def _choose(cache: TensorCache, max_nbytes: int) -> np.ndarray[Any, Any]:
    """Return the indices of samples to read, int64 ascending: all of them, or some at equal distances from each other."""
    sizes = np.fromiter((entry.nbytes for entry in cache._entries()), np.int64, len(cache))
    total = int(sizes.sum())
    if not total:
        raise ValueError("there are no samples with tensors")
    count = len(cache) if total <= max_nbytes else max(1, int(len(cache) * max_nbytes / total))
    count = min(count, _MAX_SAMPLES)
    return np.array(list(spread(len(cache), count)), np.int64)


def _alike(cache: TensorCache, numbers: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return the samples that can form batches: those with the most frequent dtype of each tensor, and the most frequent
    elements of each list of tensors, or without the tensor or list."""
    schema = cache.schema
    uneven = [each.name for each in schema.values() if isinstance(each.dtype, tuple)]
    lists = list(_lists(each.name for each in schema.values() if each.num_samples < len(cache)))
    if not uneven and not lists:
        return numbers
    forms: list[list[Any]] = []
    for number in numbers.tolist():
        tensors = flatten(cache[number])
        elements = _lists(tensors)
        dtypes = [(type(tensors[name]), tensors[name].dtype) if name in tensors else None for name in uneven]
        forms.append([*dtypes, *map(elements.get, lists)])
    kept = np.ones(len(numbers), bool)
    for forms_of_one in zip(*forms, strict=True):
        counts = Counter(form for form, is_kept in zip(forms_of_one, kept, strict=True) if is_kept and form is not None)
        if counts:
            wanted = (None, counts.most_common(1)[0][0])
            kept &= np.fromiter((form in wanted for form in forms_of_one), bool, len(kept))
    return numbers[kept]


def _lists(names: Iterable[str]) -> dict[str, frozenset[str]]:
    """Return the elements of each list that contains tensors; a dict with numbers as keys counts as a list."""
    found: dict[str, set[str]] = {}
    for name in names:
        parts = name.split(".")
        for at, part in enumerate(parts):
            if part.isdigit():
                found.setdefault(".".join(parts[:at]), set()).add(part)
    return {name: frozenset(elements) for name, elements in found.items()}


class _Places:
    """Where the tensors of the chosen samples are stored. All of them are read once, so that they are in the page cache."""

    def __init__(self, cache: TensorCache, numbers: np.ndarray[Any, Any]) -> None:
        self.files: Files = cache._store.files
        self.paths: list[str] = []
        begins, sizes, self._digests = [], [], list[int]()
        for number in numbers.tolist():
            shard, row = cache._store.locate(number)
            layout, begin = shard.layout(row), shard.columns.tensors_begin.item(row)
            member = shard.file.read(begin, begin + layout.nbytes)
            digest = shard.columns.digest.item(row)
            if digest and tensors_digest(member) != digest:
                what = "the safetensors member is damaged: its digest does not match its bytes"
                raise FormatError(what, kind="damaged").at(f"{shard.path}: sample {shard.key(row)!r}")
            self.paths.append(shard.path)
            begins.append(begin + layout.data_begin)
            sizes.append(layout.nbytes - layout.data_begin)
            self._digests.append(xxhash.xxh3_64_intdigest(memoryview(member)[layout.data_begin :]))
        self.begins, self.sizes = np.array(begins, np.int64), np.array(sizes, np.int64)

    def __len__(self) -> int:
        return len(self.paths)

    def read(self, numbers: list[int], buffer: memoryview) -> int:
        """Read the tensors of samples, one positioned read each, into a buffer; return the number of bytes."""
        at = 0
        for number in numbers:
            end = at + self.sizes.item(number)
            self.files.get(self.paths[number]).read_into([buffer[at:end]], self.begins.item(number))
            at = end
        return at

    def check(self, numbers: list[int], buffer: memoryview) -> None:
        """Raise FormatError unless a buffer has the bytes of samples."""
        at = 0
        for number in numbers:
            end = at + self.sizes.item(number)
            if xxhash.xxh3_64_intdigest(buffer[at:end]) != self._digests[number]:
                raise FormatError("the bytes changed while they were read", kind="damaged").at(self.paths[number])
            at = end

    def batches(self, batch_size: int) -> list[list[int]]:
        """Return all samples in random order, in batches."""
        order = np.random.default_rng(0).permutation(len(self)).tolist()
        return [order[at : at + batch_size] for at in range(0, len(order), batch_size)]

    def nbytes(self, numbers: Iterable[int]) -> int:
        return int(self.sizes[list(numbers)].sum())


def _copy_run(places: _Places, batch_size: int) -> _Run:
    # like the page cache, the source is larger than the processor's caches; like a batch, the target is used again
    nbytes = min(max(_MIN_COPY_NBYTES, *map(places.nbytes, places.batches(batch_size))), _COPY_NBYTES)
    source, target = np.ones(_COPY_NBYTES, np.uint8), np.zeros(nbytes, np.uint8)
    parts = [source[at : at + nbytes] for at in range(0, _COPY_NBYTES - nbytes + 1, nbytes)]
    mean = float(places.sizes.mean())

    def run(seconds: float) -> tuple[float, int, int]:
        target[:] = 0
        began, count = perf_counter(), 0
        for part in cycle(parts):
            np.copyto(target, part)
            count += 1
            if perf_counter() - began >= seconds:
                break
        elapsed = perf_counter() - began
        if not target.all():
            raise RuntimeError("a copy in memory has lost bytes")
        return elapsed, count * nbytes, round(count * nbytes / mean)

    return run


def _raw_run(places: _Places, batch_size: int, pool: Threads, num_threads: int) -> _Run:
    batches = places.batches(batch_size)
    longest = max(map(places.nbytes, batches))
    buffers = [memoryview(bytearray(max(1, longest))) for _ in range(num_threads)]

    def read(number: int, until: float) -> tuple[int, int, list[int]]:
        """Read every `num_threads`-th batch until a time; return the bytes, the samples, and the last batch."""
        nbytes = num_samples = 0
        mine = batches[number::num_threads] or batches
        for batch in cycle(mine):
            nbytes += places.read(batch, buffers[number])
            num_samples += len(batch)
            if perf_counter() >= until:
                break
        return nbytes, num_samples, batch

    def run(seconds: float) -> tuple[float, int, int]:
        began = perf_counter()
        jobs = [pool.submit(read, number, began + seconds) for number in range(num_threads)]
        wait(jobs)
        elapsed = perf_counter() - began
        results = [job.result() for job in jobs]
        for (*_, batch), buffer in zip(results, buffers, strict=True):
            places.check(batch, buffer)
        return elapsed, sum(each[0] for each in results), sum(each[1] for each in results)

    return run


def _collate(cache: TensorCache) -> dict[str, str]:
    """Return how to collate: tensors that not all samples have in one shape and dtype are lists."""
    found = cache.schema.values()
    uneven = [
        each.name
        for each in found
        if each.num_samples < len(cache)
        or isinstance(each.dtype, tuple)
        or each.shape is None
        or any(isinstance(dim, tuple) for dim in each.shape)
    ]
    return {glob.escape(name): "list" for name in uneven}


def _batch_run(cache: TensorCache, places: _Places, batch_size: int, ways: dict[str, str]) -> _Run:
    batches = places.batches(batch_size)

    def run(seconds: float) -> tuple[float, int, int]:
        num_batches = 0
        began = perf_counter()
        for numbers in cycle(batches):
            batch = cache.read_batch(numbers, collate=ways or "stack")
            num_batches += 1
            if perf_counter() - began >= seconds:
                break
        elapsed = perf_counter() - began
        _check_batch(cache, numbers, batch)
        rounds, rest = divmod(num_batches, len(batches))
        last = [number for each in batches[:rest] for number in each]
        nbytes = rounds * int(places.sizes.sum()) + places.nbytes(last)
        return elapsed, nbytes, rounds * len(places) + len(last)

    return run


def _loader_run(cache: TensorCache, places: _Places, batch_size: int, ways: dict[str, str], num_threads: int) -> _Run:
    options: dict[str, Any] = {
        "num_threads": num_threads,
        "prefetch_batches": num_threads + 1,
        "rank": 0,
        "world_size": 1,
    }

    def run(seconds: float) -> tuple[float, int, int]:
        counts = np.zeros(len(cache), np.int64)  # how often each sample was read
        loader = Loader(cache, batch_size, collate=ways or "stack", shuffle=True, **options)
        batch = None
        began = perf_counter()
        with closing(_endless(loader)) as batches:
            for batch, info in batches:  # noqa: B007 — checked after the loop
                np.add.at(counts, info.indices, 1)
                if perf_counter() - began >= seconds:
                    break
            elapsed = perf_counter() - began
            _check_batch(cache, info.indices.tolist(), batch)
        # each epoch has each sample once
        if counts.max() - counts.min() > 1:
            raise RuntimeError("an epoch of the loader has a sample twice")
        return elapsed, int((counts * places.sizes).sum()), int(counts.sum())

    return run


def _endless(loader: Loader) -> Generator[tuple[Any, Any], None, None]:
    try:
        while True:
            yield from loader.with_info()
    finally:
        loader.close()


def _check_batch(cache: TensorCache, numbers: list[int], batch: Any) -> None:
    """Raise FormatError unless a batch has the tensors of samples that are read one by one, bit for bit."""
    for at, number in enumerate(numbers):
        sample = cache[number]
        pairs = dict(_pairs(sample, batch, at))
        for name, lazy in flatten(sample).items():
            if name not in pairs and pairs:
                continue  # a tensor in an object, which a batch has as the sample has it
            row = pairs.get(name)
            if (
                row is None
                or tuple(row.shape) != tuple(lazy.shape)
                or _raw(row) != bytes(lazy._source.read(*_range(lazy)))
            ):
                what = f"tensor {name!r} in a batch differs from that in its sample"
                raise FormatError(what, kind="damaged").at(f"sample {cache.keys()[number]!r}")


def _range(lazy: Lazy) -> tuple[int, int]:
    return lazy._reference.begin, lazy._reference.end


def _pairs(sample: Any, batch: Any, at: int) -> Iterator[tuple[str, Any]]:
    """Yield the name of each tensor of a sample, and row `at` of the tensor or list in the same place of a batch."""
    if isinstance(sample, Lazy):
        yield sample.name, batch[at]
    elif type(sample) in DICTS:
        for key, value in sample.items():
            if _holds(value):
                yield from _pairs(value, batch[key], at)
    elif isinstance(sample, SEQUENCES):
        for item, inner in zip(sample, batch, strict=False) if _holds(sample) else ():
            yield from _pairs(item, inner, at)


def _holds(value: Any) -> bool:
    return isinstance(value, Lazy) or bool(flatten(value))


def _raw(row: Any) -> bytes:
    if isinstance(row, torch.Tensor):
        return bytes(row.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return bytes(np.ascontiguousarray(row).tobytes())
