"""Numbers, shapes and values as short text, and escapes for the page."""

from __future__ import annotations

import json
import math
import re
from typing import Any

import numpy as np

from wds_tensorcache.codec.dtypes import dtype_name
from wds_tensorcache.reading.description import value_text

# controls but tab and line feed, embeddings and overrides of the direction of text, isolates, and halves of characters
_HIDDEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
# "<" so that no text ends the script element; the separators for scripts that are older than JSON
_ESCAPED = re.compile("[<>&\u2028\u2029\x7f\ud800-\udfff]")
_SHORT = {"float": "f", "bfloat": "bf", "int": "i", "uint": "u", "complex": "c"}


def number_text(value: float | None) -> str:
    """Return a number with four significant digits, or `-` for None. Integers below 10^9 keep all digits."""
    if value is None:
        return "-"
    return f"{value:,}" if isinstance(value, int) and abs(value) < 10**9 else f"{value:.4g}"


def shape_text(shape: Any) -> str:
    """Return a shape, for example `[3..7, 16]`; `[…]` if numbers of dimensions differ."""
    if shape is None:
        return "[…]"
    return f"[{', '.join('..'.join(map(str, size)) if isinstance(size, tuple) else str(size) for size in shape)}]"


def dtype_text(dtype: Any) -> str:
    """Return a short name of a dtype, such as `bf16` or `<U5`. Several dtypes are joined: `f16/f32`."""
    if isinstance(dtype, tuple):
        return "/".join(map(dtype_text, dtype))
    if isinstance(dtype, np.dtype) and dtype.kind in "SUMm":
        return str(dtype.str)
    name = dtype_name(dtype)
    stem = name.rstrip("0123456789") if "_" not in name else "float" if name.startswith("float") else name
    return name.replace(stem, _SHORT[stem], 1) if stem in _SHORT else name


def tensor_text(tensor: Any) -> str:
    """Return dtype and shape of a lazy tensor or schema: `bf16[77, 2048]`."""
    return dtype_text(tensor.dtype) + shape_text(tensor.shape)


def escape_hidden(text: str, limit: int = 200) -> str:
    """Cut a text to `limit` characters, and escape hidden or reordering characters."""
    cut_text = text[:limit] + "…" * (len(text) > limit)
    return _HIDDEN.sub(lambda match: match[0].encode("unicode_escape", "surrogatepass").decode("ascii"), cut_text)


def page_text(value: Any, limit: int) -> str:
    """Return a value as text for the page. Strings have no quotes."""
    return escape_hidden(value if isinstance(value, str) else value_text(value, limit), limit)


def as_json(value: Any) -> str:
    """Return a value as JSON for a script element. No text in it can end the element."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return _ESCAPED.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def num_stored(text: str) -> int:
    """Return the number of bytes that a text takes in the page."""
    return len(as_json(text).encode()) - 2


def cut(text: str, max_nbytes: int) -> str:
    """Shorten a text with `…` to at most `max_nbytes` in the page."""
    if len(text) <= max_nbytes and num_stored(text) <= max_nbytes:
        return text
    room = max(0, max_nbytes - 3)  # "…" takes three bytes
    text = text[:room]
    while (nbytes := num_stored(text)) > room:
        text = text[: len(text) * room // nbytes]
    return text + "…"


def json_number(value: float) -> float | int | str:
    """Return a number for the page.

    A float has six significant digits. Integers from 2^53 on, NaN and Inf become text.
    """
    if isinstance(value, int):
        return int(value) if abs(value) < 1 << 53 else f"{value:.6g}"
    value = float(f"{value:.6g}")
    if not math.isfinite(value):
        return str(value)
    return int(value) if value.is_integer() and abs(value) < 1e6 else value
