"""Write a version of a cache: a new folder, in which shards without changed or dropped samples are hard links to old shards.

Hazard: writing into a shard that is shared by hard links changes all versions. Code must write a new file and rename it.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain, islice

from wds_tensorcache.errors import FormatError, InvalidKeyError, list_names
from wds_tensorcache.reading.find_shards import find_shards
from wds_tensorcache.reading.lookup.keys import respelled
from wds_tensorcache.shards.after_end import check_end
from wds_tensorcache.shards.dali_index import write_dali_index
from wds_tensorcache.shards.footer import build_footer, read_trailer
from wds_tensorcache.shards.index import ShardIndex
from wds_tensorcache.shards.index_paths import check_replaceable, dali_index_path, sidecar_path
from wds_tensorcache.shards.manifest import MANIFEST, Catalog, Listing, ShardEntry, stored_digest
from wds_tensorcache.shards.names import split_member
from wds_tensorcache.shards.tar.headers import BLOCK, Scanner, padding
from wds_tensorcache.shards.tar.skipped import skipped_members
from wds_tensorcache.storage.atomic import fsync_folder, write_atomically
from wds_tensorcache.storage.files import ShardFile
from wds_tensorcache.writing.copy_members import MemberRange, append_range, read_members, write_shard
from wds_tensorcache.writing.new_folder import check_local, check_new, new_folder
from wds_tensorcache.writing.pattern import DEFAULT_NAME, ShardPattern
from wds_tensorcache.writing.resume import FinishedShards, load_finished

__all__ = ["OldCache", "VersionShard", "drop", "write_version"]

_NUM_KEYS = 100  # keys that an error compares with an unknown one
_LAST_NUMBER = re.compile(r"(.*?)([0-9]+)([^0-9]*)", re.DOTALL).fullmatch


@dataclass(slots=True)
class VersionShard:
    """A finished shard to include in a version."""

    url: str  # path in the folder of the version
    path: str  # path of the finished shard
    source_shards: FinishedShards  # all shards of the cache or build that the shard comes from
    dropped_keys: set[str] = field(default_factory=set)  # keys of samples to leave out
    changed_keys: set[str] = field(default_factory=set)  # keys of samples to replace by computed ones


class OldCache:
    """The cache from which a version is made: indexes of its `shards`, and a `VersionShard` for each path in `parts`.

    Raises:
        FileNotFoundError: The folder does not exist, or has no shards.
        FormatError: A shard or the manifest is damaged, or they do not match.
        ValueError: The path is not a folder.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        check_local(folder, "the old cache of a version")
        self.folder = os.fsdecode(folder)
        found = find_shards(self.folder, copies=True)
        if not os.path.isdir(self.folder):
            raise ValueError(f"{self.folder!r} is not a folder; expected the folder of a cache")
        self.shards = load_finished({path: (listed, made) for path, listed, made in found})
        self.parts: dict[str, VersionShard] = {}
        for path in self.shards.indexes:
            url = os.path.relpath(path, self.folder)
            self.parts[path] = VersionShard(url.replace(os.sep, "/"), path, self.shards)

    def next_urls(self, name: str | None) -> Iterator[str]:
        """Yield urls for new shards, numbered after the old ones; without `name`, they are named like the last old shard."""
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
    """Write a version of a cache without some of its samples.

    Shards that lose no sample become hard links, or copies if the file system has no links. Other shards are rewritten
    under the same names, with the remaining members unchanged byte for byte; a shard without remaining members is not
    written. If the process is killed, `out` is either complete or unchanged, and the next call deletes the temporary files.

    Args:
        source: Folder of the cache; its files are not changed.
        out: Folder of the version: a new folder, or an empty one, which is replaced.
        keys: Keys of the samples to drop, with all their members.
        fsync: Wait for the disk before the folder appears.

    Raises:
        FileExistsError: `out` is not empty, or a shard has the name that the `.idx` or `.index` of another shard needs.
        FileNotFoundError: `source` does not exist, or has no shards.
        FormatError: A shard or the manifest is damaged, or was changed during the call.
        KeyError: A key has no sample.
        OSError: The disk is full, …
        ValueError: No sample would remain; or `source` is not a folder.
    """
    if isinstance(keys, (str, bytes)):
        raise TypeError(f"keys={keys!r:.100}, expected a collection of keys")
    out, old = check_new(out), OldCache(source)
    for key in keys:
        places = old.shards.find(key) if isinstance(key, str) else []
        if not places:
            raise KeyError(f"{old.folder} has no sample {key!r:.100}; there are {_near_keys(old.shards, key)}")
        for path, _ in places:
            old.parts[path].dropped_keys.add(key)
    write_version(out, old, old.parts.values(), fsync=fsync)


def _near_keys(shards: FinishedShards, key: object) -> str:
    """Return a list of keys for a message: other spellings of `key` that exist, or else some keys, similar ones first."""
    some = list(islice(chain.from_iterable(index.keys for index in shards.indexes.values()), _NUM_KEYS))
    near = respelled(key, len(some[0]) if some else 0) if isinstance(key, str) else []
    return list_names([each for each in near if each in shards] or some, key, len(shards))


def write_version(
    out: str,
    old: OldCache,
    parts: Iterable[VersionShard],
    computed: FinishedShards | None = None,
    *,
    fsync: bool = True,
) -> None:
    """Write a version. A new shard gets a footer, a sidecar and an `.idx` only if its source shard has one, too.

    Raises:
        FormatError: A shard is damaged, or was changed since it was indexed.
        ValueError: No sample remains.
    """
    listing = Listing(extra=Catalog(old.folder).read().extra)
    with new_folder(out, fsync) as folder:
        for part in parts:
            check_replaceable(dali_index_path(part.path), sidecar_path(part.path))
            path = os.path.join(folder, part.url)
            os.makedirs(os.path.dirname(path), exist_ok=True)
            index = _write_part(part, path, computed, fsync)
            if index is None:
                continue
            if os.path.exists(dali_index_path(part.path)):
                with contextlib.suppress(InvalidKeyError):  # DALI's index cannot contain some names
                    write_dali_index(dali_index_path(path), index, fsync)
            nbytes = os.path.getsize(path)
            if os.path.exists(sidecar_path(part.path)):
                write_atomically(sidecar_path(path), [build_footer(index, nbytes)], fsync)
            listing.add(path, index, ShardEntry(part.url, len(index.keys), nbytes, stored_digest(path)))
        if not any(entry.num_samples for entry in listing.entries.values()):
            raise ValueError(f"{old.folder}: no sample would remain, so nothing was written")
        listing.write(os.path.join(folder, MANIFEST), listing.entries, fsync)
        for inner, _, _ in os.walk(folder) if fsync else ():
            fsync_folder(inner)


def _write_part(part: VersionShard, path: str, computed: FinishedShards | None, fsync: bool) -> ShardIndex | None:
    """Link a shard, or rewrite it; return its index, or None if no member remains."""
    files, index = part.source_shards.files, part.source_shards.indexes[part.path]
    file = files.get(part.path)
    if part.dropped_keys or part.changed_keys:
        ranges = _remaining_ranges(file, part, computed)
        if not ranges:
            return None
        footer = read_trailer(file.read, file.nbytes, file.nbytes) is not None
        wanted = len(index.keys) - len(part.dropped_keys)
        try:
            origins = _remaining_origins(part, computed)
            index = write_shard(path, ranges, files, index.fingerprint, origins, footer=footer, fsync=fsync)
            if len(index.keys) != wanted:
                raise FormatError(
                    "the index and the shard differ in samples; see `tensorcache verify` (tc.verify)", kind="index"
                )
        except FormatError as exc:
            raise exc.at(part.path) from exc
    else:
        try:
            os.link(os.path.realpath(part.path), path)
        except OSError:  # another file system, one without links, or too many links
            write_atomically(path, read_members([MemberRange(part.path, 0, file.nbytes)], files), fsync)
        else:
            if ShardFile(path).identity != file.identity:
                raise FormatError("the shard was changed since its index was loaded; try again").at(part.path)
    file.check_unchanged()
    return index


def _remaining_origins(part: VersionShard, computed: FinishedShards | None) -> Iterator[tuple[int, str | None]]:
    """Yield the origins of the samples to keep, see `ShardIndex.origin`."""
    for row, key in enumerate(part.source_shards.indexes[part.path].keys):
        if computed is not None and key in part.changed_keys:
            yield computed.origin(*computed.find(key)[-1])
        elif key not in part.dropped_keys:
            yield part.source_shards.origin(part.path, row)


def _remaining_ranges(file: ShardFile, part: VersionShard, computed: FinishedShards | None) -> list[MemberRange]:
    """Return the ranges of members to keep; an empty list if only entries that readers skip (folders, links, …) remain."""
    ranges: list[MemberRange] = []
    pending_headers: list[MemberRange] = []  # apply to all later members; kept only if a member follows
    unread: list[OSError] = []
    has_sample = False

    def read(begin: int, end: int) -> bytes:
        try:
            return file.read(begin, end)
        except OSError as exc:
            unread.append(exc)
            raise

    def keep(span: MemberRange) -> None:
        for each in (*pending_headers, span):
            append_range(ranges, each.path, each.begin, each.end, each.header)
        pending_headers.clear()

    def keep_skipped(first: int, limit: int) -> int:
        skipped = skipped_members(read, file.nbytes, first, limit)
        # Hazard: `skipped_members` leaves out members that the disk cannot read; they would be lost.
        if unread:
            raise unread[0]
        for each in skipped:
            span, first = MemberRange(part.path, each.begin, each.end), each.end
            if each.is_common:
                pending_headers.append(span)
            else:
                keep(span)
        return first

    first, last_key, scanner = 0, "", Scanner(file.read, file.nbytes)
    for name, begin, nbytes in scanner:
        if begin - first > BLOCK:
            first = keep_skipped(first, begin - BLOCK)
        key, _ = split_member(name) or ("", "")
        end = begin + nbytes + padding(nbytes)
        if key not in part.changed_keys and key not in part.dropped_keys:
            keep(MemberRange(part.path, first, end))
        elif computed is not None and key in part.changed_keys and key != last_key:
            keep(computed.member_range(key))
        has_sample = has_sample or key not in part.dropped_keys
        first, last_key = end, key
    # Hazard: a header overwritten by zeros looks like the end of the archive, and all later members would be lost.
    check_end(file, scanner.end, len(part.source_shards.indexes[part.path].keys))
    keep_skipped(first, scanner.end)
    return ranges if has_sample else []
