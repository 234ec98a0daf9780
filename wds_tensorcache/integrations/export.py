"""Export a cache to files that need no part of this package: one file for each sample, or a WebDataset tar."""

from __future__ import annotations

import io
import json
import os
import re
import tarfile
import zipfile
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import numpy as np
import safetensors.torch
import torch

from wds_tensorcache.codec.skeleton.tensor_names import component, join_path
from wds_tensorcache.codec.tree import realize
from wds_tensorcache.errors import EncodeError, InvalidKeyError, TensorCacheError
from wds_tensorcache.progress import Progress, ProgressOption
from wds_tensorcache.reading.base_cache import Cache
from wds_tensorcache.shards.names import original_name
from wds_tensorcache.storage.atomic import find_temporary, remove_stray, write_atomically

__all__ = ["KINDS", "ExportReport", "export_cache"]

KINDS = ("pt", "npz", "safetensors", "webdataset")
_MAX_NAME_NBYTES = 200  # of a part of a path; file systems allow 255 bytes, with suffix and temporary name
_RESERVED = re.compile(
    r"(?i)(con|prn|aux|nul|com[0-9]|lpt[0-9])(\..*)?|.*[<>:\"\\|?*\x00-\x1f\x7f\ud800-\udfff].*|.*[ .]|\.+.*", re.DOTALL
)
_FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)
# dtypes that numpy lacks, and the ones that have the same numbers
_WIDER = dict.fromkeys([torch.bfloat16, *_FLOAT8], torch.float32)


@dataclass(slots=True)
class ExportReport:
    """The counts of an export.

    Attributes:
        num_written: Number of samples that this call has written.
        num_present: Number of samples whose files were there (`resume=True`).
        renamed: Names of files by key, for samples whose original names cannot be names of files.
        widened: Dtype of the file by name of the tensor, for tensors whose dtype the file cannot hold; no number changes.
    """

    num_written: int = 0
    num_present: int = 0
    renamed: dict[str, str] = field(default_factory=dict)
    widened: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        present = f", {self.num_present:,} were there" if self.num_present else ""
        return f"{self.num_written:,} samples written{present}"


def export_cache(
    cache: Cache, out: str | os.PathLike[str], kind: str, *, resume: bool = False, progress: ProgressOption = None
) -> ExportReport:
    """Write each sample of a cache into a file `NAME.KIND`, with its other members in `NAME.EXTENSION`.

    `NAME` is the original name of the sample (see `tc.original_name`), or its key if no file system can hold that name. No
    file is ever written outside `out`.

    - `"pt"`: the nested sample, by `torch.save`. Any sample; but an array that is not a tensor needs numpy's pickles.
    - `"npz"` and `"safetensors"`: the tensors by name. Other values are in `NAME.json`, by the same kind of names. npz has
      no bfloat16 and float8: these become float32, which changes no number.
    - `"webdataset"`: one tar `samples.tar`, in which `KEY.pth` is the nested sample.

    Args:
        cache: Cache, or a view of one.
        out: Folder, which is made if it does not exist.
        kind: One of these.
        resume: Keep the files of an earlier call that was interrupted; not for a tar.
        progress: As for `tc.build`.

    Raises:
        ValueError: `kind` is unknown, or `resume` is True for a tar.
        FileExistsError: A file exists, and `resume` is False.
        EncodeError: The kind of file cannot hold a value; the message names it.
        FormatError: A shard is damaged.
    """
    if kind not in KINDS:
        raise ValueError(f"{kind!r:.100}, expected one of {', '.join(map(repr, KINDS))}")
    out, report = os.path.realpath(os.fsdecode(out)), ExportReport()
    os.makedirs(out, exist_ok=True)
    with closing(Progress(progress, len(cache), unit=" samples", smoothing=0)) as bar:
        if kind == "webdataset":
            if resume:
                raise ValueError("resume=True: an interrupted tar cannot be continued; export it again")
            _write_tar(cache, os.path.join(out, "samples.tar"), report, bar)
            return report
        for folder, *_ in os.walk(out) if resume else ():
            for stray in find_temporary(folder, ".*"):
                remove_stray(stray)
        names = _Names()
        for number, key in enumerate(cache.keys()):
            name = names.name_of(key)
            if names.is_renamed:
                report.renamed[key] = name
            path = os.path.join(out, *name.split("/"))
            if os.path.lexists(f"{path}.{kind}"):
                if not resume:
                    raise FileExistsError(
                        f"{path}.{kind} exists; continue with --resume (resume=True), or choose another folder"
                    )
                report.num_present += 1
            else:
                os.makedirs(os.path.dirname(path), exist_ok=True)
                try:
                    members, files = _members(cache, number), _encode(realize(cache[number]), kind, report)
                    for suffix in members.keys() & files.keys():
                        raise EncodeError(
                            f"has a member {suffix!r}, which has the name of an exported file; use another kind"
                        )
                except TensorCacheError as exc:
                    raise exc.at(f"sample {key!r}") from exc
                for suffix, content in {
                    **members,
                    **files,
                }.items():  # the sample itself comes last: with it, all files are there
                    write_atomically(f"{path}.{suffix}", [content], fsync=False)
                report.num_written += 1
            bar.show(number + 1)
    return report


class _Names:
    """The names of files for the keys of a cache: different ones, also on file systems that ignore case."""

    def __init__(self) -> None:
        self._used: set[str] = set()
        self.is_renamed = False  # whether the last name is not the original one

    def name_of(self, key: str) -> str:
        """Return a relative path without suffix."""
        try:
            name = original_name(key)
        except InvalidKeyError:  # the key has only a hash of the name
            name = key
        wanted = name
        parts = name.split("/")
        if any(_RESERVED.fullmatch(part) or not 0 < len(part.encode()) <= _MAX_NAME_NBYTES for part in parts):
            name = key
        number = 1
        while name.casefold() in self._used:
            number += 1
            name = f"{key}-{number}"
        self._used.add(name.casefold())
        self.is_renamed = name != wanted
        return name


def _members(cache: Cache, number: int) -> dict[str, bytes]:
    """Return the other members of a sample by extension."""
    found = {}
    for suffix in cache.members:
        try:
            (found[suffix],) = cache.read_members([number], suffix)
        except KeyError:
            continue  # this sample has none
    return found


def _encode(sample: Any, kind: str, report: ExportReport) -> dict[str, bytes]:
    """Return the contents of a sample's files by suffix; the one with its tensors is the last."""
    stream = io.BytesIO()
    if kind == "pt":
        torch.save(sample, stream)
        return {"pt": stream.getvalue()}
    tensors: dict[str, Any] = {}
    values: dict[str, Any] = {}
    for name, leaf in _leaves(sample, ""):
        is_array = isinstance(leaf, (torch.Tensor, np.ndarray))
        (tensors if is_array else values)[name or "value"] = leaf
    files = {"json": _encode_json(values)} if values else {}
    if kind == "npz":
        # not `np.savez`, which has a parameter `file`
        with zipfile.ZipFile(stream, "w") as archive:
            for name, tensor in tensors.items():
                content = io.BytesIO()
                np.lib.format.write_array(content, _as_array(name, tensor, report), allow_pickle=False)
                archive.writestr(zipfile.ZipInfo(f"{name}.npy"), content.getvalue())
        return {**files, "npz": stream.getvalue()}
    for name, tensor in tensors.items():
        if isinstance(tensor, np.ndarray):
            raise EncodeError(
                f"{name!r:.200} is an array of {tensor.dtype}, which safetensors files cannot hold; use pt"
            )
    try:
        return {**files, kind: safetensors.torch.save({name: tensor.contiguous() for name, tensor in tensors.items()})}
    except (KeyError, ValueError, RuntimeError) as exc:
        raise EncodeError(f"a safetensors file cannot hold the sample: {exc!r:.300}; use pt") from exc


def _leaves(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Yield the tensors and other values of nested dicts, lists and tuples, by their paths; empty containers are values."""
    if isinstance(value, dict) and value:
        items = [(component(key, position), item) for position, (key, item) in enumerate(value.items())]
    elif isinstance(value, (list, tuple)) and any(
        isinstance(item, (dict, list, tuple, torch.Tensor, np.ndarray)) for item in value
    ):
        items = [(str(position), item) for position, item in enumerate(value)]
    else:
        yield name, value
        return
    yield from chain.from_iterable(_leaves(item, join_path(name, part)) for part, item in items)


def _encode_json(values: dict[str, Any]) -> bytes:
    for name, value in values.items():
        try:
            same = json.loads(json.dumps(value, allow_nan=False))
        except (TypeError, ValueError):
            same = None
        if not (same == value or (isinstance(value, tuple) and same == list(value))):
            raise EncodeError(f"{name!r:.200} is a {type(value).__name__}, which JSON cannot hold; use pt")
    return json.dumps(values, ensure_ascii=False, indent=1).encode("utf-8", "surrogatepass")


def _as_array(name: str, tensor: torch.Tensor | np.ndarray[Any, Any], report: ExportReport) -> np.ndarray[Any, Any]:
    if isinstance(tensor, np.ndarray):
        if tensor.dtype.hasobject:
            raise EncodeError(f"{name!r:.200} is an array of {tensor.dtype}, which numpy would pickle")
        return tensor
    wider = _WIDER.get(tensor.dtype)
    if wider is not None:
        report.widened[name] = str(wider).removeprefix("torch.")
        tensor = tensor.to(wider)
    try:
        return tensor.numpy()
    except (TypeError, RuntimeError) as exc:
        raise EncodeError(f"{name!r:.200} is {tensor.dtype}, which numpy lacks; use pt or safetensors") from exc


def _write_tar(cache: Cache, path: str, report: ExportReport, bar: Progress) -> None:
    if os.path.lexists(path):
        raise FileExistsError(f"{path} exists; choose another folder")

    def parts() -> Iterator[bytes]:
        for number, key in enumerate(cache.keys()):
            files = {"pth": _encode(realize(cache[number]), "pt", report)["pt"]}
            for suffix, content in {**_members(cache, number), **files}.items():
                info = tarfile.TarInfo(f"{key}.{suffix}")
                info.size, info.mode = len(content), 0o644
                yield info.tobuf(tarfile.PAX_FORMAT)
                yield content
                yield bytes(-len(content) % tarfile.BLOCKSIZE)
            report.num_written += 1
            bar.show(number + 1)
        yield bytes(2 * tarfile.BLOCKSIZE)

    write_atomically(path, parts())
