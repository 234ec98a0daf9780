"""`drop_text`: texts replaced at random by an empty one, for classifier-free guidance."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from wds_tensorcache.reading.base_cache import BatchInfo
from wds_tensorcache.reading.batch.batch_memory import to_device
from wds_tensorcache.reading.batch.leaves import Leaves
from wds_tensorcache.reading.seeds import fractions_of, purpose_of
from wds_tensorcache.reading.transfer import current_stream
from wds_tensorcache.training.transforms.places import place_of

__all__ = ["DropText", "drop_text"]


def drop_text(p: float, value: Mapping[str, Any], *, mark: str | None = None) -> DropText:
    """Return a transform for a loader that replaces each row's texts with probability `p`, for classifier-free guidance.

    Ho and Salimans, "Classifier-Free Diffusion Guidance", 2022. The choice of rows depends only on `info.seeds`, so
    it is the same after a resume with another batch size or number of ranks.

    Args:
        p: Probability, in [0, 1].
        value: Replacements by name; a row has all of them replaced, or none: `{"text": empty_text, "pooled": 0}`. A
            replacement is a number, a tensor or an array of one row's shape, for example the states of the empty prompt, or
            any other value in place of a value that is not a tensor, for example `{"prompt": ""}`. In a padded batch, a tensor
            may be shorter than the rows: zeros fill the rest. Rows of numpy arrays are replaced like those of tensors.
            None stays None, because a sample without a text has none to drop.
        mark: Name under which the batch gets a bool tensor `[B]`, True for the replaced rows.

    Afterwards, `info.mask` and `info.shapes` describe the texts that the batch holds.

    Raises:
        ValueError: `p` is out of range, or `value` is not a dict of replacements.

    Memory: overwrites the rows of stacked tensors in the batch's own memory; arrays and lists are replaced by new ones.
    """
    if not 0 <= p <= 1:
        raise ValueError(f"p={p}, expected a probability in [0, 1]")
    if not isinstance(value, Mapping) or not value or not all(isinstance(name, str) for name in value):
        raise ValueError(f"value={value!r:.200}, expected replacements by name: {{'text': empty_text, 'pooled': 0}}")
    return DropText(p, dict(value), mark)


@dataclass(frozen=True, slots=True)
class DropText:
    """A transform made by `drop_text`, which explains the fields.

    Threads/fork/pickle: safe everywhere. It keeps a copy of the replacements for each device and stream that it met; a pickled
        copy does not.
    """

    p: float
    value: dict[str, Any] = field(repr=False)
    mark: str | None = None
    _moved: dict[Any, torch.Tensor] = field(default_factory=dict, repr=False, compare=False)

    def __reduce__(self) -> Any:
        return DropText, (self.p, self.value, self.mark)

    def __call__(self, batch: Any, info: BatchInfo) -> Any:
        """Return the batch with some rows' texts replaced."""
        is_dropped = self._is_dropped(info)
        rows: list[int] = is_dropped.nonzero()[0].tolist()
        for name in self.value:
            target, key = place_of(batch, name)
            found = target[key]
            if isinstance(found, torch.Tensor):
                for row in rows:
                    self._replace(name, found[row])
            elif isinstance(found, list):
                target[key] = self._replaced(name, found, is_dropped)
            elif rows and isinstance(found, np.ndarray):
                target[key] = found.copy()
                for row in rows:
                    self._replace_array(name, target[key][row, ...])
            elif rows:
                target[key] = Leaves(None, tuple(name.split(".")), self._replaced(name, found, is_dropped))
        info._edits.append(self)
        if self.mark is not None:
            target, key = place_of(batch, self.mark, is_new=True)
            target[key] = to_device(torch.from_numpy(is_dropped), False, info.is_padding.device)
        return batch

    def _is_dropped(self, info: BatchInfo) -> np.ndarray[Any, np.dtype[np.bool_]]:
        return fractions_of(info.seeds, purpose_of("drop_text", self.value)) < self.p

    def edit_shapes(self, shapes: dict[str, torch.Tensor], lengths: dict[str, int], info: BatchInfo) -> None:
        """Change the shapes and the padded lengths of a batch, by name, as this transform has changed the batch."""
        rows = torch.from_numpy(self._is_dropped(info).nonzero()[0])
        for name, value in self.value.items():
            shape = tuple(getattr(value, "shape", ()))
            if not shape or not len(rows):
                continue  # a number keeps the shape of a row
            if name not in shapes and info._is_lacking(name):
                shapes[name] = torch.zeros((len(info.indices), len(shape)), dtype=torch.int64, device="cpu")
            if name not in shapes:
                continue
            if info._is_list(name):
                # a row that is None stays None
                held = rows[shapes[name][rows].any(1)]
            else:
                held = rows
                lengths.setdefault(name, info._length(name, shapes[name][:, :1]))
            if len(shape) == shapes[name].shape[1]:
                shapes[name][held] = torch.tensor(shape, dtype=torch.int64, device="cpu")
            elif len(held):
                del shapes[name]  # rows of a list have different numbers of dimensions

    def _replaced(self, name: str, values: Any, is_dropped: np.ndarray[Any, Any]) -> list[Any]:
        pairs = zip(values, is_dropped.tolist(), strict=True)
        return [self._like(name, each) if drop and each is not None else each for each, drop in pairs]

    def _replace(self, name: str, row: torch.Tensor) -> None:
        value = self._moved_to(name, row)
        if not value.ndim:
            row.fill_(value)
            return
        _check_shape(name, value, row)
        row[: len(value)] = value
        row[len(value) :] = 0

    def _replace_array(self, name: str, row: np.ndarray[Any, Any]) -> None:
        value = self._as_array(name, row.dtype)
        if not value.ndim:
            row[...] = value
            return
        _check_shape(name, value, row)
        row[: len(value)] = value
        row[len(value) :] = np.zeros((), row.dtype)

    def _like(self, name: str, row: Any) -> Any:
        if isinstance(row, np.ndarray):
            array = self._as_array(name, row.dtype)
            return array if array.ndim else np.full_like(row, array)
        if not isinstance(row, torch.Tensor):
            value = self.value[name]
            return value.detach().clone() if isinstance(value, torch.Tensor) else copy.deepcopy(value)
        value = self._moved_to(name, row)
        # a number is not read on the host: if it is on a GPU, that would wait for all work before it
        return value.clone() if value.ndim else torch.empty_like(row).fill_(value)

    def _as_array(self, name: str, dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
        """Return the replacement as a new array."""
        value = self.value[name]
        if isinstance(value, torch.Tensor):
            # numpy has no bfloat16
            value = (value.float() if value.dtype is torch.bfloat16 else value).detach().cpu().numpy()
        return np.array(value, dtype)

    def _moved_to(self, name: str, row: torch.Tensor) -> torch.Tensor:
        """Return the replacement with the dtype of a row, on its device; a number stays on the host."""
        value = self.value[name]
        if not isinstance(value, (torch.Tensor, np.ndarray)):
            return torch.tensor(value, dtype=row.dtype, device="cpu")
        # a copy for each stream, because no other stream waits for the copy to the GPU
        key = name, row.device, row.dtype, current_stream(row.device)
        found = self._moved.get(key)
        if found is None:
            value = value.detach() if isinstance(value, torch.Tensor) else torch.tensor(value, device="cpu")
            found = self._moved[key] = to_device(value.to(row.dtype).contiguous(), False, row.device)
        return found


def _check_shape(name: str, value: Any, row: Any) -> None:
    """Raise ValueError unless the replacement has the shape of a row, or is shorter."""
    if value.ndim != row.ndim or value.shape[1:] != row.shape[1:] or len(value) > len(row):
        is_longer = value.shape[1:] == row.shape[1:] and value.ndim == row.ndim
        # padded to the longest row of a batch, only some batches are too short
        remedy = f"; use collate={{{name!r}: tc.pad(to={len(value)})}} or a greater length" if is_longer else ""
        raise ValueError(
            f"the replacement of {name!r} has shape {list(value.shape)}, but a row {list(row.shape)}{remedy}"
        )
