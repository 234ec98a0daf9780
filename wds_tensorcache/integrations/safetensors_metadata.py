"""Convert the metadata of a `.safetensors` file to a member of a sample, and back."""

from __future__ import annotations

import json

METADATA = "metadata.json"  # suffix of the member


def dump_metadata(metadata: dict[str, str]) -> bytes:
    """Return the content of the member for the metadata of a file."""
    return json.dumps(metadata, sort_keys=True, ensure_ascii=False).encode()


def parse_metadata(member: bytes) -> dict[str, str] | None:
    """Return the metadata in a member that `dump_metadata` wrote; None for empty metadata, and for other content."""
    try:
        metadata = json.loads(member)
    except (ValueError, RecursionError):
        return None
    if not isinstance(metadata, dict) or not metadata or not all(isinstance(text, str) for text in metadata.values()):
        return None
    try:
        return metadata if dump_metadata(metadata) == member else None
    except UnicodeEncodeError:  # a surrogate, which a `.safetensors` file cannot hold
        return None
