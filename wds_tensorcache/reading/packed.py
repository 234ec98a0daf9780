"""Tars whose names do not end in `.tar`: readers of a folder leave them out."""

from __future__ import annotations

import re
from collections.abc import Sequence

__all__ = ["describe_packed", "packed_names", "shown_names"]

_NUM_SHOWN = 3
_IS_TAR = re.compile(r"[^.].*\.(tar(\.(gz|bz2|xz|zst))?|tgz)", re.IGNORECASE | re.DOTALL).fullmatch


def packed_names(names: Sequence[str]) -> list[str]:
    """Return the sorted names of compressed tars, and of tars such as `A.TAR`, among the names of files."""
    return sorted(name for name in names if _IS_TAR(name) and not name.endswith(".tar"))


def describe_packed(names: Sequence[str]) -> str:
    """Return the end of a message about a folder with these `packed_names`."""
    what = f"{len(names):,} other tar{' is' if len(names) == 1 else 's are'} left out ({shown_names(names)})"
    remedy = "unpack or rename them, or pass them to tc.ResumablePipeline by a pattern"
    return f"{what} because the names of shards end in .tar: {remedy}"


def shown_names(names: Sequence[str]) -> str:
    """Return the first of these names for a message."""
    return ", ".join(map(repr, names[:_NUM_SHOWN])) + ", …" * (len(names) > _NUM_SHOWN)
