"""Urls typed by the caller of a stream, and the paths that they stand for, which are never taken for urls."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Iterable, Mapping
from typing import Any

from braceexpand import braceexpand
from webdataset.pipeline import DataPipeline
from webdataset.shardlists import envsubst

from wds_tensorcache.integrations.webdataset_tar import is_named
from wds_tensorcache.reading.open_cache import existing_folder, expand_braces, find_shards

__all__ = ["find_urls"]

_HAS_AUTHORITY = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://").match
_IS_URL = re.compile(r"(pipe|file):|[A-Za-z][A-Za-z0-9+.-]*://").match
_MAX_SUBSTITUTIONS = 10  # webdataset's own


def find_urls(urls: Any) -> list[tuple[str, bool]]:
    """Return the url of each shard, and whether it is opened as a path, as all are that the caller did not type."""
    if isinstance(urls, os.PathLike):
        return _listed(urls)
    if isinstance(urls, str):
        if os.path.lexists(urls) or existing_folder(urls):
            return _find_text(urls)  # a folder may be called `a::b` or `${x}`
        return [found for part in urls.split("::") for found in _find_text(_substituted(part))]
    is_list = isinstance(urls, Iterable) and not isinstance(urls, (bytes, DataPipeline, Mapping))
    given: list[Any] = list(urls) if is_list else [None]
    if not all(isinstance(url, (str, os.PathLike)) for url in given):
        raise TypeError(f"urls={urls!r:.200}: expected a list of them, a pattern or a folder; the stages follow")
    return [found for url in given for found in ([(url, is_named(url))] if isinstance(url, str) else _listed(url))]


def _find_text(text: str) -> list[tuple[str, bool]]:
    if os.path.lexists(text):
        return _listed(text) if _is_listing(text) else [(text, is_named(text))]
    if _IS_URL(text) and not existing_folder(text):
        return [(url, False) for url in braceexpand(text)]
    if glob.has_magic(text):
        return _listed(text)
    found: list[tuple[str, bool]] = []
    for path in expand_braces(text):
        # `{pipe:…,a}.tar` does not begin with `pipe:`, so what it stands for are names of files
        is_path = path != text and (path.startswith("pipe:") or not _HAS_AUTHORITY(path))
        found += _listed(path) if _is_listing(path) else [(path, is_path)]
    return found


def _is_listing(path: str) -> bool:
    return os.path.isdir(path) or (path.endswith(".json") and os.path.exists(path))


def _listed(source: str | os.PathLike[str]) -> list[tuple[str, bool]]:
    return [(path, True) for path, *_ in find_shards(source)]


def _substituted(text: str) -> str:
    """Return a text with the environment's `WDS_name` for `${name}`, as webdataset does it."""
    for _ in range(_MAX_SUBSTITUTIONS):
        before, text = text, envsubst(text)
        if text == before:
            break
    return text
