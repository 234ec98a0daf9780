"""Urls of shards for webdataset streams: which shards a text names, and how each is opened."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Iterable, Mapping
from typing import Any, BinaryIO, TypeAlias
from urllib.parse import urlsplit

from braceexpand import braceexpand
from webdataset.gopen import gopen, gopen_schemes, rewrite_url
from webdataset.pipeline import DataPipeline
from webdataset.shardlists import envsubst

from wds_tensorcache.reading.find_shards import existing_folder, expand_braces, find_shards
from wds_tensorcache.shards.manifest import FoundShard
from wds_tensorcache.storage.files import ShardFile
from wds_tensorcache.storage.remote.stream import RemoteStream
from wds_tensorcache.storage.urls import conceal, is_url, is_web, shown

Url: TypeAlias = "tuple[str, FoundShard | None]"
_IS_URL = re.compile(r"(pipe|file):|[A-Za-z][A-Za-z0-9+.-]*://").match
_MAX_SUBSTITUTIONS = 10  # webdataset's own limit
# what webdataset itself does for our schemes; a function that the user has registered instead is called
_REPLACED = frozenset({"gopen_curl", "gopen_gsutil", "gopen_hf"})


def is_remote(url: Any) -> bool:
    """Return whether this package's clients read a url: s3, gs, az, http, https or hf.

    They do not if a file has this name, if webdataset's variable GOPEN_REWRITE changes the url, or if the user has registered
    a function for the scheme in webdataset's `gopen_schemes`.
    """
    if not isinstance(url, str) or isinstance(url, os.PathLike) or not is_url(url) or os.path.lexists(url):
        return False
    opener = gopen_schemes.get(url.partition("://")[0].lower())
    return (opener is None or getattr(opener, "__name__", "") in _REPLACED) and rewrite_url(str(url)) == str(url)


def open_url(url: Any) -> Any:
    """Open a path or a url as a stream of bytes.

    Hazard: for schemes that this package's clients do not read, this is webdataset's `gopen`, which runs a name that starts
    with `pipe:` as a command.
    """
    if is_remote(url):
        return RemoteStream(url)
    is_named = isinstance(url, str) and ":" in url and os.path.lexists(url)
    return _open_path(os.fspath(url)) if is_named or isinstance(url, os.PathLike) else gopen(url)


def shown_url(url: Any) -> str:
    """Return a path or url for messages, without credentials."""
    return shown(url) if is_remote(url) else str(url)


def _open_path(path: str) -> BinaryIO:
    held = ShardFile(path).descriptor()  # refuses folders, pipes and devices; closed with the last reference
    return open(os.dup(held.fd), "rb")


class _Path(str):
    """A shard's path, which is never opened as a url."""

    __slots__ = ()

    def __fspath__(self) -> str:
        return str(self)


def find_urls(urls: Any) -> list[Url]:
    """Return the urls of all shards, each with its entry in a manifest, if there is one.

    Names that were found, for example in a folder, are `PathLike`: never run as commands. Remote urls are concealed.
    """
    return [(conceal(url) if is_remote(url) else url, listed) for url, listed in _find_all(urls)]


def _find_all(urls: Any) -> list[Url]:
    if isinstance(urls, os.PathLike):
        return _listed(urls)
    if isinstance(urls, str):
        if os.path.lexists(urls) or existing_folder(urls):
            return _find_text(urls)  # a folder's name may contain `::` or `${x}`
        return [found for part in urls.split("::") for found in _find_text(_substituted(part))]
    is_list = isinstance(urls, Iterable) and not isinstance(urls, (bytes, DataPipeline, Mapping))
    given: list[Any] = list(urls) if is_list else [None]
    if not all(isinstance(url, (str, os.PathLike)) for url in given):
        raise TypeError(f"urls={urls!r:.200}: expected a list of urls, a pattern or a folder; pass stages after it")
    return [found for url in given for found in (_listed(url) if isinstance(url, os.PathLike) else [(url, None)])]


def _find_text(text: str) -> list[Url]:
    is_there = os.path.lexists(text)
    if not is_there and is_remote(text) and _is_several(text):
        return [(shard.path, shard if shard.entry else None) for shard in find_shards(text).shards]
    if not is_there and _IS_URL(text) and not existing_folder(text):
        return [(url, None) for url in braceexpand(text)]
    if not is_there and glob.has_magic(text):
        return _listed(text)
    found: list[Url] = []
    for path in [text] if is_there else expand_braces(text):
        if os.path.isdir(path) or (path.endswith(".json") and os.path.exists(path)):
            found += _listed(path)
        else:
            # `{pipe:…,a}.tar` does not start with `pipe:`, so its braces expand to names of files
            found.append((path if path == text else _Path(path), None))
    return found


def _is_several(url: str) -> bool:
    """Return whether a remote url means shards that a server must be asked for: those of a folder, manifest or wildcard."""
    path = urlsplit(url).path if is_web(url) else url
    name = path.rpartition("/")[2]
    if not is_web(url) and ("." not in name or set(name) & set("*?[")):
        return True
    return not name or name.endswith(".json") or bool(set(name) & set("*["))


def _listed(source: str | os.PathLike[str]) -> list[Url]:
    return [(_Path(shard.path), shard if shard.entry else None) for shard in find_shards(source).shards]


def _substituted(text: str) -> str:
    """Replace `${name}` by the environment variable `WDS_name`, repeatedly, as webdataset does."""
    for _ in range(_MAX_SUBSTITUTIONS):
        text = envsubst(text)
    return text
