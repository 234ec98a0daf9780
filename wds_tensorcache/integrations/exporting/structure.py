"""The file `NAME.structure` next to an exported `.npz` or `.safetensors` file: what the cache has beyond tensors by name.

It is written for samples that are more than a dict of tensors in the order of the file: nested samples, other values, arrays,
tensors that occur twice, and dtypes that the file cannot hold. It contains

1. a line of JSON: the names of tensors in the file by their names in the cache, where these differ;
2. the header of the `.safetensors` member of a cache (FORMAT.md 3);
3. the skeleton, whose preamble has the digest of that member.

So an import can build both members again, and the digest proves that no bit has changed.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any
from urllib.parse import unquote_to_bytes

import numpy as np
import torch

from wds_tensorcache.codec.binding import parse_preamble
from wds_tensorcache.codec.header import StoredTensor, parse_header
from wds_tensorcache.codec.sample import EncodedSample, decode_members
from wds_tensorcache.codec.tensor_names import RESERVED
from wds_tensorcache.errors import FormatError
from wds_tensorcache.integrations.exporting.widening import WIDENED, narrow_again

STRUCTURE = "structure"
_ROOT = "value"  # in place of an empty name


def file_names(names: Iterable[str]) -> dict[str, str]:
    """Return the name in files of each tensor or value, by its path in the sample: `text.a.b` for `text.a%2Eb`.

    If two of these names were equal, or a file could not have one of them, all paths stay as they are.
    """
    given = list(dict.fromkeys(names))
    plain = {name: ".".join(map(_unescape, name.split("."))) or _ROOT for name in given}
    fits = len(set(plain.values())) == len(plain) and all(map(_fits, plain.values()))
    return plain if fits else {name: name or _ROOT for name in given}


def _unescape(part: str) -> str:
    return "" if part == "%" else unquote_to_bytes(part).decode("utf-8", "surrogatepass")


def _fits(name: str) -> bool:
    """Return whether zips and JSON can have the name; a zip would end it at a NUL."""
    return name != RESERVED and not any(
        char < " " or "\x7f" <= char < "\xa0" or "\ud800" <= char < "\ue000" for char in name
    )


def build_structure(encoded: EncodedSample, names: Mapping[str, str]) -> bytes:
    """Return the content of the file; `names` has the names in the file by the names in the cache."""
    other = {name: names[name] for name in encoded.layout.tensors if names[name] != name}
    return json.dumps({"names": other}).encode() + b"\n" + encoded.header + encoded.skeleton


def rebuild_sample(content: bytes, tensors: Mapping[str, torch.Tensor | np.ndarray[Any, Any]]) -> Any:
    """Return the exported sample from the content of the file, and the tensors or arrays by their names in the other file.

    Raises:
        FormatError: The content is damaged, or the tensors are not those that were exported.
        UnsafeSkeletonError: The skeleton names code outside the format; it was not executed.

    Memory: newly allocated.
    """
    line, _, rest = content.partition(b"\n")
    try:
        names = json.loads(line)["names"]
        if not isinstance(names, dict):
            raise TypeError(f"the names are a {type(names).__name__}, expected a dict")
    except (ValueError, KeyError, TypeError, RecursionError) as exc:
        raise FormatError(f"is not the structure of a sample: {exc!r:.200}") from exc
    end = 8 + int.from_bytes(rest[:8], "little")
    header, skeleton = rest[:end], rest[end:]
    nbytes = parse_preamble(skeleton)[1]
    if nbytes is None:
        raise FormatError("the skeleton has no preamble")
    layout, _ = parse_header(header, nbytes)
    parts, used = [header], set()
    for stored in layout.tensors.values():
        name = names.get(stored.name, stored.name)
        if not isinstance(name, str) or name not in tensors:
            raise FormatError(f"the tensor {name!r:.100} is missing in the file")
        if name in used:  # Hazard: a small file could name one large tensor many times, and need a copy for each
            raise FormatError(f"the tensor {name!r:.100} of the file is used twice")
        used.add(name)
        parts.append(_stored_bytes(tensors[name], stored))
    try:
        return decode_members(skeleton, b"".join(parts), False, True, {})
    except FormatError as exc:
        if exc.kind == "damaged":
            raise _changed() from exc
        raise


def _stored_bytes(value: torch.Tensor | np.ndarray[Any, Any], stored: StoredTensor) -> bytes:
    """Return the bytes of a tensor as the cache stores them."""
    flat: np.ndarray[Any, Any] | None
    if isinstance(value, torch.Tensor) and value.dtype != torch.float32:  # numpy lacks some dtypes
        flat = value.reshape(-1).view(torch.uint8).numpy() if value.numel() else np.empty(0, np.uint8)
    else:
        flat = np.ascontiguousarray(value)
    if stored.dtype in WIDENED and flat.dtype == np.float32 and flat.nbytes != stored.end - stored.begin:
        flat = narrow_again(flat, stored.dtype)
    if flat is None or flat.nbytes != stored.end - stored.begin:
        raise _changed()
    return flat.tobytes()


def _changed() -> FormatError:
    return FormatError("the tensors were changed since the export; import the files as --format files (format='files')")
