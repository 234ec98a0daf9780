"""The grammar of tensor names: a tensor is named by its path in the sample (FORMAT.md 2.3)."""

from __future__ import annotations

import re
from collections.abc import Container
from functools import lru_cache

__all__ = ["RESERVED", "Counter", "component", "join", "short_component", "unique"]

RESERVED = "__metadata__"  # by safetensors
_ESCAPED = re.compile("[%.?:\x00-\x1f\x7f-\x9f\ud800-\udfff]")


def _escape(key: str) -> str:
    text = _ESCAPED.sub(lambda m: "".join(f"%{byte:02X}" for byte in m[0].encode("utf-8", "surrogatepass")), key)
    return text or "%"


short_component = lru_cache(4096)(_escape)  # the keys of dicts are the same in every sample


def component(key: object, position: int) -> str:
    """Return how the item of a dict with this key, `position`-th in order, is called in its tensors' names."""
    if type(key) is str:
        return short_component(key) if len(key) < 64 else _escape(key)
    return str(key) if type(key) is int and abs(key) < 1 << 64 else f"@{position}"


def join(path: str, part: str) -> str:
    """Return the path of `part` inside what lies at `path`."""
    return f"{path}.{part}" if path else part


def unique(path: str, taken: Container[str]) -> str:
    """Return the name of a tensor at `path`: the path itself, or with `~2`, `~3`, … behind it where that is taken."""
    name = base = "%5F_metadata__" if path == RESERVED else path
    number = 2
    while name in taken:
        name = f"{base}~{number}"
        number += 1
    return name


class Counter:
    """Numbers the tensors of something that has no paths inside; always true."""

    def __init__(self) -> None:
        self._count = 0

    def next(self) -> int:
        """Return 0, 1, 2, …"""
        self._count += 1
        return self._count - 1
