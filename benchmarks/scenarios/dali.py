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
from benchmarks.harness import Context, Rows, Skipped
from benchmarks.peers.base import SHUFFLED, as_array
from benchmarks.peers.ours import as_batch
from benchmarks.peers.webdataset import SHARD
from benchmarks.scenarios.gpu import THREADS, batch_size, check, long_epoch, rows_of_batches

OURS = "tensorcache nodes"
NESTED = "tensorcache nodes, nested batches"
NATIVE = "native reader, nested batches"
RAW = "fn.readers.webdataset, raw members"
PYD_SOURCE = "webdataset .pyd as external source"


class _Pipelines:
    """Pipelines of both scenarios.

    Args:
        cache: Cache of the shards in `folder`.
        fill: Samples in the buffer that shuffles a stream.
        device: Where the batches go.
        nodes: Further options of `dali_plugin.fn.tensorcache`.
        options: Those of a pipeline.
    """

    def __init__(self, cache: Any, folder: Path, fill: int, device: str, nodes: dict[str, Any], **options: Any) -> None:
        try:
            from nvidia.dali import fn, pipeline_def

            import dali_plugin
        except ImportError as exc:
            raise Skipped(f"DALI is not installed: {exc}") from exc
        self._fn, self._iterator = fn, dali_plugin.TensorCacheIterator
        shards = sorted(map(str, folder.glob("*.tar")))
        indexes = [path.replace(".tar", ".idx") for path in shards]

        def raw() -> Any:
            shuffle = {"random_shuffle": True, "initial_fill": fill, "missing_component_behavior": "error"}
            files = {"paths": shards, "index_paths": indexes, "ext": ["skel.pyd", "safetensors"]}
            members = fn.readers.webdataset(**files, **shuffle)
            return tuple(member.gpu() if device == "gpu" else member for member in members)

        native = {"shuffle": True, "initial_fill": fill, "device": device}
        self._definitions: dict[str, Callable[[], Any]] = {
            OURS: lambda: dali_plugin.fn.tensorcache(cache, shuffle=True, device=device, **nodes),
            NATIVE: lambda: dali_plugin.fn.native_reader(cache, **native),
            RAW: raw,
        }
        self._pipeline = pipeline_def(**options)

    def nested(self) -> dict[str, Iterator[Any]]:
        """Return the endless nested batches of our two readers."""
        pipes = {NESTED: self.build(OURS), NATIVE: self.build(NATIVE)}
        return {name: chain.from_iterable(repeat(self._iterator(pipe))) for name, pipe in pipes.items()}

    def build(self, name: str) -> Any:
        pipe = self._pipeline(self._definitions[name])()
        pipe.build()
        return pipe

    def build_source(self, source: Iterator[Any], count: int) -> Any:
        self._definitions[PYD_SOURCE] = lambda: tuple(
            self._fn.external_source(source=source, num_outputs=count, batch=True)
        )
        return self.build(PYD_SOURCE)


@contextmanager
def dali_gpu(context: Context) -> Iterator[Rows]:
    """Measure shuffled batches of 64, until every byte is in the GPU's memory."""
    is_dry, size = context.gpu == "cpu", batch_size(context)
    options = {"batch_size": size, "num_threads": THREADS, "prefetch_queue_depth": 4}
    nodes = {"num_threads": THREADS, "prefetch_batches": THREADS}
    with long_epoch(context) as (folder, cache):
        pipelines = _Pipelines(
            cache, folder, 4 * size, "cpu" if is_dry else "gpu", nodes, device_id=None if is_dry else 0, **options
        )
        runs: dict[str, Callable[[], Any]] = {name: partial(next, it) for name, it in pipelines.nested().items()}
        for name, run in runs.items():
            check(context, name, run(), context.gpu)
        with rows_of_batches(context, runs | {RAW: pipelines.build(RAW).run}) as rows:
            yield rows


@contextmanager
def dali_cpu(context: Context) -> Iterator[Rows]:
    """Measure shuffled batches, one byte of each page used. Raw members stay undecoded."""
    workload, size = context.workload, context.workload.batch_size
    if workload.ragged:
        raise Skipped("DALI cannot batch samples of different shapes without padding")
    num_batches = workload.timed // size
    with tc.open(context.ours) as cache:
        options = {"batch_size": size, "num_threads": 2, "device_id": None}
        pipelines = _Pipelines(cache, context.ours, SHUFFLED * size, "cpu", {}, **options)
        pipes = {name: pipelines.build(name) for name in (OURS, RAW)}
        if (context.stores / "webdataset .pyd" / SHARD).exists():  # that peer takes part
            pipes[PYD_SOURCE] = pipelines.build_source(_batches_of_pyd(context), len(workload.dtypes))
        iterators = pipelines.nested()
        written = {_key(map(as_array, workload.split(sample)[0].values())) for sample in context.samples}
        for name, batches in iterators.items():
            check(context, name, next(batches), "cpu")
        for name, pipe in pipes.items():
            rows = list(_rows(name, pipe, context))
            if len(rows) != size or not written.issuperset(map(_key, rows)):
                raise AssertionError(f"{name}: what was read is not what was written")

        def run(pipe: Any) -> int:
            seen = 0
            while seen < num_batches * size:
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
            for batch in islice(batches, num_batches):
                workload.touch(batch)
                seen += as_batch(workload, batch).count
            return seen

        runs: dict[str, Callable[[], int]] = {name: partial(nested, batches) for name, batches in iterators.items()}
        runs |= {name: partial(run, pipe) for name, pipe in pipes.items()}
        yield context.rows(runs, num_batches * size)


def _batches_of_pyd(context: Context) -> Iterator[tuple[Any, ...]]:
    """Yield batches of an endless stream as arrays, as DALI's users write it."""
    size, batch = context.workload.batch_size, []
    shard = wds.SimpleShardList(str(context.stores / "webdataset .pyd" / SHARD))
    while True:
        buffered = wds.shuffle(SHUFFLED * size, initial=SHUFFLED * size, rng=random.Random(0))
        for sample in wds.DataPipeline(shard, wds.tarfile_to_samples(), buffered, wds.decode()):
            batch.append([as_array(tensor) for tensor in context.workload.split(sample["pyd"])[0].values()])
            if len(batch) == size:
                yield tuple(np.stack(column) for column in zip(*batch, strict=True))
                batch = []


def _touch(output: Any) -> None:
    """Use one byte of each page of a pipeline's output, because its reader may return maps that are not read yet."""
    for part in [output.as_tensor()] if output.is_dense_tensor() else output:
        int(np.asarray(part).reshape(-1).view(np.uint8)[::4096].sum())


def _key(tensors: Iterable[Any]) -> tuple[int, ...]:
    """Return a checksum that is equal for two samples with the same tensors in any order."""
    return tuple(sorted(xxhash.xxh3_64_intdigest(np.ascontiguousarray(tensor)) for tensor in tensors))


def _rows(name: str, pipe: Any, context: Context) -> Iterator[list[Any]]:
    """Yield the tensors of each sample of a pipeline's next batch."""
    outputs = pipe.run()
    for row in range(context.workload.batch_size):
        arrays = [np.asarray(output[row]) for output in outputs]
        if name == RAW:
            sample = tc.decode_sample(*(array.tobytes() for array in arrays))
            yield [as_array(tensor.load()) for tensor in context.workload.split(sample)[0].values()]
        else:
            yield arrays[: len(context.workload.dtypes)]  # after our tensors come the sample indices
