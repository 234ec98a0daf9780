"""Support for lazy tensors in torch's `default_collate`: each is read once, directly into its row of the batch."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import get_worker_info
from torch.utils.data._utils.collate import collate, default_collate_fn_map

from wds_tensorcache.codec.lazy import LazyArray, LazyTensor
from wds_tensorcache.reading.base_cache import BatchInfo
from wds_tensorcache.reading.batch.leaves import Leaves

__all__ = ["register"]


def _collate_tensors(batch: list[Any], *, collate_fn_map: Any = None) -> torch.Tensor:
    """Return a tensor `[B, …]`; in a worker process it is in shared memory, so that sending it needs no copy."""
    first = batch[0]
    for item in batch:
        if item.shape != first.shape or item.dtype != first.dtype:
            raise RuntimeError(f"cannot stack {item!r} onto {first!r}: shapes and dtypes must be equal")
    rows = torch.empty(0, dtype=first.dtype, device="cpu")
    shape = (len(batch), *first.shape)
    if get_worker_info() is None:
        rows = rows.new_empty(shape)
    else:
        storage = rows._typed_storage()._new_shared(  # type: ignore[no-untyped-call]
            len(batch) * first.numel(), device=rows.device
        )
        rows = rows.new(storage).resize_(*shape)
    for item, row in zip(batch, rows, strict=True):
        item.load(out=row) if isinstance(item, LazyTensor) else row.copy_(item)
    return rows


def _collate_arrays(batch: list[Any], *, collate_fn_map: Any = None) -> torch.Tensor:
    arrays = [torch.as_tensor(item.load() if isinstance(item, LazyArray) else item) for item in batch]
    stacked: torch.Tensor = default_collate_fn_map[torch.Tensor](arrays, collate_fn_map=collate_fn_map)
    return stacked


def _collate_leaves(batch: list[Any], *, collate_fn_map: Any = None) -> Any:
    return collate([leaves.tolist() for leaves in batch], collate_fn_map=collate_fn_map)


def _collate_infos(batch: list[Any], *, collate_fn_map: Any = None) -> list[Any]:
    return list(batch)


def register() -> None:
    """Make torch's `default_collate` accept lazy tensors and arrays, and the other values that `read_batch` returns."""
    default_collate_fn_map.setdefault(LazyTensor, _collate_tensors)
    default_collate_fn_map.setdefault(LazyArray, _collate_arrays)
    default_collate_fn_map.setdefault(Leaves, _collate_leaves)
    default_collate_fn_map.setdefault(BatchInfo, _collate_infos)
