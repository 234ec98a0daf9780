"""Values of a batch by their names, which are their paths: `cond.text` is `batch["cond"]["text"]`."""

from __future__ import annotations

from typing import Any
from urllib.parse import unquote

from wds_tensorcache.errors import list_names

__all__ = ["place_of", "remove"]


def place_of(batch: Any, name: str, *, is_new: bool = False) -> tuple[Any, Any]:
    """Return the dict or list that has the value `name` of a batch, and its key or index there.

    Raises:
        KeyError: The batch has no such value; with `is_new`, no dict in which it could be.
        ValueError: With `is_new`, the dict has such a value.
    """
    *path, last = name.split(".")
    target, wanted = batch, last
    try:
        for wanted in path:
            target = target[_key(target, wanted)]
        wanted = last
        key = _key(target, last)
        if not is_new or not isinstance(target, dict):
            target[key]
    except (KeyError, IndexError, TypeError, ValueError) as exc:
        is_dict = isinstance(target, dict)
        known = f"there are {list_names(target, wanted)}" if is_dict else f"there is a {type(target).__name__}"
        raise KeyError(f"the batch has no {name!r:.100}; {known}") from exc
    if is_new and isinstance(target, dict) and key in target:
        raise ValueError(f"the batch has {name!r:.100} already; choose a new name")
    return target, key


def remove(target: Any, key: Any) -> None:
    """Remove a value from its dict, or replace it by None in its list, whose other values keep their places."""
    if isinstance(target, dict):
        del target[key]
    else:
        target[key] = None


def _key(target: Any, part: str) -> Any:
    if part.isdecimal() and not (isinstance(target, dict) and part in target):
        return int(part)
    return unquote(part)
