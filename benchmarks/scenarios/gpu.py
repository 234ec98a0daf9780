"""Scenario `loader_gpu`: batches of 64 into a GPU's memory, compared with plain copies; `dali_gpu` is measured alike."""

from __future__ import annotations

import os
import random
from collections import deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from functools import partial
from itertools import chain, islice, repeat
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

import wds_tensorcache as tc
from benchmarks.context import CEILING, Context, Skipped
from benchmarks.peers.ours import as_batch
from benchmarks.timing import Rounds

PINNED_COPY = f"{CEILING}: copy from pinned memory"
CACHED_COPY = f"{CEILING}: copy from the page cache"
AHEAD = "Loader(device='cuda')"
_BATCH = 64
THREADS = 8
# in each round; a pipeline has read up to 9 batches before the clock starts, which must not count
_TIMED = 1024
_LINKS = 8  # an epoch has as many times the samples; at the end of each one, batches that are read ahead run out


def loader_gpu(context: Context) -> Rounds:
    """Measure batches without DALI: `read_batch` alone, and a `Loader` that reads ahead."""
    need_gpu(context)
    with long_epoch(context) as folder, tc.open(folder, num_threads=THREADS) as cache:
        order, size = tc.EpochOrder(len(cache), seed=0), batch_size(context)
        numbers = [order(0, range(at, at + size)) for at in range(0, len(cache) - size + 1, size)]
        endless = chain.from_iterable(repeat(numbers))
        options = {"num_threads": THREADS, "prefetch_batches": THREADS}
        with tc.Loader(cache, size, shuffle=True, last_batch="drop", device=context.gpu, **options) as loader:
            ahead = chain.from_iterable(repeat(loader))
            runs = {
                "read_batch(device='cuda')": lambda: cache.read_batch(next(endless), device=context.gpu),
                AHEAD: partial(next, ahead),
            }
            for name, run in runs.items():
                check(context, name, run(), context.gpu)
            return measure(context, runs)


def batch_size(context: Context) -> int:
    """Return the samples of a batch."""
    return 8 if context.gpu == "cpu" else _BATCH


def need_gpu(context: Context) -> None:
    """Skip the scenario where it cannot run."""
    if context.gpu == "cuda" and not torch.cuda.is_available():
        raise Skipped(f"torch {torch.__version__} sees no CUDA device")
    if context.workload.ragged:
        raise Skipped("DALI cannot batch samples of different shapes without padding")


@contextmanager
def long_epoch(context: Context) -> Iterator[Path]:
    """Make a folder in which each of our shards has several names."""
    with TemporaryDirectory(dir=context.scratch) as folder:
        for number in range(_LINKS):
            for path in (*context.ours.glob("*.tar"), *context.ours.glob("*.idx")):
                os.link(path, Path(folder, f"{number}-{path.name}"))
        yield Path(folder)


def measure(context: Context, runs: dict[str, Callable[[], Any]]) -> Rounds:
    """Measure functions that put a batch into the GPU's memory, beside plain copies."""
    is_dry, size = context.gpu == "cpu", batch_size(context)
    count = 4 if is_dry else _TIMED
    tensors = context.workload.split(context.samples[0])[0].values()
    nbytes = size * sum(tensor.nbytes for tensor in tensors)
    host = torch.empty(nbytes, dtype=torch.uint8, pin_memory=not is_dry)

    def copied() -> Any:
        return host.to(context.gpu, non_blocking=True)

    def timed(run: Callable[[], Any]) -> int:
        for _ in islice(repeat(None), count):
            run()
        if not is_dry:
            torch.cuda.synchronize()
        return count * size

    with closing(_read_and_copied(context, nbytes)) as cached:
        ceilings = {PINNED_COPY: copied, CACHED_COPY: partial(next, cached)}
        runs = ceilings | runs
        return context.measure({name: partial(timed, run) for name, run in runs.items()}, count * size)


def _read_and_copied(context: Context, nbytes: int) -> Generator[Any, None, None]:
    """Yield tensors on the GPU: as many bytes as a batch has, from random places of a shard, in one read each."""
    path = min(context.ours.glob("*.tar"))
    last, generator = path.stat().st_size - nbytes, random.Random(0)
    stream = torch.cuda.Stream() if context.gpu == "cuda" else None

    def read(begin: int) -> tuple[Any, Any]:
        host = torch.empty(nbytes, dtype=torch.uint8, pin_memory=stream is not None)
        if os.preadv(number, [host.numpy()], begin) != nbytes:
            raise AssertionError(f"{path}: read less than {nbytes} bytes")
        with torch.cuda.stream(stream):  # None does nothing
            return host.to(context.gpu, non_blocking=True), stream and stream.record_event()

    number = os.open(path, os.O_RDONLY)
    try:
        with ThreadPoolExecutor(THREADS) as pool:
            waiting = deque(pool.submit(read, generator.randint(0, last)) for _ in range(2 * THREADS))
            while True:
                moved, event = waiting.popleft().result()
                waiting.append(pool.submit(read, generator.randint(0, last)))
                if event is not None:
                    torch.cuda.current_stream().wait_event(event)
                    moved.record_stream(torch.cuda.current_stream())
                yield moved
    finally:
        os.close(number)


def check(context: Context, name: str, batch: Any, device: str) -> None:
    """Raise AssertionError unless a nested batch is on the device and equals the samples as written."""
    workload = context.workload
    tensors, small = workload.split(batch)
    if {tensor.device.type for tensor in tensors.values()} != {device}:
        raise AssertionError(f"{name}: not on {device}")
    on_host = workload.nest({key: tensor.cpu() for key, tensor in tensors.items()}, small)
    for sample in as_batch(workload, on_host).samples():
        context.check(name, [sample], [workload.split(sample)[1]["index"]])
