"""Scenarios `dali_cpu`, `dali_gpu`: batches from DALI pipelines without operators, with our readers and with the usual ones."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import chain, islice, repeat
from pathlib import Path
from typing import Any

import numpy as np
import webdataset as wds
import xxhash

import wds_tensorcache as tc
from benchmarks.harness import Context, Rows
from benchmarks.peers.base import SHUFFLED
from benchmarks.peers.ours import as_batch
from benchmarks.peers.webdataset import SHARD
from benchmarks.scenarios.gpu import THREADS, batch_size, check, long_epoch, rows_of_batches

OURS = "tensorcache nodes"
NESTED = "tensorcache nodes, nested batches"
NATIVE = "native reader, nested batches"
RAW = "fn.readers.webdataset, raw members"
PYD_SOURCE = "webdataset .pyd as external source"


def _definitions(cache: Any, folder: Path, fill: int, device: str, **nodes: Any) -> dict[str, Callable[[], Any]]:
    """Return functions that define the outputs of a pipeline.

    Args:
        cache: Cache of the shards in `folder`.
        fill: Samples in the buffer that shuffles a stream.
        device: Device of the batches.
        nodes: Further options of `dali_plugin.fn.tensorcache`.
    """
    from nvidia.dali import fn

    import dali_plugin

    shards = sorted(map(str, folder.glob("*.tar")))
    indexes = [path.replace(".tar", ".idx") for path in shards]

    def raw() -> Any:
        shuffle = {"random_shuffle": True, "initial_fill": fill, "missing_component_behavior": "error"}
        files = {"paths": shards, "index_paths": indexes, "ext": ["skel.pyd", "safetensors"]}
        members = fn.readers.webdataset(**files, **shuffle)
        return tuple(member.gpu() if device == "gpu" else member for member in members)

    return {
        OURS: lambda: dali_plugin.fn.tensorcache(cache, shuffle=True, device=device, **nodes),
        NATIVE: lambda: dali_plugin.fn.native_reader(cache, shuffle=True, initial_fill=fill, device=device),
        RAW: raw,
    }


def _build(definition: Callable[[], Any], **options: Any) -> Any:
    from nvidia.dali import pipeline_def

    pipe = pipeline_def(**options)(definition)()
    pipe.build()
    return pipe


def _nested(definitions: dict[str, Callable[[], Any]], **options: Any) -> dict[str, Iterator[Any]]:
    """Return the endless nested batches of our two readers."""
    from dali_plugin import TensorCacheIterator

    pipes = {NESTED: _build(definitions[OURS], **options), NATIVE: _build(definitions[NATIVE], **options)}
    return {name: chain.from_iterable(repeat(TensorCacheIterator(pipe))) for name, pipe in pipes.items()}


@contextmanager
def dali_gpu(context: Context) -> Iterator[Rows]:
    """Measure shuffled batches of 64, until every byte is in the GPU's memory."""
    is_dry, size = context.gpu == "cpu", batch_size(context)
    options = {
        "batch_size": size,
        "num_threads": THREADS,
        "prefetch_queue_depth": 4,
        "device_id": None if is_dry else 0,
    }
    nodes = {"num_threads": THREADS, "prefetch_batches": THREADS}
    with long_epoch(context) as (folder, cache):
        definitions = _definitions(cache, folder, 4 * size, "cpu" if is_dry else "gpu", **nodes)
        batches = _nested(definitions, **options)
        runs: dict[str, Callable[[], Any]] = {name: partial(next, iterator) for name, iterator in batches.items()}
        for name, run in runs.items():
            check(context, name, run(), context.gpu)
        with rows_of_batches(context, runs | {RAW: _build(definitions[RAW], **options).run}) as rows:
            yield rows


@contextmanager
def dali_cpu(context: Context) -> Iterator[Rows]:
    """Measure shuffled batches, one byte of each page used. Raw members stay undecoded."""
    workload, size = context.workload, context.workload.batch_size
    context.refuse_ragged()
    num_batches = workload.timed // size
    options = {"batch_size": size, "num_threads": 2, "device_id": None}
    with tc.open(context.ours) as cache:
        definitions = _definitions(cache, context.ours, SHUFFLED * size, "cpu")
        nested = _nested(definitions, **options)
        if (context.stores / "webdataset .pyd" / SHARD).exists():  # that peer takes part
            from nvidia.dali import fn

            source = {"source": _batches_of_pyd(context), "num_outputs": len(workload.dtypes), "batch": True}
            definitions[PYD_SOURCE] = lambda: tuple(fn.external_source(**source))
        del definitions[NATIVE]
        flat = {name: _outputs(_build(definition, **options)) for name, definition in definitions.items()}
        for name, batches in nested.items():
            check(context, name, next(batches), "cpu")
        written = {_key(workload.split(sample)[0].values()) for sample in context.samples}
        for name, batches in flat.items():
            rows = [_key(_tensors(name, next(batches), row, context)) for row in range(size)]
            if not written.issuperset(rows):
                raise AssertionError(f"{name}: what was read is not what was written")

        def use_nested(batch: Any) -> int:
            workload.touch(batch)
            return as_batch(workload, batch).count

        def run(batches: Iterator[Any], use: Callable[[Any], int]) -> int:
            return sum(map(use, islice(batches, num_batches)))

        runs = {name: partial(run, batches, use_nested) for name, batches in nested.items()}
        runs |= {name: partial(run, batches, _use_outputs) for name, batches in flat.items()}
        yield context.rows(runs, num_batches * size)


def _batches_of_pyd(context: Context) -> Iterator[tuple[Any, ...]]:
    """Yield batches of an endless stream as arrays, as DALI's users write it."""
    size, batch = context.workload.batch_size, []
    shard = wds.SimpleShardList(str(context.stores / "webdataset .pyd" / SHARD))
    while True:
        buffered = wds.shuffle(SHUFFLED * size, initial=SHUFFLED * size, rng=random.Random(0))
        for sample in wds.DataPipeline(shard, wds.tarfile_to_samples(), buffered, wds.decode()):
            batch.append([tensor.numpy() for tensor in context.workload.split(sample["pyd"])[0].values()])
            if len(batch) == size:
                yield tuple(np.stack(column) for column in zip(*batch, strict=True))
                batch = []


def _outputs(pipe: Any) -> Iterator[Any]:
    """Yield the outputs of endless epochs of a pipeline."""
    while True:
        try:
            yield pipe.run()
        except StopIteration:  # the end of an epoch
            pipe.reset()


def _use_outputs(outputs: Any) -> int:
    """Use one byte of each page, because a reader may return maps that are not read yet; return the size of the batch."""
    for output in outputs:
        for part in [output.as_tensor()] if output.is_dense_tensor() else output:
            int(np.asarray(part).reshape(-1).view(np.uint8)[::4096].sum())
    return len(outputs[0])


def _key(tensors: Iterable[Any]) -> tuple[int, ...]:
    """Return a checksum that is equal for two samples with the same tensors in any order."""
    return tuple(sorted(xxhash.xxh3_64_intdigest(np.ascontiguousarray(tensor)) for tensor in tensors))


def _tensors(name: str, outputs: Any, row: int, context: Context) -> list[Any]:
    """Return the tensors of a sample of a pipeline's batch."""
    arrays = [np.asarray(output[row]) for output in outputs]
    if name == RAW:
        sample = tc.decode_sample(*(array.tobytes() for array in arrays))
        return [tensor.load() for tensor in context.workload.split(sample)[0].values()]
    return arrays[: len(context.workload.dtypes)]  # after our tensors come the sample indices
