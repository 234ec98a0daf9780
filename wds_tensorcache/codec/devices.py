"""Devices that tensors are asked to go to."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["check_device"]


def check_device(device: Any) -> None:
    """Raise RuntimeError if a GPU is asked for and there is none, as torch does for devices that it does not know."""
    if device is not None and torch.device(device).type == "cuda" and not torch.cuda.is_available():
        raise RuntimeError(
            f"device={device!r}, but torch sees no GPU; leave it out, or install a build of torch for CUDA"
        )
