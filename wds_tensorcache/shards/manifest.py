"""The manifest of a folder of shards, `manifest.json`. Each change writes the whole file."""

from __future__ import annotations

import errno
import json
import os
import re
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from shlex import quote
from typing import TYPE_CHECKING, Any

from wds_tensorcache.codec.header import parse_json
from wds_tensorcache.errors import FormatError, Kind, MissingShardError, list_names
from wds_tensorcache.storage.files import ShardFile
from wds_tensorcache.storage.system import MAX_WHOLE_NBYTES
from wds_tensorcache.storage.urls import is_url, is_web, join_url, keep_secrets, shown

if TYPE_CHECKING:
    from wds_tensorcache.shards.index import ShardIndex
    from wds_tensorcache.storage.folder import Folder

MANIFEST = "manifest.json"
_KIND = "wids-shard-index-v1"
_WIDS_VERSION = 1
_OURS, _OUR_VERSION = "tensorcache", 1
_NO_NAME = frozenset({errno.ENOTDIR, errno.ENAMETOOLONG, errno.ELOOP, errno.EINVAL, errno.EILSEQ})
_NO_PATH = re.compile("[\0\ud800-\udc7f\udd00-\udfff]")  # no file name contains these, even with surrogateescape
_DIGEST = re.compile("[0-9a-f]{16}").fullmatch
_PLAIN = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]*(?:/[A-Za-z0-9_-][A-Za-z0-9_.-]*)*\Z").match
_COMMAND = re.compile(r"(?i:pipe|file|data):")
_MIN_VALUE_NBYTES, _NUM_SHORT = 6, 1 << 20


@dataclass(frozen=True, slots=True)
class ShardEntry:
    """The entry of one shard in a manifest. Unknown fields are None."""

    url: str  # relative to the manifest's folder
    num_samples: int  # including samples without a cache
    nbytes: int  # length of the whole file
    digest: str | None = None  # of the index, as `stored_digest` returns it


@dataclass(frozen=True, slots=True)
class FoundShard:
    """A shard from the caller, a folder or a manifest. Fields that do not apply are None."""

    path: str  # path or url
    entry: ShardEntry | None = None  # in the manifest
    manifest: str | None = None  # path or url of the manifest, for messages
    status: os.stat_result | None = None  # of a local file that a manifest lists
    same_as: str | None = None  # the url of an earlier entry for the same file, which is an error
    error: FormatError | OSError | None = None  # the reason why a listed shard cannot be read
    caches: Mapping[str, int] | None = None  # in the manifest: numbers of samples by name of the cache
    fingerprint: Mapping[str, Any] | None = None  # in the manifest, or of a build


def read_manifest(path: str) -> tuple[list[ShardEntry], dict[str, Any]]:
    """Read a manifest's shards, in order, and its key `tensorcache` (default `{}`).

    The manifest is at a path or url. Manifests from the wids tool are also accepted, except if they use `base` or `datasets`.

    Raises:
        FormatError: The file is not a valid manifest, uses `base` or `datasets`, or lists a file outside its folder.
        OSError: The file cannot be read, or the request failed.
    """
    try:
        if is_url(path):
            from wds_tensorcache.storage.remote.remote_file import read_whole

            return _parse_manifest(read_whole(path))
        file = ShardFile(path)
        if file.nbytes > MAX_WHOLE_NBYTES:
            raise FormatError(f"has {file.nbytes:,} bytes, more than the limit for a manifest, {MAX_WHOLE_NBYTES:,}")
        return _parse_manifest(file.read(0, file.nbytes))
    except FormatError as exc:
        raise exc.at(path) from exc


def locate_shards(
    path: str, entries: Iterable[ShardEntry], extra: Mapping[str, Any] | None = None
) -> Iterator[FoundShard]:
    """Yield a `FoundShard` for each entry of a manifest, in order.

    Urls are relative to the folder of the manifest, which is at `path`. The caches and fingerprints in `extra`, the value of
    the manifest's key `tensorcache`, are added. Errors are stored in `FoundShard.error`, not raised.
    """
    firsts: dict[Any, str] = {}  # the first url of each file
    is_remote = is_url(path)
    manifest = path if is_remote else os.path.abspath(path)
    folder = keep_secrets(path, path.rpartition("/")[0]) if is_remote else os.path.dirname(path)
    for entry in entries:
        shard, status, same_as = os.path.join(folder, entry.url), None, None
        identity: Any = None
        details: tuple[Any, Any] = None, None
        error: FormatError | OSError | None = None
        try:
            if is_remote:
                identity = shard = shard_url(folder, entry.url)
            else:
                status = _status(entry, shard)
                # `./a.tar` and links may all name the same file
                identity = (status.st_dev, status.st_ino) if status.st_ino else os.path.realpath(shard)
            first = firsts.setdefault(identity, entry.url)
            if first != entry.url:
                same_as = first
                raise FormatError(
                    f"{entry.url!r:.200} is the same file as {first!r:.200}; list it once", kind="duplicate"
                )
            if extra is not None:
                details = _parse_details(entry, extra, shard)
        except FormatError as exc:
            error = exc.at(path)
        except FileNotFoundError:
            remedy = (
                "copy it again, or write the remaining shards into another folder with `tensorcache repair` (tc.repair); "
                f"if it was renamed or deleted on purpose, run `tensorcache index {folder or os.curdir}`"
            )
            error = MissingShardError(f"{entry.url!r:.200} is listed but does not exist; {remedy}").at(path)
        except OSError as exc:
            error = exc
        yield FoundShard(shard, entry, manifest, status, same_as, error, *details)


def shard_url(folder: str, listed: str) -> str:
    """Return the url of the shard that a manifest lists as `listed`.

    `folder` is the url of the manifest's folder. `listed` must be a path relative to the folder, not percent-encoded, or the
    url of an object in the folder. Any other value raises FormatError.
    """
    # Hazard: a hostile manifest could make readers send requests, perhaps with credentials, to another host or folder, run a
    # command, or open local files.
    if _PLAIN(listed):  # most shards of large manifests
        return keep_secrets(folder, f"{folder}/{listed}")
    name = listed.removeprefix(f"{folder}/") if "://" in listed else listed
    parts = [part for part in name.split("/") if part != "."]
    is_encoded = name != listed and is_web(folder) and re.search("[?#]|%2[eEfF]|%5[cC]", name)
    if "://" in name or _COMMAND.match(name) or "\\" in name or not (parts and all(parts)) or is_encoded:
        problem = f"lists {shown(listed)!r:.200}, expected the path of a shard in the folder of the manifest"
        remedy = "pass the urls of other shards to tc.open, in a list"
        raise FormatError(f"{problem}: relative, with '/' between names and without '..'; {remedy}", kind="index")
    path = "/".join(parts)
    return keep_secrets(folder, f"{folder}/{path}") if name != listed else join_url(folder, path)


def _status(entry: ShardEntry, shard: str) -> os.stat_result:
    if "://" in entry.url:
        problem = f"{shown(entry.url)!r:.200} is a url in a local manifest; pass the urls to tc.open, in a list"
        raise FormatError(problem, kind="index")
    try:
        status = os.stat(shard)
    except (OSError, ValueError) as exc:
        if isinstance(exc, OSError) and exc.errno not in _NO_NAME:
            raise
        problem = f"{entry.url!r:.200} is not a possible path: {getattr(exc, 'strerror', exc)}"
        raise FormatError(problem, kind="index") from exc
    if not stat.S_ISREG(status.st_mode):
        raise FormatError(f"{entry.url!r:.200} is a folder, pipe or device, expected a file", kind="index")
    return status


def _parse_details(entry: ShardEntry, extra: Mapping[str, Any], path: str) -> tuple[Any, Any]:
    """Return a shard's caches and fingerprint in the manifest, None if missing."""
    caches, fingerprints = extra.get("caches", {}), extra.get("fingerprints", {})
    counts = caches.get(entry.url) if isinstance(caches, dict) else None
    if counts is not None and not are_counts(counts):
        problem = f"{entry.url} has caches {counts!r:.100}, expected numbers of samples by name"
        raise FormatError(f"{problem}, each at least 1; run `tensorcache index {quote(path)}` (tc.write_index)")
    fingerprint = fingerprints.get(entry.url) if isinstance(fingerprints, dict) else None
    if fingerprint is not None and not isinstance(fingerprint, dict):
        raise FormatError(f"{entry.url} has a fingerprint {fingerprint!r:.100}, expected a dict")
    return counts, fingerprint


def stored_digest(path: str) -> str | None:
    """Return the index digest of a shard, or else of its sidecar."""
    from wds_tensorcache.shards.footer import read_trailer
    from wds_tensorcache.shards.load_index import parse_both

    file = ShardFile(path)
    trailers = parse_both(file, lambda part: read_trailer(part.read, part.nbytes, file.nbytes))
    return next((trailer.digest for trailer in trailers), None)


def check_listed(
    path: str, entry: ShardEntry, manifest: str | None, *, num_samples: int | None = None, digest: str | None = None
) -> None:
    """Raise FormatError unless a shard matches its entry in a manifest.

    `num_samples` of the shard and `digest` of its index are None if they are unknown.
    """
    if num_samples not in (None, entry.num_samples):
        raise other_count(path, f"{num_samples} samples in all", entry.num_samples)
    if None not in (entry.digest, digest) and entry.digest != digest:
        problem = f"its index has the digest {digest}, but {manifest} lists {entry.digest}"
        command = f"`tensorcache index {quote(os.path.dirname(path) or os.curdir)}`"
        remedy = "upload its own manifest again" if is_url(path) else f"list its folder anew with {command}"
        remedy = f"copy the right shard again, or, if this is the right one and another tool has indexed it, {remedy}"
        problem = f"another shard has replaced the one that was listed: {problem}; {remedy}"
        raise FormatError(problem, kind="index").at(path)


def other_count(path: str, counted: str, listed: int | None) -> FormatError:
    """Return the error for a sample count that differs from the manifest. `counted` describes the shard."""
    remedy = f"`tensorcache verify` (tc.verify){' of a local copy' * is_url(path)} reports whether the shard is damaged"
    remedy += f"; if it is not, run `tensorcache index {quote(path)}` (tc.write_index)"
    return FormatError(f"{counted}, but the manifest lists {listed}: one of the two is wrong; {remedy}").at(path)


def are_counts(counts: Any) -> bool:
    """Return whether a manifest's value maps names to sample counts above 0."""
    return isinstance(counts, dict) and all(type(count) is int and 0 < count < 1 << 63 for count in counts.values())


def _parse_manifest(content: bytes) -> tuple[list[ShardEntry], dict[str, Any]]:
    # Small values take up to 30 times their bytes as objects. The entry of a shard has 8 bytes or more for each value.
    num_values = sum(map(content.count, (b"{", b"[", b",", b":")))
    if num_values > _NUM_SHORT + len(content) // _MIN_VALUE_NBYTES:
        problem = f"{num_values:,} keys, values and containers in {len(content):,} bytes, more than the limit"
        raise FormatError(f"{problem}: {_NUM_SHORT:,}, and one for each {_MIN_VALUE_NBYTES} bytes", kind="index")
    try:
        document = parse_json(content)
    except (ValueError, RecursionError) as exc:
        remedy = "copy it again, or move it out of the folder, and then run `tensorcache index` on the folder"
        raise FormatError(f"expected a manifest, but the file is not JSON: {exc}; {remedy}", kind="index") from exc
    keys = list(document) if isinstance(document, dict) else []
    if not {"shardlist", "wids_version", "__kind__", _OURS}.intersection(keys):
        content_shown = f"keys {list_names(keys)}" if isinstance(document, dict) else f"a {type(document).__name__}"
        problem = f"not a manifest of shards, but other JSON ({content_shown}), perhaps of another program"
        remedy = "move it out of the folder, or pass the shards themselves, for example by a pattern '…/*.tar'"
        raise FormatError(f"{problem}; {remedy}", kind="index")
    kind, version = document.get("__kind__", _KIND), document.get("wids_version")
    _expect(kind == _KIND, "__kind__", kind, repr(_KIND))
    _expect(type(version) is int and version == _WIDS_VERSION, "wids_version", version, str(_WIDS_VERSION))
    for key in ("base", "datasets"):
        problem = "no value: list all shards in shardlist, with urls relative to the manifest"
        _expect(not document.get(key), key, document.get(key), problem, kind="format")
    shardlist: Any = document.get("shardlist")
    extra: Any = document.get(_OURS, {})
    _expect(isinstance(shardlist, list), "shardlist", shardlist, "a list")
    _expect(isinstance(extra, dict), _OURS, extra, "an object")
    version = extra.get("version", _OUR_VERSION)
    _expect(type(version) is int and version == _OUR_VERSION, f"{_OURS}.version", version, str(_OUR_VERSION))
    entries: dict[str, ShardEntry] = {}
    for position, shard in enumerate(shardlist):
        entry = _parse_shard(shard, f"shardlist[{position}]")
        if entries.setdefault(entry.url, entry) is not entry:
            raise FormatError(f"shardlist[{position}]: url {shown(entry.url)!r:.100} occurs twice", kind="duplicate")
    return list(entries.values()), extra


def _parse_shard(shard: Any, where: str) -> ShardEntry:
    if not isinstance(shard, dict):
        raise _wrong(where, shard, "an object")
    url, digest = shard.get("url"), shard.get("index")
    if not isinstance(url, str) or not url or _NO_PATH.search(url):
        raise _wrong(f"{where}: url", url, "a path or a url")
    _check_inside(url)
    for key in ("nsamples", "filesize"):
        if type(shard.get(key)) is not int or not 0 <= shard[key] < 1 << 63:
            raise _wrong(f"{where}: {key}", shard.get(key), "a non-negative integer below 2^63")
    if digest is not None and not (isinstance(digest, str) and _DIGEST(digest)):
        raise _wrong(f"{where}: index", digest, "16 hexadecimal digits")
    return ShardEntry(url, shard["nsamples"], shard["filesize"], digest)


def _check_inside(url: str) -> None:
    # Hazard: a downloaded manifest could make a reader or a tool read private files.
    if not _PLAIN(url) and (os.path.isabs(url) or ".." in re.split(r"[/\\]", url)):
        remedy = "a manifest lists only files in its folder; to read another shard, pass its own path to tc.open"
        raise FormatError(f"lists {shown(url)!r:.200}, which is outside the manifest's folder; {remedy}", kind="index")


def _expect(is_good: bool, key: str, value: object, expected: str, kind: Kind = "index") -> None:
    if not is_good:
        raise _wrong(key, value, expected, kind)


def _wrong(key: str, value: object, expected: str, kind: Kind = "index") -> FormatError:
    # the repr of a deeply nested container exceeds the interpreter's recursion limit
    text = f"a {type(value).__name__}" if isinstance(value, (list, dict)) else f"{value!r:.100}"
    return FormatError(f"{key} is {text}, expected {expected}", kind=kind)


@dataclass(slots=True)
class Manifest:
    """The content of a manifest: shards, caches and fingerprints by url."""

    entries: dict[str, ShardEntry] = field(default_factory=dict)
    caches: dict[str, dict[str, int]] = field(default_factory=dict)  # numbers of samples by name of the cache
    fingerprints: dict[str, Any] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)
    _spelled: dict[str, str] = field(init=False)  # maps `a.tar` to its url if that is `./a.tar`

    def __post_init__(self) -> None:
        plain = {os.path.normpath(url): url for url in self.entries}
        self._spelled = {name: url for name, url in plain.items() if name != url and os.path.basename(name) == name}

    @classmethod
    def of(cls, folder: Folder) -> Manifest:
        """Read the manifest of a folder, or return an empty manifest. Raise FormatError if it is malformed."""
        return cls.parse(folder.read(MANIFEST), shown(folder.locate(MANIFEST)))

    @classmethod
    def parse(cls, content: bytes | None, path: str) -> Manifest:
        """Parse the manifest at `path`. `content` is None for a missing file. Raise FormatError if it is malformed."""
        try:
            entries, extra = ([], {}) if content is None else _parse_manifest(content)
        except FormatError as exc:
            raise exc.at(path) from exc
        caches, fingerprints = extra.pop("caches", {}), extra.pop("fingerprints", {})
        if not isinstance(caches, dict) or not isinstance(fingerprints, dict):
            raise FormatError(f"{path}: caches and fingerprints must both be objects")
        return cls({entry.url: entry for entry in entries}, caches, fingerprints, extra)

    def fingerprint(self, name: str) -> Any:
        """Return the fingerprint of the shard with this file name, or None."""
        return self.fingerprints.get(self._spelled.get(name, name))

    def add(self, entry: ShardEntry, index: ShardIndex) -> None:
        self.remove(entry.url)
        self.entries[entry.url] = entry
        self.caches[entry.url] = {name: len(columns) for name, columns in index.caches.items() if len(columns)}
        if index.fingerprint is not None:
            self.fingerprints[entry.url] = dict(index.fingerprint)

    def remove(self, *urls: str) -> None:
        """Remove the shards with these urls, if the manifest lists them."""
        for url in {*urls, *(self._spelled.pop(url, url) for url in urls)}:
            for table in (self.entries, self.caches, self.fingerprints):
                table.pop(url, None)

    def build(self) -> bytes:
        """Return the manifest as bytes. Readers number samples in the order of `entries`."""
        ours: dict[str, Any] = {"version": _OUR_VERSION, "caches": dict(sorted(self.caches.items()))}
        if self.fingerprints:
            ours["fingerprints"] = dict(sorted(self.fingerprints.items()))
        listed = [
            {"url": s.url, "nsamples": s.num_samples, "filesize": s.nbytes} | ({"index": s.digest} if s.digest else {})
            for s in self.entries.values()
        ]
        head = f'{{\n"__kind__": "{_KIND}",\n"wids_version": {_WIDS_VERSION},\n"shardlist": [\n'
        end = f'\n],\n"{_OURS}": {json.dumps({**self.extra, **ours}, allow_nan=False)}\n}}\n'
        return (head + ",\n".join(map(json.dumps, listed)) + end).encode("ascii")


def change_manifest(folder: Folder, change: Callable[[Manifest], None]) -> None:
    """Change the manifest of a folder, and sort its entries by url.

    In an object store, `change` is called again if another process has changed the manifest at the same time. If the manifest
    is damaged (FormatError), or `change` raises an error, the manifest is not written.
    """

    def apply(content: bytes | None) -> bytes:
        manifest = Manifest.parse(content, shown(folder.locate(MANIFEST)))
        change(manifest)
        manifest.entries = dict(sorted(manifest.entries.items()))
        return manifest.build()

    folder.change(MANIFEST, apply)


def entry_of(path: str, index: ShardIndex, url: str | None = None) -> ShardEntry:
    """Return the entry of a local shard. By default, `url` is the name of the file."""
    digest = stored_digest(path)
    # A damaged footer may end with another digest than the sidecar that readers use instead.
    is_sure = index.digest in (None, digest)
    url = url or os.path.basename(path)
    return ShardEntry(url, len(index.keys), os.path.getsize(path), digest if is_sure else None)
