"""The files beside shards: `NAME.idx` as DALI reads it, `manifest.json` as wids reads it, each replaced as a whole."""

from __future__ import annotations

import errno
import json
import os
import re
import stat
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from wds_tensorcache.errors import FormatError, KeyRuleError, MissingShardError
from wds_tensorcache.storage.atomic import write_atomically
from wds_tensorcache.storage.files import ShardFile

__all__ = [
    "MANIFEST",
    "Located",
    "ShardEntry",
    "build_idx",
    "dali_index_path",
    "locate_shards",
    "own_file",
    "read_manifest",
    "write_idx",
    "write_manifest",
]

MANIFEST = "manifest.json"
_KIND = "wids-shard-index-v1"
_WIDS_VERSION = 1
_CHUNK_NBYTES = 1 << 22
_OURS = "tensorcache"
_NO_NAME = frozenset({errno.ENOTDIR, errno.ENAMETOOLONG, errno.ELOOP, errno.EINVAL, errno.EILSEQ})
_NO_PATH = re.compile("[\0\ud800-\udc7f\udd00-\udfff]")  # what no file name holds, even with surrogateescape


@dataclass(frozen=True, slots=True)
class ShardEntry:
    """What a manifest says of one shard."""

    url: str  # relative ones are relative to the manifest's folder
    num_samples: int
    nbytes: int  # of the whole file


@dataclass(frozen=True, slots=True)
class Located:
    """A shard of a manifest, found on disk or not."""

    entry: ShardEntry
    path: str
    nbytes: int  # of the file; 0 if there is an error
    same_as: str | None  # the url of an earlier entry that is the same file
    error: FormatError | OSError | None  # why it cannot be read


def dali_index_path(path: str) -> str:
    """Return where DALI's tools put the index of the shard at `path`."""
    return os.path.splitext(path)[0] + ".idx"


def write_idx(path: str, samples: Iterable[Sequence[tuple[str, int, int, str]]], *, fsync: bool = True) -> None:
    """Write DALI's index of one shard; DALI finds it by nothing but its `index_paths`.

    Args:
        path: Of the index.
        samples: As of `build_idx`.
        fsync: Wait for the disk.

    Raises:
        KeyRuleError: As `build_idx`.
    """
    write_atomically(path, [build_idx(samples)], fsync)


def build_idx(samples: Iterable[Sequence[tuple[str, int, int, str]]]) -> bytes:
    """Return DALI's index of one shard, version 1.2: the bytes that DALI's own `wds2idx` writes.

    Args:
        samples: For each, in the order of the shard, its members: (extension, offset of the content in the tar in bytes,
            length in bytes, member name).

    Raises:
        KeyRuleError: A name or an extension is empty or has white space, which separates fields in this format; or a sample
            has no members.
    """
    lines: list[bytes] = []
    for sample in samples:
        line = " ".join([f"{suffix} {begin} {nbytes} {name}" for suffix, begin, nbytes, name in sample])
        encoded = line.encode("utf-8", "surrogateescape")
        if not sample or len(encoded.split()) != 4 * len(sample):
            raise KeyRuleError(
                f"sample {len(lines)} with the members {[name for *_, name in sample]!r:.200}: DALI's index cannot hold it; "
                f"expected at least one member, and neither white space nor empty extensions"
            )
        lines.append(encoded)
    return b"".join([b"v1.2 %d\n" % len(lines), *[line + b"\n" for line in lines]])


def write_manifest(path: str, shards: Sequence[ShardEntry], extra: dict[str, Any], *, fsync: bool = True) -> None:
    """Write a manifest, one line per shard.

    Args:
        path: Of the manifest.
        shards: In the order in which readers number samples.
        extra: Goes under the key `tensorcache`, which wids ignores; what JSON can hold.
        fsync: Wait for the disk.

    Raises:
        TypeError, ValueError: `extra` is not what JSON can hold. Nothing is written.
    """
    entries = [json.dumps({"url": s.url, "nsamples": s.num_samples, "filesize": s.nbytes}) for s in shards]
    text = (
        f'{{\n"__kind__": "{_KIND}",\n"wids_version": {_WIDS_VERSION},\n"shardlist": [\n'
        + ",\n".join(entries)
        + f'\n],\n"{_OURS}": {json.dumps(extra, allow_nan=False)}\n}}\n'
    )
    write_atomically(path, [text.encode("ascii")], fsync)


def read_manifest(path: str) -> tuple[list[ShardEntry], dict[str, Any]]:
    """Return the shards of a manifest, in its order, and what is under its key `tensorcache`, if anything.

    Manifests by wids's own tool are read, too, except those that resolve urls by `base` or refer to other `datasets`.

    Raises:
        FormatError: The file is no such manifest; the message names it and says what is wrong.
        OSError: It cannot be read.
    """
    file = ShardFile(path)
    content = file.read(0, file.nbytes)
    try:
        return _parse_manifest(content)
    except FormatError as exc:
        raise exc.at(path) from exc


def locate_shards(path: str, entries: Iterable[ShardEntry]) -> Iterator[Located]:
    """Yield where each shard of a manifest is.

    Args:
        path: Path of the manifest.
        entries: Entries of the manifest, in its order.
    """
    urls: dict[Any, str] = {}  # by file
    for entry in entries:
        shard, same_as = os.path.join(os.path.dirname(path), entry.url), None
        status: os.stat_result | None = None
        error: FormatError | OSError | None = None
        try:
            status = _status(entry, shard)
        except FormatError as exc:
            error = exc.at(path)
        except FileNotFoundError:
            remedy = "copy it again, or let tc.repair write what is left into another folder"
            error = MissingShardError(f"{entry.url!r:.200} is listed, and not there: {remedy}").at(path)
        except OSError as exc:
            error = exc
        else:
            # `./a.tar`, links and absolute paths are other spellings of one file
            identity = (status.st_dev, status.st_ino) if status.st_ino else os.path.realpath(shard)
            same_as = urls.setdefault(identity, entry.url)
        if same_as == entry.url:
            same_as = None
        if same_as is not None:
            error = FormatError(
                f"{path}: {entry.url!r:.200} is the same file as {same_as!r:.200}, and would come twice; list it once"
            )
        yield Located(entry, shard, 0 if status is None else status.st_size, same_as, error)


def _status(entry: ShardEntry, shard: str) -> os.stat_result:
    if "://" in entry.url:
        raise FormatError(
            f"{entry.url:.200} is not a local path; stream it with wds.DataPipeline and tc.decode", kind="index"
        )
    try:
        status = os.stat(shard)
    except (OSError, ValueError) as exc:
        if isinstance(exc, OSError) and exc.errno not in _NO_NAME:
            raise
        raise FormatError(
            f"no file can be called {entry.url!r:.200}: {getattr(exc, 'strerror', exc)}", kind="index"
        ) from exc
    if not stat.S_ISREG(status.st_mode):
        raise FormatError(f"{entry.url!r:.200} is a folder, pipe or device, expected a file", kind="index")
    return status


def _parse_manifest(content: bytes) -> tuple[list[ShardEntry], dict[str, Any]]:
    try:
        document = json.loads(content.decode("utf-8"))
    except (ValueError, RecursionError) as exc:
        raise FormatError(f"no manifest, since it is not JSON: {exc}", kind="index") from exc
    if not isinstance(document, dict):
        raise FormatError(f"no manifest: expected a JSON object, got {_show(document)}", kind="index")
    kind, version = document.get("__kind__", _KIND), document.get("wids_version")
    if kind != _KIND:
        raise FormatError(f"__kind__ is {_show(kind)}, expected {_KIND!r}", kind="index")
    if type(version) is not int or version != _WIDS_VERSION:
        raise FormatError(f"wids_version is {_show(version)}, expected {_WIDS_VERSION}", kind="index")
    for key in ("base", "datasets"):
        if document.get(key):
            raise FormatError(
                f"{key} is {_show(document[key])}, expected urls of shards only, relative to the manifest"
            )
    shardlist, extra = document.get("shardlist"), document.get(_OURS, {})
    if not isinstance(shardlist, list):
        raise FormatError(f"shardlist is {_show(shardlist)}, expected a list", kind="index")
    if not isinstance(extra, dict):
        raise FormatError(f"{_OURS} is {_show(extra)}, expected an object", kind="index")
    entries: dict[str, ShardEntry] = {}
    for position, shard in enumerate(shardlist):
        entry = _parse_shard(shard, f"shardlist[{position}]")
        if entries.setdefault(entry.url, entry) is not entry:
            raise FormatError(f"shardlist[{position}]: url {entry.url!r:.100} is there twice", kind="duplicate")
    return list(entries.values()), extra


def _parse_shard(shard: object, where: str) -> ShardEntry:
    if not isinstance(shard, dict):
        raise FormatError(f"{where} is {_show(shard)}, expected an object", kind="index")
    url = shard.get("url")
    if not isinstance(url, str) or not url or _NO_PATH.search(url):
        raise FormatError(f"{where}: url is {_show(url)}, expected a path or a url", kind="index")
    return ShardEntry(url, _parse_count(shard, "nsamples", where), _parse_count(shard, "filesize", where))


def _parse_count(shard: dict[str, Any], key: str, where: str) -> int:
    value = shard.get(key)
    if type(value) is not int or not 0 <= value < 1 << 63:
        raise FormatError(f"{where}: {key} is {_show(value)}, expected a number that is not negative", kind="index")
    return value


def _show(value: object) -> str:
    """Return a scalar's repr, a container's type: the repr of a deep one exceeds the interpreter's recursion."""
    return f"a {type(value).__name__}" if isinstance(value, (list, dict)) else f"{value!r:.100}"


def own_file(file: ShardFile) -> ShardFile:
    """Return the file, or a copy in its place if it has other names: versions of a cache share shards by hard links.

    Raises:
        FormatError: Another file has its name since it was opened.
    """
    if os.fstat(file.fd).st_nlink < 2:
        return file
    parts = (file.read(at, min(at + _CHUNK_NBYTES, file.nbytes)) for at in range(0, file.nbytes, _CHUNK_NBYTES))
    if ShardFile(file.path).identity != file.identity:
        raise FormatError("another file has this name since it was opened: try again").at(file.path)
    write_atomically(os.path.realpath(file.path), parts)
    return ShardFile(file.path)
