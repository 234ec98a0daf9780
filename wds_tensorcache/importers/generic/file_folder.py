"""Folders of `.npz`, `.npy`, `.pt`, `.pth`, `.pkl`, `.pickle` and `.safetensors` files: a sample for each path without suffix.

    a/photo.npz                           ->  a/photo: the arrays by name
    a/photo.npy, a/photo.json             ->  a/photo: the array, with the member `json`
    a/photo.npy, a/photo.pt, a/photo.txt  ->  a/photo: {"npy": …, "pt": …}, with the member `txt`

If any path has several files with tensors, all samples are dicts by suffix, so that all have one structure. `.txt`, `.caption`
and `.json` files become members of the sample with the same path. All other files are reported as unused, and so are texts
without tensors. Paths that differ only in case are different samples. The metadata of a `.safetensors` file is the member
`metadata.json`.

An `.npy` file is one sample, also if its first dimension counts samples.
"""

from __future__ import annotations

import os
from functools import partial
from typing import Any

from wds_tensorcache.errors import FormatError
from wds_tensorcache.importers.safe_files import (
    load_npy,
    load_npz,
    load_pickle,
    load_safetensors,
    load_torch,
)
from wds_tensorcache.importers.source import Format, Loaded, Source, SourceSample
from wds_tensorcache.importers.source_folder import SourceFolder
from wds_tensorcache.integrations.safetensors_metadata import METADATA, dump_metadata

_LOADERS: dict[str, Any] = {
    ".npy": load_npy,
    ".npz": load_npz,
    ".pickle": load_pickle,
    ".pkl": load_pickle,
    ".pt": load_torch,
    ".pth": load_torch,
    ".safetensors": load_safetensors,
}
_MAX_TEXT = 1 << 26  # bytes of a file of text
_TEXTS = (".caption", ".json", ".txt")


def _recognize(folder: SourceFolder) -> int:
    return sum(len(folder.by_suffix.get(suffix, ())) for suffix in _LOADERS)


def _open(folder: SourceFolder) -> Source:
    """Find the samples: files that differ only in their suffix make one sample."""
    stems: dict[str, list[str]] = {}
    for suffix in _LOADERS:
        for name in folder.by_suffix.get(suffix, ()):
            stems.setdefault(os.path.splitext(name)[0], []).append(name)
    has_several = any(len(names) > 1 for names in stems.values())
    texts: dict[str, list[str]] = {}
    for suffix in _TEXTS:
        for name in folder.by_suffix.get(suffix, ()):
            texts.setdefault(os.path.splitext(name)[0], []).append(name)
    return Source(
        [
            SourceSample(
                stem,
                (*names, *texts.get(stem, ())),
                partial(_load, folder, names, texts.get(stem, []), has_several),
            )
            for stem, names in sorted(stems.items())
        ]
    )


def _load(folder: SourceFolder, names: list[str], texts: list[str], has_several: bool) -> Loaded:
    suffixes = [os.path.splitext(name)[1].lower() for name in (*names, *texts)]
    if len(set(suffixes)) < len(suffixes):
        raise FormatError(f"the suffixes of {', '.join(names + texts)} differ only in case")
    contents = {suffix[1:]: _LOADERS[suffix](folder, name) for suffix, name in zip(suffixes, names, strict=False)}
    members = {os.path.splitext(name)[1][1:].lower(): folder.read(name, _MAX_TEXT) for name in texts}
    if ".safetensors" in suffixes:
        contents["safetensors"], metadata = contents["safetensors"]
        members |= {METADATA: dump_metadata(metadata)} if metadata else {}
    return Loaded(contents if has_several else contents[suffixes[0][1:]], members)


FORMAT = Format(
    "files",
    "folders of .npy, .npz, .pt, .pth, .pkl and .safetensors files, one sample for each stem",
    _recognize,
    _open,
    True,
)
