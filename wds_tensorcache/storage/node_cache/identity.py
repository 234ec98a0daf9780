"""Names of cached objects: a digest of url, tag and length, so that two states of an object never share a file."""

from __future__ import annotations

import re
from hashlib import sha256
from urllib.parse import urlsplit, urlunsplit

from wds_tensorcache.storage.remote.client import ObjectInfo
from wds_tensorcache.storage.remote.secret_parts import reveal
from wds_tensorcache.storage.remote.urls import is_web

__all__ = ["digest_of"]

# Parameters of signed urls, which change while the object stays the same. All other parameters may select the object.
_SIGNATURES = re.compile(
    r"(?:x-(?:amz|goog|oss|cos)-.*|awsaccesskeyid|googleaccessid|signature|expires|policy|key-pair-id|token|access_token"
    r"|sig|se|sp|sv|sr|st|spr|sip|ske|skoid|sks|skt|sktid|skv)",
    re.IGNORECASE,
).fullmatch


def digest_of(url: str, info: ObjectInfo) -> bytes:
    """Return 32 bytes that stand for one state of an object. The url cannot be recovered from them."""
    plain = url
    if is_web(url):  # in all other urls, `?` and `#` are part of the object's name
        parts = urlsplit(reveal(url))
        query = "&".join(item for item in parts.query.split("&") if not _SIGNATURES(item.partition("=")[0]))
        plain = urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2], query=query, fragment=""))
    return sha256("\0".join((plain, str(info.tag), str(info.nbytes))).encode("utf-8", "surrogateescape")).digest()
