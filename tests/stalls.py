"""Work that keeps a GPU busy, so that what must wait for copies, and does not, gives wrong values."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

# of every module whose tests need a CUDA device
GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason=f"torch {torch.__version__} sees no CUDA device"),
]
_CYCLES = 400_000_000  # about a quarter of a second


def stall(stream: Any, times: int = 1) -> None:
    """Keep a stream busy for about a quarter of a second, `times` times."""
    with torch.cuda.stream(stream):
        for _ in range(times):
            torch.cuda._sleep(_CYCLES)


class CopyStall:
    """A copy of 2 GB on its own stream. It occupies the copy engine, so other copies to the GPU wait for it."""

    def __init__(self) -> None:
        self._host = torch.empty(2 << 30, dtype=torch.uint8, pin_memory=True)
        self._device = torch.empty(2 << 30, dtype=torch.uint8, device="cuda")
        self._stream = torch.cuda.Stream()

    def __call__(self) -> None:
        with torch.cuda.stream(self._stream):
            self._device.copy_(self._host, non_blocking=True)


@contextmanager
def no_hidden_waits() -> Iterator[None]:
    """Make torch raise RuntimeError, in all threads, if a call would wait for the GPU."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it warns once that some waits are not found
            torch.cuda.set_sync_debug_mode("error")
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
