"""Heads of responses: states, ranges and lengths that they report, and reasons to refuse them."""

from __future__ import annotations

import re
from collections.abc import Mapping

from wds_tensorcache.storage.remote.client import ObjectInfo
from wds_tensorcache.storage.remote.http.transport import Response
from wds_tensorcache.storage.remote.retry import Target

_CONTENT_RANGE = re.compile(r"bytes\s+(?:(\d{1,18})-(\d{1,18})|\*)/(\d{1,18}|\*)", re.IGNORECASE | re.ASCII)
_NUMBER = re.compile(r"\d{1,18}", re.ASCII)


def is_strong(tag: str | None) -> bool:
    """Return whether a tag is a strong ETag: objects with equal strong ETags have equal bytes."""
    return tag is not None and tag.startswith('"')


def conditions(expected: ObjectInfo) -> Mapping[str, str]:
    """Return the headers that let a server refuse another version of an object. `If-Match` needs a strong ETag (RFC 9110)."""
    tag = expected.tag
    if tag is None or tag.startswith("W/"):
        return {}
    return {"If-Match": tag} if is_strong(tag) else {"If-Unmodified-Since": tag}


def tag_of(response: Response) -> str | None:
    """Return the ETag, or else the date of modification; None if there is neither, or it cannot be sent in a header."""
    tag = (response.headers.get("ETag") or "").strip()
    if tag and not tag.startswith(('"', "W/")):
        tag = f'"{tag}"'  # some servers forget the quotes
    tag = tag or (response.headers.get("Last-Modified") or "").strip()
    return tag if tag and tag.isprintable() and tag.isascii() else None


def _length_of(response: Response) -> int | None:
    """Return the length of the body in bytes by Content-Length; None if it is missing or is not a number."""
    text = (response.headers.get("Content-Length") or "").strip()
    return int(text) if _NUMBER.fullmatch(text) else None


def state_of(response: Response) -> ObjectInfo | None:
    """Return the state of an object by the response with its whole body; None if it does not have the length."""
    length = _length_of(response)
    return None if length is None else ObjectInfo(length, tag_of(response))


def show_range(response: Response) -> str:
    """Return the value of `Content-Range` for messages, cut to 100 characters."""
    return f"{response.headers.get('Content-Range')!r:.100}"


def content_range(response: Response, target: Target) -> tuple[int, int, int | None]:
    """Return the range `[begin, end)` of a partial response, and the length of the object in bytes, or None if the header
    lacks it.

    Raises:
        RemoteError: The header Content-Range is missing or impossible.
    """
    match = _CONTENT_RANGE.fullmatch((response.headers.get("Content-Range") or "").strip())
    if not match or match[1] is None:
        raise target.error(f"a partial response with Content-Range {show_range(response)}", 206)
    total = None if match[3] == "*" else int(match[3])
    begin, end = int(match[1]), int(match[2]) + 1
    if begin >= end or (total is not None and end > total):
        raise target.error(f"an impossible Content-Range {show_range(response)}", 206)
    return begin, end, total


def total_of(response: Response) -> int | None:
    """Return the length of the object in bytes by the Content-Range of a refused range; None if the header lacks it."""
    match = _CONTENT_RANGE.fullmatch((response.headers.get("Content-Range") or "").strip())
    return int(match[3]) if match and match[3] != "*" else None


def check_encoding(response: Response, target: Target) -> None:
    """Raise RemoteError if the server has compressed the body, whose bytes are then not those of the object."""
    encoding = (response.headers.get("Content-Encoding") or "identity").strip().lower()
    if encoding != "identity":
        problem = (
            f"the server encodes the bytes ({encoding:.40}) although it was asked not to; switch its compression off"
        )
        raise target.error(problem, response.status)


def check_body(response: Response, target: Target, nbytes: int) -> None:
    """Raise RemoteError unless the body consists of `nbytes` bytes of the object."""
    check_encoding(response, target)
    length = _length_of(response)
    if length is not None and length != nbytes:
        raise target.error(f"expected {nbytes} bytes, the server sends {length}", response.status)


def refusal(response: Response, target: Target) -> Exception:
    """Return the error for a response with a status that does not pass, and read the rest of its body if it is short."""
    response.close()
    status = response.status
    if status == 412:
        return target.changed("the server has another version of it")
    if status in (404, 410):
        return target.missing()
    problem = f"the server responds with status {status}"
    if status in (401, 403):
        problem += "; check the credentials: in the url, or in a netrc file; a signed url may have expired"
    return target.error(problem, status)
