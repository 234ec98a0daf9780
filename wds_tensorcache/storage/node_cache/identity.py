"""Names of cached objects: digests of url, tag and length."""

from __future__ import annotations

import re
from hashlib import sha256
from urllib.parse import urlsplit, urlunsplit

from wds_tensorcache.storage.remote.retry import ObjectInfo
from wds_tensorcache.storage.urls import conceal, credentials_of, is_web, reveal

# Parameters of signed urls, which change while the object stays the same. All other parameters may select the object.
_SIGNATURES = re.compile(
    r"(?:x-(?:amz|goog|oss|cos)-.*|awsaccesskeyid|googleaccessid|signature|expires|policy|key-pair-id|token|access_token"
    r"|sig|se|sp|sv|sr|st|spr|sip|ske|skoid|sks|skt|sktid|skv)",
    re.IGNORECASE,
).fullmatch


def digest_of(url: str, info: ObjectInfo) -> bytes:
    """Return a 32-byte digest of one state of an object. It does not reveal the url."""
    plain = unsigned(url)
    # Without a strong ETag, the user name and the whole query count, too: two revisions of an object may have the same date.
    if is_web(url) and not (info.tag or "").startswith('"'):
        user, _ = credentials_of(url) or ("", "")
        plain = f"{user}@{reveal(conceal(url))}"
    return sha256("\0".join((plain, str(info.tag), str(info.nbytes))).encode("utf-8", "surrogateescape")).digest()


def unsigned(url: str) -> str:
    """Return a url without user name, password and signatures in its query."""
    if not is_web(url):  # `?` and `#` are part of the object's name
        return url
    parts = urlsplit(reveal(conceal(url)))
    query = "&".join(item for item in parts.query.split("&") if not _SIGNATURES(item.partition("=")[0]))
    return urlunsplit(parts._replace(query=query))
