"""Scenarios `dali_gpu`, `loader_gpu`: batches of 64 into a GPU's memory, compared with a plain copy."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import chain, islice, repeat
from typing import Any

import torch

import wds_tensorcache as tc
from benchmarks.context import CEILING, Context, Skipped
from benchmarks.peers.base import by_sample, unstack
from benchmarks.timing import Rounds, Variant, interleaved

__all__ = ["AHEAD", "DALI_NATIVE", "DALI_NODES", "PINNED_COPY", "dali_gpu", "loader_gpu"]

PINNED_COPY = f"{CEILING}: copy from pinned memory"
DALI_NODES = "tensorcache nodes, nested batches"
DALI_NATIVE = "native reader, nested batches"
AHEAD = "Loader(device='cuda')"
_RAW = "fn.readers.webdataset, raw members"
_BATCH = 64
_THREADS = 8
_AHEAD = 4  # batches
# in each round; a pipeline has read up to 9 batches before the clock starts, which must not count
_TIMED = 1024


def dali_gpu(context: Context) -> Rounds:
    """Measure shuffled batches from DALI pipelines, until every byte is in the GPU's memory."""
    _need_gpu(context)
    try:
        from nvidia.dali import fn, pipeline_def

        import dali_plugin
    except ImportError as exc:
        raise Skipped(f"DALI is not installed: {exc}") from exc
    is_dry, size = context.gpu == "cpu", _batch_size(context)
    options = {"batch_size": size, "num_threads": _THREADS, "prefetch_queue_depth": _AHEAD}
    options["device_id"] = None if is_dry else 0
    device = "cpu" if is_dry else "gpu"
    shards = sorted(map(str, context.ours.glob("*.tar")))

    @pipeline_def(**options)
    def ours(cache: Any) -> Any:
        ahead = {"num_threads": _THREADS, "prefetch_batches": _THREADS}
        return dali_plugin.fn.tensorcache(cache, shuffle=True, device=device, **ahead)

    @pipeline_def(**options)
    def native(cache: Any) -> Any:
        return dali_plugin.fn.native_reader(cache, shuffle=True, initial_fill=4 * size, device=device)

    @pipeline_def(**options)
    def raw() -> Any:
        indexes = [path.replace(".tar", ".idx") for path in shards]
        ext = ["skel.pyd", "safetensors"]
        members = fn.readers.webdataset(
            paths=shards, index_paths=indexes, ext=ext, random_shuffle=True, initial_fill=4 * size
        )
        return tuple(members if is_dry else (member.gpu() for member in members))

    with tc.open(context.ours, num_threads=_THREADS) as cache:
        nested = {
            name: chain.from_iterable(repeat(dali_plugin.TensorCacheIterator(made(cache))))
            for name, made in ((DALI_NODES, ours), (DALI_NATIVE, native))
        }
        pipe = raw()
        pipe.build()
        runs: dict[str, Callable[[], Any]] = {name: partial(next, batches) for name, batches in nested.items()}
        for name, run in runs.items():
            _check(context, name, run())
        return _measure(context, runs | {_RAW: pipe.run})


def loader_gpu(context: Context) -> Rounds:
    """Measure batches without DALI: `read_batch` alone, and a `Loader` that reads ahead."""
    _need_gpu(context)
    with tc.open(context.ours, num_threads=_THREADS) as cache:
        order, size = tc.EpochOrder(len(cache), seed=0), _batch_size(context)
        numbers = [order(0, range(at, at + size)) for at in range(0, len(cache) - size + 1, size)]
        endless = chain.from_iterable(repeat(numbers))
        options = {"num_threads": _THREADS, "prefetch_batches": _THREADS}
        with tc.Loader(cache, size, shuffle=True, last_batch="drop", device=context.gpu, **options) as loader:
            ahead = chain.from_iterable(repeat(loader))
            runs = {
                "read_batch(device='cuda')": lambda: cache.read_batch(next(endless), device=context.gpu),
                AHEAD: partial(next, ahead),
            }
            for name, run in runs.items():
                _check(context, name, run())
            return _measure(context, runs)


def _batch_size(context: Context) -> int:
    return 8 if context.gpu == "cpu" else _BATCH


def _need_gpu(context: Context) -> None:
    if context.gpu == "cuda" and not torch.cuda.is_available():
        raise Skipped(f"torch {torch.__version__} sees no CUDA device")
    if context.workload.ragged:
        raise Skipped("DALI cannot batch samples of different shapes without padding")


def _measure(context: Context, runs: dict[str, Callable[[], Any]]) -> Rounds:
    is_dry, size = context.gpu == "cpu", _batch_size(context)
    count = 4 if is_dry else _TIMED
    tensors = context.workload.split(context.samples[0])[0].values()
    host = torch.empty(size * sum(tensor.nbytes for tensor in tensors), dtype=torch.uint8, pin_memory=not is_dry)

    def copied() -> Any:
        return host.to(context.gpu, non_blocking=True)

    def timed(run: Callable[[], Any]) -> int:
        for _ in islice(repeat(None), count):
            run()
        if not is_dry:
            torch.cuda.synchronize()
        return count * size

    variants = {
        name: Variant(partial(timed, run), count * size, context.warm(name))
        for name, run in {PINNED_COPY: copied, **runs}.items()
    }
    return interleaved(variants, context.rounds)


def _check(context: Context, name: str, batch: Any) -> None:
    """Raise AssertionError unless a batch is on the GPU and equals the samples as written."""
    workload = context.workload
    tensors, small = workload.split(batch)
    if not all(tensor.device.type == context.gpu for tensor in tensors.values()):
        raise AssertionError(f"{name}: not on {context.gpu}")
    on_host = {key: tensor.cpu() for key, tensor in tensors.items()}
    for sample in unstack(workload, on_host, by_sample(small)):
        context.check(name, [sample], [workload.split(sample)[1]["index"]])
