"""Statistics of the numbers of tensors, in one pass over parts of bounded size."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from wds_tensorcache.codec.lazy import Lazy
from wds_tensorcache.errors import FormatError
from wds_tensorcache.inspecting.histogram import Bins, Histogram

Array = np.ndarray[Any, Any]
_PART_NBYTES = 1 << 22


@dataclass(frozen=True, slots=True)
class ValueStatistics:
    """Statistics of numbers. For a complex tensor, the real and imaginary parts are counted separately; a bool is 0 or 1.

    Attributes:
        num_values: Number of all values.
        num_nan, num_inf: Numbers of NaN, and of positive and negative infinity.
        num_zero: Number of zeros of either sign.
        min, max: Smallest and largest finite value, exact; None if there are none.
        mean, std: Mean and standard deviation of the finite values (divided by n, not n - 1); None if there are none.
        histogram: Histogram of the finite values; None if there are none.
    """

    num_values: int
    num_nan: int
    num_inf: int
    num_zero: int
    min: int | float | None
    max: int | float | None
    mean: float | None
    std: float | None
    histogram: Histogram | None

    @property
    def is_finite(self) -> bool:
        """True if no value is NaN or infinite."""
        return not self.num_nan and not self.num_inf


class Moments:
    """Statistics of all numbers that were added.

    Args:
        is_whole: The values are whole numbers; no bin of the histogram is narrower than 1.
        has_histogram: Make a histogram, which takes most of the time for a small tensor.

    Memory: 64 KiB with a histogram, and 40 bytes per number that is added at once.
    """

    def __init__(self, is_whole: bool = False, has_histogram: bool = True) -> None:
        self._bins = Bins(is_whole) if has_histogram else None
        self._num_values = self._num_nan = self._num_inf = self._num_zero = self._num_finite = 0
        self._min: Any = None
        self._max: Any = None
        self._mean = self._squares = 0.0

    @property
    def num_not_finite(self) -> int:
        """Number of NaN and infinities so far."""
        return self._num_nan + self._num_inf

    def add(self, values: Array) -> None:
        """Add numbers: an array `[n]` of bools, integers or floats."""
        self._num_values += len(values)
        self._num_zero += len(values) - int(np.count_nonzero(values))
        if values.dtype.kind == "f":
            is_finite = np.isfinite(values)
            if not is_finite.all():
                num_nan = int(np.count_nonzero(np.isnan(values)))
                self._num_nan += num_nan
                self._num_inf += len(values) - int(np.count_nonzero(is_finite)) - num_nan
                values = values[is_finite]
        if not len(values):
            return
        low, high = values.min().item(), values.max().item()
        self._min = low if self._min is None else min(self._min, low)
        self._max = high if self._max is None else max(self._max, high)
        numbers = values.astype(np.float64)
        # the sums of float64 values near their limit are infinite
        with np.errstate(over="ignore", invalid="ignore"):
            # Chan's method: no difference of large sums
            mean = float(numbers.mean())
            apart = numbers - mean
            squares = float(np.square(apart, out=apart).sum())
            total, delta = self._num_finite + len(numbers), mean - self._mean
            self._squares += squares + delta * delta * (self._num_finite * len(numbers) / total)
            self._mean += delta * len(numbers) / total
        self._num_finite = total
        if self._bins is not None:
            self._bins.add(numbers)

    def result(self) -> ValueStatistics:
        """Return the statistics."""
        some = self._num_finite > 0
        return ValueStatistics(
            self._num_values,
            self._num_nan,
            self._num_inf,
            self._num_zero,
            self._min,
            self._max,
            self._mean if some else None,
            math.sqrt(self._squares / self._num_finite) if some else None,
            None if self._bins is None else self._bins.histogram(),
        )


def read_parts(lazy: Lazy) -> Iterator[tuple[Any, Any]]:
    """Yield the elements of a tensor or array as pairs of a buffer, and a 1-D tensor or array that aliases it.

    Raises:
        FormatError: The bytes are not values of the dtype, or the shard was changed; the message names the tensor.

    Memory: each part is private to the caller and has at most 4 MiB, or one element.
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
    """Return a tensor or array as an array of bools, integers or floats; None if its elements are not numbers (text, dates).

    The real and imaginary parts of complex numbers form a further dimension of size 2. Floats of less than 32 bits
    become float32.
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


def measure(lazy: Lazy) -> ValueStatistics | None:
    """Return statistics of one tensor; None if its elements are not numbers. See `read_parts` for errors."""
    moments = None
    for _, part in read_parts(lazy):
        numbers = as_numbers(part)
        if numbers is None:
            return None
        moments = moments or Moments(numbers.dtype.kind != "f")
        moments.add(numbers.reshape(-1))
    return (moments or Moments()).result()
