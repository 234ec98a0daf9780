"""Parse JSON strictly: duplicate keys, `NaN` and `-0`, which `json.loads` accepts, are errors."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any, NoReturn

from wds_tensorcache.errors import FormatError

__all__ = ["parse_json"]


def parse_json(text: bytes) -> Any:
    """Return the value of UTF-8 JSON. Unlike `json.loads`, also raise ValueError for duplicate keys, `NaN` and `-0`."""
    return (_BY_DIGITS if b"-0" in text else _DECODER).decode(text.decode())


def _parse_int(digits: str) -> int:
    if digits.startswith("-0"):
        raise ValueError("it contains -0; expected 0")
    return int(digits)


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"it contains {name}, which is not valid JSON")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) < len(pairs):
        [(name, _), *_] = Counter(name for name, _ in pairs).most_common(1)
        raise FormatError(f"key {name!r} occurs twice in one object")
    return result


_DECODER = json.JSONDecoder(object_pairs_hook=_unique, parse_constant=_refuse_constant)
_BY_DIGITS = json.JSONDecoder(object_pairs_hook=_unique, parse_constant=_refuse_constant, parse_int=_parse_int)
