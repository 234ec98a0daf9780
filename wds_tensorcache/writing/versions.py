"""A new version of a cache: a folder whose shards are those of another one where nothing changed.

Versions share shards by hard links. So nothing may write into a finished shard: it writes another file, and renames that.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from wds_tensorcache.errors import FormatError, KeyRuleError
from wds_tensorcache.reading.open_cache import find_shards
from wds_tensorcache.shards.catalog import MANIFEST, Catalog, Listing, dali_index_path, write_dali_index
from wds_tensorcache.shards.footer import build_footer, declared_place
from wds_tensorcache.shards.index import ShardIndex
from wds_tensorcache.shards.manifest import ShardEntry
from wds_tensorcache.shards.names import split_member
from wds_tensorcache.shards.remainder import check_end
from wds_tensorcache.shards.sidecar import check_replaceable, sidecar_path
from wds_tensorcache.shards.tar.archive import BLOCK, Scanner, padding
from wds_tensorcache.shards.tar.skipped import skipped_members
from wds_tensorcache.storage.atomic import fsync_folder, write_atomically
from wds_tensorcache.storage.files import ShardFile
from wds_tensorcache.writing.finished import FinishedShards, Span, load_finished
from wds_tensorcache.writing.new_folder import check_new, new_folder
from wds_tensorcache.writing.open_shard import write_shard
from wds_tensorcache.writing.pattern import DEFAULT_NAME, ShardPattern

__all__ = ["OldCache", "Part", "drop", "write_version"]

_CHUNK_NBYTES = 1 << 22
_LAST_NUMBER = re.compile(r"(.*?)([0-9]+)([^0-9]*)", re.DOTALL).fullmatch


@dataclass(slots=True)
class Part:
    """A finished shard that becomes part of a version.

    Attributes:
        url: Path in the folder of the version.
        path: Path of the shard.
        shards: The shards that it is one of.
        gone: Keys of samples that are left out.
        changed: Keys of samples whose places others take.
    """

    url: str
    path: str
    shards: FinishedShards
    gone: set[str] = field(default_factory=set)
    changed: set[str] = field(default_factory=set)


class OldCache:
    """The folder that a version is made from.

    Attributes:
        parts: Its shards by path, in the order in which samples are numbered.
        shards: Their indexes.

    Raises:
        FileNotFoundError: There is no such folder, or no shard.
        FormatError: A shard or the manifest is damaged, or does not match the other.
        ValueError: It is no folder, or the manifest lists shards outside of it.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = os.fsdecode(folder)
        found = find_shards(self.folder)
        self.shards = load_finished((path for path, *_ in found), {path: listed for path, _, listed in found})
        self.parts: dict[str, Part] = {}
        for path in self.shards.indexes:
            url = os.path.relpath(path, self.folder)
            if not os.path.isdir(self.folder) or os.path.isabs(url) or url.split(os.sep)[0] == os.pardir:
                raise ValueError(f"expected a folder with all shards of a cache in it; {self.folder!r} gives {path!r}")
            self.parts[path] = Part(url.replace(os.sep, "/"), path, self.shards)

    def next_urls(self, name: str | None) -> Iterator[str]:
        """Yield names for more shards, with numbers after those of the old ones; called like the last one if `name` is None."""
        folder, last = os.path.split(list(self.parts.values())[-1].url)
        match = _LAST_NUMBER(last)
        if name is None and match is not None and "%" not in last:
            name = f"{match[1]}%0{len(match[2])}d{match[3]}"
        pattern = ShardPattern(os.path.join(folder, name or DEFAULT_NAME))
        names = [os.path.basename(part.url) for part in self.parts.values() if os.path.dirname(part.url) == folder]
        number = max((each for each in map(pattern.number, names) if each is not None), default=-1)
        while True:
            number += 1
            yield pattern.path(number)


def drop(
    source: str | os.PathLike[str], out: str | os.PathLike[str], keys: Iterable[str], *, fsync: bool = True
) -> None:
    """Make a version of a cache without some samples, as `build(reuse=…)` makes one with other items.

    Shards that lose no sample are hard links, or copies where the file system cannot link them. The others are written again
    under the same names: what stays is copied byte for byte. A shard that has no member left is not written. Whenever the
    process is killed, `out` is complete or as it was; the next call deletes what was left beside it.

    Args:
        source: Folder of the cache, which stays as it is.
        out: Folder of the version: a new one, or an empty one, which is replaced.
        keys: Keys of the samples. Samples go with all their members.
        fsync: Wait for the disk before the folder appears.

    Raises:
        FileExistsError: `out` is not empty, or a shard has the name of another one's index.
        FileNotFoundError: There is no such folder, or no shard.
        FormatError: A shard or the manifest is damaged, or was changed meanwhile.
        KeyError: There is no sample of a key.
        OSError: The disk is full, …
        ValueError: No sample would be left; `source` is no folder, or its manifest lists shards outside of it.
    """
    if isinstance(keys, (str, bytes)):
        raise TypeError(f"keys={keys!r:.100}, expected a collection of keys")
    out, old = check_new(out), OldCache(source)
    for key in keys:
        places = old.shards.find(key) if isinstance(key, str) else []
        if not places:
            raise KeyError(f"{old.folder} has no sample {key!r:.100}")
        for path, _ in places:
            old.parts[path].gone.add(key)
    write_version(out, old, old.parts.values(), fsync=fsync)


def write_version(
    out: str, old: OldCache, parts: Iterable[Part], computed: FinishedShards | None = None, *, fsync: bool = True
) -> None:
    """Write a version of a cache. Its shards have a footer, a sidecar or `.idx` where those that they are made of have one.

    Args:
        out: Result of `check_new`.
        old: The cache; what else its manifest says is kept.
        parts: Shards of the version, in the order in which samples are numbered.
        computed: Samples that take the places of others.
        fsync: Wait for the disk.

    Raises:
        FormatError: A shard is damaged, or was changed since it was indexed.
        ValueError: No sample is left.
    """
    listing = Listing(extra=Catalog(old.folder).read().extra)
    with new_folder(out, fsync) as folder:
        for part in parts:
            check_replaceable(dali_index_path(part.path), sidecar_path(part.path))
            path = os.path.join(folder, part.url)
            os.makedirs(os.path.dirname(path), exist_ok=True)
            index = _add(part, path, computed, fsync)
            if index is None:
                continue
            if os.path.exists(dali_index_path(part.path)):
                with contextlib.suppress(KeyRuleError):  # names that DALI's index cannot hold
                    write_dali_index(dali_index_path(path), index, fsync)
            entry = ShardEntry(part.url, len(index.keys), os.path.getsize(path))
            if os.path.exists(sidecar_path(part.path)):
                write_atomically(sidecar_path(path), [build_footer(index, entry.nbytes)], fsync)
            listing.add(path, index, entry)
        if not any(entry.num_samples for entry in listing.entries.values()):
            raise ValueError(f"{old.folder}: no sample would be left")
        listing.write(os.path.join(folder, MANIFEST), listing.entries, fsync)
        for inner, _, _ in os.walk(folder) if fsync else ():
            fsync_folder(inner)


def _add(part: Part, path: str, computed: FinishedShards | None, fsync: bool) -> ShardIndex | None:
    """Link a shard, or write it again; return its index, None if nothing is left of it."""
    file, index = part.shards.file(part.path), part.shards.indexes[part.path]
    if part.gone or part.changed:
        spans = _left(file, part, computed)
        if not spans:
            return None
        footer = declared_place(file.read, file.nbytes, file.nbytes) is not None
        try:
            index, count = (
                write_shard(path, _read(spans), index.fingerprint, footer=footer, fsync=fsync),
                len(index.keys),
            )
            if len(index.keys) != count - len(part.gone):
                raise FormatError("the index has other samples than the shard; tc.verify tells which", kind="index")
        except FormatError as exc:
            raise exc.at(part.path) from exc
    else:
        try:
            os.link(os.path.realpath(part.path), path)
        except OSError:  # another file system, or one without links, or too many of them
            write_atomically(path, _read([(part.shards, part.path, 0, file.nbytes)]), fsync)
        else:
            if ShardFile(path).identity != file.identity:
                raise FormatError("the shard was changed since it was indexed").at(part.path)
    file.check_unchanged()
    return index


def _left(file: ShardFile, part: Part, computed: FinishedShards | None) -> list[Span]:
    """Return the members of a shard that stay, with new samples in the places of old ones.

    Returns nothing if no member is left but directories, links and the like.
    """
    spans: list[Span] = []
    unread: list[OSError] = []
    common: list[Span] = []  # headers of all members that follow: no archive may end with them
    is_left = False

    def add(span: Span) -> None:
        for each in (*common, span):
            if spans and spans[-1][1] == each[1] and spans[-1][3] == each[2]:
                spans[-1] = *spans[-1][:3], each[3]
            else:
                spans.append(each)
        common.clear()

    def read(begin: int, end: int) -> bytes:
        try:
            return file.read(begin, end)
        except OSError as exc:
            unread.append(exc)
            raise

    def skip(first: int, limit: int) -> int:
        skipped = skipped_members(read, file.nbytes, first, limit)
        # Hazard: members that the disk cannot read are not among the skipped ones, and would be lost.
        if unread:
            raise unread[0]
        for each in skipped:
            span, first = (part.shards, part.path, each.begin, each.end), each.end
            if each.is_common:
                common.append(span)
            else:
                add(span)
        return first

    first, last_key, scanner = 0, "", Scanner(file.read, file.nbytes)
    for name, begin, nbytes in scanner:
        if begin - first > BLOCK:
            first = skip(first, begin - BLOCK)
        key, _ = split_member(name) or ("", "")
        end = begin + nbytes + padding(nbytes)
        if key not in part.changed and key not in part.gone:
            add((part.shards, part.path, first, end))
        elif computed is not None and key in part.changed and key != last_key:
            add(computed.span(key))
        is_left = is_left or key not in part.gone
        first, last_key = end, key
    # Hazard: a header that zeros have overwritten looks like the end, and what follows it would be lost.
    check_end(file, scanner.end, len(part.shards.indexes[part.path].keys))
    skip(first, scanner.end)
    return spans if is_left else []


def _read(spans: Iterable[Span]) -> Iterator[bytes]:
    for shards, path, first, last in spans:
        for begin in range(first, last, _CHUNK_NBYTES):
            yield shards.file(path).read(begin, min(begin + _CHUNK_NBYTES, last))
