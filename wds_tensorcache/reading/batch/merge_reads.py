"""Plan the reads of a sample: tensors with small gaps between them are read as one range of bytes.

Reads of different samples are not merged; `read_rows.py` orders them.
"""

from __future__ import annotations

__all__ = ["SCRATCH_NBYTES", "Runs", "merge_reads"]

# byte ranges to read, as (begin, end, parts); a part is (tensor number, nbytes), or (-1, nbytes) for a gap
Runs = list[tuple[int, int, list[tuple[int, int]]]]
SCRATCH_NBYTES = 1 << 14  # reading a gap of up to this many bytes is cheaper than another system call


def merge_reads(begins: list[int], sizes: list[int]) -> Runs:
    """Return the ranges to read for tensors with these offsets and sizes in bytes."""
    runs: Runs = []
    for begin, tensor in sorted(zip(begins, range(len(begins)), strict=True)):
        nbytes = sizes[tensor]
        gap = begin - runs[-1][1] if runs else -1
        if not nbytes:
            continue
        if 0 <= gap <= SCRATCH_NBYTES:
            first, _, parts = runs[-1]
            parts += [(-1, gap), (tensor, nbytes)] if gap else [(tensor, nbytes)]
            runs[-1] = first, begin + nbytes, parts
        else:
            runs.append((begin, begin + nbytes, [(tensor, nbytes)]))
    return runs
