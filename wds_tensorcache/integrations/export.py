"""Export a cache to files that need no part of this package: one file for each sample, or a WebDataset tar."""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import tarfile
import unicodedata
import zipfile
from collections.abc import Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from itertools import chain, count
from typing import Any

import numpy as np
import safetensors.torch
import torch

from wds_tensorcache.codec.skeleton.tensor_names import RESERVED, component, join_path
from wds_tensorcache.codec.tree import realize
from wds_tensorcache.errors import EncodeError, InvalidKeyError, TensorCacheError
from wds_tensorcache.progress import Progress, ProgressOption
from wds_tensorcache.reading.base_cache import Cache
from wds_tensorcache.shards.names import original_name
from wds_tensorcache.storage.atomic import find_temporary, remove_stray, write_atomically

__all__ = ["KINDS", "ExportReport", "export_cache"]

_TAR = "samples.tar"
KINDS = ("pt", "npz", "safetensors", "webdataset")
_MAX_PART_NBYTES = 200  # of a part of a path; file systems allow 255 bytes, with suffix and temporary name
_MAX_SUFFIX_NBYTES = 30
_MAX_PATH_NBYTES = 1000
_MAX_VALUES = 1 << 20  # of a sample in an npz or safetensors file; a small one may contain one list any number of times
_MAX_NAME = 10_000
# names that Windows reserves, characters that it refuses or that a terminal obeys, hidden names, `.` and `..`
_UNSAFE_PART = re.compile(
    r"(?i)(con|prn|aux|nul|conin\$|conout\$|com[0-9\xb9\xb2\xb3]|lpt[0-9\xb9\xb2\xb3])(\..*)?|.*[ .]|\.+.*|"
    r".*[<>:\"/\\|?*\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff].*",
    re.DOTALL,
)
_FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)


@dataclass(slots=True)
class ExportReport:
    """The counts of an export.

    Attributes:
        num_written: Number of samples that this call has written.
        num_present: Number of samples whose files were there (`resume=True`).
        renamed: Names of the files by key, for samples whose files could not have the original name.
        widened: Dtypes in the files by tensor name, for tensors whose own dtype the files cannot hold; no number changes.
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

    `NAME` is the original name of the sample (see `tc.original_name`). If that is not a safe name of a file on every system, or
    another file has it, it is the key, or a name made from the key; `renamed` lists these samples. No file is ever written
    outside `out`.

    - `"pt"`: any nested sample, by `torch.save`. To load a sample with numpy arrays, `torch.load` needs `weights_only=False`.
    - `"npz"` and `"safetensors"`: the tensors by name. Other values are in `NAME.json`, by the same kind of names, or in
      `NAME.values.json` if samples have members with the suffix `json`. npz has no bfloat16 and float8: these become float32,
      which changes no number. A float8 tensor with a NaN that would change is refused.
    - `"webdataset"`: one tar `samples.tar`, in which `KEY.pth` is the nested sample.

    Args:
        cache: Cache, or a view of one.
        out: Folder, which is made if it does not exist. It must be empty, unless `kind` is `"webdataset"` or `resume` is True.
        kind: `"pt"`, `"npz"`, `"safetensors"` or `"webdataset"`.
        resume: Keep the files that an interrupted call has written; not possible for a tar.
        progress: As for `tc.build`.

    Raises:
        ValueError: `kind` is unknown, or `resume` is True for a tar.
        FileExistsError: The folder is not empty, and `resume` is False; the tar exists; or a link is in the folder's paths.
        EncodeError: The kind of file cannot hold a value; the message names it.
        InvalidKeyError: A key is not a safe path inside a tar (`kind="webdataset"`).
        FormatError: A shard is damaged.
        OSError: A file cannot be read or written.
    """
    if kind not in KINDS:
        raise ValueError(f"{kind!r:.100}, expected one of {', '.join(map(repr, KINDS))}")
    out, report = os.path.realpath(os.fsdecode(out)), ExportReport()
    os.makedirs(out, exist_ok=True)
    with closing(Progress(progress, len(cache), unit=" samples", smoothing=0)) as bar:
        if kind == "webdataset":
            if resume:
                raise ValueError("resume=True: an interrupted tar cannot be continued; export it again")
            _write_tar(cache, os.path.join(out, _TAR), report, bar)
            return report
        if os.listdir(out) and not resume:
            raise FileExistsError(f"{out} is not empty; continue with --resume (resume=True), or choose another folder")
        for folder, *_ in os.walk(out):
            for stray in find_temporary(folder, ".*"):
                remove_stray(stray)
        names, having = _Names(), cache._having()
        of_values = "values.json" if "json" in having else "json"
        own = ["pt"] if kind == "pt" else [of_values, kind]
        for number, key in enumerate(cache.keys()):
            suffixes = [suffix for suffix, rows in having.items() if rows[number]]
            name, is_renamed = names.name_of(key, [*own, *suffixes])
            if is_renamed:
                report.renamed[key] = name
            path = os.path.join(out, *name.split("/"))
            if os.path.lexists(f"{path}.{kind}"):
                report.num_present += 1
            else:
                _make_folder(os.path.dirname(path), out)
                try:
                    members = _read_members(cache, number, suffixes)
                    files = _encode(realize(cache[number]), kind, report, of_values)
                    for suffix in members.keys() & files.keys():
                        raise EncodeError(
                            f"has a member {suffix!r}, which has the name of an exported file; use another kind"
                        )
                except TensorCacheError as exc:
                    raise exc.at(f"sample {key!r:.100}") from exc
                # the sample itself comes last: with it, all files are there
                for suffix, content in {**members, **files}.items():
                    write_atomically(f"{path}.{suffix}", [content], fsync=False)
                report.num_written += 1
            bar.show(number + 1)
    return report


def _make_folder(folder: str, out: str) -> None:
    """Make a folder in `out`. Hazard: a link in an existing folder could lead out of it."""
    os.makedirs(folder, exist_ok=True)
    if os.path.realpath(folder) != folder:
        raise FileExistsError(f"{folder} is or contains a link; export into a new folder, not into {out}")


class _Names:
    """Names of files for the samples of a cache. No two of them are one name for a file system that ignores case."""

    def __init__(self) -> None:
        self._files: set[str] = set()
        self._folders: set[str] = set()

    def name_of(self, key: str, suffixes: Iterable[str]) -> tuple[str, bool]:
        """Return a relative path for the files of a sample, without suffix, and whether it differs from the original name.

        Raises:
            EncodeError: A file with one of the suffixes would not be safe.
        """
        for suffix in suffixes:
            if len(suffix.encode("utf-8", "replace")) > _MAX_SUFFIX_NBYTES or _UNSAFE_PART.fullmatch(f"x.{suffix}"):
                raise EncodeError(f"sample {key!r:.100}: member {suffix!r:.100} cannot be the end of a file's name")
        try:
            original = original_name(key)
        except InvalidKeyError:  # the key has only a hash of the name
            original = key
        safe = (
            key
            if _is_safe(key)
            else "sample-" + hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()[:32]
        )
        for name in chain([original, safe], (f"{safe}-{number}" for number in count(2))):
            if _is_safe(name) and self._claim(name, suffixes):
                return name, name != original
        raise AssertionError("there is always one more number")

    def _claim(self, name: str, suffixes: Iterable[str]) -> bool:
        """Claim the names of a sample's files, unless one of them is in use, also as a folder."""
        files = {_folded(f"{name}.{suffix}") for suffix in suffixes}
        parts = _folded(name).split("/")
        folders = {"/".join(parts[:end]) for end in range(1, len(parts))}
        if files & self._files or files & self._folders or folders & self._files:
            return False
        self._files |= files
        self._folders |= folders
        return True


def _folded(name: str) -> str:
    """Return a form that is equal for two names if some file system treats them as one name."""
    return unicodedata.normalize("NFC", unicodedata.normalize("NFC", name).casefold())


def _is_safe(name: str) -> bool:
    """Return whether a relative path names a file in its folder, on every system."""
    raw = name.encode("utf-8", "surrogatepass")
    parts = raw.split(b"/")
    return (
        len(raw) <= _MAX_PATH_NBYTES
        and all(0 < len(part) <= _MAX_PART_NBYTES for part in parts)
        and not any(map(_UNSAFE_PART.fullmatch, name.split("/")))
    )


def _read_members(cache: Cache, number: int, suffixes: Iterable[str]) -> dict[str, bytes]:
    """Return the other members of a sample by extension."""
    return {suffix: cache.read_members([number], suffix)[0] for suffix in suffixes}


def _encode(sample: Any, kind: str, report: ExportReport, of_values: str = "json") -> dict[str, bytes]:
    """Return the contents of a sample's files by suffix; the one with its tensors is the last.

    `of_values` is the suffix of the file with the values that are not tensors. Widened tensors are added to `report`.
    """
    stream = io.BytesIO()
    if kind == "pt":
        torch.save(sample, stream)
        return {"pt": stream.getvalue()}
    tensors: dict[str, Any] = {}
    values: dict[str, Any] = {}
    for number, (name, leaf) in enumerate(_all_leaves(sample)):
        name = name or "value"
        if number >= _MAX_VALUES or len(name) > _MAX_NAME:
            raise EncodeError(
                f"has more than {_MAX_VALUES:,} values, or a name of more than {_MAX_NAME:,} characters; use pt"
            )
        if name in tensors or name in values:
            raise EncodeError(f"two keys of a dict have the name {name!r:.200} in the file; use pt")
        (tensors if isinstance(leaf, (torch.Tensor, np.ndarray)) else values)[name] = leaf
    files = {of_values: _encode_json(values)} if values else {}
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
        if name == RESERVED:
            raise EncodeError(f"safetensors reserves the name {name!r}; use pt or npz")
    try:
        # a copy: a tensor may occur twice, and safetensors refuses tensors that share memory
        copies = {name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in tensors.items()}
        return {**files, kind: safetensors.torch.save(copies)}
    except (KeyError, ValueError, RuntimeError) as exc:
        raise EncodeError(f"a safetensors file cannot hold the sample: {exc!r:.300}; use pt") from exc


def _all_leaves(sample: Any) -> Iterator[tuple[str, Any]]:
    try:
        yield from _leaves(sample, "")
    except RecursionError as exc:
        raise EncodeError("is nested too deeply, or contains itself; use pt") from exc


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
    try:
        return json.dumps(values, ensure_ascii=False, indent=1).encode("utf-8")
    except UnicodeEncodeError:  # lone surrogates, as in names of files that are not UTF-8
        return json.dumps(values, indent=1).encode("ascii")


def _as_array(name: str, tensor: torch.Tensor | np.ndarray[Any, Any], report: ExportReport) -> np.ndarray[Any, Any]:
    if isinstance(tensor, np.ndarray):
        if tensor.dtype.hasobject:
            raise EncodeError(f"{name!r:.200} is an array of {tensor.dtype}, which numpy would pickle")
        return tensor
    if tensor.dtype == torch.bfloat16:  # the upper half of a float32; also keeps the bits of every NaN
        report.widened[name] = "float32"
        bits = tensor.contiguous().view(torch.int16).numpy().view(np.uint16)
        return np.left_shift(bits, 16, dtype=np.uint32).view(np.float32)
    if tensor.dtype in _FLOAT8:
        wider = tensor.to(torch.float32)
        if not torch.equal(wider.to(tensor.dtype).view(torch.uint8), tensor.view(torch.uint8)):
            raise EncodeError(
                f"{name!r:.200} is {tensor.dtype} with a NaN that float32 does not keep; use pt or safetensors"
            )
        report.widened[name] = "float32"
        tensor = wider
    try:
        return tensor.numpy()
    except (TypeError, RuntimeError) as exc:
        raise EncodeError(f"{name!r:.200} is {tensor.dtype}, which numpy lacks; use pt or safetensors") from exc


def _write_tar(cache: Cache, path: str, report: ExportReport, bar: Progress) -> None:
    if os.path.lexists(path):
        raise FileExistsError(f"{path} exists; choose another folder")
    for stray in find_temporary(os.path.dirname(path), re.escape(_TAR)):
        remove_stray(stray)

    def parts() -> Iterator[bytes]:
        met: set[str] = set()
        having = cache._having()
        for number, key in enumerate(cache.keys()):
            try:
                members = _read_members(cache, number, (suffix for suffix, rows in having.items() if rows[number]))
                if not _is_safe(key):
                    raise InvalidKeyError("the key is not a safe relative path; use another kind")
                if key in met:
                    raise EncodeError("the key occurs twice; use another kind")
                if "pth" in members:
                    raise EncodeError("has a member 'pth', which has the name of an exported file; use another kind")
                members["pth"] = _encode(realize(cache[number]), "pt", report)["pt"]
            except TensorCacheError as exc:
                raise exc.at(f"sample {key!r:.100}") from exc
            met.add(key)
            for suffix, content in members.items():
                info = tarfile.TarInfo(f"{key}.{suffix}")
                info.size, info.mode = len(content), 0o644
                yield info.tobuf(tarfile.PAX_FORMAT)
                yield content
                yield bytes(-len(content) % tarfile.BLOCKSIZE)
            report.num_written += 1
            bar.show(number + 1)
        yield bytes(2 * tarfile.BLOCKSIZE)

    write_atomically(path, parts())
