"""Folders that `tensorcache export` has written: the same cache again, bit for bit, with the same keys and members.

The file `tensorcache-export.jsonl` lists the samples. A sample has

    a/photo.pt                                             the object, or
    a/photo.npz, a/photo.structure, a/photo.json           tensors, structure, and values for people, or
    a/photo.safetensors, a/photo.structure, a/photo.json
    a/photo.jpg, a/photo.txt                               other members

or is in `samples.tar`. The fingerprint of the new cache has that of the exported one as `exported`. Tensors that were changed
after the export are refused; `--format files` reads them.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any

from wds_tensorcache.errors import FormatError, TensorCacheError
from wds_tensorcache.importers.safe_files import load_npz, load_safetensors, load_torch, parse_torch
from wds_tensorcache.importers.source import Format, Loaded, Source, SourceSample
from wds_tensorcache.importers.source_folder import SourceFolder
from wds_tensorcache.integrations.exporting.export_cache import KINDS, TAR
from wds_tensorcache.integrations.exporting.export_list import LIST, ExportedSample, ExportList, parse_list
from wds_tensorcache.integrations.exporting.structure import STRUCTURE, rebuild_sample
from wds_tensorcache.integrations.safetensors_metadata import METADATA, dump_metadata
from wds_tensorcache.shards.tar import Scanner

_LOST = "is missing: the export was interrupted, or the file was deleted"


def _recognize(folder: SourceFolder) -> int:
    return len(folder.names) if LIST in folder else 0


def _open(folder: SourceFolder) -> Source:
    if LIST not in folder:
        raise FormatError(f"{folder.path} has no file {LIST}, which tensorcache export writes")
    try:
        listed = parse_list(folder.read(LIST))
        if listed.kind not in KINDS:
            raise FormatError(f"has files of the kind {listed.kind!r:.100}, expected one of {', '.join(KINDS)}")
    except TensorCacheError as exc:
        raise exc.at(LIST) from exc
    find: Callable[[ExportedSample], tuple[tuple[str, ...], Callable[[], Loaded]]]
    if listed.kind == "webdataset":
        if TAR not in folder:
            raise FormatError(_LOST).at(TAR)
        find = partial(_find_in_tar, folder, _list_members(folder))
    else:
        find = partial(_find_files, folder, listed)
    samples, bad, met = [], {}, set()
    for each in listed.samples:
        try:
            files, load = find(each)
        except FormatError as exc:
            bad[each.name] = str(exc)
            continue
        # a key that occurs twice in the cache gets a key from the name of its file
        if each.key in met:
            samples.append(SourceSample(each.name, files, load))
        else:
            samples.append(SourceSample(each.original or each.name, files, load, key=each.key))
        met.add(each.key)
    exported = {"kind": listed.kind, "fingerprint": listed.fingerprint}
    return Source(samples, {"exported": exported}, bad, [LIST])


def _find_files(
    folder: SourceFolder, listed: ExportList, each: ExportedSample
) -> tuple[tuple[str, ...], Callable[[], Loaded]]:
    """Return the files of a sample, and a function that reads them; raise FormatError if one is missing."""
    of_tensors = f"{each.name}.{listed.kind}"
    needed = [f"{each.name}.{suffix}" for suffix in each.members if (listed.kind, suffix) != ("safetensors", METADATA)]
    optional = [f"{each.name}.{suffix}" for suffix in (STRUCTURE, listed.values, METADATA)]
    for name in (of_tensors, *needed):
        if name not in folder:
            raise FormatError(_LOST).at(name)
    files = dict.fromkeys([of_tensors, *needed, *(name for name in optional if name in folder)])
    return tuple(files), partial(_load, folder, listed, each)


def _load(folder: SourceFolder, listed: ExportList, each: ExportedSample) -> Loaded:
    name = f"{each.name}.{listed.kind}"
    value: Any
    metadata: dict[str, str] = {}
    if listed.kind == "pt":
        value = load_torch(folder, name)
    elif listed.kind == "npz":
        value = load_npz(folder, name)
    else:
        value, metadata = load_safetensors(folder, name)
    structure = f"{each.name}.{STRUCTURE}"
    if listed.kind != "pt" and structure in folder:
        try:
            value = rebuild_sample(folder.read(structure), value)
        except TensorCacheError as exc:
            raise exc.at(structure) from exc
    elif listed.kind != "pt" and f"{each.name}.{listed.values}" in folder:
        raise FormatError(_LOST).at(structure)
    members = {}
    for suffix in each.members:
        file = f"{each.name}.{suffix}"
        members[suffix] = dump_metadata(metadata) if metadata and file not in folder else folder.read(file)
    return Loaded(value, members)


def _list_members(folder: SourceFolder) -> dict[str, tuple[int, int]]:
    """Return begin and end of each member of the tar, in bytes."""
    found: dict[str, tuple[int, int]] = {}
    try:
        for member, begin, nbytes in Scanner(partial(folder.read_range, TAR), os.path.getsize(folder.locate(TAR))):
            member = member.removeprefix("./")  # as after `tar -c .` of the extracted files
            if member in found:
                raise FormatError(f"member {member!r:.100} occurs twice", kind="duplicate")
            found[member] = begin, begin + nbytes
    except TensorCacheError as exc:
        raise exc.at(TAR) from exc
    return found


def _find_in_tar(
    folder: SourceFolder, extents: dict[str, tuple[int, int]], each: ExportedSample
) -> tuple[tuple[str, ...], Callable[[], Loaded]]:
    """Return the tar, and a function that reads a sample in it; raise FormatError if a member is missing."""
    found = {}
    for suffix in ("pth", *each.members):
        member = f"{each.key}.{suffix}"
        if member not in extents:
            raise FormatError(f"member {member!r:.100} is missing").at(TAR)
        found[suffix] = extents[member]
    return (TAR,), partial(_load_from_tar, folder, each.key, found)


def _load_from_tar(folder: SourceFolder, key: str, extents: dict[str, tuple[int, int]]) -> Loaded:
    members = {suffix: folder.read_range(TAR, *extent) for suffix, extent in extents.items()}
    try:
        return Loaded(parse_torch(members.pop("pth"), folder.trust), members)
    except TensorCacheError as exc:
        raise exc.at(f"{TAR}: sample {key!r:.100}") from exc


FORMAT = Format(
    "tensorcache-export",
    "files and tars that `tensorcache export` has written: the same cache again",
    _recognize,
    _open,
    is_certain=True,
)
