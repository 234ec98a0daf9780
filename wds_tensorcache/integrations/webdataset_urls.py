"""Shards of webdataset streams, found and opened by path or url."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias
from urllib.parse import urlsplit

from braceexpand import braceexpand
from webdataset.gopen import gopen, gopen_schemes, rewrite_url
from webdataset.pipeline import DataPipeline

from wds_tensorcache.reading.find_shards import existing_folder, find_shards
from wds_tensorcache.shards.manifest import FoundShard
from wds_tensorcache.storage.files import ShardFile
from wds_tensorcache.storage.remote.stream import RemoteStream
from wds_tensorcache.storage.urls import conceal, is_url, is_web, shown

Url: TypeAlias = "tuple[str, FoundShard | None]"
_IS_URL = re.compile(r"(pipe|file):|[A-Za-z][A-Za-z0-9+.-]*://").match
# webdataset's own functions for our schemes, which we replace; a function that the user has registered is called
_REPLACED = frozenset({"gopen_curl", "gopen_gsutil", "gopen_hf"})


def is_remote(url: Any) -> bool:
    """Return whether this package's clients read a url. They read s3, gs, az, http, https and hf.

    The result is False if a file has this name, or if webdataset's variable GOPEN_REWRITE changes the url. It is also False
    if the user has registered a function for the scheme in webdataset's `gopen_schemes`.
    """
    if not isinstance(url, str) or isinstance(url, os.PathLike) or not is_url(url) or os.path.lexists(url):
        return False
    opener = gopen_schemes.get(url.partition("://")[0].lower())
    return (opener is None or getattr(opener, "__name__", "") in _REPLACED) and rewrite_url(str(url)) == str(url)


def open_url(url: Any) -> Any:
    """Open a path or a url as a stream of bytes.

    Hazard: urls that this package's clients do not read are passed to webdataset's `gopen`, which runs a url that starts with
    `pipe:` as a command.
    """
    if is_remote(url):
        return RemoteStream(url)
    if not isinstance(url, os.PathLike) and not (isinstance(url, str) and ":" in url and os.path.lexists(url)):
        return gopen(url)
    held = ShardFile(os.fspath(url)).descriptor()  # refuses folders, pipes and devices; closed with the last reference
    return open(os.dup(held.fd), "rb")


def shown_url(url: Any) -> str:
    """Return a path or url for messages, without credentials of remote urls."""
    return shown(url) if is_remote(url) else str(url)


class _Path(str):
    """A shard's path, which is never opened as a url."""

    __slots__ = ()

    def __fspath__(self) -> str:
        return str(self)


def find_urls(urls: Any) -> list[Url]:
    """Return the url of each shard, and the shard in a manifest. The latter is None if no manifest lists the shard.

    Paths from folders, manifests and patterns are `PathLike`, so they are never run as commands. Secrets in remote urls are
    concealed. Raise TypeError for anything but paths, urls and lists of them.
    """
    if isinstance(urls, str) and not isinstance(urls, os.PathLike):
        return _find_text(urls)
    is_list = isinstance(urls, Iterable) and not isinstance(urls, (bytes, DataPipeline, Mapping))
    listed: list[Any] = [urls] if isinstance(urls, os.PathLike) else list(urls) if is_list else [None]
    if not all(isinstance(url, (str, os.PathLike)) for url in listed):
        raise TypeError(f"urls={urls!r:.200}: expected a list of urls, a pattern or a folder; pass stages after it")
    return [shard for url in listed for shard in (_find_paths(url) if isinstance(url, os.PathLike) else [_as_is(url)])]


def _find_text(text: str) -> list[Url]:
    if os.path.isfile(text) and not text.endswith(".json"):
        return [(text, None)]
    is_local = os.path.lexists(text) or bool(existing_folder(text)) or not _IS_URL(text)
    if is_local or (is_remote(text) and _is_several(text)):
        # also `{pipe:…,a}.tar`, which does not start with `pipe:`, so its braces expand to names of files
        return _find_paths(text)
    return [_as_is(url) for url in braceexpand(text)]


def _is_several(url: str) -> bool:
    """Return whether a remote url names a folder, manifest or pattern."""
    path = urlsplit(url).path if is_web(url) else url
    name = path.rpartition("/")[2]
    if not is_web(url) and ("." not in name or set(name) & set("*?[")):
        return True
    return not name or name.endswith(".json") or bool(set(name) & set("*["))


def _find_paths(source: str | os.PathLike[str]) -> list[Url]:
    shards = find_shards(source).shards
    return [
        (shard.path if is_url(shard.path) else _Path(shard.path), shard if shard.entry else None) for shard in shards
    ]


def _as_is(url: str) -> Url:
    return (conceal(url) if is_remote(url) else url), None
