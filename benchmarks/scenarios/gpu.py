"""Scenario `loader_gpu`: batches of 64 into a GPU's memory, compared with plain copies; `dali_gpu` is measured alike."""

from __future__ import annotations

import os
import random
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import torch

import wds_tensorcache as tc
from benchmarks.harness import CEILING, Context, Rows, Skipped, require
from benchmarks.peers.ours import as_batch

PINNED_COPY = f"{CEILING}: copy from pinned memory"
CACHED_COPY = f"{CEILING}: copy from the page cache"
AHEAD = "Loader(device='cuda')"
_BATCH = 64
THREADS = 8
# in each round; a pipeline has read up to 9 batches before the clock starts, which must not count
_TIMED = 1024
_LINKS = 8  # an epoch has as many times the samples; at the end of each one, batches that are read ahead run out


def loader_gpu(context: Context) -> Rows:
    """Measure batches without DALI: `read_batch` alone, and a `Loader` that reads ahead."""
    _, cache, size = long_epoch(context)
    order = tc.EpochOrder(len(cache), seed=0)
    batches = [order(0, range(at, at + size)) for at in range(0, len(cache) - size + 1, size)]
    endless = chain.from_iterable(repeat(batches))
    options = {"num_threads": THREADS, "prefetch_batches": THREADS, "device": context.gpu}
    loader = context.enter(tc.Loader(cache, size, shuffle=True, last_batch="drop", **options))
    runs = {
        "read_batch(device='cuda')": lambda: cache.read_batch(next(endless), device=context.gpu),
        AHEAD: partial(next, chain.from_iterable(repeat(loader))),
    }
    for name, run in runs.items():
        check(context, name, run(), context.gpu)
    return rows_of_batches(context, size, runs)


def long_epoch(context: Context) -> tuple[Path, Any, int]:
    """Return a folder in which each of our shards has several names, its cache, and the samples of a batch."""
    if context.gpu == "cuda" and not torch.cuda.is_available():
        raise Skipped(f"torch {torch.__version__} sees no CUDA device")
    folder = context.new_folder()
    for link in range(_LINKS):
        for path in (*context.ours.glob("*.tar"), *context.ours.glob("*.idx")):
            os.link(path, folder / f"{link}-{path.name}")
    return folder, context.enter(tc.open(folder, num_threads=THREADS)), 8 if context.gpu == "cpu" else _BATCH


def rows_of_batches(context: Context, size: int, runs: dict[str, Callable[[], Any]]) -> Rows:
    """Return rows of functions that put a batch into the GPU's memory, beside plain copies."""
    is_dry = context.gpu == "cpu"
    count = 4 if is_dry else _TIMED
    nbytes = size * sum(tensor.nbytes for tensor in context.workload.split(context.samples[0])[0].values())
    host = torch.empty(nbytes, dtype=torch.uint8, pin_memory=not is_dry)

    def timed(run: Callable[[], Any]) -> int:
        for _ in range(count):
            run()
        if not is_dry:
            torch.cuda.synchronize()
        return count * size

    cached = _read_and_copied(context, nbytes)
    context.stack.callback(cached.close)
    ceilings = {PINNED_COPY: lambda: host.to(context.gpu, non_blocking=True), CACHED_COPY: partial(next, cached)}
    return context.rows({name: partial(timed, run) for name, run in (ceilings | runs).items()}, count * size)


def _read_and_copied(context: Context, nbytes: int) -> Iterator[Any]:
    """Yield tensors on the GPU: as many bytes as a batch has, from random places of a shard, in one read each."""
    path = min(context.ours.glob("*.tar"))
    last, generator = path.stat().st_size - nbytes, random.Random(0)
    stream = torch.cuda.Stream() if context.gpu == "cuda" else None

    def read(begin: int) -> tuple[Any, Any]:
        host = torch.empty(nbytes, dtype=torch.uint8, pin_memory=stream is not None)
        require(os.preadv(file.fileno(), [host.numpy()], begin) == nbytes, CACHED_COPY, "a read was short")
        with torch.cuda.stream(stream):  # None does nothing
            return host.to(context.gpu, non_blocking=True), stream and stream.record_event()

    with path.open("rb") as file, ThreadPoolExecutor(THREADS) as pool:
        waiting = deque(pool.submit(read, generator.randint(0, last)) for _ in range(2 * THREADS))
        while True:
            moved, event = waiting.popleft().result()
            waiting.append(pool.submit(read, generator.randint(0, last)))
            if event is not None:
                torch.cuda.current_stream().wait_event(event)
                moved.record_stream(torch.cuda.current_stream())
            yield moved


def check(context: Context, name: str, batch: Any, device: str) -> None:
    """Raise AssertionError unless a nested batch is on the device and equals the samples as written."""
    workload = context.workload
    tensors, small = workload.split(batch)
    require({tensor.device.type for tensor in tensors.values()} == {device}, name, f"not on {device}")
    on_host = workload.nest({key: tensor.cpu() for key, tensor in tensors.items()}, small)
    context.check_any(name, as_batch(workload, on_host).samples())
