"""Find the shards of a url: a folder, a manifest, a shard or a pattern."""

from __future__ import annotations

import fnmatch
from urllib.parse import unquote

from braceexpand import braceexpand

from wds_tensorcache.errors import RemoteError, did_you_mean
from wds_tensorcache.reading.packed import describe_packed, packed_names
from wds_tensorcache.shards.manifest import MANIFEST, Found, ListedCounts
from wds_tensorcache.shards.remote.listed import read_remote_manifest
from wds_tensorcache.storage.remote.clients import client_for
from wds_tensorcache.storage.urls import conceal, is_web, join_url, name_of, shown

__all__ = ["find_remote"]

_WILDCARDS, _WEB_WILDCARDS = frozenset("*?["), frozenset("*[")  # in a web server's url, `?` begins a query


def find_remote(source: str) -> list[Found]:
    """Return the shards of a url from the caller, as in `open`. Braces and wildcards are expanded nowhere else.

    Raises:
        FileNotFoundError: There is no such object, or no shard; or the folder has no manifest, and the server has no listings.
        FormatError: A manifest is damaged, or lists a shard that is not in its folder.
        RemoteError: A request failed.
        ValueError: The url is not valid, or names of folders contain wildcards.

    Cost: one request for each manifest or listing; none for the url of a shard.
    """
    # Hazard: urlsplit drops line ends and tabs silently, and would name another object.
    if not source.isprintable():
        raise ValueError(f"a url with characters that are not printable: {shown(source)!r:.200}")
    if not _split(source)[0].partition("://")[2]:
        raise ValueError(f"{shown(source)!r:.200}: expected a server or a bucket after '://'")
    found: list[Found] = []
    for url in _expand_braces(source):
        found += _find(conceal(url))
    return found


def _expand_braces(url: str) -> list[str]:
    head, path, query = _split(url)
    if "{" not in path:
        return [url]
    try:
        return [head + expanded + query for expanded in braceexpand(path)]
    except ValueError:  # unbalanced braces may be part of an object's name
        return [url]


def _split(url: str) -> tuple[str, str, str]:
    """Return the parts of a url: up to the server or bucket; the path; and a web server's query, with its mark."""
    scheme, _, rest = url.partition("://")
    ends = [at for mark in ("/?#" if is_web(url) else "/") if (at := rest.find(mark)) >= 0]
    end = min(ends, default=len(rest))
    path = rest[end:]
    marks = [at for mark in "?#" if is_web(url) and (at := path.find(mark)) >= 0]
    stop = min(marks, default=len(path))
    return f"{scheme}://{rest[:end]}", path[:stop], path[stop:]


def _has_wildcards(url: str) -> bool:
    return bool((_WEB_WILDCARDS if is_web(url) else _WILDCARDS) & set(_split(url)[1]))


def _find(url: str) -> list[Found]:
    path = _split(url)[1]
    if _has_wildcards(url):
        return [(each, None, None) for each in _matches(url)]
    hint = did_you_mean(path.rstrip("/").rpartition("/")[2], [MANIFEST])
    if path.endswith(".json"):
        try:
            return read_remote_manifest(url)
        except FileNotFoundError as exc:
            if not hint or path.endswith(f"/{MANIFEST}"):
                raise
            raise FileNotFoundError(f"{exc}{hint}") from exc
    if path.endswith(".tar"):
        return [(url, None, None)]
    kinds = "; a url that ends in neither .json nor .tar is that of a folder"
    try:
        return read_remote_manifest(join_url(url, MANIFEST))
    except FileNotFoundError as exc:
        try:
            names = _listed(url)
        except RemoteError as refusal:
            why = "web servers have no listings" if is_web(url) else str(refusal)
            what = f"{url} has no {MANIFEST}, and its server cannot list the folder ({why})"
            remedy = f"check the url; upload the {MANIFEST} of the cache, or pass the urls of the shards"
            raise FileNotFoundError(f"{what}{kinds}; {remedy}, such as '…/train-{{000000..000099}}.tar'{hint}") from exc
        shards = [each for each in names if name_of(each).endswith(".tar")]
        packed = packed_names(list(map(name_of, names)))
        left_out = describe_packed(packed) if packed else None
        if not shards:
            end = kinds + hint if left_out is None else f"; {left_out}"
            raise FileNotFoundError(f"{url} has neither {MANIFEST} nor any *.tar{end}") from exc
        counts = None if left_out is None else ListedCounts(left_out=f"{url}: {left_out}")
        return [(each, counts, None) for each in shards]


def _matches(url: str) -> list[str]:
    """Return the urls of the objects that a pattern with wildcards matches."""
    folder, _, pattern = url.rpartition("/")
    if _has_wildcards(folder):
        raise ValueError(f"{url}: expected wildcards only in the last part of a url, not in folders")
    pattern = unquote(pattern) if is_web(url) else pattern
    found = [each for each in _listed(folder) if fnmatch.fnmatchcase(name_of(each), pattern)]
    if not found:
        raise FileNotFoundError(f"{url} matches no object")
    return found


def _listed(folder: str) -> list[str]:
    """Return the urls of the objects in a folder, in the order of their names, without hidden ones."""
    urls = (conceal(url) for url, _ in client_for(folder).list_objects(folder))
    return sorted((url for url in urls if not name_of(url).startswith(".")), key=name_of)
