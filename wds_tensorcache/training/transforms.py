"""`drop_text` and `sample_moments`: random transforms that resume exactly."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from wds_tensorcache.errors import list_names
from wds_tensorcache.reading.batch.batch_memory import to_device
from wds_tensorcache.reading.batch.leaves import Leaves
from wds_tensorcache.reading.batch_info import BatchInfo
from wds_tensorcache.reading.seeds import fractions_of, purpose_of
from wds_tensorcache.reading.structure import key_of
from wds_tensorcache.reading.transfer import current_stream
from wds_tensorcache.training.normal import normal

_LOGVAR_LIMITS = -30.0, 20.0  # as in the `DiagonalGaussianDistribution` of diffusers


def drop_text(p: float, value: Mapping[str, Any], *, mark: str | None = None) -> DropText:
    """Return a transform that drops texts at random, for classifier-free guidance.

    It replaces each row's texts with probability `p` (Ho and Salimans, "Classifier-Free Diffusion Guidance", 2022). The choice
    of rows depends only on `info.seeds`, `p` and the names in `value`. So it is the same after a resume with another batch size
    or number of ranks, and transforms with other names choose independently. Afterwards, `info.mask` and `info.shapes` describe
    the texts that the batch holds.

    Args:
        p: Probability, in [0, 1].
        value: Replacements by name; a row gets either all replacements or none: `{"text": empty_text, "pooled": 0}`.
            In place of a tensor, a replacement is a number, which fills the row, or a tensor or array of one row's shape, for
            example the states of the empty prompt. In a padded batch, it may be shorter than the rows: zeros fill the rest. In
            a list of tensors, it may have any shape. In place of any other value, a replacement may be any value, for example
            `{"prompt": ""}`. In a list, None stays None, because a sample without a text has no text to drop. In a padded
            batch, the row of such a sample is replaced like any other.
        mark: Name under which the batch gets a bool tensor `[B]`, on the batch's device. It is True for the chosen rows, also
            where a text is None.

    Raises:
        ValueError: `p` is out of range, or `value` is empty or not a dict with names as keys.
        TypeError: `mark` is not a string.

    Raises (as the cause of the loader's error):
        KeyError: The batch has no such value.
        TypeError: A text is a numpy array; store it as a tensor. Or a text is a tensor, but its replacement is neither a tensor
            nor a number. Or the batch's value is neither a tensor nor a list.
        ValueError: A replacement does not have the shape of a row of a stacked or padded tensor; or the batch has a value named
            `mark` already.

    Memory: overwrites the rows of stacked or padded tensors in the batch's own memory. Lists are replaced by new lists. It
        shares the replacement tensors with the caller, who must not change them; arrays are copied.
    """
    if not 0 <= p <= 1:
        raise ValueError(f"p={p}, expected a probability in [0, 1]")
    if not isinstance(value, Mapping) or not value or not all(isinstance(name, str) for name in value):
        raise ValueError(f"value={value!r:.200}, expected replacements by name: {{'text': empty_text, 'pooled': 0}}")
    if mark is not None and not isinstance(mark, str):
        raise TypeError(f"mark={mark!r:.100}, expected a name for the mask of the replaced rows, such as 'is_dropped'")
    values = {name: torch.tensor(text) if isinstance(text, np.ndarray) else text for name, text in value.items()}
    return DropText(p, {n: v.detach() if isinstance(v, torch.Tensor) else v for n, v in values.items()}, mark)


@dataclass(frozen=True, slots=True)
class DropText:
    """A transform made by `drop_text`, which explains the fields.

    Threads/fork/pickle: safe everywhere. It keeps a copy of the replacements for each device and stream on which it ran; a
        pickled copy does not.
    """

    p: float
    value: dict[str, Any] = field(repr=False)
    mark: str | None = None
    _moved: dict[Any, torch.Tensor] = field(default_factory=dict, repr=False, compare=False)

    def __reduce__(self) -> Any:
        return DropText, (self.p, self.value, self.mark)

    def __call__(self, batch: Any, info: BatchInfo) -> Any:
        """Replace the texts of random rows, and return the batch."""
        is_dropped = self._is_dropped(info)
        rows: list[int] = is_dropped.nonzero()[0].tolist()
        for name in self.value:
            container, key = _locate(batch, name)
            texts = container[key]
            if isinstance(texts, torch.Tensor):
                is_stacked = isinstance(info._way(name), str)
                for row in rows:
                    self._overwrite(name, texts[row], is_stacked)
            elif not isinstance(texts, (list, Leaves)):
                raise TypeError(f"drop_text replaces tensors and lists, but {name!r:.100} is a {type(texts).__name__}")
            elif rows:
                replaced = list(texts)
                for row in rows:
                    if replaced[row] is not None:
                        replaced[row] = self._like(name, replaced[row])
                container[key] = replaced if isinstance(texts, list) else Leaves(None, tuple(name.split(".")), replaced)
        info._edits.append(self)
        if self.mark is not None:
            container, key = _locate(batch, self.mark, is_new=True)
            container[key] = to_device(torch.from_numpy(is_dropped), False, info.is_padding.device)
        return batch

    def _is_dropped(self, info: BatchInfo) -> np.ndarray[Any, np.dtype[np.bool_]]:
        return fractions_of(info.seeds, purpose_of("drop_text", self.value)) < self.p

    def edit_shapes(self, shapes: dict[str, torch.Tensor], lengths: dict[str, int], info: BatchInfo) -> None:
        """Change `shapes` and padded `lengths` as this transform has changed the batch."""
        rows = torch.from_numpy(self._is_dropped(info).nonzero()[0])
        for name, value in self.value.items():
            shape = tuple(getattr(value, "shape", ()))
            if not shape or not len(rows):
                continue  # a number keeps the shape of a row
            if name not in shapes and info._is_lacking(name):
                shapes[name] = torch.zeros((len(info.indices), len(shape)), dtype=torch.int64, device="cpu")
            if name not in shapes:
                continue
            held = rows
            if info._way(name) == "list":
                held = rows[shapes[name][rows].any(1)]  # a row that is None stays None
            else:
                lengths.setdefault(name, info._length(name, shapes[name][:, :1]))
            if len(shape) == shapes[name].shape[1]:
                shapes[name][held] = torch.tensor(shape, dtype=torch.int64, device="cpu")
            elif len(held):
                del shapes[name]  # rows of a list have different numbers of dimensions

    def _overwrite(self, name: str, row: torch.Tensor, is_stacked: bool) -> None:
        value = self._moved_to(name, row)
        if not value.ndim:
            row.fill_(value)
            return
        is_alike = value.ndim == row.ndim and value.shape[1:] == row.shape[1:]
        if not is_alike or len(value) > len(row) or (is_stacked and len(value) < len(row)):
            remedy = ""
            # padded to the longest row of a batch, only some batches are too short
            if is_alike and len(value) > len(row):
                remedy = f"; use collate={{{name!r}: tc.pad(to={len(value)})}} or a greater length"
            elif is_alike:
                remedy = f"; for texts, collate={{{name!r}: 'pad'}} allows shorter ones"
            raise ValueError(
                f"the replacement of {name!r} has shape {list(value.shape)}, but a row {list(row.shape)}{remedy}"
            )
        row[: len(value)] = value
        row[len(value) :] = 0

    def _like(self, name: str, row: Any) -> Any:
        if isinstance(row, np.ndarray):
            raise TypeError(f"drop_text replaces tensors and lists, but {name!r:.100} has numpy arrays")
        if not isinstance(row, torch.Tensor):
            return copy.deepcopy(self.value[name])
        value = self._moved_to(name, row)
        # a number is not read on the host: if it is on a GPU, that would wait for all work before it
        return value.clone() if value.ndim else torch.empty_like(row).fill_(value)

    def _moved_to(self, name: str, row: torch.Tensor) -> torch.Tensor:
        """Return the replacement in a row's dtype; tensors move to its device."""
        value = self.value[name]
        if not isinstance(value, torch.Tensor):
            if not isinstance(value, (int, float, complex, np.generic)):
                problem = f"the batch has a tensor {name!r:.100}, but its replacement is a {type(value).__name__}"
                raise TypeError(f"{problem}; pass a tensor or a number to drop_text")
            return torch.tensor(value, dtype=row.dtype, device="cpu")
        # a copy for each stream, because no other stream waits for the copy to the GPU
        key = name, row.device, row.dtype, current_stream(row.device)
        if key not in self._moved:
            self._moved[key] = to_device(value.to(row.dtype).contiguous(), False, row.device)
        return self._moved[key]


def sample_moments(mean: str, std: str | None = None, *, to: str | None = None, logvar: bool = False) -> SampleMoments:
    """Return a transform that draws latents from normal distributions: `mean + std * noise`.

    The noise of a row depends only on `info.seeds` and on the latent's name. So each epoch has new latents, and they are the
    same after a resume with another batch size or number of ranks. The noise has the same bits on every CPU and every CUDA
    device. In a list, a row that is None, because its sample lacks the moments, stays None.

    Args:
        mean: Name of the tensor with the means. Without `std`, it also contains the standard deviations, concatenated to the
            means in the channel dimension: `[B, 2 * C, …]`, or a list of B tensors `[2 * C, …]`.
        std: Name of the tensor with the standard deviations, of the same shape.
        to: Name of the latent in the batch; by default, `mean`. The tensors of the moments are removed from the batch.
        logvar: True if the standard deviations are stored as logarithms of variances. As in diffusers, they are limited to
            [-30, 20]. Their exponentials may differ between devices in the last bits.

    Raises:
        TypeError: `logvar` is not a bool.

    Raises (as the cause of the loader's error):
        KeyError: The batch has no such tensor.
        TypeError: The value is not a tensor of floating-point numbers.
        ValueError: The number of channels is odd, or the shapes of means and deviations differ. A row has means, but no
            deviations. Or the batch has a value named `to` already.

    Memory: computes in float32; the latent has the dtype of the means and new memory.
    """
    if not isinstance(logvar, bool):
        raise TypeError(
            f"logvar={logvar!r:.100}, expected a bool; std= names the tensor that has the logarithms of variances"
        )
    return SampleMoments(mean, std, mean if to is None else to, logvar)


@dataclass(frozen=True, slots=True)
class SampleMoments:
    """A transform made by `sample_moments`, which explains the fields. Threads/fork/pickle: immutable, safe everywhere."""

    mean: str
    std: str | None
    to: str
    logvar: bool

    def __call__(self, batch: Any, info: BatchInfo) -> Any:
        """Replace the moments of a batch by latents, and return the batch."""
        target, key = _locate(batch, self.mean)
        means, stds = target[key], None
        if self.std is not None:
            other, other_key = _locate(batch, self.std)
            stds = other[other_key]
            _remove(other, other_key)
        seeds = torch.from_numpy(info.seeds)
        if isinstance(means, list):
            parts = [None] * len(means) if stds is None else stds
            latent: Any = [self._row(*row) for row in zip(means, parts, torch.split(seeds, 1), strict=True)]
        elif isinstance(means, Leaves) and all(mean is None for mean in means):
            latent = means
        else:
            latent = self._sample(means, stds, seeds)
        if self.to != self.mean:
            _remove(target, key)
            target, key = _locate(batch, self.to, is_new=True)
        target[key] = latent
        info._edits.append(self)
        return batch

    def edit_shapes(self, shapes: dict[str, torch.Tensor], lengths: dict[str, int], info: BatchInfo) -> None:
        """Change `shapes` and padded `lengths`; see `DropText.edit_shapes`."""
        latents = shapes.pop(self.mean, None)
        if self.std is not None:
            shapes.pop(self.std, None)
        if latents is None or not latents.shape[1]:
            return
        parts = 2 if self.std is None else 1
        lengths[self.to] = lengths.pop(self.mean, info._length(self.mean, latents[:, :1])) // parts
        latents[:, 0] //= parts
        shapes[self.to] = latents

    def _row(self, mean: Any, std: Any, seed: torch.Tensor) -> Any:
        if mean is None:
            return None
        if std is None and self.std is not None:
            raise ValueError(f"moments {self.mean!r}: a row has means, but no deviations {self.std!r}")
        return self._sample(mean[None], None if std is None else std[None], seed)[0]

    def _sample(self, mean: Any, std: Any, seeds: torch.Tensor) -> torch.Tensor:
        for moments in (mean,) if std is None else (mean, std):
            if not isinstance(moments, torch.Tensor) or not moments.is_floating_point():
                kind = str(moments.dtype) if isinstance(moments, torch.Tensor) else type(moments).__name__
                raise TypeError(f"moments {self.mean!r}: expected a floating-point tensor, got {kind}")
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


def _locate(batch: Any, name: str, *, is_new: bool = False) -> tuple[Any, Any]:
    """Return the container and the key of a value: `cond.text` is `batch["cond"]["text"]`."""
    # with `is_new`, the batch must have a container for the value, but no value there
    container, parts = batch, name.split(".")
    for number, part in enumerate(parts, 1):
        is_dict = isinstance(container, dict)
        key = int(part) if part.isdecimal() and not (is_dict and part in container) else key_of(part)
        has_key = key in container if is_dict else isinstance(container, list) and key in range(len(container))
        if number == len(parts) and is_new and (is_dict or has_key):
            if has_key and container[key] is not None:  # None takes the place of moments in a list
                raise ValueError(f"the batch has {name!r:.100} already; choose a new name")
            break
        if not has_key:
            contents = (
                f"there are {list_names(container, part)}" if is_dict else f"there is a {type(container).__name__}"
            )
            raise KeyError(f"the batch has no {name!r:.100}; {contents}")
        if number < len(parts):
            container = container[key]
    return container, key


def _remove(container: Any, key: Any) -> None:
    """Remove a value from its dict, or put None in its list."""
    if isinstance(container, dict):
        del container[key]
    else:
        container[key] = None
