"""Plan the reads of a sample: tensors with small gaps between them are read as one range of bytes.

Reads of different samples are not merged; `read_rows.py` orders them.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, chain
from typing import Any

import numpy as np

__all__ = ["SCRATCH_NBYTES", "RunTable", "Runs", "merge_reads", "ranges"]

Array = np.ndarray[Any, Any]
# byte ranges to read, as (begin, end, parts); a part is (tensor number, nbytes), or (-1, nbytes) for a gap
Runs = list[tuple[int, int, list[tuple[int, int]]]]
SCRATCH_NBYTES = 1 << 14  # reading a gap of up to this many bytes is cheaper than another system call


def merge_reads(begins: list[int], sizes: list[int], most: int = SCRATCH_NBYTES) -> Runs:
    """Return the ranges to read for tensors with these offsets and sizes in bytes; a gap has at most `most` bytes."""
    runs: Runs = []
    for begin, tensor in sorted(zip(begins, range(len(begins)), strict=True)):
        nbytes = sizes[tensor]
        gap = begin - runs[-1][1] if runs else -1
        if not nbytes:
            continue
        if 0 <= gap <= most:
            first, _, parts = runs[-1]
            parts += [(-1, gap), (tensor, nbytes)] if gap else [(tensor, nbytes)]
            runs[-1] = first, begin + nbytes, parts
        else:
            runs.append((begin, begin + nbytes, [(tensor, nbytes)]))
    return runs


class RunTable:
    """The runs of all layouts of a batch, and their parts, as arrays.

    Attributes:
        first_run: Index of each layout's first run, and last the number of runs, int64 `[layouts + 1]`.
        begin, nbytes: Range of bytes of each run, int64 `[runs]`.
        ends: End of each layout's last run, 0 if it has none, int64 `[layouts]`.
        first_part: Index of each run's first part, and last the number of parts, int64 `[runs + 1]`.
        tensor, part_nbytes: Tensor number, or -1 for a gap, and length of each part, int64 `[parts]`.
        most_parts: The largest number of parts of a run.
    """

    def __init__(self, runs: Sequence[Runs]) -> None:
        flat = list(chain.from_iterable(runs))
        self.first_run = _firsts(map(len, runs))
        self.begin = np.array([begin for begin, _, _ in flat], np.int64)
        self.nbytes = np.array([end for _, end, _ in flat], np.int64) - self.begin
        self.ends = np.array([each[-1][1] if each else 0 for each in runs], np.int64)
        counts = [len(parts) for _, _, parts in flat]
        self.first_part = _firsts(counts)
        self.most_parts = max(counts, default=0)
        parts = np.array([part for _, _, parts in flat for part in parts], np.int64).reshape(-1, 2)
        self.tensor, self.part_nbytes = parts.T.copy()


def _firsts(counts: Any) -> Array:
    return np.array(list(accumulate(counts, initial=0)), np.int64)


def ranges(first: Array, which: Array) -> tuple[Array, Array]:
    """Return the items of some groups, and for each item the index in `which` of its group, both int64.

    The items of group `g` are `first[g]`, …, `first[g + 1] - 1`.
    """
    begins = first[which]
    counts = first[which + 1] - begins
    ends = counts.cumsum()
    owner = np.repeat(np.arange(len(which)), counts)
    return np.arange(len(owner)) + (begins - ends + counts)[owner], owner
