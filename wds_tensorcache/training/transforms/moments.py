"""`sample_moments`: a fresh latent in each epoch from a cached mean and deviation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from wds_tensorcache.reading.base_cache import BatchInfo
from wds_tensorcache.training.transforms.normal import normal
from wds_tensorcache.training.transforms.places import place_of, remove

__all__ = ["SampleMoments", "sample_moments"]

_LOG_VARIANCES = -30.0, 20.0  # limits, as in the `DiagonalGaussianDistribution` of diffusers


def sample_moments(
    mean: str, deviation: str | None = None, *, to: str | None = None, log_variance: bool = False
) -> SampleMoments:
    """Return a transform for a loader that draws a latent from a normal distribution: `mean + deviation * noise`.

    The noise of a row depends only on `info.seeds`. So each epoch has new latents, and they are the same after a resume with
    another batch size or number of ranks. The noise has the same bits on every device.

    Args:
        mean: Name of the tensor with the means. Without `deviation`, it also has the deviations, concatenated to the means in
            the channel dimension: `[B, 2 * C, …]`, or a list of B tensors `[2 * C, …]`.
        deviation: Name of the tensor with the standard deviations, of the same shape.
        to: Name of the latent in the batch; by default, `mean`. The latent takes the place of the moments.
        log_variance: The deviations are stored as logarithms of variances. As in diffusers, they are limited to [-30, 20].

    Raises (as the cause of the loader's error):
        KeyError: The batch has no such tensor.
        TypeError: It is not a tensor of floating-point numbers.
        ValueError: Its number of channels is odd, or the shapes of means and deviations differ.

    Memory: computes in float32; the latent has the dtype of the means and new memory.
    """
    return SampleMoments(mean, deviation, mean if to is None else to, log_variance)


@dataclass(frozen=True, slots=True)
class SampleMoments:
    """A transform made by `sample_moments`, which explains the fields.

    Threads/fork/pickle: immutable, safe everywhere.
    """

    mean: str
    deviation: str | None
    to: str
    log_variance: bool

    def __call__(self, batch: Any, info: BatchInfo) -> Any:
        """Return the batch with a latent in place of the moments."""
        target, key = place_of(batch, self.mean)
        means, deviations = target[key], None
        if self.deviation is not None:
            other, other_key = place_of(batch, self.deviation)
            deviations = other[other_key]
            remove(other, other_key)
        seeds = torch.from_numpy(info.seeds)
        if isinstance(means, list):
            parts = [None] * len(means) if deviations is None else deviations
            rows = zip(means, parts, torch.tensor_split(seeds, len(means)), strict=True)
            latent: Any = [
                self._sample(mean[None], None if part is None else part[None], seed)[0] for mean, part, seed in rows
            ]
        else:
            latent = self._sample(means, deviations, seeds)
        if self.to != self.mean:
            remove(target, key)
            target, key = place_of(batch, self.to, is_new=True)
        target[key] = latent
        return batch

    def _sample(self, mean: Any, deviation: Any, seeds: torch.Tensor) -> torch.Tensor:
        for found in (mean,) if deviation is None else (mean, deviation):
            if not isinstance(found, torch.Tensor) or not found.is_floating_point():
                what = str(found.dtype) if isinstance(found, torch.Tensor) else type(found).__name__
                raise TypeError(f"moments {self.mean!r}: expected a floating-point tensor, got {what}")
        if deviation is None:
            if mean.ndim < 2 or mean.shape[1] % 2:
                raise ValueError(
                    f"moments {self.mean!r} of shape {list(mean.shape)}: expected means and deviations in dimension 1"
                )
            mean, deviation = mean.chunk(2, 1)
        if mean.shape != deviation.shape:
            raise ValueError(f"means of shape {list(mean.shape)}, but deviations of shape {list(deviation.shape)}")
        spread = deviation.float()
        if self.log_variance:
            spread = spread.clamp(*_LOG_VARIANCES).mul_(0.5).exp_()
        seeds = seeds.to(mean.device, non_blocking=True)
        noise = normal(seeds, tuple(mean.shape[1:]), f"sample_moments|{self.to}")
        return noise.mul_(spread).add_(mean.float()).to(mean.dtype)
