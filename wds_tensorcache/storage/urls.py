"""Urls of remote objects: parts, secrets, and the form in messages.

Secrets are user name, password and query, which may be a signature. Errors, reprs, pickles and files show paths of shards. So
`conceal` turns a url from the caller into a `SecretUrl` with a public text, and clients `reveal` the query in requests.

In urls of web servers (`http`, `https`), names are percent-encoded, and `?` and `#` begin a query and a fragment. In urls of
object stores and hubs (all other schemes), everything after the bucket is the object's key, without any encoding.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from functools import lru_cache
from multiprocessing.reduction import ForkingPickler
from typing import Any
from urllib.parse import quote, unquote, urlsplit, urlunsplit

from wds_tensorcache.errors import RemoteError

SCHEMES = frozenset({"s3", "gs", "az", "http", "https", "hf"})
WRITABLE = frozenset({"s3", "gs", "az"})
_WEB = frozenset({"http", "https"})
_SETTINGS = {"s3": "AWS_…", "gs": "GOOGLE_…", "az": "AZURE_STORAGE_…"}  # variables that have credentials
_IN_PATH = "/:@!$&'()*+,;=-._~"  # RFC 3986, 3.3
_PARTS = re.compile(r"(?s)(.*?)://([^/?#]*)([^?#]*)(.*)").fullmatch
_ANY_URL = re.compile(r"[a-z][a-z0-9+.-]+://", re.IGNORECASE).match  # longer than the name of a drive
_CHANGED_BY_PATHLIB = re.compile(r"(?:s3|gs|az|https?|hf):/(?!/)", re.IGNORECASE).match


class SecretUrl(str):
    """The public text of a web server's url, with its secrets. Texts made from it contain no secrets.

    Urls are equal if their texts and secrets are, so two revisions of an object, chosen by queries, are two keys of a dict.

    Threads/fork/pickle: pickles that `multiprocessing` sends to other processes of this program contain the secrets. All
        other pickles may become files, so they leave the secrets out. A url from such a pickle raises RemoteError in
        requests that need the query.

    Attributes:
        query: The query; None if a pickle left it out.
        credentials: User name and password, if there are any.
    """

    __slots__ = ("credentials", "query")

    query: str | None
    credentials: tuple[str, str] | None

    def __new__(cls, public: str, query: str | None, credentials: tuple[str, str] | None) -> SecretUrl:
        url = super().__new__(cls, public)
        url.query, url.credentials = query, credentials
        return url

    def _parts(self) -> tuple[str, str | None, tuple[str, str] | None]:
        return str(self), self.query, self.credentials

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SecretUrl) and self._parts() == other._parts()

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash(self._parts())

    def __copy__(self) -> SecretUrl:
        return self

    def __deepcopy__(self, memo: Any) -> SecretUrl:
        return self

    def __reduce__(self) -> Any:
        return (str, (str(self),)) if self.query == "" else (SecretUrl, (str(self), None, None))


ForkingPickler.register(SecretUrl, lambda url: (SecretUrl, url._parts()))


def _split(url: str) -> tuple[str, str, str, str, str]:
    """Return scheme, `USER@`, host, path, and `?QUERY#FRAGMENT` of a web server's url."""
    # Unlike `urlsplit`, this drops no characters, and leaves `?` and `#` in the keys of object stores.
    match = _PARTS(url)
    if match is None:
        return "", "", "", url, ""
    scheme, server, path, rest = match.groups()
    # in hf://NAME@REVISION/…, a revision follows the `@`
    user, at, host = ("", "", server) if scheme.lower() == "hf" else server.rpartition("@")
    return scheme, user + at, host, *((path, rest) if is_web(url) else (path + rest, ""))


def conceal(url: str) -> str:
    """Remove user name, password, query and fragment from a web server's url. Return a `SecretUrl` if it has secrets.

    Raises:
        ValueError: The url of an object store has a user name or a password.
    """
    if isinstance(url, SecretUrl) or not any(mark in url for mark in "@?#"):
        return url
    scheme, user_info, host, path, rest = _split(url)
    public = f"{scheme}://{host}{path}" if scheme else url
    query = rest.partition("#")[0][1:]
    if user_info and scheme.lower() in _SETTINGS:
        raise ValueError(
            f"{public}: credentials in the url are not read; set the variables {_SETTINGS[scheme.lower()]}"
        )
    if not is_web(url) or not (user_info or query):
        return public
    user, _, password = user_info[:-1].partition(":")
    return SecretUrl(public, query, (unquote(user), unquote(password)) if user_info else None)


def keep_secrets(url: str, public: str) -> str:
    """Return the url `public` with the secrets of `url`. Both must be on the same server."""
    return SecretUrl(public, url.query, url.credentials) if isinstance(url, SecretUrl) else public


def reveal(url: str) -> str:
    """Return a url with its query. Raise RemoteError if a pickle left out the query."""
    if not isinstance(url, SecretUrl):
        return url
    if url.query is None:  # the server could send another revision of the object
        problem = (
            "a pickle left out the query of this url, which may be a signature; open the whole url in this process"
        )
        raise RemoteError(f"{url}: {problem}")
    return f"{url}?{url.query}" if url.query else str(url)


def credentials_of(url: str) -> tuple[str, str] | None:
    """Return user name and password of a web server's url, or None. The url may be concealed."""
    url = conceal(url)
    return url.credentials if isinstance(url, SecretUrl) else None


def is_url(path: str) -> bool:
    """Return whether a text begins with one of `SCHEMES` and `://`."""
    scheme, separator, _ = path.partition("://")
    return bool(separator) and scheme.lower() in SCHEMES


def check_not_url(path: str, schemes: Collection[str] = SCHEMES) -> None:
    """Raise ValueError if a path looks like a url. The error lists the accepted `schemes`."""
    # otherwise a local folder called `file:` or `s3:` would be created or searched
    if _CHANGED_BY_PATHLIB(path):
        raise ValueError(f"{path!r} is a url that pathlib has changed; pass a str, such as 's3://bucket/cache'")
    if _ANY_URL(path):
        prefixes = ", ".join(f"{scheme}://" for scheme in sorted(schemes))
        hint = f", or a url that begins with one of {prefixes}" if prefixes else ""
        raise ValueError(f"{shown(path)}: expected a local path{hint}")


def check_writable(url: str) -> None:
    """Raise ValueError unless a url names an object store's bucket, without credentials."""
    scheme, _, rest = conceal(url).partition("://")
    if scheme.lower() not in WRITABLE:
        raise ValueError(f"{shown(url)}: shards are written to s3://, gs:// or az:// urls, or to a local path")
    if not rest.partition("/")[0]:
        raise ValueError(f"{shown(url)}: expected the name of a bucket after {scheme}://")


def is_web(url: str) -> bool:
    """Return whether a url names a web server (`http`, `https`)."""
    return url.partition("://")[0].lower() in _WEB


def join_url(folder: str, name: str) -> str:
    """Return the url of the object `name` in a folder. It keeps the folder's secrets.

    `name` may contain slashes. In a web server's url, it is percent-encoded.
    """
    if not is_web(folder):
        return folder.rstrip("/") + "/" + name
    parts = urlsplit(folder)
    path = parts.path.rstrip("/") + "/" + quote(name, safe=_IN_PATH)
    return keep_secrets(folder, urlunsplit(parts._replace(path=path, fragment="")))


def name_of(url: str) -> str:
    """Return the last part of an object's name. Percent-decode it for a web server."""
    if not is_web(url):
        return url.rpartition("/")[2]
    return unquote(_split(url)[3].rpartition("/")[2])


def split_url(url: str) -> tuple[str, str, str]:
    """Split a url into server (or bucket), path, and query with fragment.

    The first text includes scheme and user. The third is empty unless the url names a web server.
    """
    scheme, user_info, host, path, rest = _split(url)
    return f"{scheme}://{user_info}{host}", path, rest


def shown(url: str) -> str:
    """Return a url for messages, without user name and password. `?…` replaces a query, which may be a signature."""
    scheme, _, host, path, rest = _split(url)
    query = rest.partition("#")[0][1:]
    return f"{scheme}://{host}{path}" + ("?…" if query else "") if scheme else url


def bucket_and_key(url: str) -> tuple[str, str]:
    """Return bucket (or container) and key of an object store's url."""
    bucket, _, key = url.partition("://")[2].partition("/")
    return bucket, key


@lru_cache(4096)
def origin_of(url: str) -> str:
    """Return scheme and server or bucket, for example `https://host:8000`. A web server's credentials are left out."""
    scheme, user_info, host, *_ = _split(url)
    return f"{scheme.lower()}://{host.lower() if is_web(url) else user_info + host}"


@lru_cache(4096)
def web_url(url: str) -> str:
    """Return a web server's url for a request, without credentials and fragment. urllib3 percent-encodes it.

    Raises:
        ValueError: The url has control characters, no server, or an impossible port.
    """
    # urlsplit drops line ends and tabs silently, and would request another object.
    if any(ord(character) < 0x20 or ord(character) == 0x7F for character in url):
        raise ValueError(f"a url with control characters: {shown(url)!r}")
    parts = urlsplit(url)
    if not parts.hostname:
        raise ValueError(f"a url without a server: {shown(url)!r}")
    _ = parts.port  # raises ValueError
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2], path=parts.path or "/", fragment=""))
