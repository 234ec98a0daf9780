"""The metadata of a `.safetensors` file as a member of a sample, and back."""

from __future__ import annotations

import json

METADATA = "metadata.json"  # suffix of the member


def dump_metadata(metadata: dict[str, str]) -> bytes:
    """Return the member for the metadata of a file."""
    return json.dumps(metadata, sort_keys=True, ensure_ascii=False).encode()


def parse_metadata(member: bytes) -> dict[str, str] | None:
    """Return the metadata from a member that `dump_metadata` has made; None for any other content."""
    try:
        found = json.loads(member)
    except (ValueError, RecursionError):
        return None
    if not isinstance(found, dict) or not found or not all(isinstance(text, str) for text in found.values()):
        return None
    try:
        return found if dump_metadata(found) == member else None
    except UnicodeEncodeError:  # a surrogate, which a `.safetensors` file cannot hold
        return None
