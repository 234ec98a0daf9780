"""What a model returns for a batch, sample by sample."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

__all__ = ["unbatch"]


def unbatch(made: Any, count: int) -> list[Any]:
    """Return the samples of a batch: a list of them, or a nest of dicts whose tensors, arrays and lists have a row for each.

    Raises:
        ValueError: There is not one for each.

    Memory: rows alias the batch's tensors; those on a device are copied to the host once for all rows.
    """
    return list(_rows(made, count, "what fn returned"))


def _rows(value: Any, count: int, where: str) -> Any:
    """Return a sequence of `count` parts."""
    if isinstance(value, Mapping):
        parts = {name: _rows(part, count, f"{where}[{name!r}]") for name, part in value.items()}
        return [{name: rows[i] for name, rows in parts.items()} for i in range(count)]
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu()
    is_sequence = isinstance(value, (list, tuple)) or (isinstance(value, (torch.Tensor, np.ndarray)) and value.ndim)
    if not is_sequence or len(value) != count:
        what = f"{len(value)} rows" if is_sequence else f"a {type(value).__name__}"
        raise ValueError(f"{where} is {what}, expected one for each of {count} items")
    return value
