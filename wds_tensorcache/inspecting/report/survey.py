"""Findings in some samples of a cache: statistics, colors and usual ranges of tensors, and outliers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np

from wds_tensorcache.codec.dtypes import dtype_name
from wds_tensorcache.codec.lazy import Lazy
from wds_tensorcache.errors import FormatError, TensorCacheError
from wds_tensorcache.inspecting.report.pictures import Colors, Planes, fit_colors, planes_of, shrink
from wds_tensorcache.inspecting.report.texts import visible
from wds_tensorcache.inspecting.tensors_ahead import tensors_ahead
from wds_tensorcache.inspecting.values import Moments, ValueStatistics, as_numbers, read_parts
from wds_tensorcache.reading.cache import Cache
from wds_tensorcache.reading.description import Description

Array = np.ndarray[Any, Any]
# statistics of the tensors of one sample, by name; None for tensors of text or dates
Values = Mapping[str, ValueStatistics | None]
MAX_TENSORS = 300  # tensors of a cache that are examined and shown
READ_ERRORS = TensorCacheError, OSError
_MAX_FITTED = 48  # samples from which the colors of a tensor are computed
_FITTED_SIDE = 64
_MIN_SAMPLES = 8  # samples of a tensor from which a usual range is computed
_MIN_VALUES = 16  # smaller tensors are never unusual
_FAR = 10.0  # distances from the median, in robust standard deviations, that are unusual
_RARE = 0.05  # share of samples in which a constant tensor is unusual


@dataclass(frozen=True, slots=True)
class Mark:
    """A reason to look at a sample.

    Attributes:
        short: A few words.
        text: A sentence that names the tensor.
    """

    short: str
    text: str


@dataclass(frozen=True, slots=True)
class _Usual:
    """The usual range of one property of a tensor."""

    low: float
    high: float


class Survey:
    """Findings in the samples `numbers` of a cache. All their tensors are read, in parts of at most 4 MiB.

    Args:
        cache: Cache, or a view of one.
        numbers: Indices of the samples to examine, ascending.
        progress: Called with the number of samples that were examined, and of those to examine.

    Attributes:
        cache: The cache.
        numbers: Indices of the examined samples, ascending.
        description: Properties of all samples, from the indexes; of the examined samples alone if a sample is damaged.
        positions: Position of each tensor that is shown, by name; at most 300.
        values: Statistics of the tensors of each examined sample, by index.
        totals: Statistics of each tensor over all examined samples, by name.
        errors: Messages of samples that cannot be read, by index.

    Memory: 64 KiB for each tensor that is shown, and a few hundred bytes for each of them in each examined sample.
    Threads: immutable after `__init__`, so safe to share.
    """

    def __init__(
        self,
        cache: Cache[Any],
        numbers: Sequence[int],
        progress: Callable[[int, int], object] = lambda done, total: None,
    ) -> None:
        self.cache, self.numbers = cache, numbers
        self.values: dict[int, Values] = {}
        self.errors: dict[int, str] = {}
        self._moments: dict[str, Moments] = {}
        self._planes: dict[tuple[str, int, int], list[Array]] = {}
        self.description = _describe(cache, numbers)
        self.positions = {name: at for at, name in enumerate(islice(self.description.tensors, MAX_TENSORS))}
        for done, (number, lazies, error) in enumerate(tensors_ahead(cache, numbers), 1):
            try:
                if error is not None:
                    raise error
                self.values[number] = self.measure(lazies, self._moments)
                self._keep_planes(lazies)
            except READ_ERRORS as exc:
                self.errors[number] = visible(str(exc), 500)
            progress(done, len(numbers))
        self.totals = {name: moments.result() for name, moments in self._moments.items()}
        self._colors = {key: fit_colors(found, key[2]) for key, found in self._planes.items()}
        del self._planes, self._moments
        self._usual, self._constant = self._find_usual()

    def measure(self, lazies: Mapping[str, Lazy], totals: dict[str, Moments] | None = None) -> Values:
        """Return statistics of the tensors of one sample that are shown, and add their numbers to `totals`."""
        found: dict[str, ValueStatistics | None] = {}
        for name, lazy in lazies.items():
            if name not in self.positions:
                continue
            moments = Moments(has_histogram=False)
            for _, part in read_parts(lazy):
                numbers = as_numbers(part)
                if numbers is None:
                    break
                moments.add(numbers.reshape(-1))
                if totals is not None:
                    totals.setdefault(name, Moments(numbers.dtype.kind != "f")).add(numbers.reshape(-1))
            result = moments.result()
            found[name] = result if result.num_values or not lazy.nbytes else None
        return found

    def _keep_planes(self, lazies: Mapping[str, Lazy]) -> None:
        for name, lazy in lazies.items():
            planes = planes_of(name, lazy.dtype, lazy.shape) if name in self.positions else None
            if planes is not None:
                kept = self._planes.setdefault(_color_key(name, lazy, planes), [])
                if len(kept) < _MAX_FITTED:
                    kept.append(shrink(load_planes(lazy, planes), _FITTED_SIDE, planes.kind))

    def colors_of(self, name: str, lazy: Lazy, planes: Planes, loaded: Array) -> Colors:
        """Return the colors of a tensor: the same for all samples, or its own if no examined sample has such a tensor."""
        return self._colors.get(_color_key(name, lazy, planes)) or fit_colors([loaded], _num_bits(lazy))

    def _find_usual(self) -> tuple[dict[tuple[str, str], _Usual], set[str]]:
        """Return usual ranges by tensor and property, and the tensors that are constant in many samples."""
        usual: dict[tuple[str, str], _Usual] = {}
        constant: set[str] = set()
        for name in self.positions:
            found = [values[name] for values in self.values.values() if name in values]
            measured = [each for each in found if each is not None and each.std is not None]
            if sum(each.std == 0 for each in measured) > _RARE * len(measured):
                constant.add(name)
            if len(measured) < _MIN_SAMPLES or not _is_float(self.description.tensors[name].dtype):
                continue
            for what in ("mean", "std"):
                numbers = np.array([getattr(each, what) for each in measured])
                numbers = numbers[np.isfinite(numbers)]
                if not len(numbers):
                    continue
                median = float(np.median(numbers))
                spread = 1.4826 * float(np.median(np.abs(numbers - median)))
                if spread > 0:
                    distance = max(_FAR * spread, 0.01 * abs(median))
                    usual[name, what] = _Usual(median - distance, median + distance)
        return usual, constant

    def marks(self, values: Values) -> list[Mark]:
        """Return the reasons to look at a sample: NaN, infinities, unusual means and deviations, and unusual constants."""
        found = []
        for name, each in values.items():
            if each is None:
                continue
            shown = f"{visible(name, 100) or 'the tensor'}"
            for what, count in (("NaN", each.num_nan), ("Inf", each.num_inf)):
                if count:
                    of = f"{count:,} of {each.num_values:,} numbers"
                    found.append(Mark(f"{count:,} {what}", f"{shown}: {of} {'are' if count > 1 else 'is'} {what}"))
            if each.num_values < _MIN_VALUES or each.std is None:
                continue
            if each.std == 0 and name not in self._constant and len(self.values) >= _MIN_SAMPLES:
                found.append(Mark("constant", f"{shown}: all numbers are {each.min:.6g}, unlike in other samples"))
                continue
            for what in ("mean", "std"):
                usual, number = self._usual.get((name, what)), getattr(each, what)
                if usual is not None and not usual.low <= number <= usual.high:
                    text = f"{shown}: {what} {number:.4g}; {usual.low:.4g} to {usual.high:.4g} is usual"
                    found.append(Mark(f"unusual {what}", text))
        return found


def load_planes(lazy: Lazy, planes: Planes) -> Array:
    """Read a tensor or array, and return the planes to draw, float32 `[C, H, W]`."""
    return planes.take(lazy.load())


def _color_key(name: str, lazy: Lazy, planes: Planes) -> tuple[str, int, int]:
    return name, planes.num_channels, _num_bits(lazy)


def _num_bits(lazy: Lazy) -> int:
    return 8 if dtype_name(lazy.dtype) == "uint8" else 0


def _is_float(dtype: Any) -> bool:
    return any("float" in str(each) for each in (dtype if isinstance(dtype, tuple) else (dtype,)))


def _describe(cache: Cache[Any], numbers: Sequence[int]) -> Description:
    """Describe all samples, or only the intact ones in `numbers` if `describe` meets a damaged sample."""
    try:
        return cache.describe()
    except FormatError:
        intact = []
        for number in numbers:
            try:
                cache[number]
                intact.append(number)
            except READ_ERRORS:
                continue
        return cache[intact].describe()
