"""Scenario `dali_cpu`: batches from DALI pipelines on the CPU, with our readers and with the usual ones."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import chain, islice, repeat
from pathlib import Path
from typing import Any

import numpy as np
import webdataset as wds
import xxhash

import wds_tensorcache as tc
from benchmarks.context import Context, Skipped
from benchmarks.peers.base import as_array, by_sample, unstack
from benchmarks.peers.webdataset import SHARD
from benchmarks.timing import Rounds
from benchmarks.workloads import Workload

OURS = "tensorcache nodes"
NESTED = "tensorcache nodes, nested batches"
NATIVE = "native reader, nested batches"
RAW = "fn.readers.webdataset, raw members"
PYD_SOURCE = "webdataset .pyd as external source"
_THREADS = 2
_SHUFFLED = 8  # batches in the buffer that shuffles a stream


def dali_cpu(context: Context) -> Rounds:
    """Measure shuffled batches of a pipeline without operators, one byte of each page used. Raw members stay undecoded."""
    try:
        from nvidia.dali import fn, pipeline_def

        import dali_plugin
    except ImportError as exc:
        raise Skipped(f"DALI is not installed: {exc}") from exc
    workload, size = context.workload, context.workload.batch_size
    if workload.ragged:
        raise Skipped("DALI cannot batch samples of different shapes without padding")
    options = {"batch_size": size, "num_threads": _THREADS, "device_id": None}
    shards = sorted(context.ours.glob("*.tar"))
    count = workload.timed // size

    @pipeline_def(**options)
    def ours(cache: Any) -> Any:
        return dali_plugin.fn.tensorcache(cache, shuffle=True)

    @pipeline_def(**options)
    def native(cache: Any) -> Any:
        return dali_plugin.fn.native_reader(cache, shuffle=True, initial_fill=_SHUFFLED * size)

    @pipeline_def(**options)
    def raw(shards: list[Path]) -> Any:
        return tuple(
            fn.readers.webdataset(
                paths=[str(shard) for shard in shards],
                index_paths=[str(shard.with_suffix(".idx")) for shard in shards],
                ext=["skel.pyd", "safetensors"],
                random_shuffle=True,
                initial_fill=_SHUFFLED * size,
                missing_component_behavior="error",
            )
        )

    @pipeline_def(**options)
    def stock(samples: Callable[[], Iterator[Any]]) -> Any:
        source = _batches(context, samples)
        return tuple(fn.external_source(source=source, num_outputs=len(workload.dtypes), batch=True))

    def pyd() -> Iterator[Any]:
        buffered = wds.shuffle(_SHUFFLED * size, initial=_SHUFFLED * size, rng=random.Random(0))
        stages = (wds.tarfile_to_samples(), buffered, wds.decode())
        shard = wds.SimpleShardList(str(context.stores / "webdataset .pyd" / SHARD))
        return (sample["pyd"] for sample in wds.DataPipeline(shard, *stages))

    with tc.open(context.ours) as cache:
        pipes = {OURS: ours(cache), RAW: raw(shards)}
        if (context.stores / "webdataset .pyd" / SHARD).exists():  # that peer takes part
            pipes[PYD_SOURCE] = stock(pyd)
        for pipe in pipes.values():
            pipe.build()
        iterators = {
            name: chain.from_iterable(repeat(dali_plugin.TensorCacheIterator(made(cache))))
            for name, made in ((NESTED, ours), (NATIVE, native))
        }
        _check(context, pipes, {name: next(batches) for name, batches in iterators.items()})

        def run(pipe: Any) -> int:
            seen = 0
            while seen < count * size:
                try:
                    outputs = pipe.run()
                except StopIteration:  # the end of an epoch
                    pipe.reset()
                    continue
                for output in outputs:
                    _touch(output)
                seen += len(outputs[0])
            return seen

        def nested(batches: Iterator[Any]) -> int:
            seen = 0
            for batch in islice(batches, count):
                workload.touch(batch)
                seen += len(workload.split(batch)[0][workload.one[0]])
            return seen

        runs: dict[str, Callable[[], int]] = {name: partial(nested, batches) for name, batches in iterators.items()}
        runs |= {name: partial(run, pipe) for name, pipe in pipes.items()}
        return context.measure(runs, count * size)


def _batches(context: Context, samples: Callable[[], Iterator[Any]]) -> Iterator[tuple[Any, ...]]:
    """Yield batches of an endless stream as arrays, as DALI's users write it."""
    batch = []
    while True:
        for sample in samples():
            batch.append([as_array(tensor) for tensor in context.workload.split(sample)[0].values()])
            if len(batch) == context.workload.batch_size:
                yield tuple(np.stack(column) for column in zip(*batch, strict=True))
                batch = []


def _touch(output: Any) -> None:
    """Use one byte of each page of a pipeline's output, because its reader may return maps that are not read yet."""
    for part in [output.as_tensor()] if output.is_dense_tensor() else output:
        int(np.asarray(part).reshape(-1).view(np.uint8)[::4096].sum())


def _key(tensors: Iterable[Any]) -> tuple[int, ...]:
    """Return a checksum that is equal for two samples with the same tensors in any order."""
    return tuple(sorted(xxhash.xxh3_64_intdigest(np.ascontiguousarray(tensor)) for tensor in tensors))


def _check(context: Context, pipes: dict[str, Any], batches: dict[str, Any]) -> None:
    """Raise AssertionError unless the output equals the samples as written."""
    workload = context.workload
    known = {_key(map(as_array, workload.split(sample)[0].values())) for sample in context.samples}
    found = {name: list(_rows(name, pipe, workload)) for name, pipe in pipes.items()}
    for name, batch in batches.items():
        tensors, small = workload.split(batch)
        for sample in unstack(workload, tensors, by_sample(small)):
            context.check(name, [sample], [workload.split(sample)[1]["index"]])
    for name, rows in found.items():
        if len(rows) != workload.batch_size or not known.issuperset(map(_key, rows)):
            raise AssertionError(f"{name}: what was read is not what was written")


def _rows(name: str, pipe: Any, workload: Workload) -> Iterator[list[Any]]:
    """Yield the tensors of each sample of a pipeline's next batch."""
    outputs = pipe.run()
    for row in range(workload.batch_size):
        arrays = [np.asarray(output[row]) for output in outputs]
        if name == RAW:
            sample = tc.decode_sample(*(array.tobytes() for array in arrays))
            yield [as_array(tensor.load()) for tensor in workload.split(sample)[0].values()]
        else:
            yield arrays[: len(workload.dtypes)]  # after our tensors come the sample indices
