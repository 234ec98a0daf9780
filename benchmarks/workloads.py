"""The samples that are measured."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["checksum", "diffusion_sample", "touch"]


def diffusion_sample(index: int) -> dict[str, Any]:
    """Return a sample as diffusion trainers cache them: 450 KB in three fp16 tensors, and some small values."""
    generator = torch.Generator().manual_seed(index)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).half()

    conditioning = {"pooled_output": random(1, 1280), "prompt": f"photograph number {index} of a harbour at dawn"}
    conditioning |= {"size": (1024, 1024), "crop": (0, 0)}
    return {"latent": {"samples": random(1, 4, 128, 128)}, "cond": [[random(1, 77, 2048), conditioning]], "seed": index}


def _tensors(sample: dict[str, Any]) -> list[Any]:
    ((text, conditioning),) = sample["cond"]
    return [sample["latent"]["samples"], text, conditioning["pooled_output"]]


def touch(sample: dict[str, Any]) -> None:
    """Use every tensor: read one byte of each of its pages."""
    for tensor in _tensors(sample):
        loaded = tensor if isinstance(tensor, torch.Tensor) else tensor.load()
        int(loaded.view(-1).view(torch.uint8)[::4096].sum())


def checksum(sample: dict[str, Any]) -> tuple[Any, ...]:
    """Return what must be equal for two samples to be the same."""
    ((_, conditioning),) = sample["cond"]
    small = (conditioning["prompt"], conditioning["size"], conditioning["crop"], sample["seed"])
    sums = [
        int(torch.as_tensor(t).contiguous().view(-1).view(torch.int16).sum(dtype=torch.int64)) for t in _tensors(sample)
    ]
    return (*sums, *small)
