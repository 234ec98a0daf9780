"""`sample_moments`: a fresh latent in each epoch from a cached mean and standard deviation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from wds_tensorcache.reading.base_cache import BatchInfo
from wds_tensorcache.reading.batch.batch_memory import to_device
from wds_tensorcache.reading.batch.leaves import Leaves
from wds_tensorcache.training.transforms.normal import normal
from wds_tensorcache.training.transforms.places import place_of, remove

__all__ = ["SampleMoments", "sample_moments"]

_LOGVAR_LIMITS = -30.0, 20.0  # as in the `DiagonalGaussianDistribution` of diffusers


def sample_moments(mean: str, std: str | None = None, *, to: str | None = None, logvar: bool = False) -> SampleMoments:
    """Return a transform for a loader that draws a latent from a normal distribution: `mean + std * noise`.

    The noise of a row depends only on `info.seeds`. So each epoch has new latents, and they are the same after a resume with
    another batch size or number of ranks. The noise has the same bits on every CPU and every CUDA device.

    Args:
        mean: Name of the tensor with the means. Without `std`, it also has the standard deviations, concatenated to the
            means in the channel dimension: `[B, 2 * C, …]`, or a list of B tensors `[2 * C, …]`.
        std: Name of the tensor with the standard deviations, of the same shape.
        to: Name of the latent in the batch; by default, `mean`. The latent takes the place of the moments.
        logvar: The standard deviations are stored as logarithms of variances. As in diffusers, they are limited to [-30, 20].
            Their exponentials may differ between devices in the last bits.

    A row that is None, because its sample lacks the moments, stays None.

    Raises:
        TypeError: `logvar` is not a bool.

    Raises (as the cause of the loader's error):
        KeyError: The batch has no such tensor.
        TypeError: It is not a tensor of floating-point numbers.
        ValueError: Its number of channels is odd, or the shapes of means and deviations differ; or a row has means, but no
            deviations.

    Memory: computes in float32; the latent has the dtype of the means and new memory.
    """
    if not isinstance(logvar, bool):
        raise TypeError(
            f"logvar={logvar!r:.100}, expected a bool; std= names the tensor that has the logarithms of variances"
        )
    return SampleMoments(mean, std, mean if to is None else to, logvar)


@dataclass(frozen=True, slots=True)
class SampleMoments:
    """A transform made by `sample_moments`, which explains the fields.

    Threads/fork/pickle: immutable, safe everywhere.
    """

    mean: str
    std: str | None
    to: str
    logvar: bool

    def __call__(self, batch: Any, info: BatchInfo) -> Any:
        """Return the batch with a latent in place of the moments."""
        target, key = place_of(batch, self.mean)
        means, stds = target[key], None
        if self.std is not None:
            other, other_key = place_of(batch, self.std)
            stds = other[other_key]
            remove(other, other_key)
        seeds = torch.from_numpy(info.seeds)
        if isinstance(means, list):
            parts = [None] * len(means) if stds is None else stds
            rows = zip(means, parts, torch.tensor_split(seeds, len(means)), strict=True)
            latent: Any = [self._row(*row) for row in rows]
        elif isinstance(means, Leaves) and all(mean is None for mean in means):
            latent = means
        else:
            latent = self._sample(means, stds, seeds)
        if self.to != self.mean:
            remove(target, key)
            target, key = place_of(batch, self.to, is_new=True)
        target[key] = latent
        info._edits.append(self)
        return batch

    def edit_shapes(self, shapes: dict[str, torch.Tensor], lengths: dict[str, int], info: BatchInfo) -> None:
        """Change the shapes and the padded lengths of a batch, by name, as this transform has changed the batch."""
        found = shapes.pop(self.mean, None)
        if self.std is not None:
            shapes.pop(self.std, None)
        if found is None or not found.shape[1]:
            return
        parts = 2 if self.std is None else 1
        lengths[self.to] = lengths.pop(self.mean, info._length(self.mean, found[:, :1])) // parts
        found[:, 0] //= parts
        shapes[self.to] = found

    def _row(self, mean: Any, std: Any, seed: torch.Tensor) -> Any:
        """Return the latent of one row of a list."""
        if mean is None:
            return None
        if std is None and self.std is not None:
            raise ValueError(f"moments {self.mean!r}: a row has means, but no deviations {self.std!r}")
        return self._sample(mean[None], None if std is None else std[None], seed)[0]

    def _sample(self, mean: Any, std: Any, seeds: torch.Tensor) -> torch.Tensor:
        for found in (mean,) if std is None else (mean, std):
            if not isinstance(found, torch.Tensor) or not found.is_floating_point():
                what = str(found.dtype) if isinstance(found, torch.Tensor) else type(found).__name__
                raise TypeError(f"moments {self.mean!r}: expected a floating-point tensor, got {what}")
        if std is None:
            if mean.ndim < 2 or mean.shape[1] % 2:
                raise ValueError(
                    f"moments {self.mean!r} of shape {list(mean.shape)}: expected means and deviations in dimension 1"
                )
            mean, std = mean.chunk(2, 1)
        if mean.shape != std.shape:
            raise ValueError(f"means of shape {list(mean.shape)}, but deviations of shape {list(std.shape)}")
        spread = std.float()
        if self.logvar:
            spread = spread.clamp(*_LOGVAR_LIMITS).mul_(0.5).exp_()
        noise = normal(to_device(seeds, False, mean.device), tuple(mean.shape[1:]), f"sample_moments|{self.to}")
        return noise.mul_(spread).add_(mean.float()).to(mean.dtype)
