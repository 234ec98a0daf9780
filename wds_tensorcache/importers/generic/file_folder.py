"""Folders of `.npz`, `.npy`, `.safetensors` and pickled files. Each path without suffix is a sample.

Pickled files are `.pt`, `.pth` and `.ckpt` files of `torch.save`, such as the hidden states that EAGLE caches, and `.pkl` and
`.pickle` files.

    a/photo.npz                           ->  a/photo: the arrays by name
    a/photo.npy, a/photo.json             ->  a/photo: the array, with the member `json`
    a/photo.npy, a/photo.pt, a/photo.txt  ->  a/photo: {"npy": …, "pt": …}, with the member `txt`

If any path has several files with tensors, all samples are dicts by suffix, so that all have one structure. `.txt`, `.caption`
and `.json` files become members of the sample with the same path. All other files are reported as unused, and so are texts
without tensors. Paths that differ only in case are different samples. The metadata of a `.safetensors` file is the member
`metadata.json`.

An `.npy` file is one sample, even if its first dimension counts samples.

The files of an extracted shard, `KEY.skel.pyd`, `KEY.safetensors` and `KEY.EXTENSION`, become the original sample, bit for bit
and with the same key. If they are in a subfolder whose name cannot be part of a key, `tc.safe_key` makes the key from their
path. If their cache has a name, pack the files with tar instead: the tar is a shard.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from functools import partial
from typing import Any

from wds_tensorcache.codec.sample import decode_members
from wds_tensorcache.errors import FormatError, InvalidKeyError
from wds_tensorcache.importers.safe_files import (
    load_npy,
    load_npz,
    load_pickle,
    load_safetensors,
    load_torch,
)
from wds_tensorcache.importers.source import Format, Loaded, Source, SourceSample
from wds_tensorcache.importers.source_folder import SourceFolder, naming
from wds_tensorcache.integrations.exporting import METADATA, dump_metadata
from wds_tensorcache.shards.names import SKELETON, TENSORS, check_key, check_suffixes, half_of, split_member

_LOADERS: dict[str, Any] = {
    ".ckpt": load_torch,
    ".npy": load_npy,
    ".npz": load_npz,
    ".pickle": load_pickle,
    ".pkl": load_pickle,
    ".pt": load_torch,
    ".pth": load_torch,
    ".safetensors": load_safetensors,
}
_TEXTS = (".caption", ".json", ".txt")
_DRAFT = ".skeleton.pkl"  # of a draft of ComfyUI, with the structure of many samples


def _recognize(folder: SourceFolder) -> int:
    return sum(len(folder.by_suffix.get(suffix, ())) for suffix in _LOADERS)


def _open(folder: SourceFolder) -> Source:
    extracted = _find_extracted(folder)
    used = {name for files in extracted.values() for name in files.values()}
    bad = {}
    for name in folder.by_suffix.get(".pkl", ()):
        tensors = f"{name.removesuffix(_DRAFT)}.safetensors"
        if name.endswith(_DRAFT) and tensors in folder:
            bad[name] = (
                f"has the structure of the tensors in {tensors}, probably of many samples; save each sample by itself"
            )
            used |= {name, tensors}
    stems: dict[str, list[str]] = {}
    texts: dict[str, list[str]] = {}
    for suffixes, names_of in ((_LOADERS, stems), (_TEXTS, texts)):
        for name in (name for suffix in suffixes for name in folder.by_suffix.get(suffix, ()) if name not in used):
            names_of.setdefault(os.path.splitext(name)[0], []).append(name)
    has_several = any(len(names) > 1 for names in stems.values())
    samples = []
    for stem, names in stems.items():
        load = partial(_load, folder, names, texts.get(stem, []), has_several)
        samples.append(SourceSample(stem, (*names, *texts.get(stem, ())), load))
    for key, files in extracted.items():
        load = partial(_load_extracted, folder, files)
        samples.append(SourceSample(key, tuple(files.values()), load, key if _is_legal(key, files) else None))
    # Hazard: after a new file changes the structure, a resumed import would mix samples of both.
    structure = {"structure": "dicts by suffix"} if has_several else {}
    return Source(sorted(samples, key=lambda sample: sample.name), structure, bad)


def _find_extracted(folder: SourceFolder) -> dict[str, dict[str, str]]:
    """Return the files of extracted shards, by key and suffix."""
    split = {name: split_member(name) or (name, "") for name in folder.by_suffix.get(".pyd", ())}
    extracted: dict[str, dict[str, str]] = {key: {} for key, suffix in split.values() if half_of(suffix)}
    for name in folder.names if extracted else ():
        key, suffix = split_member(name) or (name, "")
        if key in extracted:
            extracted[key][suffix] = name
    return extracted


def _is_legal(key: str, suffixes: Iterable[str]) -> bool:
    # the folder of an extracted shard may have any name
    try:
        check_key(key)
        check_suffixes(key, suffixes)
    except InvalidKeyError:
        return False
    return True


def _load_extracted(folder: SourceFolder, files: dict[str, str]) -> Loaded:
    for suffix, name in files.items():
        half = half_of(suffix)
        if half is not None and half.name:
            raise FormatError(f"belongs to the cache {half.name!r}: pack the folder with tar, which makes a shard").at(
                name
            )
    members = {suffix: folder.read(name) for suffix, name in files.items()}
    if TENSORS not in members:
        raise FormatError(f"has no .{TENSORS} file beside it").at(files[SKELETON])
    with naming(files[SKELETON]):
        return Loaded(decode_members(members.pop(SKELETON), members.pop(TENSORS), False, True, {}), members)


def _load(folder: SourceFolder, names: list[str], texts: list[str], has_several: bool) -> Loaded:
    suffixes = [os.path.splitext(name)[1].lower() for name in (*names, *texts)]
    if len(set(suffixes)) < len(suffixes):
        raise FormatError(f"the suffixes of {', '.join(names + texts)} differ only in case")
    contents = {suffix[1:]: _LOADERS[suffix](folder, name) for suffix, name in zip(suffixes, names, strict=False)}
    members = {os.path.splitext(name)[1][1:].lower(): folder.read(name) for name in texts}
    if ".safetensors" in suffixes:
        contents["safetensors"], metadata = contents["safetensors"]
        members |= {METADATA: dump_metadata(metadata)} if metadata else {}
    return Loaded(contents if has_several else contents[suffixes[0][1:]], members)


FORMAT = Format(
    "files",
    "folders of .npy, .npz, .pt, .pth, .ckpt, .pkl and .safetensors files, one sample for each stem; extracted shards",
    _recognize,
    _open,
    True,
)
