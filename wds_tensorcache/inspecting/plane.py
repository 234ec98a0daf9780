"""Planes of a tensor to draw, and the levels of their colors."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from wds_tensorcache.codec.lazy import Lazy
from wds_tensorcache.inspecting.values import as_numbers

Array = np.ndarray[Any, Any]
_MOMENTS = re.compile(r"moment|mean.?(?:std|var|logvar)|posterior|latent.?dist", re.IGNORECASE)
_MASK = re.compile(r"mask|alpha|image|depth|canny|pixel|digit", re.IGNORECASE)
_NUM_FITTED = 1024  # pixels of each sample from which colors are computed
_MAX_ELEMENTS = 1 << 26  # larger tensors are not drawn
_HUGE = 1e30
_FAR = 10  # a sample with a range of more medians than this does not influence the colors
NOT_FINITE = (255, 0, 90)  # red, which the other colors do not have
# viridis, at equal distances
_COLORS = np.array(
    [(68, 1, 84), (71, 44, 122), (59, 81, 139), (44, 113, 142), (33, 144, 141), (39, 173, 129), (92, 200, 99),
     (170, 220, 50), (253, 231, 37)],
    np.float32,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Planes:
    """The planes of a tensor to draw.

    Attributes:
        kind: `"picture"` for the channels of one picture, `"map"` for planes of numbers.
        count: Number of channels, or of all planes `[H, W]`.
        height, width: Size in elements.
        note: Text about the part that is drawn, and about its colors; may be empty.
    """

    kind: str
    count: int
    height: int
    width: int
    note: str
    _first: int = 0  # the first of all planes `[H, W]` of the tensor that is drawn
    _step: int = 1  # distance to the next plane that is drawn
    _is_channels_last: bool = False

    def load(self, lazy: Lazy, count: int | None = None) -> Array:
        """Read planes of a tensor; float32 `[C, H, W]`. Complex numbers become their absolute values.

        Args:
            lazy: Tensor or array of the dtype and shape for which `find_planes` returned these planes.
            count: Maximum number of planes; by default, all channels of a picture, and the first plane of a map.

        Memory: only these planes are read, but all planes of a picture `[H, W, C]`.
        """
        count = min(self.count, count or (self.count if self.kind == "picture" else 1))
        shape = math.prod(lazy.shape) // (self.height * self.width), self.height, self.width
        if self._is_channels_last:
            shape = *shape[1:], shape[0]
        flat = type(lazy)(replace(lazy._reference, shape=shape), lazy._source)
        if self._is_channels_last:
            numbers = np.moveaxis(self._numbers(flat.load()), 2, 0)[:count]
        elif self._step == 1:
            numbers = self._numbers(flat[self._first : self._first + count])
        else:
            last = self._first + count * self._step
            numbers = np.stack([self._numbers(flat[at]) for at in range(self._first, last, self._step)])
        with np.errstate(over="ignore"):
            planes = numbers.astype(np.float32)
        # numbers beyond float32 are not infinities
        too_large = np.isinf(planes) & np.isfinite(numbers)
        planes[too_large] = np.copysign(_HUGE, planes[too_large])
        return planes

    @staticmethod
    def _numbers(value: Any) -> Array:
        numbers: Any = as_numbers(value)  # `find_planes` refuses dtypes without numbers
        planes: Array = np.hypot(numbers[..., 0], numbers[..., 1]) if numbers.ndim > value.ndim else numbers
        return planes


def find_planes(name: str, dtype: Any, shape: Sequence[int]) -> Planes | None:
    """Return the planes of a tensor to draw, or None.

    Tensors with fewer than two elements, more than 67 million, or no numbers are not drawn. Pictures are latents and images
    `[C, H, W]`, uint8 images `[H, W, C]`, the middle frame of videos `[C, T, H, W]`, and masks `[H, W]`. Leading dimensions of
    length 1 do not count. Only the means of moments are drawn. Any other tensor `[…, H, W]` is a map, and `[N]` is one row.
    """
    if not _is_number(dtype) or not 2 <= math.prod(shape) <= _MAX_ELEMENTS:
        return None
    dims = (1,) * (2 - len(shape)) + tuple(shape)
    while len(dims) > 2 and dims[0] == 1:
        dims = dims[1:]
    height, width = dims[-2:]
    if len(dims) == 2:
        is_small = min(dims) >= 4 and max(dims) <= 4 * min(dims)
        is_byte = dtype.itemsize == 1 and not str(dtype).startswith("torch.float")
        is_picture = is_small and (is_byte or _MASK.search(name))
        return Planes("picture" if is_picture else "map", 1, height, width, "")
    is_last = len(dims) == 3 and dims[2] in (1, 3, 4) and dims[0] > 4 and "uint8" in str(dtype)
    channels, height, width = (dims[2], *dims[:2]) if is_last else (dims[0], height, width)
    if len(dims) > 4 or min(height, width) < 4 or max(height, width) > 5 * min(height, width) or channels > 512:
        count, (height, width) = math.prod(dims[:-2]), dims[-2:]
        return Planes("map", count, height, width, f"the first of {count:,} planes")
    notes, frame, num_frames = [], 0, 1
    if len(dims) == 4:
        num_frames, frame = dims[1], dims[1] // 2
        notes += [f"frame {frame + 1} of {dims[1]}"] if dims[1] > 1 else []
    if not is_last and channels % 2 == 0 and (channels == 8 or _MOMENTS.search(name)):
        notes.append(f"first {channels // 2} of {channels} channels: the means")
        channels //= 2
    elif is_last and channels == 4:
        channels = 3
    if channels not in (1, 3):
        notes.append(f"{channels} channels as colors")
    return Planes("picture", channels, height, width, ", ".join(notes), frame, num_frames, is_last)


def _is_number(dtype: Any) -> bool:
    return "float4" not in str(dtype) if isinstance(dtype, torch.dtype) else np.dtype(dtype).kind in "biufc"


def shrink(planes: Array, height: int, width: int) -> Array:
    """Shrink planes `[C, H, W]` to at most this size. Each element is the mean of a block; NaN and infinities spread to it."""
    height, width = min(height, planes.shape[1]), min(width, planes.shape[2])
    if (height, width) == planes.shape[1:]:
        return planes
    whole = torch.from_numpy(np.ascontiguousarray(planes))[None]
    result: Array = torch.nn.functional.adaptive_avg_pool2d(whole, (height, width))[0].numpy()
    return result


@dataclass(frozen=True, slots=True)
class Colors:
    """The map from numbers of one tensor to levels, for all samples.

    Attributes:
        mean, basis: Center `[C]` and principal components `[3, C]`; None for tensors of one or three channels.
        low, high: Numbers that become the darkest and the brightest color; `[1]`, or `[3]` with a basis.
    """

    mean: Array | None
    basis: Array | None
    low: Array
    high: Array


def fit_colors(planes: Sequence[Array], is_uint8: bool = False) -> Colors:
    """Return colors that show the differences in planes `[C, H, W]` of several samples.

    One channel is brightness; three channels are red, green and blue. For other numbers of channels, the first principal
    component is brightness, and the next two are hues.
    """
    parts = [_some_pixels(part) for part in planes]
    ranges = [np.ptp(part) if part.size else 0 for part in parts]
    # a broken sample must not hide the differences between other samples
    parts = [part for part, size in zip(parts, ranges, strict=True) if size <= _FAR * np.median(ranges)]
    pixels = np.concatenate(parts, axis=1)
    if not pixels.size:
        pixels = np.zeros((len(pixels), 1))
    if len(pixels) in (1, 3):
        return Colors(None, None, *(np.array([end], np.float32) for end in _range_of(pixels, is_uint8)))
    mean = pixels.mean(1)
    # hazard: squares of huge numbers overflow
    scale = max(float(np.abs(pixels - mean[:, None]).max()), 1e-30)
    centered = (pixels - mean[:, None]) / scale
    _, vectors = np.linalg.eigh(centered @ centered.T / centered.shape[1])
    basis = np.zeros((3, len(pixels)))
    components = vectors[:, ::-1][:, :3].T
    # the sign of a component is arbitrary: photos have few highlights on a darker ground, so the longer tail becomes bright
    tails = ((components @ centered) ** 3).sum(1)
    basis[: len(components)] = components * np.where(tails < 0, -1, 1)[:, None]
    low, high = np.percentile(basis @ (pixels - mean[:, None]), [1, 99], axis=1)
    return Colors(*(part.astype(np.float32) for part in (mean, basis, low, high)))


def _some_pixels(planes: Array) -> Array:
    """Return the finite pixels among pixels at equal distances, float64 `[C, n]`."""
    flat = planes.reshape(len(planes), -1)
    flat = flat[:, :: max(1, flat.shape[1] // _NUM_FITTED)].astype(np.float64)
    return flat[:, np.isfinite(flat).all(0)]


def _range_of(pixels: Array, is_uint8: bool) -> tuple[float, float]:
    if is_uint8:
        return 0.0, 255.0
    least, most = float(pixels.min()), float(pixels.max())
    for low, high in ((0.0, 1.0), (-1.0, 1.0)):
        if low <= least <= most <= high and most - least > (high - low) / 4:
            return low, high
    low, high = np.percentile(pixels, [1, 99]).tolist()
    return (low, high) if high > low else (least, most)


def levels_of(planes: Array, colors: Colors) -> Array:
    """Return levels in [0, 1], `[1, H, W]` or `[3, H, W]`. Places where a plane is not finite are NaN."""
    is_finite = np.isfinite(planes).all(0)
    planes = np.where(is_finite, planes, 0)
    with np.errstate(over="ignore", invalid="ignore"):
        if colors.basis is not None and colors.mean is not None:
            planes = np.tensordot(colors.basis, planes - colors.mean[:, None, None], 1)
        low, high = colors.low[:, None, None], colors.high[:, None, None]
        levels = np.clip(np.nan_to_num((planes - low) / np.maximum(high - low, 1e-30), nan=0.5), 0, 1)
    return np.where(is_finite, levels, np.nan)


def heat(levels: Array) -> Array:
    """Return the colors of levels `[H, W]`, uint8 `[H, W, 3]`. 0 is dark, 1 bright, NaN red."""
    is_finite = np.isfinite(levels)
    place = np.where(is_finite, levels, 0) * (len(_COLORS) - 1)
    below = np.clip(place.astype(np.int64), 0, len(_COLORS) - 2)
    share = (place - below)[..., None].astype(np.float32)
    colors = _COLORS[below] * (1 - share) + _COLORS[below + 1] * share
    result: Array = np.where(is_finite[..., None], np.rint(colors), NOT_FINITE).astype(np.uint8)
    return result
