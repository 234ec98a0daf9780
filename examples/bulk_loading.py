"""Compute mean and deviation of every latent channel of a whole cache, as diffusion models need them.

    python examples/bulk_loading.py [--out demo_out] [--cache FOLDER --tensor latent] [--device cuda]

Without `--cache`, writes a cache of 1,000 latents in three aspect ratios first. Each batch has one shape (`bucket_by`), so only
the end of a bucket is padded. A batch arrives in one transfer and is reduced on the device while the next one is read. Prints
the result, its difference from the same statistics of single tensors, and the reading speed.

Needs: wds_tensorcache, torch.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

import wds_tensorcache as tc

SHAPES = ((16, 64, 64), (16, 48, 80), (16, 80, 48))


def write_cache(folder: Path, count: int) -> None:
    """Write latents as a VAE would give them: each channel with its own mean and deviation."""
    generator = torch.Generator().manual_seed(0)
    means, deviations = torch.linspace(-1, 1, 16), torch.linspace(0.5, 2, 16)
    with tc.ShardWriter(folder / "latents-%03d.tar", max_samples=500, overwrite=True) as sink:
        for i in range(count):
            latent = torch.randn(SHAPES[i % 3], generator=generator)
            sink.write(f"{i:06d}", {"latent": (latent * deviations[:, None, None] + means[:, None, None]).half()})


def in_bulk(cache: tc.TensorCache, name: str, device: str | None) -> Iterator[torch.Tensor]:
    """Yield `[B, C, ...]`, each sample once, in batches of one shape."""
    loader = tc.Loader(cache.select([name]), 64, bucket_by=name, device=device)
    for batch in loader:
        yield batch[name]


def one_by_one(cache: tc.TensorCache, name: str) -> Iterator[torch.Tensor]:
    """Yield `[1, C, ...]`, each sample once."""
    for sample in cache:
        yield sample[name].load()[None]


def rate(batches: Iterable[torch.Tensor]) -> float:
    """Return the MB/s of reading alone."""
    begun = time.perf_counter()
    return sum(batch.nbytes for batch in batches) / 1e6 / (time.perf_counter() - begun)


def channels(batches: Iterable[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return mean and deviation of each channel."""
    count, total, squares = 0, torch.zeros(1), torch.zeros(1)
    for batch in batches:
        summed_dims = [dim for dim in range(batch.ndim) if dim != 1]
        count += batch.numel() // batch.shape[1]
        total = total.to(batch.device) + batch.sum(summed_dims, dtype=torch.float32).double()
        norms = torch.linalg.vector_norm(batch, dim=summed_dims, dtype=torch.float32)
        squares = squares.to(batch.device) + norms.double().square()
    mean = total / count
    return mean.cpu(), (squares / count - mean.square()).sqrt().cpu()


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("demo_out"))
    parser.add_argument("--cache", type=Path)
    parser.add_argument("--tensor", default="latent", help="its name, one of the sample's items")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else None)
    options = parser.parse_args()
    folder: Any = options.cache
    if folder is None:
        folder = options.out / "bulk"
        write_cache(folder, 1000)
    with tc.open(folder) as cache:
        mean, deviation = channels(in_bulk(cache, options.tensor, options.device))
        other_mean, other_deviation = channels(one_by_one(cache, options.tensor))
        difference = torch.maximum((mean - other_mean).abs().max(), (deviation - other_deviation).abs().max())
        rounded = [[round(value, 2) for value in values.tolist()[:4]] for values in (mean, deviation)]
        print(
            f"{len(cache)} samples; mean {rounded[0]}…, deviation {rounded[1]}…; the two ways differ by {difference:.4f}"
        )
        print(f"reading alone: {rate(in_bulk(cache, options.tensor, options.device)):,.0f} MB/s")


if __name__ == "__main__":
    main()
