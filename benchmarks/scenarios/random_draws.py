"""Scenario `random_draws`: epochs of our loader with alternatives, and with latents drawn from moments, beside those without.

Rows that are compared read the same number of bytes from the same shards.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch

import wds_tensorcache as tc
from benchmarks.context import CEILING, Context
from benchmarks.peers import NAME
from benchmarks.timing import Rounds

_WORKLOAD = "diffusion"  # the samples are this scenario's own, so one run is enough
SAME_BYTES = f"{NAME}, Loader, one latent and one text"
CHOSEN = f"{NAME}, Loader, chosen of two latents and two texts"
MOMENTS = f"{NAME}, Loader, moments and text"
SAMPLED = f"{NAME}, Loader, latent sampled from moments, and text"
ARITHMETIC = f"{CEILING}, sampling from moments in memory"
_THREADS = 2
_PREFETCHED = 2
# after these, the process has mapped the pages of nearly all alternatives, as it has all pages of the row without alternatives
_WARM_EPOCHS = 6
_CHOOSE = {"latent": ["latent", "latent_flipped"], "text": "captions.*"}


def random_draws(context: Context) -> Rounds:
    """Measure a whole epoch of each loader. The arithmetic of an epoch runs on as many threads."""
    if context.workload.name != _WORKLOAD:
        return {}
    size, count = context.workload.batch_size, context.workload.count // 2
    folder = context.scratch / "random_draws"
    with ExitStack() as stack:
        _write(folder, count)
        cache = stack.enter_context(tc.open(folder, num_threads=_THREADS))

        def loader(names: list[str], **options: Any) -> tc.Loader:
            made = tc.Loader(
                cache.select(names), size, shuffle=True, num_threads=_THREADS, prefetch_batches=_PREFETCHED, **options
            )
            stack.callback(made.close)
            return made

        sample = tc.sample_moments("moments", to="latent")
        loaders = {
            SAME_BYTES: loader(["latent", "captions.0"]),
            CHOSEN: loader(["latent", "latent_flipped", "captions.*"], choose=_CHOOSE),
            MOMENTS: loader(["moments", "captions.0"]),
            SAMPLED: loader(["moments", "captions.0"], transform=sample),
        }
        for name in (SAME_BYTES, CHOSEN):
            _check(name, loaders[name], cache)
        _check_sampled(loaders[SAMPLED], cache)
        for _ in range(_WARM_EPOCHS):
            _epoch(loaders[CHOSEN])
        pool = ThreadPoolExecutor(_THREADS, "arithmetic")
        stack.callback(pool.shutdown)
        runs: dict[str, Callable[[], int]] = {name: partial(_epoch, each) for name, each in loaders.items()}
        runs[ARITHMETIC] = partial(_sample_all, pool, sample, list(loaders[MOMENTS].with_info()))
        return context.measure(runs, count)


def _write(folder: Path, count: int) -> None:
    with tc.ShardWriter(folder / "%02d.tar", max_samples=count // 2, fsync=False) as sink:
        for i in range(count):
            generator = torch.Generator().manual_seed(i)
            latents = torch.randn(2, 4, 128, 128, generator=generator).half()
            texts = torch.randn(2, 77, 2048, generator=generator).half()
            moments = torch.cat([latents[0], torch.rand(4, 128, 128, generator=generator).half() + 0.1])
            parts = {"latent": latents[0], "latent_flipped": latents[1], "moments": moments, "captions": [*texts]}
            sink.write(f"{i:06d}", parts)


def _epoch(loader: tc.Loader) -> int:
    return sum(len(batch["latent"] if "latent" in batch else batch["moments"]) for batch in loader)


def _sample_all(pool: ThreadPoolExecutor, sample: Any, batches: list[tuple[Any, tc.BatchInfo]]) -> int:
    """Draw all latents of an epoch, with as many batches alive as in a loader."""
    jobs: deque[Any] = deque()
    seen = 0
    for batch, info in batches:
        jobs.append(pool.submit(sample, dict(batch), info))
        if len(jobs) > _PREFETCHED:
            seen += len(jobs.popleft().result()["latent"])
    return seen + sum(len(job.result()["latent"]) for job in jobs)


def _rows(loader: tc.Loader) -> Iterator[tuple[int, dict[str, str], Any, torch.Tensor]]:
    """Yield the index of each sample, its choices, its latent and its text."""
    for batch, info in loader.with_info():
        texts = batch["text"] if "text" in batch else batch["captions"][0]
        for row, index in enumerate(info.indices.tolist()):
            chosen = {name: info.choices.chosen(name)[row] for name in info.choices}
            yield index, chosen, batch["latent"][row], texts[row]


def _check(name: str, loader: tc.Loader, cache: Any) -> None:
    """Raise AssertionError unless an epoch has each sample once, with the latents and texts that it says."""
    seen, drawn = set(), set()
    for index, chosen, latent, text in _rows(loader):
        sample = cache[index]
        caption = chosen.get("text", "captions.0")
        expected = sample[chosen.get("latent", "latent")].load(), sample["captions"][int(caption[-1])].load()
        if not (torch.equal(latent, expected[0]) and torch.equal(text, expected[1])):
            raise AssertionError(f"{name}: what was read is not what was written")
        seen.add(index)
        drawn.add(tuple(chosen.values()))
    if len(seen) != len(cache) or len(drawn) != (4 if name == CHOSEN else 1):
        raise AssertionError(f"{name}: {len(seen)} of {len(cache)} samples, with {len(drawn)} combinations")


def _check_sampled(loader: tc.Loader, cache: Any) -> None:
    """Raise AssertionError unless the noise of an epoch has mean 0 and deviation 1, each sample its own."""
    noises = []
    for index, _, latent, text in _rows(loader):
        mean, deviation = cache[index]["moments"].load().float().chunk(2)
        noises.append(((latent.float() - mean) / deviation).flatten())
        if not torch.equal(text, cache[index]["captions"][0].load()):
            raise AssertionError(f"{SAMPLED}: what was read is not what was written")
    noise = torch.stack(noises)
    correlation = (noise[0] * noise[1]).mean().item()
    if abs(noise.mean().item()) > 0.01 or abs(noise.std().item() - 1) > 0.01 or abs(correlation) > 0.03:
        raise AssertionError(f"{SAMPLED}: the noise is not normal")
