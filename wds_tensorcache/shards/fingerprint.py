"""Checks of fingerprints. A fingerprint records how a cache was made: its model, revision, dtype, scaling, crop, …"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from wds_tensorcache.errors import StaleCacheError

SOURCE = "source"  # field of imports: the folder of the files, or a list of folders
_NONE: Any = object()
# Fingerprints are compared as texts, because `==` takes 1 for 1.0 and true.
as_text = json.JSONEncoder(sort_keys=True).encode


def as_fingerprint(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields as JSON reads them back, with tuples as lists.

    Raises:
        TypeError, ValueError: `fields` is not a mapping with str keys, or JSON cannot represent a value.
    """
    if not isinstance(fields, Mapping) or not all(isinstance(name, str) for name in fields):
        raise TypeError(f"the fingerprint is {fields!r:.200}, expected a dict with str keys")
    fingerprint: dict[str, Any] = {}
    for name in sorted(fields):
        try:
            fingerprint[name] = json.loads(json.dumps(fields[name], allow_nan=False, sort_keys=True))
        except (TypeError, ValueError, RecursionError) as exc:
            error = TypeError if isinstance(exc, TypeError) else ValueError
            raise error(f"fingerprint[{name!r}] cannot be represented in JSON: {exc}; pass a str") from exc
    return fingerprint


def check_fingerprint(where: str, stored: Mapping[str, Any] | None, expected: Mapping[str, Any]) -> None:
    """Raise StaleCacheError unless `stored` contains all expected fields and values. It may contain more fields."""
    if stored is None:
        raise StaleCacheError(f"{where}: the cache has no fingerprint; expected {expected!r:.500}")
    for name, value in expected.items():
        other = stored.get(name, _NONE)
        if other is _NONE or as_text(other) != as_text(value):
            has = "has no such field" if other is _NONE else f"was made with {other!r:.200}"
            raise StaleCacheError(f"{where}: expected {name}={value!r:.200}, but the cache {has}")


def check_same(where: str, stored: Mapping[str, Any] | None, expected: Mapping[str, Any] | None) -> None:
    """Raise StaleCacheError unless `stored` equals `expected`, the new samples' fingerprint."""
    if as_text(stored) != as_text(expected):
        check_fingerprint(where, stored, expected or {})
        raise StaleCacheError(f"{where} was made with {stored!r:.500}, the new samples are made with {expected!r:.500}")


def common_fields(fingerprints: Iterable[Mapping[str, Any] | None]) -> dict[str, Any]:
    parts = [{name: as_text(value) for name, value in (fingerprint or {}).items()} for fingerprint in fingerprints]
    first = parts[0] if parts else {}
    return {name: json.loads(text) for name, text in first.items() if all(other.get(name) == text for other in parts)}
