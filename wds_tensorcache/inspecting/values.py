"""Statistics of the numbers of tensors, in one pass over bounded parts."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from wds_tensorcache.codec.lazy import Lazy
from wds_tensorcache.errors import FormatError

Array = np.ndarray[Any, Any]
_PART_NBYTES = 1 << 22
_MAX_KEPT = 1 << 14  # values from which a histogram is made
_NUM_BINS = 64
_CUT = 0.1  # percent of the values that may be cut off at either end of a histogram


@dataclass(frozen=True, slots=True)
class Histogram:
    """The numbers of values in bins of equal width. It counts all finite values, or 8,000 to 16,000 at random.

    Attributes:
        begin: Lower end of the first bin.
        width: Width of each bin; a whole number for integers, 0 if all values are equal floats.
        counts: Numbers of values in `[begin + i * width, begin + (i + 1) * width)`, at most 64 bins. The last bin includes its
            end.
        num_below, num_above: Numbers of values outside the bins. They are 0 unless a few outliers would leave most bins empty.
            Then at most 0.1% of the values at either end are outside.
    """

    begin: float
    width: float
    counts: tuple[int, ...]
    num_below: int
    num_above: int


@dataclass(slots=True)
class ValueStatistics:
    """Statistics of numbers. For a complex tensor, the real and imaginary parts are counted separately; a bool is 0 or 1.

    Attributes:
        num_values: Number of all values.
        num_nan, num_inf: Numbers of NaN, and of positive and negative infinity.
        num_zero: Number of zeros of either sign.
        min, max: Smallest and largest finite value, exact; None without finite values.
        mean, std: Mean and standard deviation of the finite values (divided by n, not n - 1); None without finite values.
        histogram: Histogram of the finite values; None if there are no finite values, or if no histogram was made.
    """

    num_values: int = 0
    num_nan: int = 0
    num_inf: int = 0
    num_zero: int = 0
    min: int | float | None = None
    max: int | float | None = None
    mean: float | None = None
    std: float | None = None
    histogram: Histogram | None = None

    @property
    def is_finite(self) -> bool:
        return not self.num_nan and not self.num_inf

    @property
    def num_finite(self) -> int:
        return self.num_values - self.num_nan - self.num_inf


def compute_statistics(values: Array) -> ValueStatistics:
    """Return the statistics of bools, integers or floats `[n]`, without a histogram."""
    num_zero = len(values) - int(np.count_nonzero(values))
    is_finite = np.isfinite(values)
    finite = values if is_finite.all() else values[is_finite]
    num_nan = int(np.isnan(values).sum()) if len(finite) < len(values) else 0
    counts = len(values), num_nan, len(values) - len(finite) - num_nan, num_zero
    if not len(finite):
        return ValueStatistics(*counts)
    low, high = +finite.min().item(), +finite.max().item()  # `+` makes bools integers
    if low == high:  # a rounded sum would give a mean that differs from the values
        return ValueStatistics(*counts, low, high, float(low), 0.0)
    # the sums of float64 values near their limit are infinite
    with np.errstate(over="ignore", invalid="ignore"):
        numbers = finite.astype(np.float64)
        mean = float(numbers.mean())
        numbers -= mean
        std = math.sqrt(float(np.square(numbers, out=numbers).mean()))
    return ValueStatistics(*counts, low, high, mean, std)


def merge_statistics(one: ValueStatistics, two: ValueStatistics) -> ValueStatistics:
    """Return the statistics of two sets of values together, without a histogram."""
    nan_inf_zero = one.num_nan + two.num_nan, one.num_inf + two.num_inf, one.num_zero + two.num_zero
    counts = (one.num_values + two.num_values, *nan_inf_zero)
    if not one.num_finite or not two.num_finite:
        finite = one if one.num_finite else two
        return ValueStatistics(*counts, finite.min, finite.max, finite.mean, finite.std)
    a: Any = one  # no None: there are finite values
    b: Any = two
    # Chan's method: no difference of large sums
    share = b.num_finite / (a.num_finite + b.num_finite)
    delta = b.mean - a.mean
    std = math.sqrt((1 - share) * a.std * a.std + share * b.std * b.std + delta * delta * share * (1 - share))
    return ValueStatistics(*counts, min(a.min, b.min), max(a.max, b.max), a.mean + delta * share, std)


class ValueSample:
    """A random sample of finite values, of bounded size. Equal calls of `add` give equal samples."""

    def __init__(self) -> None:
        self._random = np.random.default_rng(0)
        self._kept = np.empty(0)
        self._share, self._num_added, self._is_whole = 1.0, 0, True

    def add(self, values: Array) -> None:
        """Add an array `[n]` of bools, integers or floats."""
        self._num_added += len(values)
        self._is_whole &= values.dtype.kind != "f"
        while self._share * self._num_added > _MAX_KEPT:
            self._share /= 2
            self._kept = self._kept[self._random.random(len(self._kept)) < 0.5]
        if self._share < 1:
            count = self._random.binomial(len(values), self._share)
            values = values[self._random.integers(0, len(values), count)]
        self._kept = np.append(self._kept, values[np.isfinite(values)])

    def make_histogram(self) -> Histogram | None:
        """Return the histogram of the finite values; None without finite values."""
        if not len(self._kept):
            return None
        halves = self._kept / 2  # hazard: the range of the largest float64 values overflows
        low, high = halves.min(), halves.max()
        inner = np.percentile(halves, [_CUT, 100 - _CUT], method="nearest")
        if 0 < inner[1] - inner[0] < (high - low) / 4:
            low, high = inner
        inside = halves[(low <= halves) & (halves <= high)]
        if self._is_whole:
            width = max(1.0, math.ceil((2 * (high - low) + 1) / _NUM_BINS)) / 2
            num_bins = min(int((high - low) // width) + 1, _NUM_BINS)  # hazard: numbers beyond 2^53 are rounded
        else:
            width = (high - low) / _NUM_BINS
            num_bins = _NUM_BINS if width > 0 else 1
        bins = ((inside - low) / width).astype(np.int64) if width > 0 else np.zeros(len(inside), np.int64)
        counts = np.bincount(np.minimum(bins, num_bins - 1), minlength=num_bins)
        num_below, num_above = int((halves < low).sum()), int((halves > high).sum())
        return Histogram(float(2 * low), float(2 * width), tuple(counts.tolist()), num_below, num_above)


def read_parts(lazy: Lazy) -> Iterator[tuple[Any, Any]]:
    """Yield parts of a tensor: buffers, each with a 1-D view.

    Raises:
        FormatError: The shard was changed, or the bytes are not values of the dtype; the message then names the tensor.

    Memory: each part is a copy of at most 4 MiB, or one element if it is larger.
    """
    reference, width = lazy._reference, lazy.dtype.itemsize
    step = max(_PART_NBYTES // width, 1) * width
    for begin in range(reference.begin, reference.end, step):
        end = min(begin + step, reference.end)
        buffer = lazy._source.read(begin, end)
        try:
            yield buffer, lazy.view_buffer(buffer, lazy.dtype, ((end - begin) // width,))
        except FormatError as exc:
            raise exc.at(f"tensor {lazy.name!r}") from exc


def as_numbers(part: Any) -> Array | None:
    """Return a tensor or array as bools, integers or floats, or None.

    Texts, dates and packed float4 have no numbers. The real and imaginary parts of complex numbers form a further dimension of
    size 2. Floats of less than 32 bits become float32.
    """
    if isinstance(part, torch.Tensor):
        if "float4" in str(part.dtype):  # two numbers in each byte, which torch does not convert
            return None
        if part.dtype.is_complex:
            part = torch.view_as_real(part)
        if part.dtype == torch.bfloat16:  # torch would start threads, which take longer than the conversion
            high = part.view(torch.int16).numpy().view(np.uint16)
            part = np.left_shift(high, 16, dtype=np.uint32).view(np.float32)
        else:
            part = (part.float() if part.dtype.is_floating_point and part.dtype.itemsize == 1 else part).numpy()
    elif part.dtype.kind == "c":
        part = np.stack([part.real, part.imag], -1)
    if part.dtype == np.float16:  # numpy computes with it ten times slower
        part = part.astype(np.float32)
    array: Array = part
    return array if array.dtype.kind in "biuf" else None


def measure(lazy: Lazy, sample: ValueSample | None = None, digest: Any = None) -> ValueStatistics | None:
    """Return statistics of a tensor without a histogram; None without numbers.

    See `read_parts` for errors. All values are added to `sample`, and all bytes to `digest`, a hash object of xxhash.
    """
    statistics: ValueStatistics | None = ValueStatistics()
    for buffer, part in read_parts(lazy):
        if digest is not None:
            digest.update(buffer)
        numbers = as_numbers(part)
        if numbers is None or statistics is None:
            statistics = None
            continue
        numbers = numbers.reshape(-1)
        statistics = merge_statistics(statistics, compute_statistics(numbers))
        if sample is not None:
            sample.add(numbers)
    return statistics
