"""Bars of `tqdm` that show the progress of long calls."""

from __future__ import annotations

import sys
from typing import Any

__all__ = ["open_bar"]


def open_bar(show: bool | None, **options: Any) -> Any:
    """Return a new `tqdm` bar, or None. `show=None` shows the bar if `tqdm` is installed and stderr is a terminal.

    Raises:
        ImportError: `show` is True, and `tqdm` is not installed.
    """
    if not (sys.stderr.isatty() if show is None else show):
        return None
    try:
        from tqdm import tqdm
    except ImportError as exc:
        if show:
            raise ImportError("progress=True needs tqdm: pip install tqdm") from exc
        return None
    return tqdm(**options)
