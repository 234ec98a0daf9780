"""What the writer makes of a sample's other members, unless it is given an encoder."""

from __future__ import annotations

import json
from typing import Any

from wds_tensorcache.errors import EncodeError

__all__ = ["encode_plain"]


def encode_plain(members: dict[str, Any]) -> dict[str, bytes]:
    """Return the bytes of members, by extension: bytes, text, `json` and `cls` are taken.

    Raises:
        EncodeError: A member is something else, or JSON or UTF-8 cannot hold it.
    """
    result = {}
    for extension, value in members.items():
        kind = extension.rpartition(".")[2].lower()
        if isinstance(value, (bytes, bytearray, memoryview)):
            result[extension] = bytes(value)
        elif isinstance(value, str) and kind != "json":
            try:
                result[extension] = value.encode()
            except UnicodeEncodeError as exc:
                raise EncodeError(f"member {extension!r} is text that UTF-8 cannot hold: {exc}") from exc
        elif kind == "cls" and isinstance(value, int):
            result[extension] = b"%d" % value
        elif kind != "json":
            raise EncodeError(
                f"member {extension!r} is a {type(value).__name__}; pass bytes, or encoder=webdataset.writer.make_encoder(True)"
            )
        else:
            try:
                result[extension] = json.dumps(value).encode()
            except (TypeError, ValueError, RecursionError) as exc:
                raise EncodeError(f"member {extension!r} is not what JSON can hold: {exc}") from exc
    return result
