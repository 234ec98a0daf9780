"""Urls of remote objects: which texts are urls, parts of them, and how messages show them, without credentials.

In urls of web servers (`http`, `https`), names are percent-encoded, and `?` and `#` begin a query and a fragment. In urls of
object stores and hubs (all other schemes), the rest after the bucket is the object's key, as it is.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from functools import lru_cache
from urllib.parse import quote, unquote, urlsplit, urlunsplit

__all__ = [
    "SCHEMES",
    "bucket_and_key",
    "check_not_url",
    "is_url",
    "is_web",
    "join_url",
    "name_of",
    "origin_of",
    "shown",
    "split_netloc",
    "web_url",
]

SCHEMES = frozenset({"s3", "gs", "az", "http", "https", "hf"})
_WEB = frozenset({"http", "https"})
_IN_PATH = "/:@!$&'()*+,;=-._~"  # RFC 3986, 3.3
_IN_QUERY = _IN_PATH + "?"
_ANY_URL = re.compile(r"[a-z][a-z0-9+.-]+://", re.IGNORECASE).match  # longer than the name of a drive
_CHANGED_BY_PATHLIB = re.compile(r"(?:s3|gs|az|https?|hf):/(?!/)", re.IGNORECASE).match


def is_url(path: str) -> bool:
    """Return whether a text names a remote object: it begins with one of `SCHEMES` and `://`."""
    scheme, found, _ = path.partition("://")
    return bool(found) and scheme.lower() in SCHEMES


def check_not_url(path: str, schemes: Collection[str] = SCHEMES) -> None:
    """Raise ValueError if a path looks like a url. The error lists `schemes`, which the caller accepts.

    Hazard: a local folder called `file:` or `s3:` would be created or searched instead.
    """
    if _CHANGED_BY_PATHLIB(path):
        raise ValueError(f"{path!r} is a url that pathlib has changed; pass a str, such as 's3://bucket/cache'")
    if _ANY_URL(path):
        known = ", ".join(f"{scheme}://" for scheme in sorted(schemes))
        others = f", or a url that begins with one of {known}" if known else ""
        raise ValueError(f"{shown(path)}: expected a local path{others}")


def is_web(url: str) -> bool:
    """Return whether a url is that of a web server (`http`, `https`), whose names are percent-encoded."""
    return url.partition("://")[0].lower() in _WEB


def join_url(folder: str, name: str) -> str:
    """Return the url of the object `name`, which may contain slashes, in a folder.

    In a web server's url, `name` is percent-encoded, and the folder's query, if any, is kept.
    """
    if not is_web(folder):
        return folder.rstrip("/") + "/" + name
    parts = urlsplit(folder)
    return urlunsplit(parts._replace(path=parts.path.rstrip("/") + "/" + quote(name, safe=_IN_PATH), fragment=""))


def name_of(url: str) -> str:
    """Return the last part of an object's name, decoded in a web server's url."""
    if not is_web(url):
        return url.rpartition("/")[2]
    return unquote(urlsplit(url).path.rpartition("/")[2])


def shown(url: str) -> str:
    """Return a url for messages, without user name and password. `?…` replaces a query, which may be a signature."""
    scheme, found, rest = url.partition("://")
    if not found:
        return url
    netloc, slash, path = split_netloc(rest)
    netloc = netloc.rpartition("@")[2]
    if not is_web(url):
        return f"{scheme}://{netloc}{slash}{path}"
    path, query, _ = path.partition("#")[0].partition("?")
    return f"{scheme}://{netloc}{slash}{path}" + ("?…" if query else "")


def split_netloc(rest: str) -> tuple[str, str, str]:
    """Return the part before the first of `/?#`, the slash if there is one, and the rest, of a url without its scheme and `://`."""
    ends = [at for at in map(rest.find, "/?#") if at >= 0]
    end = min(ends, default=len(rest))
    has_slash = rest[end : end + 1] == "/"
    return rest[:end], "/" if has_slash else "", rest[end + has_slash :]


def bucket_and_key(url: str) -> tuple[str, str]:
    """Return the bucket, or container, and the object's key of an object store's url."""
    bucket, _, key = url.partition("://")[2].partition("/")
    return bucket, key


@lru_cache(4096)
def origin_of(url: str) -> str:
    """Return scheme and server of a url, or scheme and bucket, for example `https://host:8000`, without credentials."""
    scheme, _, rest = url.partition("://")
    if not is_web(url):
        return f"{scheme.lower()}://{rest.partition('/')[0]}"
    return f"{scheme.lower()}://{split_netloc(rest)[0].rpartition('@')[2].lower()}"


@lru_cache(4096)
def web_url(url: str) -> str:
    """Return a web server's url as it is sent: without credentials and fragment, other characters percent-encoded.

    Raises:
        ValueError: The url has control characters, no server, or an impossible port.
    """
    # Hazard: urlsplit drops line ends and tabs silently, and would request another object.
    if any(ord(character) < 0x20 or ord(character) == 0x7F for character in url):
        raise ValueError(f"a url with control characters: {shown(url)!r}")
    parts = urlsplit(url)
    if not parts.hostname:
        raise ValueError(f"a url without a server: {shown(url)!r}")
    _ = parts.port  # raises ValueError
    return urlunsplit(
        (
            parts.scheme.lower(),
            parts.netloc.rpartition("@")[2],
            _encoded(parts.path, _IN_PATH) or "/",
            _encoded(parts.query, _IN_QUERY),
            "",
        )
    )


def _encoded(text: str, safe: str) -> str:
    """Percent-encode a part of a url that may be encoded already: `%` stays where two hexadecimal digits follow."""
    first, *rest = text.split("%")
    encoded = [quote(first, safe=safe)]
    for part in rest:
        is_code = len(part) >= 2 and all(character in "0123456789abcdefABCDEF" for character in part[:2])
        encoded.append(("%" if is_code else "%25") + quote(part, safe=safe))
    return "".join(encoded)
