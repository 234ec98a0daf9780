"""`tensorcache bench`: reading speed of a cache, and limits of this machine."""

from __future__ import annotations

import glob
import statistics
from collections.abc import Callable, Iterator
from contextlib import closing
from itertools import cycle
from time import perf_counter
from typing import Any

import click
import numpy as np

import wds_tensorcache as tc
from wds_tensorcache.cli.cache_argument import cache_argument, cache_option, open_cache, threads_option
from wds_tensorcache.cli.looking.marks import is_unicode
from wds_tensorcache.cli.output import Output, json_option
from wds_tensorcache.errors import format_count, list_names
from wds_tensorcache.reading.find_shards import find_shards
from wds_tensorcache.reading.positions import spread
from wds_tensorcache.reading.schema import TensorSchema
from wds_tensorcache.storage.system import memory_nbytes, num_cores
from wds_tensorcache.storage.threads import Threads

_COPY, _RAW, _BATCH, _LOADER = "copies in memory", "raw reads", "read_batch", "Loader"
_ROUNDS = 3
_SOURCE_NBYTES = 1 << 26  # more than a processor's caches hold
_MIN_COPY_NBYTES = 1 << 14  # shorter copies would measure the calls
_MAX_SAMPLES = 1 << 18  # samples to read; a sample takes some hundred bytes of memory
_SMALL_NBYTES = 1 << 16  # a smaller sample takes more time for its own work than for its bytes
_NEAR = 0.7  # of a ceiling
_WIDTH = 30  # of the longest bar
Array = np.ndarray[Any, Any]
# path of a shard, begin and end of the tensors of a sample, and the bytes of those that are not left out
_Extent = tuple[str, int, int, int]


@click.command()
@cache_argument
@click.option("--batch-size", type=click.IntRange(1), default=32, show_default=True, help="Samples in a batch.")
@click.option(
    "--seconds",
    type=click.FloatRange(0, 600),
    default=1.0,
    show_default=True,
    help="Time of a run; there are three of each.",
)
@click.option(
    "--max-nbytes",
    type=click.IntRange(1),
    default=1 << 30,
    show_default=True,
    help="Bytes of the samples to read, at most a quarter of the memory.",
)
@threads_option
@cache_option
@json_option
def bench(
    path: str,
    batch_size: int,
    seconds: float,
    max_nbytes: int,
    threads: int | None,
    cache_name: str | None,
    as_json: bool,
) -> None:
    """Measure the speed at which this machine reads CACHE in random order, and name the bottleneck.

    All bytes come from the page cache. Four rates are printed: read_batch, the loader, and two upper limits. The limits are
    copies in memory, and positioned reads of the same bytes.
    """
    output, threads = Output(as_json), threads or num_cores()
    find_shards(path, local_for="measured")  # the raw reads are those of files in the page cache
    with open_cache(path, cache_name, threads) as whole, output.progress("measuring") as show:
        uneven = [tensor.name for tensor in whole.schema.values() if _is_uneven(tensor, len(whole))]
        uneven = uneven if len(uneven) < len(whole.schema) else []  # without other tensors, batches raise the error
        if uneven:
            problem = "since the dtypes or the lengths of their lists differ between samples"
            output.note(f"not in the batches, {problem}: {list_names(uneven)}")
            whole = whole.select([glob.escape(name) for name in whole.schema if name not in uneven])
        used = whole[_choose(whole, min(max_nbytes, memory_nbytes() // 4))]
        extents = [_read_extent(used, index, uneven) for index in range(len(used))]
        sizes = np.array([nbytes for *_, nbytes in extents])
        if not sizes.any():
            raise ValueError(f"no samples with tensors among {len(used):,} of {len(whole):,}; raise --max-nbytes")
        order = np.random.default_rng(0).permutation(len(used)).tolist()
        batches = [order[at : at + batch_size] for at in range(0, len(order), batch_size)]
        collate, mean = _find_collate(whole), float(sizes.mean())
        with Threads(threads, "tensorcache-bench") as pool:
            ways: dict[str, Callable[[], Iterator[int]]] = {
                _COPY: lambda: _copy(max(_MIN_COPY_NBYTES, min(_SOURCE_NBYTES, int(mean * batch_size)))),
                _RAW: lambda: _read_raw(used, extents, batches, pool, threads),
                _BATCH: lambda: _read_batches(used, sizes, batches, collate),
                _LOADER: lambda: _load_batches(used, sizes, batch_size, collate, threads),
            }
            rounds: dict[str, list[float]] = {name: [] for name in ways}
            for done in range(_ROUNDS * len(ways)):  # the ways take turns
                name = list(ways)[done % len(ways)]
                rounds[name].append(_measure(ways[name](), seconds))
                show(done + 1, _ROUNDS * len(ways))
    rates = {name: statistics.median(values) for name, values in rounds.items()}
    records: list[dict[str, Any]] = [
        {
            "name": name,
            "num_threads": 1 if name == _COPY else threads,
            "nbytes_per_s": rate,
            "samples_per_s": rate / mean,
            "rounds": rounds[name],
        }
        for name, rate in rates.items()
    ]
    limit = _describe_limit(rates, int(mean))
    output.result(
        {
            "num_samples": len(whole),
            "num_used": len(used),
            "nbytes_used": int(sizes.sum()),
            "batch_size": min(batch_size, len(used)),
            "num_cores": num_cores(),
            "rates": records,
            "limit": limit,
        }
    )
    output.line(
        f"{len(used):,} of {format_count(len(whole), 'sample')}, {sizes.sum():,} bytes of tensors, "
        f"batches of {min(batch_size, len(used)):,}, {format_count(num_cores(), 'core')}"
    )
    output.line()
    mark, width = "█" if is_unicode(output.console) else "#", _WIDTH / max(rates.values())
    rows = [
        (name, count, f"{rate / 1e9:.3g}", f"{per_s:,.0f}", mark * max(1, round(width * rate)))
        for name, count, rate, per_s, _ in (record.values() for record in records)
    ]
    output.table(("", "threads", "GB/s", "samples/s", ""), rows, right=("threads", "GB/s", "samples/s"))
    output.line()
    output.line(limit)


def _is_uneven(tensor: TensorSchema, num_samples: int) -> bool:
    """Return whether batches cannot contain a tensor."""
    # its dtypes differ, or lists that contain it have different lengths
    is_in_list = any(map(str.isdecimal, tensor.name.split(".")))
    return isinstance(tensor.dtype, tuple) or (is_in_list and tensor.num_samples < num_samples)


def _describe_limit(rates: dict[str, float], sample_nbytes: int) -> str:
    """Describe the bottleneck of the loader, from rates in bytes per second."""
    copies, raw, batch, loader = (rates[name] for name in (_COPY, _RAW, _BATCH, _LOADER))
    text = f"the loader reaches {loader / raw:.0%} of what positioned reads of the same bytes reach"
    if loader >= _NEAR * raw:
        return f"The limit here is reading itself: {text}, and these reach {raw / copies:.0%} of the rate of a copy in memory."
    if sample_nbytes < _SMALL_NBYTES:
        work = f"{1e6 * sample_nbytes / loader:.1f} us for {sample_nbytes:,} bytes"
        return f"The limit here is the work for each sample, {work}, and not the bytes: {text}."
    return f"The limit here is putting samples together in batches: {text}, and read_batch alone {batch / raw:.0%}."


def _choose(cache: tc.TensorCache, max_nbytes: int) -> Array:
    """Return indices of samples at equal distances, with about `max_nbytes` of tensors."""
    total = sum(tensor.nbytes for tensor in cache.schema.values())
    count = len(cache) if total <= max_nbytes else max(1, int(len(cache) * max_nbytes / total))
    return np.array(spread(len(cache), min(count, _MAX_SAMPLES)), np.int64)


def _read_extent(cache: tc.TensorCache, index: int, left_out: list[str]) -> _Extent:
    """Read a sample's tensors into the page cache; return their place."""
    shard, row = cache._store.locate(cache._at(index))
    layout, begin = shard.layout(row), shard.columns.tensors_begin.item(row)
    shard.file.read(begin, begin + layout.nbytes)
    unused = [layout.named[name] for name in left_out if name in layout.named]
    nbytes = layout.nbytes - layout.data_begin - sum(tensor.end - tensor.begin for tensor in unused)
    return shard.path, begin + layout.data_begin, begin + layout.nbytes, nbytes


def _find_collate(cache: tc.TensorCache) -> Any:
    """Return `collate` with lists for tensors that cannot be stacked."""
    ways = {}
    for tensor in cache.schema.values():
        is_uneven = tensor.shape is None or any(isinstance(size, tuple) for size in tensor.shape)
        if is_uneven or tensor.num_samples < len(cache):
            ways[glob.escape(tensor.name)] = "list"
    return ways or "stack"


def _measure(steps: Iterator[int], seconds: float) -> float:
    """Run steps for `seconds`; return bytes per second. Each step yields its number of bytes."""
    total, elapsed, began = 0, 0.0, perf_counter()
    with closing(steps):  # type: ignore[type-var]  # a generator
        for nbytes in steps:
            total += nbytes
            elapsed = perf_counter() - began
            if total and not elapsed < seconds:  # so that NaN ends, too
                break
    return total / elapsed


def _copy(nbytes: int) -> Iterator[int]:
    # like the page cache, the source is larger than the processor's caches; like a batch, the target is used again
    source, target = np.ones(_SOURCE_NBYTES, np.uint8), np.zeros(nbytes, np.uint8)
    for begin in cycle(range(0, _SOURCE_NBYTES - nbytes + 1, nbytes)):
        np.copyto(target, source[begin : begin + nbytes])
        yield nbytes


def _read_raw(
    cache: tc.TensorCache, extents: list[_Extent], batches: list[list[int]], pool: Threads, threads: int
) -> Iterator[int]:
    files = cache._store.files
    longest = max(sum(extents[index][2] - extents[index][1] for index in batch) for batch in batches)
    buffers = [memoryview(bytearray(longest)) for _ in range(threads)]

    def read(batch: list[int], buffer: memoryview) -> int:
        at = 0
        for path, begin, end, _ in map(extents.__getitem__, batch):
            files.get(path).read_into([buffer[at : at + end - begin]], begin)
            at += end - begin
        return at

    for at in cycle(range(0, len(batches), threads)):
        yield sum(pool.map(read, batches[at : at + threads], buffers))


def _read_batches(cache: tc.TensorCache, sizes: Array, batches: list[list[int]], collate: Any) -> Iterator[int]:
    for indices in cycle(batches):
        cache.read_batch(indices, collate=collate)
        yield int(sizes[indices].sum())


def _load_batches(cache: tc.TensorCache, sizes: Array, batch_size: int, collate: Any, threads: int) -> Iterator[int]:
    options: dict[str, Any] = {"num_threads": threads, "prefetch_batches": threads + 1}
    with closing(
        tc.Loader(cache, batch_size, collate=collate, shuffle=True, rank=0, world_size=1, **options)
    ) as loader:
        while True:
            for _, info in loader.with_info():
                yield int(sizes[info.indices].sum())
