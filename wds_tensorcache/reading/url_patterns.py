"""Expand patterns of urls: braces, and wildcards in the names of objects."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator
from urllib.parse import unquote

from braceexpand import braceexpand

from wds_tensorcache.storage.folder import folder_of
from wds_tensorcache.storage.urls import conceal, is_web, shown, split_url

_WILDCARDS, _WEB_WILDCARDS = frozenset("*?["), frozenset("*[")  # in a web server's url, `?` begins a query


def expand_url(source: str) -> Iterator[str]:
    """Yield the urls of a url or pattern from the caller, concealed.

    Cost: one request for each pattern with wildcards.

    Raises:
        FileNotFoundError: No object matches a pattern.
        RemoteError: A request failed.
        ValueError: The url is not valid, or names of folders contain wildcards.
    """
    # urlsplit drops line ends and tabs silently, and would name another object.
    if not source.isprintable():
        raise ValueError(f"a url with characters that are not printable: {shown(source)!r:.200}")
    if not split_url(source)[0].partition("://")[2]:
        raise ValueError(f"{shown(source)!r:.200}: expected a server or a bucket after '://'")
    for url in map(conceal, _expand_braces(source)):
        if _has_wildcards(url):
            yield from _match(url)
        else:
            yield url


def _expand_braces(url: str) -> list[str]:
    head, path, query = split_url(url)
    if "{" not in path:
        return [url]
    try:
        return [head + expanded + query for expanded in braceexpand(path)]
    except ValueError:  # unbalanced braces may be part of an object's name
        return [url]


def _has_wildcards(url: str) -> bool:
    return bool((_WEB_WILDCARDS if is_web(url) else _WILDCARDS) & set(split_url(url)[1]))


def _match(url: str) -> list[str]:
    """Return the urls of the objects that a pattern with wildcards matches."""
    path, _, pattern = url.rpartition("/")
    if _has_wildcards(path):
        raise ValueError(f"{url}: expected wildcards only in the last part of a url, not in folders")
    pattern, folder = unquote(pattern) if is_web(url) else pattern, folder_of(path)
    names = [name for name in folder.names() if not name.startswith(".") and fnmatch.fnmatchcase(name, pattern)]
    if not names:
        raise FileNotFoundError(f"{url} matches no object")
    return list(map(folder.locate, names))
