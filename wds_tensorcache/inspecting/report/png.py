"""Planes of tensors as small PNG files, made with zlib alone."""

from __future__ import annotations

import struct
import zlib
from typing import Any

import numpy as np

from wds_tensorcache.inspecting.plane import NOT_FINITE, Colors, heat, levels_of, shrink

Array = np.ndarray[Any, Any]
_HUE = 0.3  # share of the two hues, against brightness
_MAX_MAP = 48, 128  # rows and columns of a map


def paint(planes: Array, colors: Colors, kind: str) -> Array:
    """Paint planes `[C, H, W]` as uint8 `[H, W, 3]`, or `[H, W]` in gray. NaN and Inf are red."""
    levels = levels_of(planes, colors)
    if kind == "map":
        return heat(levels[0])
    is_bad = np.isnan(levels[0])
    levels = np.nan_to_num(levels)
    if colors.basis is not None:
        light, red, blue = 0.06 + 0.88 * levels[0], _HUE * (levels[1] - 0.5), _HUE * (levels[2] - 0.5)
        levels = np.stack([light + 1.402 * red, light - 0.344 * blue - 0.714 * red, light + 1.772 * blue])
    picture: Array = np.rint(np.moveaxis(np.clip(levels, 0, 1) * 255, 0, -1)).astype(np.uint8)
    if is_bad.any():
        picture = np.where(is_bad[..., None], np.array(NOT_FINITE, np.uint8), picture)
    return picture.squeeze(-1) if picture.shape[-1] == 1 else picture


def fit_png(planes: Array, colors: Colors, kind: str, max_side: int, max_nbytes: int) -> tuple[bytes, int, int]:
    """Return a PNG of at most about `max_nbytes`, its width and height. A large PNG gets coarser colors, then fewer pixels.

    A picture keeps its proportions; a map has at most 128 columns and 48 rows.
    """
    height, width = planes.shape[1:]
    while True:
        scale = min(1.0, max_side / max(height, width))
        size = max(1, round(height * scale)), max(1, round(width * scale))
        if kind == "map":
            size = min(height, _MAX_MAP[0], max_side), min(width, _MAX_MAP[1], max_side)
        picture = paint(shrink(planes, *size), colors, kind)
        encoded = encode_png(picture, 32)  # first: if 32 levels do not fit, finer colors do not fit either
        if len(encoded) <= max_nbytes or max(size) <= 8:
            finer = (encode_png(picture, num_levels) for num_levels in (256, 64))
            return next((png for png in finer if len(png) <= max_nbytes), encoded), size[1], size[0]
        share = (max_nbytes / len(encoded)) ** 0.5
        max_side = min(max(size) - 1, max(8, int(max(size) * share)))


def encode_png(picture: Array, num_levels: int) -> bytes:
    """Encode a picture, gray `[H, W]` or colors `[H, W, 3]`, as a PNG file. Each color has `num_levels` levels."""
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
