"""`drop_text`: texts replaced at random by an empty one, for classifier-free guidance."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from wds_tensorcache.reading.base_cache import BatchInfo
from wds_tensorcache.reading.batch.leaves import Leaves
from wds_tensorcache.reading.seeds import fractions_of
from wds_tensorcache.training.transforms.places import place_of

__all__ = ["DropText", "drop_text"]


def drop_text(p: float, value: Mapping[str, Any], *, mark: str | None = None) -> DropText:
    """Return a transform for a loader that replaces each row's texts with probability `p`, for classifier-free guidance.

    Ho and Salimans, "Classifier-Free Diffusion Guidance", 2022. The choice of rows depends only on `info.seeds`, so
    it is the same after a resume with another batch size or number of ranks.

    Args:
        p: Probability, in [0, 1].
        value: Replacements by name; a row has all of them replaced, or none: `{"text": empty_text, "pooled": 0}`. A
            replacement is a number, a tensor of one row's shape, for example the states of the empty prompt, or any other
            value in place of a value that is not a tensor, for example `{"prompt": ""}`. In a padded batch, a tensor may
            be shorter than the rows: zeros fill the rest.
        mark: Name under which the batch gets a bool tensor `[B]`, True for the replaced rows. Use it where masks matter,
            because `info` describes the texts as they are stored.

    Raises:
        ValueError: `p` is out of range, or `value` is not a dict of replacements.

    Memory: overwrites the rows in the batch's own memory.
    """
    if not 0 <= p <= 1:
        raise ValueError(f"p={p}, expected a probability in [0, 1]")
    if not isinstance(value, Mapping) or not value or not all(isinstance(name, str) for name in value):
        raise ValueError(f"value={value!r:.200}, expected replacements by name: {{'text': empty_text, 'pooled': 0}}")
    return DropText(p, dict(value), mark)


@dataclass(frozen=True, slots=True)
class DropText:
    """A transform made by `drop_text`, which explains the fields.

    Threads/fork/pickle: safe everywhere; it keeps a copy of the replacements on each device that it met.
    """

    p: float
    value: dict[str, Any] = field(repr=False)
    mark: str | None = None
    _moved: dict[tuple[str, torch.device, torch.dtype], torch.Tensor] = field(
        default_factory=dict, repr=False, compare=False
    )

    def __call__(self, batch: Any, info: BatchInfo) -> Any:
        """Return the batch with some rows' texts replaced."""
        is_dropped = fractions_of(info.seeds, "|".join(("drop_text", *self.value))) < self.p
        rows: list[int] = is_dropped.nonzero()[0].tolist()
        for name in self.value:
            target, key = place_of(batch, name)
            found = target[key]
            if isinstance(found, torch.Tensor):
                for row in rows:
                    self._replace(name, found[row])
            elif isinstance(found, list):
                target[key] = [self._like(name, each) if at in rows else each for at, each in enumerate(found)]
            elif rows and isinstance(found, np.ndarray):
                target[key] = found.copy()
                target[key][is_dropped] = self.value[name]
            elif rows:
                values = [self.value[name] if at in rows else each for at, each in enumerate(found)]
                target[key] = Leaves(None, tuple(name.split(".")), values)
        if self.mark is not None:
            target, key = place_of(batch, self.mark, is_new=True)
            target[key] = torch.from_numpy(is_dropped).to(info.is_padding.device, non_blocking=True)
        return batch

    def _replace(self, name: str, row: torch.Tensor) -> None:
        value = self._moved_to(name, row)
        if not value.ndim:
            row.fill_(value)
            return
        if value.ndim != row.ndim or value.shape[1:] != row.shape[1:] or len(value) > len(row):
            raise ValueError(f"the replacement of {name!r} has shape {list(value.shape)}, but a row {list(row.shape)}")
        row[: len(value)] = value
        row[len(value) :] = 0

    def _like(self, name: str, row: Any) -> Any:
        if not isinstance(row, torch.Tensor):
            return self.value[name]
        value = self._moved_to(name, row)
        return value.clone() if value.ndim else row.new_full(row.shape, value.item())

    def _moved_to(self, name: str, row: torch.Tensor) -> torch.Tensor:
        """Return the replacement with the dtype of a row, on its device; a number stays on the host."""
        value = self.value[name]
        if not isinstance(value, torch.Tensor):
            return torch.tensor(value, dtype=row.dtype, device="cpu")
        key = name, row.device, row.dtype
        if key not in self._moved:
            self._moved[key] = value.detach().to(row.device, row.dtype)
        return self._moved[key]
