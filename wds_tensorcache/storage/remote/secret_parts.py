"""Secret parts of urls: user names, passwords and queries, which may be signatures. Only requests contain them.

Paths of shards are in errors, reprs, pickles and kept indexes. So a url that a caller passes is split at once: everything
above the clients has the public part, and clients add the secret part again.
"""

from __future__ import annotations

import multiprocessing.context
from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote, urlsplit, urlunsplit

from wds_tensorcache.storage.remote.urls import is_web, origin_of, split_netloc

__all__ = ["adopt", "conceal", "credentials_of", "for_children", "reveal", "without_credentials"]

_QUERIES: dict[str, str] = {}  # by the public url of a folder or an object, without a final slash
_CREDENTIALS: dict[str, tuple[str, str]] = {}  # user name and password by origin


def without_credentials(url: str) -> str:
    """Return a url without its user name and password, which this process keeps for all requests to the same origin.

    So a url in an error, a repr or a pickle has no credentials. Another process needs them again: pass the whole url there,
    or use a netrc file.
    """
    scheme, found, rest = url.partition("://")
    netloc, slash, path = split_netloc(rest)
    user_info, at, host = netloc.rpartition("@")
    if not found or not at:
        return url
    user, _, password = user_info.partition(":")
    _CREDENTIALS[origin_of(url)] = unquote(user), unquote(password)
    return f"{scheme}://{host}{slash}{path}"


def credentials_of(url: str) -> tuple[str, str] | None:
    """Return the user name and password that `without_credentials` removed from a url of the same origin."""
    return _CREDENTIALS.get(origin_of(url))


def conceal(url: str) -> str:
    """Return a url without user name, password, query and fragment, which this process keeps for its requests.

    The query of a folder is also sent for the objects in it. A new query of the same url replaces the old one, which may be an
    expired signature.
    """
    url = without_credentials(url)
    if not is_web(url):
        return url
    parts = urlsplit(url)
    public = urlunsplit(parts._replace(query="", fragment=""))
    if parts.query:
        _QUERIES[public.rstrip("/")] = parts.query
    return public


def reveal(url: str) -> str:
    """Return a url with the query that this process keeps for it, or for the nearest folder that contains it."""
    if not _QUERIES or not is_web(url):
        return url
    parts = urlsplit(url)
    if parts.query:
        return url
    public = urlunsplit(parts._replace(fragment="")).rstrip("/")
    while not public.endswith(":/"):
        query = _QUERIES.get(public)
        if query is not None:
            return urlunsplit(parts._replace(query=query))
        public = public.rpartition("/")[0]
    return url


def for_children() -> Mapping[str, Any]:
    """Return the secret parts while a child process of this one is started, for its arguments; at other times, nothing.

    So no pickle in a file or for another machine contains them. `multiprocessing` guards its own key in this way.
    """
    if multiprocessing.context.get_spawning_popen() is None or not (_QUERIES or _CREDENTIALS):
        return {}
    return {"queries": dict(_QUERIES), "credentials": dict(_CREDENTIALS)}


def adopt(secrets: Mapping[str, Any]) -> None:
    """Keep the secret parts that the parent process returned from `for_children`."""
    for kept, given in ((_QUERIES, "queries"), (_CREDENTIALS, "credentials")):
        for key, value in secrets.get(given, {}).items():
            kept.setdefault(key, value)
