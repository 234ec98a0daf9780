"""Real pipelines on the CPU, and one sample of what they give."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.dali.conftest import sample

INSTALL = "needs NVIDIA DALI: pip install nvidia-dali-cuda130 (runs without a GPU)"
dali = pytest.importorskip("nvidia.dali", reason=INSTALL)


def pipeline(function: Any, batch_size: int = 6, **options: Any) -> Any:
    return dali.pipeline_def(function, batch_size=batch_size, num_threads=1, device_id=None, **options)()


def unbatched(batch: Any, at: int, like: Any = None) -> Any:
    """Return one sample of a batch, which is like that sample."""
    like = sample(0) if like is None else like
    if isinstance(like, dict):
        return {key: unbatched(batch[key], at, value) for key, value in like.items() if key in batch}
    if isinstance(like, (list, tuple)) and any(isinstance(value, (dict, list, tuple, torch.Tensor)) for value in like):
        return type(like)(unbatched(part, at, value) for part, value in zip(batch, like, strict=True))
    return batch[at]
