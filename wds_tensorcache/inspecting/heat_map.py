"""Heat maps: a plane of a tensor as a small image."""

from __future__ import annotations

from typing import Any

import numpy as np

from wds_tensorcache.codec.lazy import Lazy
from wds_tensorcache.errors import FormatError
from wds_tensorcache.inspecting.values import as_numbers

Array = np.ndarray[Any, Any]
_MAX_ROWS, _MAX_NUMBERS = 512, 1 << 22
NOT_FINITE = (255, 0, 90)  # red, which the other colors do not have
# viridis, at equal distances
_COLORS = np.array(
    [(68, 1, 84), (71, 44, 122), (59, 81, 139), (44, 113, 142), (33, 144, 141), (39, 173, 129), (92, 200, 99),
     (170, 220, 50), (253, 231, 37)],
    np.float32,
)  # fmt: skip


def num_planes(lazy: Lazy) -> int:
    """Return the number of planes of a tensor: the product of all dimensions but the last two; 0 if it has no elements."""
    return int(np.prod(lazy.shape[:-2], dtype=np.int64)) if 0 not in lazy.shape else 0


def read_plane(lazy: Lazy, number: int = 0) -> Array | None:
    """Return one plane of a tensor, for example a channel of a latent.

    Args:
        lazy: A tensor `[…, H, W]`. One of the shape `[N]` is a plane of one row.
        number: Number of the plane, in C order.

    Returns:
        Numbers, float64 `[H, W]`, or some of the rows at equal distances if there are more than 4 million numbers; None if the
        tensor has no such plane, or less than two numbers, or if its elements are text or dates. Complex numbers become their
        absolute values.

    Raises:
        FormatError: The bytes are not values of the dtype, or the shard was changed; the message names the tensor.

    Cost: reads the bytes of the plane, and no more.
    """
    shape = tuple(lazy.shape)
    if not shape or number >= num_planes(lazy) or (height := shape[-2] if len(shape) > 1 else 1) * shape[-1] < 2:
        return None
    width = shape[-1]
    row_nbytes = width * lazy.dtype.itemsize
    begin = lazy._reference.begin + number * height * row_nbytes
    rows = np.arange(height)
    if height * width > _MAX_NUMBERS:
        rows = np.linspace(0, height - 1, max(1, min(height, _MAX_ROWS, _MAX_NUMBERS // width))).astype(np.int64)
    # one read if all rows are needed, else one for each row
    ranges = [(0, height)] if len(rows) == height else [(row, row + 1) for row in rows.tolist()]
    parts = []
    for first, last in ranges:
        buffer = lazy._source.read(begin + first * row_nbytes, begin + last * row_nbytes)
        try:
            part = lazy.view_buffer(buffer, lazy.dtype, (last - first, width))
        except FormatError as exc:
            raise exc.at(f"tensor {lazy.name!r}") from exc
        numbers = as_numbers(part)
        if numbers is None:
            return None
        parts.append(np.hypot(numbers[..., 0], numbers[..., 1]) if numbers.ndim == 3 else numbers)
    return np.concatenate(parts).astype(np.float64)


def shrink(plane: Array, height: int, width: int) -> Array:
    """Return the means of equal blocks of a plane, float64, at most `[height, width]`. Blocks with NaN or infinity are NaN."""
    plane = np.where(np.isfinite(plane), plane, np.nan)
    for axis, most in enumerate((height, width)):
        count = plane.shape[axis]
        if count > most:
            cuts = np.arange(most) * count // most
            sizes = np.diff(np.append(cuts, count)).reshape((-1, 1) if axis == 0 else (1, -1))
            with np.errstate(over="ignore", invalid="ignore"):
                plane = np.add.reduceat(plane, cuts, axis) / sizes
    return plane


def levels_of(image: Array) -> Array:
    """Scale an image, float64 `[H, W]`, to [0, 1], and clip 2% of its finite values at either end; NaN stays NaN."""
    finite = image[np.isfinite(image)]
    if not len(finite):
        return np.full_like(image, np.nan)
    low, high = np.percentile(finite, [2, 98])
    if not high > low:
        low, high = finite.min(), finite.max()
    with np.errstate(over="ignore", invalid="ignore"):
        scaled = (image - low) / (high - low) if high > low else np.where(np.isfinite(image), 0.5, np.nan)
    # the range of the largest float64 values overflows
    return np.clip(np.where(np.isnan(scaled) & np.isfinite(image), 0.5, scaled), 0, 1)


def colors_of(levels: Array) -> Array:
    """Return the colors of levels in [0, 1], uint8 `[H, W, 3]`: dark for 0, bright for 1, red for NaN."""
    finite = np.isfinite(levels)
    place = np.where(finite, levels, 0) * (len(_COLORS) - 1)
    below = np.clip(place.astype(np.int64), 0, len(_COLORS) - 2)
    share = (place - below)[..., None].astype(np.float32)
    colors = _COLORS[below] * (1 - share) + _COLORS[below + 1] * share
    result: Array = np.where(finite[..., None], np.rint(colors), NOT_FINITE).astype(np.uint8)
    return result
