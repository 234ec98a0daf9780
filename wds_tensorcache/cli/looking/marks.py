"""Numbers, histograms and heat maps as text for a terminal."""

from __future__ import annotations

from typing import Any

import numpy as np
from rich.console import Console
from rich.style import Style
from rich.text import Text

from wds_tensorcache.inspecting.heat_map import colors_of, levels_of, shrink
from wds_tensorcache.inspecting.histogram import Histogram
from wds_tensorcache.inspecting.values import ValueStatistics

_BARS = " ▁▂▃▄▅▆▇█"
_SHADES, _ASCII_SHADES = " ░▒▓█", " .:-=+*#%@"
_NOT_FINITE = "!"


def number(value: float | None) -> str:
    """Return a number with four digits; `-` in place of None."""
    if value is None:
        return "-"
    return f"{value:,}" if isinstance(value, int) and abs(value) < 10**9 else f"{value:.4g}"


def values_text(values: ValueStatistics) -> Text:
    """Return minimum, mean, maximum, and the numbers of NaN and infinity, which are red unless they are 0."""
    text = Text(f"min {number(values.min)}  mean {number(values.mean)}  max {number(values.max)}")
    text.append(f"  {values.num_nan:,} NaN", "bold red" if values.num_nan else "dim")
    if values.num_inf:
        text.append(f"  {values.num_inf:,} Inf", "bold red")
    return text


def sparkline(histogram: Histogram | None) -> str:
    """Return a histogram as `▁▃▇█▅▁`, at most 16 characters. A bin that is not empty has at least the lowest bar."""
    if histogram is None:
        return ""
    counts = merge_bins(histogram, 16)[0]
    bars = np.ceil(counts * (len(_BARS) - 1) / counts.max()).astype(int)
    return "".join(_BARS[bar] for bar in bars)


def merge_bins(histogram: Histogram, most: int) -> tuple[Any, int]:
    """Return the counts of at most `most` bins, and how many bins of the histogram each of them is."""
    counts = np.array(histogram.counts)
    merged = -(-len(counts) // most)
    return np.add.reduceat(counts, np.arange(0, len(counts), merged)), merged


def is_unicode(console: Console) -> bool:
    """Return whether the output can have block characters."""
    return console.encoding.lower().replace("-", "").startswith("utf")


def has_colors(console: Console) -> bool:
    """Return whether the output is a terminal with at least 256 colors that may be used (`NO_COLOR`)."""
    return not console.no_color and console.color_system in ("256", "truecolor") and is_unicode(console)


def heat_map(plane: Any, console: Console, width: int, height: int) -> list[Text]:
    """Return lines that show a plane of a tensor.

    Args:
        plane: Numbers, float64 `[H, W]`.
        width: Largest width in characters.
        height: Largest number of lines. With colors, each line shows two rows of the plane.

    Proportions are kept, unless one side of the plane is more than four times as long as the other.
    """
    rows, columns = plane.shape
    if rows <= 4 * columns and columns <= 4 * rows:  # a character is about twice as high as it is wide
        scale = min(width / columns, 2 * height / rows, 1)
        width, height = max(1, round(columns * scale)), max(1, round(rows * scale / 2))
    if not has_colors(console):
        shades = _SHADES if is_unicode(console) else _ASCII_SHADES
        levels = levels_of(shrink(plane, height, width))
        places = np.nan_to_num(levels * (len(shades) - 1)).round().astype(int)
        return [
            Text("".join(_NOT_FINITE if np.isnan(level) else shades[place] for level, place in zip(*row, strict=True)))
            for row in zip(levels, places, strict=True)
        ]
    colors = colors_of(levels_of(shrink(plane, 2 * height, width)))
    lines = []
    for at in range(0, len(colors), 2):
        line = Text()
        for column in range(colors.shape[1]):
            upper = "rgb({},{},{})".format(*colors[at, column].tolist())
            lower = "rgb({},{},{})".format(*colors[at + 1, column].tolist()) if at + 1 < len(colors) else None
            line.append("▀", Style(color=upper, bgcolor=lower))
        lines.append(line)
    return lines
