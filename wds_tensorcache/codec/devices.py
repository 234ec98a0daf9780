"""Devices that tensors are asked to go to."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["check_device"]


def check_device(device: Any, pin: bool = False) -> None:
    """Raise ValueError if torch has no such device, or nothing to pin memory for; touches CUDA only if asked for it."""
    try:
        kind = None if device is None else torch.device(device).type
    except (RuntimeError, TypeError) as exc:
        raise ValueError(f"device={device!r}: {exc}") from exc
    if kind == "cuda" and not torch.cuda.is_available():
        raise ValueError(
            f"device={device!r}, but torch sees no GPU; leave it out, or install a build of torch for CUDA"
        )
    if pin and not torch.accelerator.is_available():
        raise ValueError("pin=True, but torch sees no GPU that memory could be pinned for; leave it out")
