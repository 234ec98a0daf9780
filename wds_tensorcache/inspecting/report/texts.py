"""Values of a cache as text of bounded length. Characters that hide or reorder text become escapes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from itertools import islice
from typing import Any

from wds_tensorcache.codec.lazy import Lazy
from wds_tensorcache.codec.tree import CONTAINERS

# controls but tab and line feed, embeddings and overrides of the direction of text, isolates, and halves of characters
_HIDDEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
_MAX_DEPTH = 4
_MAX_BITS = 4096  # a larger int takes long to print, or is refused
_BRACKETS: dict[Any, tuple[str, str]] = {list: ("[", "]"), tuple: ("(", ")"), dict: ("{", "}"), set: ("{", "}")}


def visible(text: str, limit: int = 200) -> str:
    """Return at most `limit` characters of a text; control characters are escapes such as `\\x1b`."""
    cut = text[:limit] + "…" * (len(text) > limit)
    return _HIDDEN.sub(lambda match: match[0].encode("unicode_escape", "surrogatepass").decode("ascii"), cut)


def num_stored(text: str) -> int:
    """Return how many bytes a visible text takes in the page, at least."""
    return len(text.encode()) + 5 * sum(map(text.count, "<>&")) + sum(map(text.count, '\n\t\\"'))


def cut(text: str, max_nbytes: int) -> str:
    """Return a visible text, or a beginning of it and `…`, that takes at most `max_nbytes` in the page."""
    if len(text) <= max_nbytes and num_stored(text) <= max_nbytes:
        return text
    text = text[: max(0, max_nbytes - 3)]
    while text and (nbytes := num_stored(text)) > max_nbytes - 3:
        text = text[: len(text) * max(0, max_nbytes - 3) // nbytes]
    return text + "…"


def words(value: Any, limit: int = 200) -> str:
    """Return a value as text of at most about `limit` characters: a string as it is, any other value as Python writes it.

    Hazard: a hostile container may contain itself, or one list many times over, so that its repr is far larger than it.
    """
    if isinstance(value, str):
        return visible(value, limit)
    return visible(_written(value, limit, _MAX_DEPTH), limit)


def _written(value: Any, limit: int, depth: int) -> str:
    if isinstance(value, (str, bytes, bytearray)):
        return repr(value[:limit]) + "…" * (len(value) > limit)
    if isinstance(value, int) and value.bit_length() > _MAX_BITS:
        return f"an int of {value.bit_length():,} bits"
    if isinstance(value, Lazy):
        return f"tensor {value.name!r:.80}"
    is_dict = isinstance(value, Mapping)
    if not is_dict and not isinstance(value, CONTAINERS):
        return f"{value!r:.{limit}}"
    begin, end = _BRACKETS.get(type(value), (f"{type(value).__name__}([", "])"))
    if not depth:
        return f"{begin}…{end}"
    parts: list[str] = []
    size = 0
    for item in value.items() if is_dict else value:
        if size > limit or len(parts) > 100:
            parts.append("…")
            break
        pair = item if is_dict else (item,)
        parts.append(": ".join(_written(part, limit - size, depth - 1) for part in islice(pair, 2)))
        size += len(parts[-1]) + 2
    return f"{begin}{', '.join(parts)}{',' * (type(value) is tuple and len(value) == 1)}{end}"


def number(value: float) -> float | int | str:
    """Return a number for JSON with six digits; NaN and infinities as text, because JSON has none."""
    if isinstance(value, int):
        value = int(value)  # of a bool
        return value if abs(value) < 1 << 53 else f"{value:.6g}" if value.bit_length() < 1000 else "huge"
    value = float(f"{value:.6g}")
    if value != value or value in (float("inf"), float("-inf")):
        return str(value)
    return int(value) if value.is_integer() and abs(value) < 1e6 else value
