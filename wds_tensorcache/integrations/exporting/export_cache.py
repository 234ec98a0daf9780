"""Export a cache to files that need no part of this package: one file for each sample, or a WebDataset tar."""

from __future__ import annotations

import os
import re
import tarfile
from collections.abc import Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass, field

from wds_tensorcache.codec.tree import realize
from wds_tensorcache.errors import EncodeError, FormatError, InvalidKeyError, StaleCacheError, TensorCacheError
from wds_tensorcache.integrations.exporting.contents import ExportNotes, encode_files, encode_torch
from wds_tensorcache.integrations.exporting.export_list import (
    LIST,
    ExportedSample,
    ExportList,
    identify,
    parse_list,
    write_list,
)
from wds_tensorcache.integrations.exporting.file_names import FileNames, is_safe
from wds_tensorcache.integrations.exporting.structure import STRUCTURE
from wds_tensorcache.integrations.safetensors_metadata import METADATA, parse_metadata
from wds_tensorcache.progress import Progress, ProgressOption
from wds_tensorcache.reading.cache import Cache, TensorCache
from wds_tensorcache.reading.join import JoinedCache
from wds_tensorcache.storage.atomic import find_temporary, remove_stray, write_atomically
from wds_tensorcache.storage.urls import check_not_url, is_url, shown

TAR = "samples.tar"
KINDS = ("pt", "npz", "safetensors", "webdataset")


@dataclass(slots=True)
class ExportReport:
    """The counts of an export.

    Attributes:
        num_written: Number of samples that this call has written.
        num_present: Number of samples whose files were there (`resume=True`).
        renamed: Names of the files by key, for samples whose files could not have the original name.
        widened: Dtypes in the files by tensor name, for tensors whose own dtype the files cannot hold; no number changes.
        as_text: Types by name, for values that JSON cannot hold, such as sets and NaN; the JSON has a text in their place.
        num_without: Number of samples in the shards that do not have the exported cache, such as pictures alone.
        other_caches: Names of other caches in the shards, which are not exported.
    """

    num_written: int = 0
    num_present: int = 0
    renamed: dict[str, str] = field(default_factory=dict)
    widened: dict[str, str] = field(default_factory=dict)
    as_text: dict[str, str] = field(default_factory=dict)
    num_without: int = 0
    other_caches: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        present = f", {self.num_present:,} were there" if self.num_present else ""
        return f"{self.num_written:,} samples written{present}"


def export_cache(
    cache: Cache, out: str | os.PathLike[str], kind: str, *, resume: bool = False, progress: ProgressOption = None
) -> ExportReport:
    """Write each sample of a cache into a file `NAME.KIND`, with its other members in `NAME.EXTENSION`.

    `NAME` is the original name of the sample (see `tc.original_name`). If that is not a safe name of a file on every system, or
    another file has it, it is the key, or a name made from the key; `renamed` lists these samples. No file is ever written
    outside `out`.

    - `"pt"`: any nested sample, by `torch.save`. To load a sample with numpy arrays, `torch.load` needs `weights_only=False`.
    - `"npz"` and `"safetensors"`: the tensors by name. Other values are in `NAME.json`, by the same kind of names, or in
      `NAME.values.json` if samples have members with the suffix `json`. A tensor whose dtype the file cannot hold has another
      one with the same numbers: bfloat16 and float8 are float32 in npz files.
    - `"webdataset"`: one tar `samples.tar`, in which `KEY.pth` is the nested sample.

    `tc.import_cache(out, …)` makes the same cache again, bit for bit. For that, the file `tensorcache-export.jsonl` lists the
    samples, and a sample that is more than a dict of tensors has a file `NAME.structure`.

    Args:
        cache: Cache, or a view of one.
        out: Local folder, which is made if it does not exist. It must be empty, unless `kind` is `"webdataset"` or `resume` is
            True.
        kind: `"pt"`, `"npz"`, `"safetensors"` or `"webdataset"`.
        resume: Keep the files that an interrupted call has written; not possible for a tar.
        progress: As for `tc.build`.

    Raises:
        ValueError: `kind` is unknown, `out` is a url, or `resume` is True for a tar.
        FileExistsError: The folder is not empty, and `resume` is False; the tar exists; or a link is in the folder's paths.
        StaleCacheError: `resume` is True, and the folder has no files of an export, or files of another cache or kind.
        EncodeError: The kind of file cannot hold a value; the message names it.
        InvalidKeyError: A key is not a safe path inside a tar (`kind="webdataset"`).
        FormatError: A shard is damaged; or `tc.open` has warned that the manifest does not list all shards of the folder.
        OSError: A file cannot be read or written.
    """
    if kind not in KINDS:
        raise ValueError(f"{kind!r:.100}, expected one of {', '.join(map(repr, KINDS))}")
    is_tar = kind == "webdataset"
    if is_tar and resume:
        raise ValueError("resume=True: an interrupted tar cannot be continued; export it again")
    if is_url(text := os.fsdecode(out)):
        raise ValueError(f"{shown(text)}: files are exported to local folders; export to one, and copy it")
    check_not_url(text, ())
    if cache._left_out is not None:
        raise FormatError(cache._left_out, kind="index")
    _check_hidden(cache)
    out, report = os.path.realpath(text), ExportReport()
    if isinstance(cache, TensorCache):
        shards = cache._store.shards
        report.num_without = sum(len(shard.index.keys) - len(shard) for shard in shards)
        report.other_caches = sorted({name for shard in shards for name in shard.index.caches if name != shard.name})
    os.makedirs(out, exist_ok=True)
    if is_tar and os.path.lexists(os.path.join(out, TAR)):
        raise FileExistsError(f"{os.path.join(out, TAR)} exists; choose another folder")
    if not is_tar and not resume and os.listdir(out):
        raise FileExistsError(f"{out} is not empty; continue with --resume (resume=True), or choose another folder")
    for folder, *_ in os.walk(out):
        for stray in find_temporary(folder, re.escape(TAR) if is_tar else ".*"):
            remove_stray(stray)
    listed = _list_tar(cache) if is_tar else _list_files(cache, kind, report)
    path = os.path.join(out, LIST)
    if resume and os.listdir(out):
        _check_list(path, listed)
    else:
        if not is_tar:
            _claim(path)
        write_list(path, listed)
    try:
        with closing(Progress(progress, len(cache), unit=" samples", smoothing=0)) as bar:
            if is_tar:
                _write_tar(cache, listed, os.path.join(out, TAR), report, bar)
            else:
                _write_files(cache, listed, out, report, bar)
    except BaseException:
        if not report.num_written and not report.num_present:
            os.unlink(path)  # so that the folder is as empty as before
        raise
    return report


def _check_hidden(cache: Cache) -> None:
    """Raise TarFormatError if a shard has members that the cache does not see."""
    for part in cache._caches if isinstance(cache, JoinedCache) else ():
        _check_hidden(part)
    for shard in cache._store.shards if isinstance(cache, TensorCache) else ():
        if (unseen := shard.find_unseen(shard.index)) is not None:
            raise unseen


def _claim(path: str) -> None:
    """Create the list; raise FileExistsError if another export did so at the same time."""
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644))
    except FileExistsError as exc:
        raise FileExistsError(f"{path} exists: another export into this folder has begun; choose another one") from exc


def _list_files(cache: Cache, kind: str, report: ExportReport) -> ExportList:
    """Choose the names of all files."""
    names, having = FileNames(LIST), cache._having()
    listed = ExportList(kind, "values.json" if "json" in having else "json", identify(cache), dict(cache.fingerprint))
    own = ["pt"] if kind == "pt" else [listed.values, STRUCTURE, kind]
    for number, key in enumerate(cache.keys()):
        members = tuple(suffix for suffix, rows in having.items() if rows[number])
        for suffix in members:
            if suffix in own:
                what = f"has a member {suffix!r}, which has the name of an exported file; use another kind"
                raise EncodeError(what).at(f"sample {key!r:.100}")
        stored = cache._stored_name(number)
        original = cache._name_at(number, key)
        name, is_renamed = names.name_of(key, key if original is None else original, [*own, *members])
        if is_renamed:
            report.renamed[key] = name
        listed.samples.append(ExportedSample(key, name, members, None if stored == name else stored))
    return listed


def _check_list(path: str, listed: ExportList) -> None:
    """Raise StaleCacheError if the list of an interrupted export is not this one."""
    what = "export into another folder"
    try:
        with open(path, "rb") as file:
            found = parse_list(file.read())
    except FileNotFoundError as exc:
        raise StaleCacheError(f"{os.path.dirname(path)} has no files of an interrupted export; {what}") from exc
    except TensorCacheError as exc:
        raise exc.at(path) from exc
    if found.kind != listed.kind:
        raise StaleCacheError(f"{path}: the files there are {found.kind}, not {listed.kind}; {what}")
    if (found.cache, found.samples) != (listed.cache, listed.samples):
        raise StaleCacheError(f"{path}: the files there are of another cache, or of this one before it changed; {what}")


def _write_files(cache: Cache, listed: ExportList, out: str, report: ExportReport, bar: Progress) -> None:
    notes = ExportNotes()
    report.widened, report.as_text = notes.widened, notes.as_text
    for number, each in enumerate(listed.samples):
        path = os.path.join(out, *each.name.split("/"))
        if os.path.lexists(f"{path}.{listed.kind}"):
            report.num_present += 1
        else:
            _make_folder(os.path.dirname(path), out)
            try:
                files = _encode(cache, number, each, listed, notes)
            except TensorCacheError as exc:
                raise exc.at(f"sample {each.key!r:.100}") from exc
            # the sample itself comes last: with it, all files are there
            for suffix, content in files.items():
                write_atomically(f"{path}.{suffix}", [content], fsync=False)
            report.num_written += 1
        bar.show(number + 1)


def _encode(
    cache: Cache, number: int, each: ExportedSample, listed: ExportList, notes: ExportNotes
) -> dict[str, bytes]:
    """Return the contents of all files of a sample by suffix."""
    members, sample = _read_members(cache, number, each.members), realize(cache[number])
    if listed.kind == "pt":
        return {**members, "pt": encode_torch(sample)}
    metadata = parse_metadata(members.get(METADATA, b"")) if listed.kind == "safetensors" else None
    if metadata is not None:
        del members[METADATA]  # the file itself holds it
    return {**members, **encode_files(sample, listed.kind, listed.values, notes, metadata)}


def _make_folder(folder: str, out: str) -> None:
    """Make a folder in `out`. Hazard: a link in an existing folder could lead out of it."""
    os.makedirs(folder, exist_ok=True)
    if os.path.realpath(folder) != folder:
        raise FileExistsError(f"{folder} is or contains a link; export into a new folder, not into {out}")


def _read_members(cache: Cache, number: int, suffixes: Iterable[str]) -> dict[str, bytes]:
    """Return the other members of a sample by extension."""
    return {suffix: cache.read_members([number], suffix)[0] for suffix in suffixes}


def _list_tar(cache: Cache) -> ExportList:
    """Check that the tar can have all names."""
    listed = ExportList("webdataset", "json", identify(cache), dict(cache.fingerprint))
    met: set[str] = set()
    having = cache._having()
    for number, key in enumerate(cache.keys()):
        members = tuple(suffix for suffix, rows in having.items() if rows[number])
        try:
            if not is_safe(key):
                raise InvalidKeyError("the key is not a safe relative path; use another kind")
            if key in met:
                raise EncodeError("the key occurs twice; use another kind")
            if "pth" in members:
                raise EncodeError("has a member 'pth', which has the name of an exported file; use another kind")
        except TensorCacheError as exc:
            raise exc.at(f"sample {key!r:.100}") from exc
        met.add(key)
        listed.samples.append(ExportedSample(key, key, members, cache._stored_name(number)))
    return listed


def _write_tar(cache: Cache, listed: ExportList, path: str, report: ExportReport, bar: Progress) -> None:
    def parts() -> Iterator[bytes]:
        for number, each in enumerate(listed.samples):
            try:
                members = _read_members(cache, number, each.members)
                members["pth"] = encode_torch(realize(cache[number]))
            except TensorCacheError as exc:
                raise exc.at(f"sample {each.key!r:.100}") from exc
            for suffix, content in members.items():
                info = tarfile.TarInfo(f"{each.key}.{suffix}")
                info.size, info.mode = len(content), 0o644
                yield info.tobuf(tarfile.PAX_FORMAT)
                yield content
                yield bytes(-len(content) % tarfile.BLOCKSIZE)
            report.num_written += 1
            bar.show(number + 1)
        yield bytes(2 * tarfile.BLOCKSIZE)

    write_atomically(path, parts())
