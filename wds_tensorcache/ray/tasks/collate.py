"""The collate function that Ray calls with tables of Arrow."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from ray.data.collate_fn import ArrowBatchCollateFn

from wds_tensorcache.ray.rows.torch_columns import to_torch


class TorchCollate(ArrowBatchCollateFn):  # type: ignore[misc]
    """Batches of torch tensors, with the dtypes that the cache has; see `tc.ray.ray_collate`.

    Threads/fork/pickle: immutable, safe everywhere.
    """

    def __init__(self, dtypes: Mapping[str, torch.dtype] | None) -> None:
        super().__init__()
        self._dtypes = dict(dtypes or {})

    def __call__(self, batch: Any) -> dict[str, Any]:
        return to_torch(batch, self._dtypes)
