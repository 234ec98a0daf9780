"""Exports of caches: a file for each sample, or a WebDataset tar. Other programs read them without this package."""

from __future__ import annotations

import hashlib
import io
import json
import os
import tarfile
import unicodedata
import zipfile
from collections.abc import Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from itertools import chain, count, islice
from typing import Any

import numpy as np
import safetensors.torch
import torch

from wds_tensorcache.codec.dtypes import TORCH_TRUE
from wds_tensorcache.codec.reference import RESERVED
from wds_tensorcache.codec.tree import SEQUENCES, realize, rebuild, repeats_much
from wds_tensorcache.errors import EncodeError, InvalidKeyError
from wds_tensorcache.progress import Progress, ProgressOption
from wds_tensorcache.reading.cache import Cache, TensorCache
from wds_tensorcache.reading.description import value_text
from wds_tensorcache.reading.join import JoinedCache
from wds_tensorcache.shards.names import safe_key
from wds_tensorcache.storage.atomic import find_temporary, write_atomically
from wds_tensorcache.storage.system import boot_id
from wds_tensorcache.writing.new_folder import check_new, new_folder

KINDS = ("pt", "npz", "safetensors", "webdataset")
METADATA = "metadata.json"  # suffix of the member with the metadata of a `.safetensors` file
_TAR = "samples.tar"
_MAX_PART_NBYTES, _MAX_PATH_NBYTES = 200, 1000  # file systems allow 255 for a part, with suffix and temporary name
_REFUSED = frozenset('\\:*?"<>|')  # by other systems
_MAX_VALUES = 1 << 16  # in an npz or safetensors file: a small sample may contain one list any number of times
_MAX_NAME = 10_000


@dataclass(slots=True)
class ExportReport:
    """The counts of an export.

    Attributes:
        num_written: Number of samples that this call has written.
        num_present: Number of samples that an interrupted call had written.
        renamed: File names by key, for samples whose files could not have the original name.
        widened: Dtypes in the files by tensor name, for tensors with a dtype that the files cannot hold. No number changes.
            As `as_text`, it lists only samples that this call has written.
        as_text: Types by name, for values that JSON cannot hold, such as sets and NaN. The JSON has a text in their place,
            which ends after about 200 characters.
        num_without: Number of samples in the shards without the exported cache, for example samples with only a picture. A view
            counts all its shards; a joined or shared cache has 0.
        other_caches: Names of other caches in the shards, which are not exported; empty for a joined or shared cache.
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
    cache: Cache, out: str | os.PathLike[str], kind: str, *, progress: ProgressOption = None
) -> ExportReport:
    """Write each sample of a cache into a file `NAME.KIND`. Its other members are in `NAME.EXTENSION`.

    `NAME` is the original name of the sample (see `tc.original_name`). If this is not safe as a file's name, or another file
    has it, `NAME` is the key, or made from the key. The report lists these samples in `renamed`. No file is ever written
    outside `out`.

    - `"pt"`: any nested sample, by `torch.save`. To load a sample with numpy arrays, `torch.load` needs `weights_only=False`.
    - `"npz"` and `"safetensors"`: the tensors, named by the keys on their paths: `text.states`. Other values are in
      `NAME.json`, with names of the same form, or in `NAME.values.json` if samples have members with the suffix `json`. numpy
      has no bfloat16, float8 and complex32: such tensors become float32, or complex64, with the same numbers.
    - `"webdataset"`: one tar `samples.tar`, in which `KEY.pth` is the nested sample.

    The folder appears when it is complete. If an export was interrupted or killed, repeat the call to continue the export. A
    tar begins again, and so does an export of a `SharedDataset`, and every export after a reboot.

    Args:
        cache: Cache, or a view of a cache.
        out: Local folder, which is created. If it exists, it must be empty.
        kind: `"pt"`, `"npz"`, `"safetensors"` or `"webdataset"`.
        progress: As for `tc.build`.

    Returns:
        The counts, and the names and values that had to change.

    Raises:
        ValueError: `kind` is unknown, or `out` is a url or an empty string.
        TypeError: `cache` is not a cache, for example a path.
        FileExistsError: The folder is not empty, or another process is writing it. Or `out` is a file, the current folder or a
            mount point.
        EncodeError: The kind of file cannot hold a value or a member; the message names it. Or a key occurs twice
            (`kind="webdataset"`).
        InvalidKeyError: A key is not a safe path inside a tar (`kind="webdataset"`).
        FormatError: A shard is damaged; or `tc.open` has warned that the manifest does not list all shards of the folder.
        OSError: A file cannot be read or written.
        ImportError: `progress` is True, and `tqdm` is not installed.
    """
    if kind not in KINDS:
        raise ValueError(f"{kind=!r:.100}, expected one of {', '.join(map(repr, KINDS))}")
    path = check_new(out, "choose another folder")
    if not isinstance(cache, Cache):
        raise TypeError(f"cache={cache!r:.200}, expected a cache: tc.open(…)")
    cache._check_complete()
    export = _Export(cache, kind)
    with (
        new_folder(path, token=_identify(cache, kind)) as folder,
        closing(Progress(progress, len(cache), unit=" samples", smoothing=0)) as bar,
    ):
        export.write(folder, bar)
        os.sync()  # the folder must not get its name before its files are on the disk
    return export.report


def _shards_of(cache: Cache) -> list[Any] | None:
    """Return the identities of a cache's shards; None if it has none."""
    if isinstance(cache, JoinedCache):
        shards = [_shards_of(part) for part in cache._caches]
        return None if None in shards else [cache._names, *shards]
    return [shard.file.identity for shard in cache._store.shards] if isinstance(cache, TensorCache) else None


def _identify(cache: Cache, kind: str) -> str | None:
    """Return a hash that is equal if an export can be resumed."""
    shards = _shards_of(cache)
    # a SharedDataset may load other samples in the next call
    if shards is None:
        return None
    # Hazard: after a power cut, finished files may be empty; after a new boot, an export begins again
    digest = hashlib.sha256(f"{boot_id()} {kind} {json.dumps(cache.fingerprint, sort_keys=True, default=str)}".encode())
    selected = cache.schema
    for i, entry in enumerate(cache._entries()):
        shapes = sorted(item for item in entry.shapes.items() if item[0] in selected)
        sample = [entry.key, shapes, cache._stored_name(i)]
        if isinstance(cache, TensorCache):
            shard, row = cache._store.locate(cache._at(i))
            sample += shard.columns.digest.item(row), shard.columns.skeleton_nbytes.item(row)
        digest.update(repr(sample).encode("utf-8", "surrogatepass"))
    # members outside the cache have no digest
    digest.update(repr(shards).encode("utf-8", "surrogatepass"))
    return digest.hexdigest()[:32]


class _Export:
    def __init__(self, cache: Cache, kind: str) -> None:
        self.report = ExportReport()
        self._cache, self._kind = cache, kind
        self._having = cache._having()
        self._values = "values.json" if "json" in self._having else "json"
        self._own = {"pt": ["pt"], "webdataset": ["pth"]}.get(kind, [self._values, kind])
        self._is_file: dict[str, bool] = {}  # names of files and folders, as file systems compare them
        self._keys = list(cache.keys())
        self._names = [self._name(i, key) for i, key in enumerate(self._keys)]
        if isinstance(cache, TensorCache):
            shards = cache._store.shards
            self.report.num_without = sum(len(shard.index.keys) - len(shard) for shard in shards)
            self.report.other_caches = sorted(
                {name for shard in shards for name in shard.index.caches} - {shards[0].name}
            )

    def write(self, folder: str, bar: Progress) -> None:
        """Write the samples that the folder lacks, or a whole tar."""
        if self._kind == "webdataset":
            path = os.path.join(folder, _TAR)
            try:
                with tarfile.open(path, "w", format=tarfile.PAX_FORMAT) as tar:
                    for i, name in enumerate(self._names):
                        for suffix, content in self._contents(i).items():
                            member = tarfile.TarInfo(f"{name}.{suffix}")
                            member.size = len(content)
                            tar.addfile(member, io.BytesIO(content))
                        bar.show(i + 1)
            except OSError as exc:
                if exc.errno and exc.filename is None:  # as for a full disk
                    exc.filename = path
                raise
            return
        for place, _, _ in os.walk(folder):
            for stray in find_temporary(place, ".+"):  # of a killed export
                os.unlink(stray)
        for i, name in enumerate(self._names):
            path = os.path.join(folder, *name.split("/"))
            if os.path.exists(f"{path}.{self._kind}"):
                self.report.num_present += 1
            else:
                os.makedirs(os.path.dirname(path), exist_ok=True)
                # the file with the tensors comes last: if it exists, all files of the sample exist
                for suffix, content in self._contents(i).items():
                    write_atomically(f"{path}.{suffix}", [content], fsync=False)
            bar.show(i + 1)

    def _members(self, i: int) -> list[str]:
        return [suffix for suffix, rows in self._having.items() if rows[i]]

    def _name(self, i: int, key: str) -> str:
        """Choose and claim an unused name for a sample's files."""
        suffixes = [*self._own, *self._members(i)]
        for suffix in suffixes[len(self._own) :]:
            if suffix in self._own:
                problem = f"has a member {suffix!r}, which has the name of an exported file; use another kind"
                raise EncodeError(problem).at(f"sample {key!r:.100}")
            if not _is_safe(f"x.{suffix}"):
                raise EncodeError(f"sample {key!r:.100}: member {suffix!r:.100} cannot be the end of a file's name")
        if self._kind == "webdataset":
            if not _is_safe(key):
                raise InvalidKeyError(f"sample {key!r:.100}: the key is not a safe relative path; use another kind")
            if not self._claim(key, suffixes):
                raise EncodeError(f"sample {key!r:.100}: the key occurs twice; use another kind")
            return key
        original = self._cache._name_at(i, key)
        first = key if original is None else original
        for name in chain([first, key, safe_key(key)], (f"{safe_key(key)}-{n}" for n in count(2))):
            if _is_safe(name) and self._claim(name, suffixes):
                break
        if name != first:
            self.report.renamed[key] = name
        return name

    def _claim(self, name: str, suffixes: Iterable[str]) -> bool:
        """Claim a sample's file names; return False if one is taken."""
        folded = name if self._kind == "webdataset" else _fold(name)
        files = [f"{folded}.{suffix}" for suffix in suffixes]
        folders = [folded[:end] for end, character in enumerate(folded) if character == "/"]
        if any(file in self._is_file for file in files) or any(map(self._is_file.get, folders)):
            return False
        self._is_file |= dict.fromkeys(folders, False) | dict.fromkeys(files, True)
        return True

    def _contents(self, i: int) -> dict[str, bytes]:
        """Return a sample's files by suffix, with the tensors last."""
        members = {suffix: self._cache.read_members([i], suffix)[0] for suffix in self._members(i)}
        sample = realize(self._cache[i])
        self.report.num_written += 1
        if self._kind in ("pt", "webdataset"):
            stream = io.BytesIO()
            torch.save(sample, stream)
            return {**members, self._own[0]: stream.getvalue()}
        try:
            arrays, values = self._separate(sample)
            if self._kind == "npz":
                content = _write_npz(arrays)
            else:
                metadata = parse_metadata(members.get(METADATA, b""))
                if metadata is not None:
                    del members[METADATA]  # the file itself holds the metadata
                content = safetensors.torch.save(arrays, metadata)
        except EncodeError as exc:
            raise exc.at(f"sample {self._keys[i]!r:.100}") from exc
        except (KeyError, TypeError, ValueError, RuntimeError) as exc:
            problem = f"sample {self._keys[i]!r:.100}: a {self._kind} file cannot hold it: {exc!r:.300}; use pt"
            raise EncodeError(problem) from exc
        if values:
            # lone surrogates, as in names of files that are not UTF-8, become escapes of JSON
            text = json.dumps(values, ensure_ascii=False, indent=1).encode("utf-8", "backslashreplace")
            members[self._values] = text
        return {**members, self._kind: content}

    def _separate(self, sample: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the tensors, and the values for JSON, both by name."""
        arrays: dict[str, Any] = {}
        values: dict[str, Any] = {}
        try:
            leaves = list(islice(_leaves(sample, ""), _MAX_VALUES + 1))
        except RecursionError as exc:
            raise EncodeError("is nested too deeply, or contains itself; use pt") from exc
        if len(leaves) > _MAX_VALUES or any(len(name) > _MAX_NAME for name, _ in leaves):
            problem = f"has more than {_MAX_VALUES:,} values, or a name of more than {_MAX_NAME:,} characters; use pt"
            raise EncodeError(problem)
        if repeats_much([leaf for _, leaf in leaves]):
            raise EncodeError("contains one object too often for JSON; use pt")
        for name, leaf in leaves:
            if name in arrays or name in values:
                raise EncodeError(f"two values would have the name {name!r:.100}; use pt")
            if not isinstance(leaf, (torch.Tensor, np.ndarray)):
                values[name] = self._as_json(name, leaf)
                continue
            if name == RESERVED or not name.isprintable():
                raise EncodeError(f"a tensor has the name {name!r:.100}; use pt")
            arrays[name] = self._as_array(name, leaf) if self._kind == "npz" else _as_tensor(name, leaf)
        return arrays, values

    def _as_array(self, name: str, leaf: Any) -> Any:
        if isinstance(leaf, np.ndarray):
            return leaf
        try:
            return leaf.numpy()
        except TypeError:  # numpy lacks the dtype
            wide = leaf.to(torch.complex64 if leaf.is_complex() else torch.float32)
            self.report.widened[name] = str(wide.dtype).removeprefix("torch.")
            return wide.numpy()

    def _as_json(self, name: str, leaf: Any) -> Any:
        """Return a value that JSON can hold. Its text takes the place of other values, which the report lists."""
        leaf = rebuild(leaf, lambda number: number.item() if number.dtype.kind in "biuf" else number, np.generic)
        try:
            decoded = json.loads(json.dumps(leaf, allow_nan=False))
        except (TypeError, ValueError, RecursionError):
            decoded = None
        if decoded == leaf or (isinstance(leaf, tuple) and decoded == list(leaf)):
            return leaf
        self.report.as_text[name] = type(leaf).__name__
        return value_text(leaf)


def _leaves(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Yield the tensors and other values in containers by name. Empty containers and lists of plain values are values."""
    if isinstance(value, dict) and value:
        items: Iterable[tuple[Any, Any]] = value.items()
    elif isinstance(value, SEQUENCES) and any(
        isinstance(item, (dict, *SEQUENCES, torch.Tensor, np.ndarray)) for item in value
    ):
        items = enumerate(value)
    else:
        yield name or "value", value
        return
    for key, item in items:
        yield from _leaves(item, f"{name}.{key}" if name else str(key))


def _as_tensor(name: str, leaf: Any) -> torch.Tensor:
    tensor = torch.from_numpy(leaf) if isinstance(leaf, np.ndarray) else leaf
    if TORCH_TRUE[tensor.dtype].attribute is not None:  # safetensors saves more dtypes than it loads
        raise ValueError(f"tensor {name!r:.100} is {tensor.dtype}")
    # a copy: a tensor may occur twice, and safetensors refuses tensors that share memory
    return tensor.clone(memory_format=torch.contiguous_format)


def dump_metadata(metadata: dict[str, str]) -> bytes:
    """Return the content of the member for the metadata of a file."""
    return json.dumps(metadata, sort_keys=True, ensure_ascii=False).encode()


def parse_metadata(member: bytes) -> dict[str, str] | None:
    """Return the metadata that `dump_metadata` wrote into a member. Return None for empty metadata, and for other content."""
    try:
        metadata = json.loads(member)
        is_ours = dump_metadata(metadata) == member
    except (ValueError, TypeError, RecursionError):  # also for a surrogate, which a `.safetensors` file cannot hold
        return None
    has_texts = isinstance(metadata, dict) and all(isinstance(text, str) for text in metadata.values())
    return metadata if is_ours and has_texts and metadata else None


def _write_npz(arrays: dict[str, Any]) -> bytes:
    # not `np.savez`, which has a parameter `file`
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        for name, array in arrays.items():
            content = io.BytesIO()
            np.lib.format.write_array(content, array, allow_pickle=False)
            archive.writestr(zipfile.ZipInfo(f"{name}.npy"), content.getvalue())
    return stream.getvalue()


def _is_safe(name: str) -> bool:
    """Return whether a relative path is short, and safe on every system."""
    return (
        all(part.isprintable() and part[:1] not in ("", ".") and _REFUSED.isdisjoint(part) for part in name.split("/"))
        and max(map(len, name.encode().split(b"/"))) <= _MAX_PART_NBYTES
        and len(name.encode()) <= _MAX_PATH_NBYTES
    )


def _fold(name: str) -> str:
    """Return a normal form of a name. Names that some file system treats as equal have the same form."""
    return unicodedata.normalize("NFC", unicodedata.normalize("NFC", name).casefold())
