"""Histograms of numbers whose range is not known in advance, in one pass and in bounded memory."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
_NUM_FINE = 8192  # bins while counting, so that outliers at 100 times the rest leave dozens of bins to the rest
_NUM_SHOWN = 64
_SHARE_CUT = 0.001  # share of the values that may be cut off at either end
_BITS = 53  # of a float64: indices of bins are exact


@dataclass(frozen=True, slots=True)
class Histogram:
    """Numbers of values in bins of equal width.

    Attributes:
        begin: Lower end of the first bin, or the smallest float64 if that is larger.
        width: Width of each bin, a power of two.
        counts: Numbers of values in `[begin + i * width, begin + (i + 1) * width)`, at most 64 bins.
        num_below, num_above: Numbers of values outside the bins. They are 0 unless a few outliers would fill the histogram with
            empty bins; then at most 0.1% of the values at either end are outside.
    """

    begin: float
    width: float
    counts: tuple[int, ...]
    num_below: int
    num_above: int


class Bins:
    """Exact counts of values in fine bins, which become wider when the range of the values grows.

    Memory: 64 KiB. The width is a power of two, and each bin starts at a multiple of it. So two old bins fit into one new bin,
        and no value is ever counted in a wrong bin.

    Args:
        is_whole: The values are whole numbers; no bin is narrower than 1.
    """

    def __init__(self, is_whole: bool = False) -> None:
        self._exponent = 0 if is_whole else -1074  # the width is 2 ** exponent
        self._first = 0  # the first bin starts at first * width
        self._counts = np.zeros(_NUM_FINE, np.int64)
        self._low, self._high = math.inf, -math.inf

    def add(self, values: Array) -> None:
        """Count finite values, float64 `[n]`."""
        if not len(values):
            return
        self._low, self._high = min(self._low, float(values.min())), max(self._high, float(values.max()))
        self._make_room()
        self._counts += np.bincount(_bins_of(values, self._exponent) - self._first, minlength=_NUM_FINE)

    def _make_room(self) -> None:
        exponent = max(self._exponent, math.frexp(max(-self._low, self._high))[1] - _BITS)
        while True:
            first, last = _bins_of(np.array([self._low, self._high]), exponent).tolist()
            if last - first < _NUM_FINE:
                break
            exponent += max(1, (last - first).bit_length() - _NUM_FINE.bit_length())
        if exponent == self._exponent and self._first <= first and last < self._first + _NUM_FINE:
            return
        used = np.flatnonzero(self._counts)
        # a shift of an int64 by more than 63 bits is not defined
        moved = (self._first + used) >> min(exponent - self._exponent, 63)
        counts = np.zeros_like(self._counts)
        self._exponent, self._first = exponent, first - (_NUM_FINE - 1 - (last - first)) // 2
        np.add.at(counts, moved - self._first, self._counts[used])
        self._counts = counts

    def histogram(self) -> Histogram | None:
        """Return the histogram of the values so far; None if there are none."""
        used = np.flatnonzero(self._counts)
        if not len(used):
            return None
        begin, end = int(used[0]), int(used[-1]) + 1
        total = np.cumsum(self._counts)
        cut = int(total[-1] * _SHARE_CUT)
        inner_begin = int(np.searchsorted(total, cut, "right"))
        inner_end = int(np.searchsorted(total, total[-1] - cut)) + 1
        if 4 * (inner_end - inner_begin) < end - begin:
            begin, end = inner_begin, inner_end
        shift = 0
        while ((self._first + end - 1) >> shift) - ((self._first + begin) >> shift) >= _NUM_SHOWN:
            shift += 1
        inside = self._counts[begin:end]
        first = (self._first + begin) >> shift
        which = ((self._first + np.arange(begin, end)) >> shift) - first
        counts = np.zeros(int(which[-1]) + 1, np.int64)
        np.add.at(counts, which, inside)
        return Histogram(
            _scaled(first, self._exponent + shift),
            math.ldexp(1, self._exponent + shift),
            tuple(counts.tolist()),
            int(self._counts[:begin].sum()),
            int(self._counts[end:].sum()),
        )


def _bins_of(values: Array, exponent: int) -> Array:
    """Return the bin of each value, int64 `[n]`, for bins of the width `2 ** exponent`."""
    scaled = np.ldexp(values, -exponent)
    if exponent > 0:  # a small negative number may have become zero
        scaled[(scaled == 0) & (values < 0)] = -1
    return np.floor(scaled, out=scaled).astype(np.int64)


def _scaled(number: int, exponent: int) -> float:
    try:
        return math.ldexp(number, exponent)
    except OverflowError:
        return math.copysign(sys.float_info.max, number)
