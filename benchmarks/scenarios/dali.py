"""Scenarios `dali_cpu`, `dali_gpu`: batches from DALI pipelines without operators, with our readers and with the usual ones."""

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
from benchmarks.peers.base import as_array
from benchmarks.peers.ours import as_batch
from benchmarks.peers.webdataset import SHARD
from benchmarks.scenarios.gpu import THREADS, batch_size, check, long_epoch, measure, need_gpu
from benchmarks.timing import Rounds

OURS = "tensorcache nodes"
NESTED = "tensorcache nodes, nested batches"
NATIVE = "native reader, nested batches"
RAW = "fn.readers.webdataset, raw members"
PYD_SOURCE = "webdataset .pyd as external source"
_SHUFFLED = 8  # batches in the buffer that shuffles a stream; on a GPU 4


class _Pipelines:
    """Pipelines of both scenarios.

    Args:
        options: Those of a pipeline.
        nodes: Those of `dali_plugin.fn.tensorcache`.
        fill: Samples in the buffer that shuffles a stream.
    """

    def __init__(self, options: dict[str, Any], nodes: dict[str, Any], fill: int) -> None:
        try:
            from nvidia.dali import fn, pipeline_def

            import dali_plugin
        except ImportError as exc:
            raise Skipped(f"DALI is not installed: {exc}") from exc
        self._fn, self._plugin, self._pipeline = fn, dali_plugin, pipeline_def(**options)
        self._nodes, self._device, self._fill = nodes, nodes.get("device", "cpu"), fill

    def ours(self, cache: Any) -> Any:
        return self._pipeline(lambda: self._plugin.fn.tensorcache(cache, shuffle=True, **self._nodes))()

    def _native(self, cache: Any) -> Any:
        options = {"shuffle": True, "initial_fill": self._fill, "device": self._device}
        return self._pipeline(lambda: self._plugin.fn.native_reader(cache, **options))()

    def nested(self, cache: Any) -> dict[str, Iterator[Any]]:
        """Return the endless nested batches of our two readers."""
        pipes = {NESTED: self.ours(cache), NATIVE: self._native(cache)}
        return {
            name: chain.from_iterable(repeat(self._plugin.TensorCacheIterator(pipe))) for name, pipe in pipes.items()
        }

    def raw(self, folder: Path) -> Any:
        shards = sorted(map(str, folder.glob("*.tar")))

        def define() -> Any:
            members = self._fn.readers.webdataset(
                paths=shards,
                index_paths=[path.replace(".tar", ".idx") for path in shards],
                ext=["skel.pyd", "safetensors"],
                random_shuffle=True,
                initial_fill=self._fill,
                missing_component_behavior="error",
            )
            return tuple(member.gpu() if self._device == "gpu" else member for member in members)

        return self._built(define)

    def source(self, source: Iterator[Any], count: int) -> Any:
        return self._built(lambda: tuple(self._fn.external_source(source=source, num_outputs=count, batch=True)))

    def _built(self, define: Callable[[], Any]) -> Any:
        pipe = self._pipeline(define)()
        pipe.build()
        return pipe


def dali_gpu(context: Context) -> Rounds:
    """Measure shuffled batches of 64, until every byte is in the GPU's memory."""
    need_gpu(context)
    is_dry, size = context.gpu == "cpu", batch_size(context)
    options = {
        "batch_size": size,
        "num_threads": THREADS,
        "prefetch_queue_depth": 4,
        "device_id": None if is_dry else 0,
    }
    nodes = {"device": "cpu" if is_dry else "gpu", "num_threads": THREADS, "prefetch_batches": THREADS}
    pipelines = _Pipelines(options, nodes, 4 * size)
    with long_epoch(context) as folder, tc.open(folder, num_threads=THREADS) as cache:
        runs: dict[str, Callable[[], Any]] = {
            name: partial(next, each) for name, each in pipelines.nested(cache).items()
        }
        for name, run in runs.items():
            check(context, name, run(), context.gpu)
        return measure(context, runs | {RAW: pipelines.raw(folder).run})


def dali_cpu(context: Context) -> Rounds:
    """Measure shuffled batches, one byte of each page used. Raw members stay undecoded."""
    workload, size = context.workload, context.workload.batch_size
    if workload.ragged:
        raise Skipped("DALI cannot batch samples of different shapes without padding")
    pipelines = _Pipelines({"batch_size": size, "num_threads": 2, "device_id": None}, {}, _SHUFFLED * size)
    count = workload.timed // size
    with tc.open(context.ours) as cache:
        pipes = {OURS: pipelines.ours(cache), RAW: pipelines.raw(context.ours)}
        pipes[OURS].build()
        if (context.stores / "webdataset .pyd" / SHARD).exists():  # that peer takes part
            pipes[PYD_SOURCE] = pipelines.source(_batches_of_pyd(context), len(workload.dtypes))
        iterators = pipelines.nested(cache)
        known = {_key(map(as_array, workload.split(sample)[0].values())) for sample in context.samples}
        for name, batches in iterators.items():
            check(context, name, next(batches), "cpu")
        for name, pipe in pipes.items():
            rows = list(_rows(name, pipe, context))
            if len(rows) != size or not known.issuperset(map(_key, rows)):
                raise AssertionError(f"{name}: what was read is not what was written")

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
                seen += as_batch(workload, batch).count
            return seen

        runs: dict[str, Callable[[], int]] = {name: partial(nested, batches) for name, batches in iterators.items()}
        runs |= {name: partial(run, pipe) for name, pipe in pipes.items()}
        return context.measure(runs, count * size)


def _batches_of_pyd(context: Context) -> Iterator[tuple[Any, ...]]:
    """Yield batches of an endless stream as arrays, as DALI's users write it."""
    size, batch = context.workload.batch_size, []
    shard = wds.SimpleShardList(str(context.stores / "webdataset .pyd" / SHARD))
    while True:
        buffered = wds.shuffle(_SHUFFLED * size, initial=_SHUFFLED * size, rng=random.Random(0))
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
