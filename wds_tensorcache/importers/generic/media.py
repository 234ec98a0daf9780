"""Pictures and other media in samples, which become members; pictures without an encoding, which become tensors."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from wds_tensorcache.errors import FormatError
from wds_tensorcache.importers.safe_files import as_tensor
from wds_tensorcache.importers.source import Loaded

_SIGNATURES = {
    b"\xff\xd8\xff": "jpg",
    b"\x89PNG": "png",
    b"GIF8": "gif",
    b"BM": "bmp",
    b"II*\0": "tif",
    b"MM\0*": "tif",
}
_RIFF = {b"WEBP": "webp", b"WAVE": "wav", b"AVI ": "avi"}
_MODES = {
    **dict.fromkeys(("L", "P"), (np.uint8, ())),
    **dict.fromkeys(("LA", "PA", "La"), (np.uint8, (2,))),
    **dict.fromkeys(("RGB", "YCbCr", "LAB", "HSV"), (np.uint8, (3,))),
    **dict.fromkeys(("RGBA", "RGBX", "RGBa", "CMYK"), (np.uint8, (4,))),
    "I": (np.int32, ()),
    "F": (np.float32, ()),
    "I;16": (np.uint16, ()),
}


@dataclass(frozen=True, slots=True)
class Media:
    """Encoded media in a sample.

    Attributes:
        extension: Extension of the member, for example `jpg`.
        content: Content of the member.
    """

    extension: str
    content: bytes


def separate_media(value: Any) -> Loaded:
    """Return a sample whose media became members, named by their paths: `image.jpg`, `frames.0.jpg`.

    Dicts lose the entries with media or with a list of media alone. Other lists and tuples have None in place of media. In
    names, `_` takes the place of all characters but ASCII letters, digits, `.` and `-`.

    Raises:
        FormatError: Two media have the same name.
    """
    members: dict[str, bytes] = {}
    rest = _separate(value, "", members)
    return Loaded({} if isinstance(rest, Media) else rest, members)


def _separate(value: Any, path: str, members: dict[str, bytes]) -> Any:
    """Return the value without media, and a `Media` if it has nothing else."""
    if isinstance(value, Media):
        # readers of tars need such names, which must not begin with "_"
        name = re.sub(r"[^A-Za-z0-9.-]", "_", f"{path}.{value.extension}").lstrip("._")
        if name in members:
            raise FormatError(f"two media are named {name!r:.100}; rename a column")
        members[name] = value.content
        return value
    start = f"{path}." if path else ""
    if isinstance(value, dict):
        separated = {key: _separate(item, f"{start}{key}", members) for key, item in value.items()}
        return {key: item for key, item in separated.items() if not isinstance(item, Media)}
    if isinstance(value, (list, tuple)):
        items = [_separate(item, f"{start}{number}", members) for number, item in enumerate(value)]
        if items and all(isinstance(item, Media) for item in items):
            return items[0]
        return type(value)(None if isinstance(item, Media) else item for item in items)
    return value


def extension_of(content: bytes, name: str = "", default: str = "bin") -> str:
    """Return the extension of media: from the suffix of its name, else from its first bytes."""
    suffix = name.rpartition("/")[2].rpartition(".")
    if suffix[1] and suffix[2].isascii() and suffix[2].isalnum() and len(suffix[2]) <= 5:
        return suffix[2].lower()
    if content.startswith(b"RIFF"):
        return _RIFF.get(content[8:12], default)
    return next((found for start, found in _SIGNATURES.items() if content.startswith(start)), default)


def decode_pil(raw: bytes) -> torch.Tensor:
    """Return the pixels of a picture that is stored as width, height, length of its mode, mode and pixels.

    Returns:
        Tensor [height, width, channels], without the last dimension for modes with one channel; uint8 for most modes.

    Raises:
        FormatError: The mode is unknown, or the number of pixels does not match.
    """
    width, height, nbytes = np.frombuffer(raw, "<u4", 3).tolist()
    mode = raw[12 : 12 + nbytes].decode("ascii", "replace")
    if mode not in _MODES:
        raise FormatError(f"pictures of mode {mode!r:.40} are not read; store them as PNG")
    dtype, channels = _MODES[mode]
    pixels = np.frombuffer(raw, dtype, offset=12 + nbytes).reshape(height, width, *channels)
    return torch.as_tensor(as_tensor(pixels))


def decode_list(raw: bytes, begin: int, decode: Callable[[bytes], Any]) -> list[Any]:
    """Return the items of a list that is stored as its length, the lengths of the items, and the items.

    Args:
        raw: The stored list.
        begin: Offset of its length.
        decode: Function that decodes an item.

    Raises:
        FormatError: The lengths do not match.
    """
    count = int.from_bytes(raw[begin : begin + 4], "little")
    if begin + 4 + 4 * count > len(raw):
        raise FormatError(f"a list of {count:,} items exceeds its {len(raw):,} bytes")
    ends = begin + 4 + 4 * count + np.cumsum(np.frombuffer(raw, "<u4", count, begin + 4), dtype=np.int64)
    bounds = [begin + 4 + 4 * count, *ends.tolist()]
    if bounds[-1] != len(raw):
        raise FormatError(f"a list ends at byte {bounds[-1]:,} of {len(raw):,}")
    return [decode(raw[first:last]) for first, last in pairwise(bounds)]
