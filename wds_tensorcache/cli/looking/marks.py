"""Statistics, histograms and planes of tensors for a terminal."""

from __future__ import annotations

from typing import Any

import numpy as np
from rich.console import Console
from rich.style import Style
from rich.text import Text

from wds_tensorcache.inspecting.plane import fit_colors, heat, levels_of, shrink
from wds_tensorcache.inspecting.text import number_text
from wds_tensorcache.inspecting.values import Histogram, ValueStatistics

_BARS = " ▁▂▃▄▅▆▇█"
_SHADES, _ASCII_SHADES = " ░▒▓█", " .:-=+*#%@"
_NOT_FINITE = "!"


def values_text(values: ValueStatistics) -> Text:
    """Return minimum, mean, maximum, and the counts of NaN and infinity. A count that is not 0 is red.

    A single finite number is returned alone.
    """
    if values.num_values == 1 and values.min is not None:
        return Text(number_text(values.min))
    numbers = map(number_text, (values.min, values.mean, values.max))
    text = Text("min {}  mean {}  max {}".format(*numbers))
    text.append(f"  {values.num_nan:,} NaN", "bold red" if values.num_nan else "dim")
    if values.num_inf:
        text.append(f"  {values.num_inf:,} Inf", "bold red")
    return text


def sparkline(histogram: Histogram | None) -> str:
    """Return a histogram as `▁▃▇█▅▁`, at most 16 characters. A bin that is not empty has at least the lowest bar."""
    if histogram is None:
        return ""
    counts = np.array(histogram.counts)
    counts = np.add.reduceat(counts, np.arange(0, len(counts), -(-len(counts) // 16)))
    bars = np.ceil(counts * (len(_BARS) - 1) / counts.max()).astype(int)
    return "".join(_BARS[bar] for bar in bars)


def is_unicode(console: Console) -> bool:
    """Return whether the output can show block characters."""
    return console.encoding.lower().replace("-", "").startswith("utf")


def heat_map(plane: Any, console: Console, width: int, height: int) -> list[Text]:
    """Draw a plane of a tensor, float32 `[1, H, W]`, as text.

    There are at most `height` lines of at most `width` characters. With colors, each line shows two rows of the plane.
    Proportions are kept if the longer side of the plane is at most four times the shorter side.
    """
    rows, columns = plane.shape[1:]
    if rows <= 4 * columns and columns <= 4 * rows:  # a character is about twice as high as it is wide
        scale = min(width / columns, 2 * height / rows, 1)
        width, height = max(1, round(columns * scale)), max(1, round(rows * scale / 2))
    has_blocks = is_unicode(console)
    has_colors = has_blocks and not console.no_color and console.color_system in ("256", "truecolor")
    shrunk = shrink(plane, 2 * height if has_colors else height, width)
    levels = levels_of(shrunk, fit_colors([plane]))[0]
    if not has_colors:
        shades = _SHADES if has_blocks else _ASCII_SHADES
        places = np.nan_to_num(levels * (len(shades) - 1)).round().astype(int)
        characters = np.where(np.isnan(levels), _NOT_FINITE, np.array(list(shades))[places])
        return [Text("".join(row)) for row in characters]
    colors = heat(levels)
    lines = []
    for at in range(0, len(colors), 2):
        line = Text()
        for column in range(colors.shape[1]):
            upper = "rgb({},{},{})".format(*colors[at, column].tolist())
            lower = "rgb({},{},{})".format(*colors[at + 1, column].tolist()) if at + 1 < len(colors) else None
            line.append("▀", Style(color=upper, bgcolor=lower))
        lines.append(line)
    return lines
