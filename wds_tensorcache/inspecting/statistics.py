"""Statistics of a cache: sizes, shapes, dtypes, numbers, and repeated tensors, in one pass and in bounded memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import xxhash

from wds_tensorcache.codec.dtypes import dtype_name
from wds_tensorcache.codec.lazy import Lazy
from wds_tensorcache.errors import TensorCacheError
from wds_tensorcache.inspecting.repeats import RepeatCounter, Repeats
from wds_tensorcache.inspecting.tensors_ahead import tensors_ahead
from wds_tensorcache.inspecting.values import Moments, ValueStatistics, as_numbers, read_parts
from wds_tensorcache.reading.cache import TensorCache
from wds_tensorcache.reading.description import TensorDescription, ValueDescription
from wds_tensorcache.reading.positions import spread

__all__ = ["CacheStatistics", "ShapeCount", "SmallValue", "TensorStatistics", "collect_statistics", "dtype_name"]

_MAX_TENSORS = 1000  # tensors, by name, whose numbers are examined: 64 KiB each
_NUM_KEYS = 8


@dataclass(frozen=True, slots=True)
class ShapeCount:
    """A shape of a tensor, and the number of samples in which it has this shape."""

    shape: tuple[int, ...]
    num_samples: int


@dataclass(frozen=True, slots=True)
class TensorStatistics:
    """The properties of one tensor.

    Attributes:
        name: Path of the tensor in the samples.
        kind: `"tensor"` for torch tensors, `"ndarray"` for numpy arrays.
        dtypes: Names of its dtypes, such as `"bfloat16"`.
        shape: Size of each dimension, or (smallest, largest) if samples differ; None if samples differ in their number of
            dimensions.
        shapes: The most frequent shapes, at most 20.
        num_shapes: Number of distinct shapes.
        num_samples: Number of samples that have the tensor.
        nbytes: Bytes of the tensor in all samples.
        num_examined: Number of samples whose numbers were read.
        values: Statistics of these numbers; None if no sample was examined, or if the elements are text or dates.
        num_not_finite: Number of examined samples that have a NaN or an infinity in this tensor.
        not_finite: Keys of the first of these samples, at most 8.
    """

    name: str
    kind: str
    dtypes: tuple[str, ...]
    shape: tuple[int | tuple[int, int], ...] | None
    shapes: tuple[ShapeCount, ...]
    num_shapes: int
    num_samples: int
    nbytes: int
    num_examined: int
    values: ValueStatistics | None
    num_not_finite: int
    not_finite: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class SmallValue:
    """A value of the samples that is not a tensor.

    Attributes:
        name: Path of the value in the samples.
        text: Its types, and an example of bounded length.
        num_samples: Number of samples that have it, among at most 64 samples.
    """

    name: str
    text: str
    num_samples: int


@dataclass(frozen=True, slots=True)
class CacheStatistics:
    """Statistics of a cache. `dataclasses.asdict` returns plain values; only floats of `ValueStatistics` may be infinite.

    Attributes:
        num_samples, num_shards: Numbers of samples and shards.
        nbytes: Bytes of the tensors of all samples.
        num_examined: Number of samples whose tensors were read, spread over the cache.
        sample_nbytes: Statistics of the bytes of the tensors of these samples.
        tensors: The tensors, in the order of the index.
        values: Values that are not tensors, in at most 64 samples.
        members: Number of samples that have a member `KEY.suffix` outside all caches, by suffix.
        repeats: Tensors that several of the examined samples have.
        fingerprint: Description of how the cache was made.
    """

    num_samples: int
    num_shards: int
    nbytes: int
    num_examined: int
    sample_nbytes: ValueStatistics
    tensors: tuple[TensorStatistics, ...]
    values: tuple[SmallValue, ...]
    members: dict[str, int]
    repeats: Repeats
    fingerprint: dict[str, object]


@dataclass(slots=True)
class _Examined:
    """The numbers of one tensor so far."""

    moments: Moments | None = None
    num_samples: int = 0
    num_not_finite: int = 0
    not_finite: list[str] = field(default_factory=list)


def collect_statistics(
    cache: TensorCache, max_samples: int | None = 1000, progress: Callable[[int, int], object] | None = None
) -> CacheStatistics:
    """Return statistics of a cache.

    Args:
        cache: From `tc.open`, or a view of it.
        max_samples: Maximum number of samples whose tensors are read, at equal distances from each other; None reads all of
            them. Sizes, shapes and dtypes are those of all samples, from the index.
        progress: Called with the number of samples that were read, and of those to read.

    Raises:
        FormatError: A shard is damaged, or does not match its index; or a sample needs a class that is not in `allow=`.

    Memory: 64 KiB for each tensor's name, for at most 1,000 names; at most 100 MB for the digests of tensors; 200 MB for the
        part of a tensor that is examined.
    """
    described = cache.describe()
    numbers = spread(len(cache), len(cache) if max_samples is None else max_samples)
    repeats, sizes = RepeatCounter(), Moments(is_whole=True)
    examined: dict[str, _Examined] = {name: _Examined() for name in list(described.tensors)[:_MAX_TENSORS]}
    keys = cache.keys()
    for done, (number, lazies, error) in enumerate(tensors_ahead(cache, numbers), 1):
        if error is not None:
            raise error
        key, nbytes = keys[number], 0
        for name, lazy in lazies.items():
            nbytes += lazy.nbytes
            if name in examined:
                try:
                    repeats.add(_examine(examined[name], lazy, key), name, key, lazy.nbytes)
                except TensorCacheError as exc:
                    raise exc.at(f"sample {key!r}") from exc
        sizes.add(np.array([nbytes]))
        if progress is not None:
            progress(done, len(numbers))
    return CacheStatistics(
        described.num_samples,
        described.num_shards,
        described.nbytes,
        len(numbers),
        sizes.result(),
        tuple(_tensor(each, examined.get(name, _Examined())) for name, each in described.tensors.items()),
        tuple(_small_value(each) for each in described.values.values()),
        described.members,
        repeats.result(),
        described.fingerprint,
    )


def _examine(examined: _Examined, lazy: Lazy, key: str) -> int:
    """Add the numbers of a tensor, and return the digest of its dtype, shape and bytes."""
    digest = xxhash.xxh3_64(f"{lazy._reference.kind} {lazy.dtype} {tuple(lazy.shape)}".encode())
    before = examined.moments.num_not_finite if examined.moments else 0
    examined.num_samples += 1
    for buffer, part in read_parts(lazy):
        digest.update(buffer)
        numbers = as_numbers(part)
        if numbers is not None:
            examined.moments = examined.moments or Moments(numbers.dtype.kind != "f")
            examined.moments.add(numbers.reshape(-1))
    if examined.moments and examined.moments.num_not_finite > before:
        examined.num_not_finite += 1
        if len(examined.not_finite) < _NUM_KEYS:
            examined.not_finite.append(key)
    return digest.intdigest()


def _tensor(described: TensorDescription, examined: _Examined) -> TensorStatistics:
    dtypes = described.dtype if isinstance(described.dtype, tuple) else (described.dtype,)
    return TensorStatistics(
        described.name,
        described.kind,
        tuple(map(dtype_name, dtypes)),
        described.shape,
        tuple(ShapeCount(shape, count) for shape, count in described.shapes.items()),
        described.num_shapes,
        described.num_samples,
        described.nbytes,
        examined.num_samples,
        examined.moments.result() if examined.moments else None,
        examined.num_not_finite,
        tuple(examined.not_finite),
    )


def _small_value(described: ValueDescription) -> SmallValue:
    return SmallValue(described.name, str(described), described.num_samples)
