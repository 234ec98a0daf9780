"""Pictures of tensors: which planes to draw, their colors, and PNG files made with zlib alone."""

from __future__ import annotations

import re
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from wds_tensorcache.inspecting.values import as_numbers

Array = np.ndarray[Any, Any]
_MOMENTS = re.compile(r"moment|mean.?(?:std|var|logvar)|posterior|latent.?dist", re.IGNORECASE)
_MASK = re.compile(r"mask|alpha|image|depth|canny|pixel|digit", re.IGNORECASE)
_NUM_FITTED = 1024  # pixels of each sample from which colors are computed
_MAX_ELEMENTS = 1 << 26  # larger tensors are not drawn
_HUE = 0.3  # share of the two hues, against brightness
_HUGE = 1e30
_BAD = (255, 0, 200)  # color of NaN and Inf
# black, purple, red, orange, pale yellow: brightness ascends evenly, so the map also reads in gray
_HEAT = np.array([[4, 4, 24], [87, 16, 110], [188, 55, 84], [249, 142, 9], [252, 255, 164]], np.float32)
_MAX_MAP = 128, 48  # columns and rows of the map of a matrix


@dataclass(frozen=True, slots=True)
class Planes:
    """How to draw a tensor, decided from its name, dtype and shape.

    Attributes:
        kind: `"picture"` for channels, `"map"` for the elements of a matrix.
        num_channels: Number of channels that are drawn.
        height, width: Size of the picture in elements.
        note: Description of the part that is drawn, for people; empty for the whole tensor.
    """

    kind: str
    num_channels: int
    height: int
    width: int
    note: str
    _dims: tuple[int, ...]  # shape without leading dimensions of length 1
    _frame: int | None
    _is_channels_last: bool

    def take(self, value: Any) -> Array:
        """Return the planes of a tensor or array; float32 [C, H, W]. Complex numbers become their absolute values."""
        numbers = as_numbers(value)
        if numbers is None:
            raise TypeError(f"elements of dtype {value.dtype} are not numbers")
        if numbers.ndim > value.ndim:
            numbers = np.hypot(numbers[..., 0], numbers[..., 1])
        numbers = numbers.reshape(self._dims)
        if self._is_channels_last:
            numbers = np.moveaxis(numbers, -1, 0)
        if self._frame is not None:
            numbers = numbers[:, self._frame]
        if numbers.ndim == 2:
            numbers = numbers[None]
        numbers = numbers[: self.num_channels]
        with np.errstate(over="ignore"):
            planes = numbers.astype(np.float32)
        # numbers beyond float32 are not infinities
        too_large = np.isinf(planes) & np.isfinite(numbers)
        planes[too_large] = np.copysign(_HUGE, planes[too_large])
        return planes


def planes_of(name: str, dtype: Any, shape: Sequence[int]) -> Planes | None:
    """Return how to draw a tensor, or None if it is not drawn.

    Latents and images `[C, H, W]` are drawn, uint8 images `[H, W, C]`, the middle frame of videos `[C, T, H, W]`, and matrices
    `[H, W]`. Leading dimensions of length 1 do not count. Of moments, which are means and deviations or variances, the first
    half of the channels is drawn.

    Args:
        name: Name of the tensor.
        dtype: Dtype of torch or numpy.
        shape: Shape of the tensor in elements.
    """
    if not _is_number(dtype) or not 0 < np.prod(shape, dtype=np.float64) <= _MAX_ELEMENTS:
        return None
    dims = tuple(shape)
    while len(dims) > 2 and dims[0] == 1:
        dims = dims[1:]
    if len(dims) == 2:
        height, width = dims
        is_small = min(dims) >= 4 and max(dims) <= 4 * min(dims)
        kind = "picture" if is_small and (_MASK.search(name) or _itemsize(dtype) == 1) else "map"
        return Planes(kind, 1, height, width, "", dims, None, False) if min(dims) > 1 else None
    if not 3 <= len(dims) <= 4:
        return None
    is_last = len(dims) == 3 and dims[2] in (1, 3, 4) and dims[0] > 4 and "uint8" in str(dtype)
    channels, height, width = (dims[2], *dims[:2]) if is_last else (dims[0], *dims[-2:])
    if min(height, width) < 4 or max(height, width) > 5 * min(height, width) or channels > 512:
        return None
    notes, frame = [], None
    if len(dims) == 4:
        frame = dims[1] // 2
        notes += [f"frame {frame + 1} of {dims[1]}"] if dims[1] > 1 else []
    if not is_last and channels % 2 == 0 and (channels == 8 or _MOMENTS.search(name)):
        notes.append(f"first {channels // 2} of {channels} channels: the means")
        channels //= 2
    elif is_last and channels == 4:
        channels = 3
    if channels not in (1, 3):
        notes.append(f"{channels} channels as colors")
    return Planes("picture", channels, height, width, ", ".join(notes), dims, frame, is_last)


def _is_number(dtype: Any) -> bool:
    if isinstance(dtype, torch.dtype):
        return dtype.itemsize > 0 and "float4" not in str(dtype)
    return np.dtype(dtype).kind in "biufc"


def _itemsize(dtype: Any) -> int:
    return int(dtype.itemsize) if not str(dtype).startswith("torch.float") else 2


@dataclass(frozen=True, slots=True)
class Colors:
    """How the numbers of one tensor become colors, the same for all samples.

    Attributes:
        mean, basis: Center `[C]` and principal components `[3, C]`; None for tensors of one or three channels.
        low, high: Numbers that become the darkest and the brightest color; `[1]`, or `[3]` with a basis.
    """

    mean: Array | None
    basis: Array | None
    low: Array
    high: Array


def fit_colors(planes: Sequence[Array], num_bits: int = 0) -> Colors:
    """Return colors that show the differences in planes `[C, H, W]` of several samples.

    Three channels are red, green and blue. Of other numbers of channels, the first principal component is brightness, and the
    next two are hues.

    Args:
        planes: Planes of some samples with the same number of channels.
        num_bits: 8 for numbers in 0..255 (uint8), 0 for numbers in any range.
    """
    pixels = np.concatenate([_some_pixels(each) for each in planes], axis=1).astype(np.float64)
    pixels = pixels[:, np.isfinite(pixels).all(0)]
    if not pixels.size:
        pixels = np.zeros((len(pixels), 1))
    if len(pixels) in (1, 3):
        return Colors(None, None, *(np.array([end], np.float32) for end in _range_of(pixels, num_bits)))
    mean = pixels.mean(1)
    # hazard: squares of huge numbers overflow
    scale = max(float(np.abs(pixels - mean[:, None]).max()), 1e-30)
    centered = (pixels - mean[:, None]) / scale
    _, vectors = np.linalg.eigh(centered @ centered.T / centered.shape[1])
    basis = np.zeros((3, len(pixels)))
    found = vectors[:, ::-1][:, :3].T
    # the sign of a component is arbitrary: photos have few highlights on a darker ground, so the longer tail becomes bright
    tails = ((found @ centered) ** 3).sum(1)
    basis[: len(found)] = found * np.where(tails < 0, -1, 1)[:, None]
    low, high = np.percentile(basis @ (pixels - mean[:, None]), [1, 99], axis=1)
    return Colors(*(each.astype(np.float32) for each in (mean, basis, low, high)))


def _some_pixels(planes: Array) -> Array:
    flat = planes.reshape(len(planes), -1)
    return flat[:, :: max(1, flat.shape[1] // _NUM_FITTED)]


def _range_of(pixels: Array, num_bits: int) -> tuple[float, float]:
    if num_bits:
        return 0.0, 255.0
    least, most = float(pixels.min()), float(pixels.max())
    for low, high in ((0.0, 1.0), (-1.0, 1.0)):
        if low <= least <= most <= high and most - least > (high - low) / 4:
            return low, high
    low, high = np.percentile(pixels, [1, 99]).tolist()
    return (low, high) if high > low else (least, most)


def paint(planes: Array, colors: Colors, kind: str) -> Array:
    """Return planes `[C, H, W]` as a picture, uint8 `[H, W, 3]`, or `[H, W]` in gray; NaN and Inf are magenta."""
    bad = ~np.isfinite(planes).all(0)
    planes = np.where(bad, 0, planes)
    with np.errstate(over="ignore", invalid="ignore"):
        if colors.basis is not None and colors.mean is not None:
            planes = np.tensordot(colors.basis, planes - colors.mean[:, None, None], 1)
        low, high = colors.low[:, None, None], colors.high[:, None, None]
        unit = np.clip(np.nan_to_num((planes - low) / np.maximum(high - low, 1e-30), nan=0.5), 0, 1)
    if colors.basis is not None:
        light, red, blue = unit[0], _HUE * (unit[1] - 0.5), _HUE * (unit[2] - 0.5)
        light = 0.06 + 0.88 * light
        unit = np.stack([light + 1.402 * red, light - 0.344 * blue - 0.714 * red, light + 1.772 * blue])
    if kind == "map":
        at = unit[0] * (len(_HEAT) - 1)
        below = np.minimum(at.astype(np.int64), len(_HEAT) - 2)
        rest = (at - below)[..., None]
        picture: Array = _HEAT[below] * (1 - rest) + _HEAT[below + 1] * rest
    else:
        picture = np.moveaxis(np.clip(unit, 0, 1) * 255, 0, -1)
    picture = np.rint(picture).astype(np.uint8)
    if bad.any():
        picture = np.array(np.broadcast_to(picture, (*bad.shape, 3)))
        picture[bad] = _BAD
    return picture[..., 0] if picture.shape[-1] == 1 else picture


def shrink(planes: Array, max_side: int, kind: str) -> Array:
    """Return planes `[C, H, W]` of at most `max_side` in both directions, each element the mean of a rectangle.

    The shape of a picture is kept. A map is squeezed to at most 128 columns and 48 rows. The mean of a rectangle with
    a NaN or Inf is not finite.
    """
    height, width = planes.shape[1:]
    scale = min(1.0, max_side / max(height, width))
    rows, columns = max(1, round(height * scale)), max(1, round(width * scale))
    if kind == "map":
        columns, rows = (min(size, most, max_side) for size, most in zip((width, height), _MAX_MAP, strict=True))
    if (rows, columns) == (height, width):
        return planes
    found = torch.nn.functional.adaptive_avg_pool2d(
        torch.from_numpy(np.ascontiguousarray(planes))[None], (rows, columns)
    )
    result: Array = found[0].numpy()
    return result


def fit_png(planes: Array, colors: Colors, kind: str, max_side: int, max_nbytes: int) -> tuple[bytes, int, int]:
    """Return a PNG of at most about `max_nbytes`, and its width and height: coarser in color first, then smaller.

    Args:
        planes: Planes, float32 `[C, H, W]`.
        colors: Colors of the tensor.
        kind: Kind of the `Planes`.
        max_side: Maximum of width and height in pixels.
        max_nbytes: Size of the file in bytes.
    """
    while True:
        picture = paint(shrink(planes, max_side, kind), colors, kind)
        height, width = picture.shape[:2]
        encoded = encode_png(picture, 32)  # first, since finer colors cannot fit if this does not
        if len(encoded) <= max_nbytes or max(width, height) <= 8:
            finer = (encode_png(picture, num_levels) for num_levels in (256, 64))
            return next((each for each in finer if len(each) <= max_nbytes), encoded), width, height
        share = (max_nbytes / len(encoded)) ** 0.5
        max_side = min(max(width, height) - 1, max(8, int(max(width, height) * share)))


def encode_png(picture: Array, num_levels: int = 256) -> bytes:
    """Return a picture as an 8-bit PNG file.

    Args:
        picture: Gray `[H, W]` or colors `[H, W, 3]`, uint8.
        num_levels: Number of brightnesses of each color; fewer make a smaller file.
    """
    if num_levels < 256:
        step = 255 / (num_levels - 1)
        picture = np.rint(np.rint(picture / step) * step).astype(np.uint8)
    height, width = picture.shape[:2]
    depth = 1 if picture.ndim == 2 else 3
    rows = np.ascontiguousarray(picture).reshape(height, width * depth)
    left = np.zeros_like(rows)
    left[:, depth:] = rows[:, :-depth]
    above = np.zeros_like(rows)
    above[1:] = rows[:-1]
    # three filters of PNG: the number that begins each row, and the differences that are stored
    choices = [(0, rows), (1, rows - left), (2, rows - above)]
    number, filtered = min(choices, key=lambda choice: int(np.abs(choice[1].view(np.int8).astype(np.int16)).sum()))
    packed = zlib.compress(np.insert(filtered, 0, number, axis=1).tobytes(), 9 if height * width <= 1 << 16 else 6)
    header = struct.pack(">IIBBBBB", width, height, 8, 0 if depth == 1 else 2, 0, 0, 0)
    chunks = (b"IHDR", header), (b"IDAT", packed), (b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))
        for kind, content in chunks
    )
