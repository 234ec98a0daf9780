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
        is_ours = dump_metadata(metadata) == member
    except (ValueError, TypeError, RecursionError):  # also for a surrogate, which a `.safetensors` file cannot hold
        return None
    has_texts = isinstance(metadata, dict) and all(isinstance(text, str) for text in metadata.values())
    return metadata if is_ours and has_texts and metadata else None
