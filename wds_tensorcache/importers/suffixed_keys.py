"""Tensor names that end with a resolution and a dtype, and the metadata of `.safetensors` files that have such names."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from wds_tensorcache.codec.dtypes import dtype_name
from wds_tensorcache.errors import FormatError, TensorCacheError
from wds_tensorcache.importers.safe_files import read_safetensors_header
from wds_tensorcache.importers.source_folder import SourceFolder

_DTYPES = {dtype_name(each): each for each in vars(torch).values() if isinstance(each, torch.dtype)}
_DTYPES |= {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_DTYPE = re.compile(rf"(.+)_({'|'.join(map(re.escape, sorted(_DTYPES, key=len, reverse=True)))})", re.DOTALL)
_RESOLUTION = re.compile(r"((?:latents|alpha_mask).*?)_((?:\d+x)?\d+x\d+)", re.DOTALL)


class SuffixedKey(NamedTuple):
    """The parts of a tensor name: `latents_clean_2x_9x64x64_bfloat16` is `latents_clean_2x`, `9x64x64` and `bfloat16`."""

    content: str
    resolution: str = ""
    dtype: str = ""


def parse_key(key: str) -> SuffixedKey:
    """Return the parts of a tensor name. Names that end with `_mask` have no dtype."""
    match = None if key.endswith("_mask") else _DTYPE.fullmatch(key)
    content, dtype = (match[1], match[2]) if match else (key, "")
    match = _RESOLUTION.fullmatch(content)
    return SuffixedKey(match[1], match[2], dtype) if match else SuffixedKey(content, "", dtype)


def short_names(keys: dict[str, SuffixedKey]) -> dict[str, str]:
    """Return a distinct short name for each key, which is its content.

    If several keys have the same content, only one of them has the short name: the one that comes first in the order float32,
    bfloat16, float16, other dtypes. The other keys keep their whole names.

    Args:
        keys: Parts of each key.
    """
    order = [torch.float32, torch.bfloat16, torch.float16]
    ranks = {
        key: order.index(each) if (each := _DTYPES.get(parts.dtype)) in order else 3 for key, parts in keys.items()
    }
    names: dict[str, str] = {}
    taken: set[str] = set(keys)
    for key in sorted(keys, key=ranks.__getitem__):
        content = keys[key].content
        names[key] = content if content == key or content not in taken else key
        taken.add(content)
    return {key: names[key] for key in keys}


def peek_header(folder: SourceFolder, name: str) -> tuple[list[str], dict[str, str]]:
    """Return tensor names and metadata; none for a damaged file, whose fault `load_safetensors` raises later."""
    try:
        return read_safetensors_header(folder, name)
    except (TensorCacheError, OSError):
        return [], {}


def as_numbers(metadata: dict[str, str], *keys: str, count: int) -> tuple[int, ...]:
    """Return the integers in entries of metadata, which commas separate if an entry has several.

    Raises:
        FormatError: There are not `count` integers, or one has more than 9 digits.
    """
    texts = ",".join(metadata[key] for key in keys).split(",")
    if len(texts) != count or not all(re.fullmatch(r"\s*-?[0-9]{1,9}\s*", text) for text in texts):
        found = ", ".join(f"{key} {metadata[key]!r:.100}" for key in keys)
        raise FormatError(f"the metadata has {found}, expected {count} integers")
    return tuple(map(int, texts))


@dataclass(slots=True)
class CommonMetadata:
    """The metadata that all files of one kind have in common, and the scheme of their tensor names.

    Attributes:
        per_file: Pattern of the keys that belong to one file, which are never shared.
        shared: Entries that all files have, so far.
        scheme: Tensor names with placeholders: `latents_FxHxW_dtype`.
    """

    per_file: re.Pattern[str]
    shared: dict[str, str] = field(default_factory=dict)
    scheme: set[str] = field(default_factory=set)
    _is_empty: bool = True

    def add(self, keys: Iterable[str], metadata: dict[str, str]) -> None:
        """Add the header of a file: keep only shared entries, and extend the scheme."""
        entries = {key: text for key, text in sorted(metadata.items()) if not self.per_file.fullmatch(key)}
        self.shared = entries if self._is_empty else dict(sorted(self.shared.items() & entries.items()))
        self._is_empty = False
        for content, resolution, dtype in map(parse_key, keys):
            size = ("", "_HxW", "_FxHxW")[resolution.count("x")]
            self.scheme.add(re.sub(r"_\d+(?=_|$)", "_N", content) + size + ("_dtype" if dtype else ""))

    def rest_of(self, metadata: dict[str, str]) -> dict[str, str]:
        """Return the entries of one file that are neither shared by all files nor matched by `per_file`."""
        return {
            key: text
            for key, text in sorted(metadata.items())
            if not self.per_file.fullmatch(key) and self.shared.get(key) != text
        }
