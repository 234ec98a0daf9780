"""Folders of `.npz`, `.npy`, `.pt`, `.pth` and `.safetensors` files: one sample for each relative path without suffix."""

from __future__ import annotations

import os
from functools import partial
from typing import Any

from wds_tensorcache.errors import FormatError
from wds_tensorcache.integrations.importers.safe_files import load_npy, load_npz, load_safetensors, load_torch
from wds_tensorcache.integrations.importers.source import Format, Loaded, Source, SourceSample
from wds_tensorcache.integrations.importers.source_folder import SourceFolder

__all__ = ["FORMAT"]

_LOADERS: dict[str, Any] = {
    ".npy": load_npy,
    ".npz": load_npz,
    ".pt": load_torch,
    ".pth": load_torch,
    ".safetensors": lambda folder, name: load_safetensors(folder, name)[0],
}


def _recognize(folder: SourceFolder) -> int:
    return sum(len(folder.by_suffix.get(suffix, ())) for suffix in _LOADERS)


def _open(folder: SourceFolder) -> Source:
    """Find the samples: files that differ only in their suffix make one sample."""
    stems: dict[str, list[str]] = {}
    for name in folder.names:
        stem, suffix = os.path.splitext(name)
        if suffix.lower() in _LOADERS:
            stems.setdefault(stem, []).append(name)
    return Source([SourceSample(stem, tuple(names), partial(_load, folder, names)) for stem, names in stems.items()])


def _load(folder: SourceFolder, names: list[str]) -> Loaded:
    """Return the content of the only file; of several files, a dict of their contents by suffix."""
    contents = {os.path.splitext(name)[1][1:].lower(): _load_one(folder, name) for name in names}
    if len(contents) < len(names):
        raise FormatError(f"the suffixes of {', '.join(names)} differ only in case")
    return Loaded(next(iter(contents.values())) if len(contents) == 1 else contents)


def _load_one(folder: SourceFolder, name: str) -> Any:
    return _LOADERS[os.path.splitext(name)[1].lower()](folder, name)


FORMAT = Format(
    "files",
    "folders of .npy, .npz, .pt, .pth and .safetensors files, one sample for each stem",
    _recognize,
    _open,
    True,
)
