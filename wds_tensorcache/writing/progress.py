"""How far a build is, with rate and time left."""

from __future__ import annotations

import sys
from typing import Any

__all__ = ["Progress"]


class Progress:
    """A bar of `tqdm`, or nothing.

    Args:
        total: Items; None if nobody knows.
        show: None shows it where `tqdm` is installed and stderr is a terminal.

    Raises:
        ImportError: It is to be shown, and `tqdm` is not installed.
    """

    def __init__(self, total: int | None, show: bool | None) -> None:
        self._bar: Any = None
        if show is None and not sys.stderr.isatty():
            return
        if show is not False:
            try:
                from tqdm import tqdm
            except ImportError as exc:
                if show:
                    raise ImportError("progress=True needs tqdm: pip install tqdm") from exc
                return
            self._bar = tqdm(total=total, unit=" samples", smoothing=0.05)

    def step(self) -> None:
        """Count a sample that was written."""
        if self._bar is not None:
            self._bar.update()

    def skip(self) -> None:
        """Count a sample that was there; it says nothing of the rate."""
        if self._bar is not None:
            self._bar.initial += 1
            self._bar.update()

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *exc: object) -> None:
        if self._bar is not None:
            self._bar.close()
