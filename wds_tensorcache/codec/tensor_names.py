"""Build the names of tensors, which are their paths in the sample (FORMAT.md 2.3), and describe paths in errors."""

from __future__ import annotations

import re
from functools import lru_cache

RESERVED = "__metadata__"  # safetensors reserves this name
_ESCAPED = re.compile("[%.?:\x00-\x1f\x7f-\x9f\ud800-\udfff]")


def _escape(key: str) -> str:
    text = _ESCAPED.sub(lambda m: "".join(f"%{byte:02X}" for byte in m[0].encode("utf-8", "surrogatepass")), key)
    return text or "%"


short_component = lru_cache(4096)(_escape)  # samples of one cache have the same keys


def component(key: object, position: int) -> str:
    """Return the part of a path that stands for a key of a dict; `position` is the position of the key in the dict."""
    if type(key) is str:
        return short_component(key) if len(key) < 64 else _escape(key)
    return str(key) if type(key) is int and abs(key) < 1 << 64 else f"@{position}"


def join_path(path: str, part: str) -> str:
    """Return the path of `part` in the container at `path`."""
    return f"{path}.{part}" if path else part


def place(path: str) -> str:
    """Return the first words of an error message about the value at `path`."""
    return f"value at {path!r}" if path else "the sample"
