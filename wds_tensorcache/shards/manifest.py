"""The manifest of a folder of shards, `manifest.json`: read, changed under a lock, and written as a whole."""

from __future__ import annotations

import errno
import json
import os
import re
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from shlex import quote
from typing import Any, NamedTuple

from wds_tensorcache.codec.header import parse_json
from wds_tensorcache.errors import FormatError, Kind, MissingShardError
from wds_tensorcache.shards.footer import read_trailer
from wds_tensorcache.shards.index import ShardIndex
from wds_tensorcache.shards.load_index import parse_both
from wds_tensorcache.storage.atomic import write_atomically
from wds_tensorcache.storage.files import ShardFile
from wds_tensorcache.storage.folder import Folder
from wds_tensorcache.storage.remote.urls import is_url, shown

__all__ = [
    "MANIFEST",
    "MAX_NBYTES",
    "Found",
    "ListedCounts",
    "Located",
    "Manifest",
    "ShardEntry",
    "are_counts",
    "change_manifest",
    "check_inside",
    "check_listed",
    "entry_of",
    "locate_shards",
    "other_count",
    "parse_entry",
    "parse_manifest",
    "read_manifest",
    "stored_digest",
    "write_manifest",
]

MANIFEST = "manifest.json"
MAX_NBYTES = 1 << 28  # lists about two million shards
_KIND = "wids-shard-index-v1"
_WIDS_VERSION = 1
_OURS, _OUR_VERSION = "tensorcache", 1
_NO_NAME = frozenset({errno.ENOTDIR, errno.ENAMETOOLONG, errno.ELOOP, errno.EINVAL, errno.EILSEQ})
_NO_PATH = re.compile("[\0\ud800-\udc7f\udd00-\udfff]")  # no file name contains these, even with surrogateescape
_DIGEST = re.compile("[0-9a-f]{16}").fullmatch
_MIN_VALUE_NBYTES, _NUM_SHORT = 6, 1 << 20


@dataclass(frozen=True, slots=True)
class ShardEntry:
    """One shard in a manifest. `digest` is that of its index, as of `stored_digest`.

    The url is relative to the manifest's folder; `nbytes` is the length of the whole file.
    """

    url: str
    num_samples: int
    nbytes: int
    digest: str | None = None

    def is_listed(self, listed: ShardEntry | None) -> bool:
        """Return whether a manifest has this entry, perhaps with another digest, since earlier writers list none."""
        return listed is not None and replace(listed, digest=self.digest) == self


@dataclass(frozen=True, slots=True)
class Located:
    """A shard that a manifest lists: the path of its file, and the error if the file cannot be read."""

    entry: ShardEntry
    path: str
    nbytes: int  # length of the file; 0 if there is an error
    status: os.stat_result | None  # None if there is an error
    same_as: str | None  # the url of an earlier entry for the same file
    error: FormatError | OSError | None  # why it cannot be read


class ListedCounts(NamedTuple):
    """Numbers in a manifest about a shard: all samples, and those of each cache; path of the manifest; bytes of the shard.

    None if unknown. `nbytes` is set only for remote shards, whose lengths are not known otherwise. `digest` is that of
    the shard's index. `left_out` is a message about shards in the folder of the manifest that it does not list. `status` is
    that of the file of a local shard.
    """

    num_samples: int | None = None
    caches: Mapping[str, int] | None = None
    manifest: str | None = None
    nbytes: int | None = None
    digest: str | None = None
    left_out: str | None = None
    status: os.stat_result | None = None


# path or url of a shard; if a manifest lists it, also its numbers and its fingerprint
Found = tuple[str, "ListedCounts | None", "Mapping[str, Any] | None"]


def write_manifest(path: str, shards: Sequence[ShardEntry], extra: dict[str, Any], *, fsync: bool = True) -> None:
    """Write a manifest, one line per shard.

    Args:
        path: Path of the manifest.
        shards: Shards in the order in which readers number samples.
        extra: Value of the key `tensorcache`, which wids ignores; must be representable in JSON.
        fsync: Wait for the disk.
    """
    write_atomically(path, [_build_manifest(shards, extra)], fsync)


def _build_manifest(shards: Sequence[ShardEntry], extra: dict[str, Any]) -> bytes:
    entries = [
        json.dumps(
            {"url": s.url, "nsamples": s.num_samples, "filesize": s.nbytes}
            | ({} if s.digest is None else {"index": s.digest})
        )
        for s in shards
    ]
    text = (
        f'{{\n"__kind__": "{_KIND}",\n"wids_version": {_WIDS_VERSION},\n"shardlist": [\n'
        + ",\n".join(entries)
        + f'\n],\n"{_OURS}": {json.dumps(extra, allow_nan=False)}\n}}\n'
    )
    return text.encode("ascii")


def read_manifest(path: str) -> tuple[list[ShardEntry], dict[str, Any]]:
    """Return the shards of a manifest, in order, and the value of its key `tensorcache`, which is empty if the key is missing.

    Manifests from wids's own tool are also accepted, except those that use `base` or `datasets`.

    Raises:
        FormatError: The file is not a manifest, uses `base` or `datasets`, or lists a file outside its folder.
        OSError: The file cannot be read.
    """
    file = ShardFile(path)
    try:
        if file.nbytes > MAX_NBYTES:
            raise FormatError(f"has {file.nbytes:,} bytes, more than the limit for a manifest, {MAX_NBYTES:,}")
        return parse_manifest(file.read(0, file.nbytes))
    except FormatError as exc:
        raise exc.at(path) from exc


def locate_shards(path: str, entries: Iterable[ShardEntry]) -> Iterator[Located]:
    """Yield the location of each of `entries`, in order; urls start from the folder of the manifest at `path`."""
    urls: dict[Any, str] = {}  # the first url of each file
    folder = os.path.dirname(path)
    for entry in entries:
        shard, same_as, nbytes, status = os.path.join(folder, entry.url), None, 0, None
        error: FormatError | OSError | None = None
        try:
            status = _status(entry, shard)
            # `./a.tar` and links may all name the same file
            nbytes, identity = status.st_size, (status.st_dev, status.st_ino)
            first = urls.setdefault(identity if status.st_ino else os.path.realpath(shard), entry.url)
            if first != entry.url:
                same_as = first
                what = f"{entry.url!r:.200} is the same file as {first!r:.200}; list it once"
                error = FormatError(what).at(path)
        except FormatError as exc:
            error = exc.at(path)
        except FileNotFoundError:
            remedy = (
                "copy it again, or let `tensorcache repair` (tc.repair) write the remaining shards into another folder"
            )
            error = MissingShardError(f"{entry.url!r:.200} is listed but does not exist; {remedy}").at(path)
        except OSError as exc:
            error = exc
        yield Located(entry, shard, nbytes, status, same_as, error)


def _status(entry: ShardEntry, shard: str) -> os.stat_result:
    if "://" in entry.url:
        what = f"{shown(entry.url)!r:.200} is a url in a local manifest; pass the urls to tc.open, in a list"
        raise FormatError(what, kind="index")
    try:
        status = os.stat(shard)
    except (OSError, ValueError) as exc:
        if isinstance(exc, OSError) and exc.errno not in _NO_NAME:
            raise
        what = f"{entry.url!r:.200} is not a possible path: {getattr(exc, 'strerror', exc)}"
        raise FormatError(what, kind="index") from exc
    if not stat.S_ISREG(status.st_mode):
        raise FormatError(f"{entry.url!r:.200} is a folder, pipe or device, expected a file", kind="index")
    return status


def parse_entry(
    path: str,
    entry: ShardEntry,
    extra: Mapping[str, Any],
    *,
    manifest: str,
    is_remote: bool = False,
    status: os.stat_result | None = None,
) -> Found:
    """Parse the counts and the fingerprint that a manifest lists for the shard at `path`.

    Args:
        entry, extra: The shard's entry, and the value of the key `tensorcache`, as `read_manifest` returns them.
        manifest: Path of the manifest, for messages.
        is_remote: `path` is a url.
        status: Status of the file of a local shard.

    Raises:
        FormatError: The manifest's counts or fingerprint of this shard have a wrong type.
    """
    caches, fingerprints = extra.get("caches", {}), extra.get("fingerprints", {})
    counts = caches.get(entry.url) if isinstance(caches, dict) else None
    if counts is not None and not are_counts(counts):
        what = f"{manifest}: {entry.url} has caches {counts!r:.100}, expected numbers of samples by name"
        raise FormatError(f"{what}, each at least 1; run `tensorcache index {quote(path)}` (tc.write_index)")
    fingerprint = fingerprints.get(entry.url) if isinstance(fingerprints, dict) else None
    if fingerprint is not None and not isinstance(fingerprint, dict):
        raise FormatError(f"{manifest}: {entry.url} has a fingerprint {fingerprint!r:.100}, expected a dict")
    nbytes = entry.nbytes if is_remote else None
    manifest = manifest if is_remote else os.path.abspath(manifest)
    listed = ListedCounts(entry.num_samples, counts, manifest, nbytes, entry.digest, status=status)
    return path, listed, fingerprint


def stored_digest(path: str) -> str | None:
    """Return the digest of the index at the end of the shard at `path`, or else in its sidecar; None without an index."""
    file = ShardFile(path)
    trailers = parse_both(file, lambda each: read_trailer(each.read, each.nbytes, file.nbytes))
    return next((trailer.digest for trailer in trailers), None)


def check_listed(path: str, listed: ListedCounts, *, num_samples: int | None = None, digest: str | None = None) -> None:
    """Compare the shard at `path` with what the manifest lists about it.

    Args:
        path: Path or url of the shard.
        listed: Numbers in the manifest.
        num_samples: Number of samples in the shard; None if unknown.
        digest: Digest of the shard's index; None if unknown.

    Raises:
        FormatError: They have different numbers of samples, or different digests.
    """
    if None not in (listed.num_samples, num_samples) and listed.num_samples != num_samples:
        raise other_count(path, f"{num_samples} samples in all", listed.num_samples)
    if None not in (listed.digest, digest) and listed.digest != digest:
        what = f"its index has the digest {digest}, but {listed.manifest} lists {listed.digest}"
        command = f"`tensorcache index {quote(os.path.dirname(path) or os.curdir)}`"
        remedy = "upload its own manifest again" if is_url(path) else f"list its folder anew with {command}"
        remedy = f"copy the right shard again, or, if this is the right one and another tool has indexed it, {remedy}"
        what = f"another shard has replaced the one that was listed: {what}"
        raise FormatError(f"{what}; {remedy}", kind="index").at(path)


def other_count(path: str, counted: str, listed: int | None) -> FormatError:
    """Return the error for a shard that has another number of samples, `counted`, than the manifest lists."""
    verify = f"`tensorcache verify` (tc.verify){' of a local copy' if is_url(path) else ''}"
    verify += " reports whether the shard is damaged"
    remedy = f"if it is not, run `tensorcache index {quote(path)}` (tc.write_index)"
    what = f"{counted}, but the manifest lists {listed}: one of the two is wrong"
    return FormatError(f"{what}; {verify}; {remedy}").at(path)


def are_counts(counts: Any) -> bool:
    """Return whether a value in a manifest is a dict from cache name to number of samples, each at least 1."""
    return isinstance(counts, dict) and all(type(count) is int and 0 < count < 1 << 63 for count in counts.values())


def parse_manifest(content: bytes) -> tuple[list[ShardEntry], dict[str, Any]]:
    """Return the shards and the value of the key `tensorcache` of a manifest with this content; see `read_manifest`."""
    # Hazard: small values take up to 30 times their bytes as objects. The entry of a shard has 8 bytes or more for each.
    num_values = sum(map(content.count, (b"{", b"[", b",", b":")))
    if num_values > _NUM_SHORT + len(content) // _MIN_VALUE_NBYTES:
        what = (
            f"{num_values:,} keys, values and containers in {len(content):,} bytes, more than the limit for a manifest"
        )
        raise FormatError(f"{what}: {_NUM_SHORT:,}, and one for each {_MIN_VALUE_NBYTES} bytes", kind="index")
    try:
        document = parse_json(content)
    except (ValueError, RecursionError) as exc:
        raise FormatError(f"expected a manifest, but the file is not JSON: {exc}", kind="index") from exc
    _expect(isinstance(document, dict), "the manifest", document, "an object")
    kind, version = document.get("__kind__", _KIND), document.get("wids_version")
    _expect(kind == _KIND, "__kind__", kind, repr(_KIND))
    _expect(type(version) is int and version == _WIDS_VERSION, "wids_version", version, str(_WIDS_VERSION))
    for key in ("base", "datasets"):
        what = "no value: list all shards in shardlist, with urls relative to the manifest"
        _expect(not document.get(key), key, document.get(key), what, kind="format")
    shardlist, extra = document.get("shardlist"), document.get(_OURS, {})
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
    url, num_samples, nbytes = shard.get("url"), shard.get("nsamples"), shard.get("filesize")
    if not isinstance(url, str) or not url or _NO_PATH.search(url):
        raise _wrong(f"{where}: url", url, "a path or a url")
    check_inside(url)
    for key, count in (("nsamples", num_samples), ("filesize", nbytes)):
        if type(count) is not int or not 0 <= count < 1 << 63:
            raise _wrong(f"{where}: {key}", count, "a non-negative integer below 2^63")
    digest = shard.get("index")
    if digest is not None and not (isinstance(digest, str) and _DIGEST(digest)):
        raise _wrong(f"{where}: index", digest, "16 hexadecimal digits")
    return ShardEntry(url, num_samples, nbytes, digest)  # type: ignore[arg-type]


def check_inside(url: str) -> None:
    """Raise FormatError if a manifest lists a file that is not in its folder.

    Hazard: a downloaded manifest must not make a reader or a tool read private files.
    """
    if os.path.isabs(url) or ".." in re.split(r"[/\\]", url):
        remedy = "a manifest lists only files in its folder; to read another shard, pass its own path to tc.open"
        raise FormatError(f"lists {shown(url)!r:.200}, which is outside the manifest's folder; {remedy}", kind="index")


def _expect(is_good: bool, what: str, value: object, expected: str, kind: Kind = "index") -> None:
    """Raise FormatError with `what`, `value` and `expected` unless `is_good`."""
    if not is_good:
        raise _wrong(what, value, expected, kind)


def _wrong(what: str, value: object, expected: str, kind: Kind = "index") -> FormatError:
    # the repr of a deeply nested container exceeds the interpreter's recursion limit
    text = f"a {type(value).__name__}" if isinstance(value, (list, dict)) else f"{value!r:.100}"
    return FormatError(f"{what} is {text}, expected {expected}", kind=kind)


@dataclass(slots=True)
class Manifest:
    """The content of a manifest: for each url the shard, the number of samples of each cache, and the fingerprint."""

    entries: dict[str, ShardEntry] = field(default_factory=dict)
    caches: dict[str, dict[str, int]] = field(default_factory=dict)
    fingerprints: dict[str, Any] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)
    _spelled: dict[str, str] = field(init=False)  # maps `a.tar` to its url if that is `./a.tar`

    def __post_init__(self) -> None:
        plain = {os.path.normpath(url): url for url in self.entries}
        self._spelled = {name: url for name, url in plain.items() if name != url and os.path.basename(name) == name}

    @classmethod
    def of(cls, folder: Folder) -> Manifest:
        """Return the manifest of a folder, or an empty one; raise FormatError as `parse` does."""
        return cls.parse(folder.read(MANIFEST, MAX_NBYTES), shown(folder.locate(MANIFEST)))

    @classmethod
    def parse(cls, content: bytes | None, path: str) -> Manifest:
        """Parse the content of a manifest, None if there is none; `path` is its path for messages.

        Raises:
            FormatError: The content is not a manifest, or its `caches` or `fingerprints` are not objects.
        """
        try:
            entries, extra = ([], {}) if content is None else parse_manifest(content)
        except FormatError as exc:
            raise exc.at(path) from exc
        caches, fingerprints = extra.pop("caches", {}), extra.pop("fingerprints", {})
        if not isinstance(caches, dict) or not isinstance(fingerprints, dict):
            raise FormatError(f"{path}: caches and fingerprints must both be objects")
        return cls({entry.url: entry for entry in entries}, caches, fingerprints, extra)

    def fingerprint(self, name: str) -> Any:
        """Return the fingerprint of the shard with this file name; None if the manifest has none."""
        return self.fingerprints.get(self._spelled.get(name, name))

    def add(self, entry: ShardEntry, index: ShardIndex) -> None:
        """Add a shard, or replace its entry."""
        self.remove(entry.url)
        self.entries[entry.url] = entry
        self.caches[entry.url] = {name: len(columns) for name, columns in index.caches.items() if len(columns)}
        if index.fingerprint is not None:
            self.fingerprints[entry.url] = dict(index.fingerprint)

    def remove(self, *urls: str) -> None:
        """Remove the shards with these urls; ignore urls that are not listed."""
        for url in {*urls, *(self._spelled.pop(url, url) for url in urls)}:
            for table in (self.entries, self.caches, self.fingerprints):
                table.pop(url, None)

    def write(self, path: str, fsync: bool = True) -> None:
        """Write the manifest to `path`, with the shards in the order in which they were added."""
        write_manifest(path, *self._content(), fsync=fsync)

    def build(self) -> bytes:
        """Return the manifest as bytes, with the shards in the order of their urls."""
        entries, extra = self._content()
        return _build_manifest(sorted(entries, key=lambda entry: entry.url), extra)

    def _content(self) -> tuple[list[ShardEntry], dict[str, Any]]:
        ours: dict[str, Any] = {"version": _OUR_VERSION, "caches": dict(sorted(self.caches.items()))}
        if self.fingerprints:
            ours["fingerprints"] = dict(sorted(self.fingerprints.items()))
        return list(self.entries.values()), {**self.extra, **ours}


def change_manifest(folder: Folder, change: Callable[[Manifest], None]) -> None:
    """Let a function change the manifest of a folder; it is called again if another process was faster.

    Raises:
        FormatError: The manifest is damaged.
        Exception: `change` raised it, and the manifest stays as it is.
    """

    def apply(content: bytes | None) -> bytes:
        manifest = Manifest.parse(content, shown(folder.locate(MANIFEST)))
        change(manifest)
        return manifest.build()

    folder.change(MANIFEST, apply)


def entry_of(path: str, index: ShardIndex, url: str | None = None) -> ShardEntry:
    """Return the entry of a local shard; `url` is its name by default."""
    digest = stored_digest(path)
    # Hazard: a damaged footer may end with another digest than the sidecar that readers use instead.
    is_sure = index.digest in (None, digest)
    url = url or os.path.basename(path)
    return ShardEntry(url, len(index.keys), os.path.getsize(path), digest if is_sure else None)
