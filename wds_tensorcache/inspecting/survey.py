"""A survey of a cache: statistics, repeated tensors, colors, and unusual samples."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import xxhash

from wds_tensorcache.codec.dtypes import dtype_name
from wds_tensorcache.codec.lazy import Lazy
from wds_tensorcache.errors import FormatError, TensorCacheError
from wds_tensorcache.inspecting.plane import Colors, Planes, find_planes, fit_colors, shrink
from wds_tensorcache.inspecting.samples_ahead import READ_ERRORS, read_samples
from wds_tensorcache.inspecting.text import escape_hidden
from wds_tensorcache.inspecting.values import (
    ValueSample,
    ValueStatistics,
    compute_statistics,
    measure,
    merge_statistics,
)
from wds_tensorcache.reading.cache import Cache
from wds_tensorcache.reading.description import Description, TensorDescription

Array = np.ndarray[Any, Any]
# statistics of the tensors of one sample, by name; None for tensors without numbers, for example of texts
Values = Mapping[str, ValueStatistics | None]
_MAX_TENSORS, _MAX_PAGE_TENSORS = 1000, 300  # tensors, by name, whose numbers are examined
_NUM_KEYS = 8
_MAX_DIGESTS = 1 << 18  # distinct tensors to remember
_NUM_REPEATS = 20
_MAX_FITTED = 48  # samples from which the colors of a tensor are computed
_FITTED_SIDE = 64
_MIN_SAMPLES = 8  # samples of a tensor from which a usual range is computed
_MIN_VALUES = 16  # smaller tensors are never unusual
_FAR = 10.0  # distances from the median, in robust standard deviations, that are unusual
_RARE = 0.05  # share of samples in which a constant tensor is unusual


@dataclass(slots=True)
class TensorStatistics:
    """The properties of one tensor.

    Attributes:
        description: Dtype, shapes, bytes and number of samples in the whole cache.
        num_examined: Number of samples whose numbers were read.
        values: Statistics of these numbers; None if no sample was examined, or if the elements are not numbers.
        num_not_finite: Number of examined samples that have a NaN or an infinity in this tensor.
        not_finite: Keys of the first of these samples, at most 8.
    """

    description: TensorDescription
    num_examined: int = 0
    values: ValueStatistics | None = None
    num_not_finite: int = 0
    not_finite: list[str] = field(default_factory=list)

    def add(self, values: ValueStatistics | None, key: str) -> None:
        self.num_examined += 1
        if values is None:
            return
        self.values = values if self.values is None else merge_statistics(self.values, values)
        if not values.is_finite:
            self.num_not_finite += 1
            self.not_finite += [key] * (len(self.not_finite) < _NUM_KEYS)

    def record(self) -> dict[str, Any]:
        return tensor_record(self.description) | {
            "num_examined": self.num_examined,
            "values": self.values,
            "num_not_finite": self.num_not_finite,
            "not_finite": self.not_finite,
        }


def tensor_record(tensor: TensorDescription) -> dict[str, Any]:
    return {
        "name": tensor.name,
        "kind": tensor.kind,
        "dtypes": dtype_names(tensor),
        "shape": tensor.shape,
        "num_samples": tensor.num_samples,
        "nbytes": tensor.nbytes,
        "num_shapes": tensor.num_shapes,
        "shapes": [{"shape": shape, "num_samples": count} for shape, count in tensor.shapes.items()],
    }


def dtype_names(tensor: TensorDescription) -> list[str]:
    """Return the names of the dtypes of a tensor, such as `"bfloat16"`."""
    return [dtype_name(dtype) for dtype in (tensor.dtype if isinstance(tensor.dtype, tuple) else (tensor.dtype,))]


@dataclass(frozen=True, slots=True)
class Repeat:
    """A tensor stored `count` times, first as `name` in the sample `key`."""

    name: str
    key: str
    nbytes: int
    count: int


@dataclass(frozen=True, slots=True)
class Repeats:
    """Tensors that are stored several times, with equal dtypes, shapes and bytes.

    Attributes:
        num_tensors: Number of copies, without the first copy of each tensor.
        nbytes: Number of bytes of these copies.
        is_partial: True if there were too many distinct tensors to remember. More tensors may then be repeated.
        most: Up to 20 tensors whose copies take the most bytes.
    """

    num_tensors: int
    nbytes: int
    is_partial: bool
    most: tuple[Repeat, ...]


class RepeatCounter:
    """A count of equal tensors by digest. Memory: the first 262,144 distinct tensors, about 100 MB."""

    def __init__(self) -> None:
        self._kept: dict[int, tuple[str, str, int, int]] = {}
        self._is_partial = False

    def add(self, digest: int, name: str, key: str, nbytes: int) -> None:
        """Count a tensor, unless it is empty. `digest` is that of its dtype, shape and bytes."""
        name, key, nbytes, count = self._kept.get(digest, (name, key, nbytes, 0))
        if nbytes and (count or len(self._kept) < _MAX_DIGESTS):
            self._kept[digest] = name, key, nbytes, count + 1
        elif nbytes:
            self._is_partial = True

    def result(self) -> Repeats:
        """Return the repeated tensors. The tensors whose copies take the most bytes come first."""
        repeats = [Repeat(*record) for record in self._kept.values() if record[-1] > 1]
        repeats.sort(key=lambda repeat: -repeat.nbytes * (repeat.count - 1))
        num_copies = sum(repeat.count - 1 for repeat in repeats)
        nbytes = sum(repeat.nbytes * (repeat.count - 1) for repeat in repeats)
        return Repeats(num_copies, nbytes, self._is_partial, tuple(repeats[:_NUM_REPEATS]))


class Mark(NamedTuple):
    """A reason to look at a sample, short and as a sentence."""

    short: str
    text: str


class Survey:
    """Statistics of samples of a cache. Tensors are read in parts of at most 4 MiB; for a page, planes are read again.

    Args:
        cache: Cache, or a view of a cache.
        indices: Indices of the samples to examine, ascending.
        progress: Function that takes the number of examined samples, and of all samples to examine.
        for_page: Also compute colors and usual ranges, and record samples that cannot be read instead of raising an error.

    Attributes:
        description: Properties of all samples, from the indexes; for a page of a damaged cache, of intact examined samples.
        tensors: Statistics of each tensor, by name. Only the first 1,000 tensors are read, or 300 for a page.
        sample_nbytes: Statistics of the bytes of the tensors of the examined samples.
        repeats: Tensors that are stored several times in the examined samples.
        positions: Position of each tensor that is read, by name.
        samples: For a page, statistics of the tensors of each examined sample, by index.
        errors: For a page, error messages of the samples that cannot be read, by index.

    Raises:
        FormatError, OSError: A sample is damaged, cannot be read, or needs a class that is not in `allow=`; without `for_page`.

    Memory: 128 KiB for each examined tensor, and at most 100 MB for digests. A page also takes a few hundred bytes for each
        tensor in each sample. Until the colors are computed, it takes up to 48 reduced pictures of each tensor.
    Threads: immutable after `__init__`, so safe to share.
    """

    def __init__(
        self,
        cache: Cache[Any],
        indices: Sequence[int],
        progress: Callable[[int, int], object],
        *,
        for_page: bool = False,
    ) -> None:
        self.cache, self.indices = cache, indices
        self.samples: dict[int, Values] = {}
        self.errors: dict[int, str] = {}
        self.description = _describe_intact(cache, indices) if for_page else cache.describe()
        names = islice(self.description.tensors, _MAX_PAGE_TENSORS if for_page else _MAX_TENSORS)
        self.positions = {name: at for at, name in enumerate(names)}
        self.tensors = {name: TensorStatistics(tensor) for name, tensor in self.description.tensors.items()}
        numbers = {name: ValueSample() for name in self.positions}
        repeats, sizes = RepeatCounter(), array("q")
        planes: dict[tuple[str, int, bool], list[Array]] = {}
        for done, (index, lazies, error) in enumerate(read_samples(cache, indices), 1):
            try:
                if error is not None:
                    raise error
                values = self._examine(lazies, cache.keys()[index], numbers, repeats)
                sizes.append(stored_nbytes(lazies))
                if for_page:
                    self.samples[index] = values
                    self._keep_planes(lazies, planes)
            except READ_ERRORS as exc:
                if not for_page:
                    raise
                self.errors[index] = escape_hidden(str(exc), 500)
            progress(done, len(indices))
        self.sample_nbytes, size_sample = compute_statistics(np.array(sizes)), ValueSample()
        size_sample.add(np.array(sizes))
        self.sample_nbytes.histogram = size_sample.make_histogram()
        for name, sample in numbers.items():
            if (statistics := self.tensors[name].values) is not None:
                statistics.histogram = sample.make_histogram()
        self.repeats = repeats.result()
        self._colors = {key: fit_colors(kept, key[2]) for key, kept in planes.items()}
        self._usual, self._constant = self._find_usual()

    def _examine(
        self, lazies: Mapping[str, Lazy], key: str, numbers: Mapping[str, ValueSample], repeats: RepeatCounter
    ) -> Values:
        values: dict[str, ValueStatistics | None] = {}
        for name, lazy in lazies.items():
            if name not in self.positions:
                continue
            # tensors are equal if their dtypes, shapes and bytes are
            digest = xxhash.xxh3_64(f"{lazy._reference.kind} {lazy.dtype} {tuple(lazy.shape)}".encode())
            try:
                values[name] = measure(lazy, numbers[name], digest)
            except TensorCacheError as exc:
                raise exc.at(f"sample {key!r}") from exc
            self.tensors[name].add(values[name], key)
            if name == lazy.name:  # a further name of a tensor is no further copy
                repeats.add(digest.intdigest(), name, key, lazy.nbytes)
        return values

    def measure(self, lazies: Mapping[str, Lazy]) -> Values:
        return {name: measure(lazy) for name, lazy in lazies.items() if name in self.positions}

    def _keep_planes(self, lazies: Mapping[str, Lazy], kept: dict[tuple[str, int, bool], list[Array]]) -> None:
        for name, lazy in lazies.items():
            planes = find_planes(name, lazy.dtype, lazy.shape) if name in self.positions else None
            if planes is not None:
                fitted = kept.setdefault(_color_key(name, lazy, planes), [])
                if len(fitted) < _MAX_FITTED:
                    fitted.append(shrink(planes.load(lazy), _FITTED_SIDE, _FITTED_SIDE))

    def colors_of(self, name: str, lazy: Lazy, planes: Planes, loaded: Array) -> Colors:
        """Return the colors of a tensor in all examined samples. If no examined sample has it, fit colors to it alone."""
        key = _color_key(name, lazy, planes)
        return self._colors.get(key) or fit_colors([loaded], key[2])

    def _find_usual(self) -> tuple[dict[tuple[str, str], tuple[float, float]], set[str]]:
        """Return usual ranges by tensor and property, and often constant tensors."""
        usual: dict[tuple[str, str], tuple[float, float]] = {}
        constant: set[str] = set()
        for name in self.positions if self.samples else ():
            examined = [values[name] for values in self.samples.values() if name in values]
            measured = [values for values in examined if values is not None and values.std is not None]
            if sum(values.std == 0 for values in measured) > _RARE * len(measured):
                constant.add(name)
            if len(measured) < _MIN_SAMPLES or "float" not in str(self.description.tensors[name].dtype):
                continue
            for prop in ("mean", "std"):
                numbers = np.array([getattr(values, prop) for values in measured])
                numbers = numbers[np.isfinite(numbers)]
                if not len(numbers):
                    continue
                median = float(np.median(numbers))
                spread = 1.4826 * float(np.median(np.abs(numbers - median)))
                if spread > 0:
                    distance = max(_FAR * spread, 0.01 * abs(median))
                    usual[name, prop] = (median - distance, median + distance)
        return usual, constant

    def marks(self, sample: Values) -> list[Mark]:
        """Return marks for NaN, infinities, and unusual means, deviations and constants."""
        marks = []
        for name, values in sample.items():
            if values is None:
                continue
            shown = escape_hidden(name, 100) or "the tensor"
            for word, count in (("NaN", values.num_nan), ("Inf", values.num_inf)):
                if count:
                    of = f"{count:,} of {values.num_values:,} numbers"
                    marks.append(Mark(f"{count:,} {word}", f"{shown}: {of} {'are' if count > 1 else 'is'} {word}"))
            if values.num_values < _MIN_VALUES or values.std is None:
                continue
            if values.std == 0 and name not in self._constant and len(self.samples) >= _MIN_SAMPLES:
                marks.append(Mark("constant", f"{shown}: all numbers are {values.min:.6g}, unlike in other samples"))
                continue
            for prop in ("mean", "std"):
                usual, number = self._usual.get((name, prop)), getattr(values, prop)
                if usual is not None and not usual[0] <= number <= usual[1]:
                    text = f"{shown}: {prop} {number:.4g}; {usual[0]:.4g} to {usual[1]:.4g} is usual"
                    marks.append(Mark(f"unusual {prop}", text))
        return marks


def stored_nbytes(lazies: Mapping[str, Lazy]) -> int:
    """Return the bytes of a sample's tensors. A tensor with several names counts once."""
    return sum(lazy.nbytes for name, lazy in lazies.items() if name == lazy.name)


def _color_key(name: str, lazy: Lazy, planes: Planes) -> tuple[str, int, bool]:
    return name, planes.count if planes.kind == "picture" else 1, dtype_name(lazy.dtype) == "uint8"


def _describe_intact(cache: Cache[Any], indices: Sequence[int]) -> Description:
    """Describe all samples, or after damage the intact samples in `indices`."""
    try:
        return cache.describe()
    except FormatError:
        intact = []
        for index in indices:
            with suppress(*READ_ERRORS):
                cache[index]
                intact.append(index)
        return cache[intact].describe()
