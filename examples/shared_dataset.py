"""Read a slow dataset in several processes that share its samples.

    python examples/shared_dataset.py        # in one terminal
    python examples/shared_dataset.py        # in another one, at the same time: it loads only the samples that are missing

The first epoch takes as long as loading all samples. Every later epoch, in both terminals, takes milliseconds.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch

import wds_tensorcache as tc


class SlowDataset(torch.utils.data.Dataset[Any]):
    """Samples with a latent of 32 KB, which take 20 ms each, as loading and encoding an image does."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict[str, Any]:
        time.sleep(0.02)
        generator = torch.Generator().manual_seed(index)
        latent = torch.randn(4, 64, 64, generator=generator)
        return {"latent": latent.bfloat16(), "caption": f"caption {index}", "index": index}


def main() -> None:
    """Read two epochs; print for each how many samples this process loaded itself so far, and which processes share them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=500)
    parser.add_argument("--name", default="shared-example")
    options = parser.parse_args()
    with tc.SharedDataset(SlowDataset(options.samples), options.name) as shared:
        loader = tc.Loader(shared, 10, shuffle=True, seed=int(time.time()))
        for epoch in range(2):
            begun = time.perf_counter()
            total = sum(len(batch["index"]) for batch in loader)
            stats = shared.stats()
            print(
                f"epoch {epoch}: {total} samples in {time.perf_counter() - begun:.2f} s; this process loaded {stats.misses}, "
                f"processes {stats.holders} share {stats.num_samples}"
            )


if __name__ == "__main__":
    main()
