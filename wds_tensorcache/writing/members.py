"""The bytes of a sample's other members, by the writer's own encoder or one that it is given."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from wds_tensorcache.codec.header import is_bound
from wds_tensorcache.errors import EncodeError, KeyRuleError, TensorCacheError
from wds_tensorcache.shards.names import TENSORS

__all__ = ["encode_others", "encode_plain"]


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


def encode_others(
    key: str, others: dict[str, Any], encoder: Callable[[dict[str, Any]], dict[str, Any]]
) -> dict[str, bytes]:
    """Return what an encoder makes of a sample's other members, if that is right.

    Raises:
        EncodeError: It is not all bytes.
        KeyRuleError: It has other names, or one half of a cache.
    """
    try:
        plain = encoder(others)
    except TensorCacheError as exc:
        raise exc.at(f"sample {key!r}") from exc
    for extension, raw in plain.items():
        if extension not in others:
            raise KeyRuleError(f"sample {key!r}: the encoder made {extension!r}, which is not among its members")
        if not isinstance(raw, (bytes, bytearray)):
            raise EncodeError(
                f"sample {key!r}: the encoder made a {type(raw).__name__} of {extension!r}, expected bytes"
            )
        if extension.lower().endswith(TENSORS) and is_bound(bytes(raw[:64])):
            raise KeyRuleError(f"sample {key!r}: {extension!r} is one half of a cache; pass what it was made of")
    return plain
