"""Scenarios `dali_cpu`, `dali_gpu`: batches from DALI pipelines without operators, with our readers and with the usual ones."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import chain, islice, repeat
from pathlib import Path
from typing import Any

import numpy as np
import webdataset as wds
import xxhash

import dali_plugin
import wds_tensorcache as tc
from benchmarks.harness import Context, Rows, require
from benchmarks.peers import PYD, SHUFFLED, as_arrays
from benchmarks.peers.ours import as_batch
from benchmarks.peers.webdataset import SHARD, shuffle, stream
from benchmarks.scenarios.gpu import THREADS, check, long_epoch, rows_of_batches

OURS = "tensorcache nodes"
NESTED = "tensorcache nodes, nested batches"
NATIVE = "native reader, nested batches"
RAW = "fn.readers.webdataset, raw members"
PYD_SOURCE = "webdataset .pyd as external source"


def _build(options: dict[str, Any], reader: Callable[..., Any], *args: Any, **arguments: Any) -> Any:
    """Build a pipeline with these options that only reads."""
    from nvidia.dali import pipeline_def

    pipe = pipeline_def(**options)(lambda: reader(*args, **arguments))()
    pipe.build()
    return pipe


def _raw(folder: Path, fill: int, device: str) -> tuple[Any, ...]:
    from nvidia.dali import fn

    shards = sorted(map(str, folder.glob("*.tar")))
    files = {"paths": shards, "index_paths": [path.replace(".tar", ".idx") for path in shards]}
    shuffled = {"random_shuffle": True, "initial_fill": fill, "missing_component_behavior": "error"}
    members = fn.readers.webdataset(ext=["skel.pyd", "safetensors"], **files, **shuffled)
    return tuple(member.gpu() if device == "gpu" else member for member in members)


def _nested(
    context: Context, options: dict[str, Any], cache: Any, fill: int, device: str, **nodes: int
) -> dict[str, Any]:
    """Return the endless nested batches of our two readers, whose first one is checked."""
    shuffled = {"shuffle": True, "device": device}
    pipes = {
        NESTED: _build(options, dali_plugin.fn.tensorcache, cache, **shuffled, **nodes),
        NATIVE: _build(options, dali_plugin.fn.native_reader, cache, initial_fill=fill, **shuffled),
    }
    endless = {name: chain.from_iterable(repeat(dali_plugin.TensorCacheIterator(pipe))) for name, pipe in pipes.items()}
    for name, batches in endless.items():
        check(context, name, next(batches), "cuda" if device == "gpu" else "cpu")
    return endless


def dali_gpu(context: Context) -> Rows:
    """Measure shuffled batches of 64, until every byte is in the GPU's memory."""
    folder, cache, size = long_epoch(context)
    device = "cpu" if context.gpu == "cpu" else "gpu"
    options = {"batch_size": size, "num_threads": THREADS, "prefetch_queue_depth": 4}
    options["device_id"] = None if device == "cpu" else 0
    batches = _nested(context, options, cache, 4 * size, device, num_threads=THREADS, prefetch_batches=THREADS)
    runs: dict[str, Callable[[], Any]] = {name: partial(next, endless) for name, endless in batches.items()}
    return rows_of_batches(context, size, runs | {RAW: _build(options, _raw, folder, 4 * size, device).run})


def dali_cpu(context: Context) -> Rows:
    """Measure shuffled batches, one byte of each page used. Raw members stay undecoded."""
    workload, size = context.workload, context.workload.batch_size
    num_batches, fill = workload.timed // size, SHUFFLED * size
    options = {"batch_size": size, "num_threads": 2, "device_id": None}
    cache = context.enter(tc.open(context.ours))
    nested = _nested(context, options, cache, fill, "cpu")
    pipes = {OURS: _build(options, dali_plugin.fn.tensorcache, cache, shuffle=True)}
    pipes[RAW] = _build(options, _raw, context.ours, fill, "cpu")
    if (context.stores / PYD / SHARD).exists():  # that peer takes part
        from nvidia.dali import fn

        source = {"source": _batches_of_pyd(context), "num_outputs": len(workload.names), "batch": True}
        pipes[PYD_SOURCE] = _build(options, lambda: tuple(fn.external_source(**source)))
    flat = {name: _outputs(pipe) for name, pipe in pipes.items()}
    written = {_key(workload.split(sample)[0].values()) for sample in context.samples}
    for name, batches in flat.items():
        keys = [_key(_tensors(name, next(batches), row, context)) for row in range(size)]
        require(written.issuperset(keys), name)

    def use_nested(batch: Any) -> int:
        workload.touch(batch)
        return as_batch(workload, batch).count

    def run(batches: Iterator[Any], use: Callable[[Any], int]) -> int:
        return sum(map(use, islice(batches, num_batches)))

    runs = {name: partial(run, batches, use_nested) for name, batches in nested.items()}
    runs |= {name: partial(run, batches, _use_outputs) for name, batches in flat.items()}
    return context.rows(runs, num_batches * size)


def _batches_of_pyd(context: Context) -> Iterator[tuple[Any, ...]]:
    """Yield batches of an endless stream as arrays, as DALI's users write it."""
    workload, batch = context.workload, []
    while True:
        stages = wds.tarfile_to_samples(), shuffle(workload), wds.decode()
        for sample in stream(context.stores / PYD / SHARD, *stages):
            batch.append(as_arrays(workload.split(sample["pyd"])[0]).values())
            if len(batch) == workload.batch_size:
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
    return arrays[: len(context.workload.names)]  # after our tensors come the sample indices
