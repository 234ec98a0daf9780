"""New shards from samples of old shards. All members are copied byte for byte, never decoded.

A new shard that equals an old shard is a hard link to it. Writing into a shard in place would change both, so code must
write a new file and rename it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np
from xxhash import xxh3_64_hexdigest

from wds_tensorcache.errors import FormatError, InvalidKeyError, format_count
from wds_tensorcache.shards.dali_index import write_dali_index
from wds_tensorcache.shards.footer import build_footer, read_trailer
from wds_tensorcache.shards.index import MemberTable, Origins, ShardIndex
from wds_tensorcache.shards.index_builder import scan_shard
from wds_tensorcache.shards.key_table import Keys
from wds_tensorcache.shards.load_index import load_index
from wds_tensorcache.shards.manifest import MANIFEST, Manifest, ShardEntry, stored_digest
from wds_tensorcache.shards.names import check_key, check_suffixes, sidecar_path
from wds_tensorcache.shards.tar import BLOCK, END_OF_ARCHIVE, build_tar_header
from wds_tensorcache.storage.atomic import fsync_folder, remove_temporary, write_atomically
from wds_tensorcache.storage.files import Files, ShardFile
from wds_tensorcache.storage.folder import folder_of
from wds_tensorcache.storage.output import Output
from wds_tensorcache.storage.threads import computed_once
from wds_tensorcache.writing.new_folder import new_folder

Array = np.ndarray[Any, Any]
_CHUNK_NBYTES = 1 << 22


@dataclasses.dataclass(slots=True)
class CopyReport:
    """The counts of `merge` or `reshard`.

    Attributes:
        num_samples: Number of samples in the new cache.
        num_shards: Number of shards in the new cache.
        num_shards_resumed: Number of new shards that an interrupted call had finished.
        nbytes: Total length of the new shards in bytes.
    """

    num_samples: int = 0
    num_shards: int = 0
    num_shards_resumed: int = 0
    nbytes: int = 0

    def __str__(self) -> str:
        resumed = f", {self.num_shards_resumed:,} of an interrupted call" if self.num_shards_resumed else ""
        shards, samples = format_count(self.num_shards, "shard"), format_count(self.num_samples, "sample")
        return f"{shards}{resumed}, {samples}, {self.nbytes:,} bytes"


class OldShard:
    """A shard to copy samples from. With a `prefix` for the keys, all copied members get new tar headers."""

    def __init__(self, path: str, index: ShardIndex, files: Files, prefix: str = "") -> None:
        file = files.get(path)
        self.path, self.index, self.identity, self.prefix = path, index, file.identity, prefix
        self.has_footer = read_trailer(file.read, file.nbytes, file.nbytes) is not None
        self.fingerprint = index.fingerprint

    @computed_once
    def keys(self) -> Keys:
        """The keys with the prefix. Raise InvalidKeyError if a reader would misread a member's name."""
        if not self.prefix:
            return self.index.keys
        suffixes, raws = self.members.suffixes, list[bytes]()
        for key in self.index.keys:
            check_key(self.prefix + key)
            check_suffixes(self.prefix + key, suffixes)
            raws.append((self.prefix + key).encode())
        return Keys.of(raws)

    @computed_once
    def members(self) -> MemberTable:
        """All members. Raise FormatError unless they are in the order of the samples in the index."""
        members = self.index.members_in_order()
        if (np.diff(members.rows) < 0).any() or len(np.unique(members.rows)) != len(self.index.keys):
            raise FormatError("the index does not list the samples in their order", kind="index").at(self.path)
        return members

    @computed_once
    def ends(self) -> Array:
        """The byte offset of each sample's end, with padding."""
        members = self.members
        last = np.flatnonzero(np.diff(members.rows, append=len(self.index.keys)))
        ends: Array = members.begins[last] + members.sizes[last]
        return (ends + BLOCK - 1) // BLOCK * BLOCK

    def select_members(self, begin: int, end: int) -> slice:
        """Return the slice of `members` that contains the members of samples `[begin, end)`."""
        return slice(*np.searchsorted(self.members.rows, [begin, end]).tolist())

    def ranges(self, begin: int, end: int) -> Iterator[MemberRange]:
        # Entries that belong to no sample, such as folders, are copied with the sample that follows them. With a prefix, and
        # after the last sample, they are left out.
        if not self.prefix:
            yield MemberRange(self.path, self.ends.item(begin - 1) if begin else 0, self.ends.item(end - 1))
            return
        members, part = self.members, self.select_members(begin, end)
        for at in range(part.start, part.stop):
            name = f"{self.keys[members.rows.item(at)]}.{members.suffixes[members.kinds.item(at)]}"
            first, nbytes = members.begins.item(at), members.sizes.item(at)
            yield MemberRange(self.path, first, first + nbytes + -nbytes % BLOCK, build_tar_header(name, nbytes))


Run = tuple[OldShard, int, int]  # consecutive samples `[begin, end)` of a shard


@dataclasses.dataclass(frozen=True, slots=True)
class NewShard:
    """The plan of a new shard: its samples and its indexes."""

    url: str  # path in the new folder
    runs: Sequence[Run]  # samples of the shard, in order; all have the same fingerprint
    footer: bool = True
    sidecar: bool = False
    dali_index: bool = True

    @property
    def link_to(self) -> OldShard | None:
        """The old shard with exactly these samples, or None. It has their fingerprint and any footer needed."""
        (old, *rows), *further_runs = self.runs
        is_whole = not further_runs and rows == [0, len(old.index.keys)]
        is_same = is_whole and old.fingerprint == old.index.fingerprint and not old.prefix
        return old if is_same and old.has_footer >= self.footer else None

    @property
    def fingerprint(self) -> Mapping[str, Any] | None:
        return self.runs[0][0].fingerprint

    def origins(self) -> Iterator[tuple[int, str | None]]:
        for old, begin, end in self.runs:
            for digest, name in map(old.index.origin, range(begin, end)):
                yield digest, name and old.prefix + name


def write_cache(
    out: str,
    shards: Sequence[NewShard],
    files: Files,
    *,
    extra: Mapping[str, Any] | None = None,
    fsync: bool = True,
    others: Mapping[str, bytes] | None = None,
    show: Callable[[int], object] = lambda num_samples: None,
) -> CopyReport:
    """Write new shards and their manifest, and rename their folder to `out`.

    `out` is a path that `check_new` returned. Until the end, the folder is hidden. The same call after an interruption takes
    over the shards that are complete in the hidden folder. `others` are the contents of other files by name. `show` is called
    with the number of samples copied so far.

    Raises:
        FormatError: An old shard is damaged, does not match its index, or was changed since it was indexed.
    """
    report, manifest = CopyReport(), Manifest(extra=dict(extra or {}))
    with new_folder(out, fsync, _digest_plan(shards)) as folder:
        for inner, *_ in os.walk(folder):
            remove_temporary(inner, ".*")
        for new in shards:
            path = os.path.join(folder, new.url)
            if os.path.exists(path):  # an interrupted call has renamed it when it was complete
                report.num_shards_resumed += 1
                # the index of a shard without a footer has neither fingerprint nor origins
                origins = Origins.of(new.origins())
                index = dataclasses.replace(load_index(ShardFile(path)), fingerprint=new.fingerprint, origins=origins)
            else:
                os.makedirs(os.path.dirname(path), exist_ok=True)
                index = _write_new(path, new, files, fsync)
            nbytes = os.path.getsize(path)
            if new.dali_index:
                with contextlib.suppress(InvalidKeyError):  # DALI's index cannot contain some names
                    write_dali_index(folder_of(os.path.dirname(path), fsync), os.path.basename(path), index)
            if new.sidecar:
                write_atomically(sidecar_path(path), [build_footer(index, nbytes)], fsync)
            manifest.add(ShardEntry(new.url, len(index.keys), nbytes, stored_digest(path)), index)
            report.num_shards += 1
            report.num_samples += len(index.keys)
            report.nbytes += nbytes
            show(report.num_samples)
        for name, content in (others or {}).items():
            write_atomically(os.path.join(folder, name), [content], fsync)
        write_atomically(os.path.join(folder, MANIFEST), [manifest.build()], fsync)
        for inner, *_ in os.walk(folder) if fsync else ():
            fsync_folder(inner)
    return report


def _digest_plan(shards: Iterable[NewShard]) -> str:
    plan = [
        [
            *(new.url, new.footer, new.sidecar, new.dali_index, new.fingerprint),
            [[os.path.abspath(old.path), old.identity, old.prefix, begin, end] for old, begin, end in new.runs],
        ]
        for new in shards
    ]
    return xxh3_64_hexdigest(json.dumps(plan, sort_keys=True).encode())


def _write_new(path: str, new: NewShard, files: Files, fsync: bool) -> ShardIndex:
    linked = new.link_to
    if linked is not None:
        index = linked.index
        _link(linked, path, files, fsync)
    else:
        ranges = chain.from_iterable(old.ranges(begin, end) for old, begin, end in new.runs)
        try:
            index = write_shard(path, ranges, files, new.fingerprint, new.origins(), footer=new.footer, fsync=fsync)
            keys = [old.keys.raw(row) for old, begin, end in new.runs for row in range(begin, end)]
            sizes = [old.members.sizes[old.select_members(begin, end)] for old, begin, end in new.runs]
            if index.keys.raws() != keys or not np.array_equal(index.members_in_order().sizes, np.concatenate(sizes)):
                raise FormatError(
                    "the index and the shard differ in samples; see `tensorcache verify` (tc.verify)", kind="index"
                )
        except FormatError as exc:
            raise exc.at(", ".join(dict.fromkeys(old.path for old, *_ in new.runs))) from exc
    for old, *_ in new.runs:
        files.get(old.path).check_unchanged()
    return index


def _link(old: OldShard, path: str, files: Files, fsync: bool) -> None:
    try:
        os.link(os.path.realpath(old.path), path)
    except OSError:  # another file system, a file system without links, or too many links
        write_atomically(path, read_members([MemberRange(old.path, 0, files.get(old.path).nbytes)], files), fsync)
    else:
        if ShardFile(path).identity != old.identity:
            raise FormatError("the shard was changed since its index was loaded; try again").at(old.path)


@dataclasses.dataclass(slots=True, order=True)
class MemberRange:
    """A range of bytes `[begin, end)` in a shard, made of whole members.

    `header` is a tar header to write before these bytes if the range begins after the header of its first member.
    """

    path: str
    begin: int
    end: int
    header: bytes = b""


def append_range(ranges: list[MemberRange], path: str, begin: int, end: int, header: bytes = b"") -> None:
    """Append a range, or extend the last if it ends at `begin`."""
    last = ranges[-1] if ranges else None
    if last is not None and last.end == begin and not header and last.path == path:
        last.end = end
    else:
        ranges.append(MemberRange(path, begin, end, header))


def read_members(ranges: Iterable[MemberRange], files: Files) -> Iterator[bytes]:
    """Yield the headers and the bytes of the ranges in chunks."""
    for part in ranges:
        yield part.header
        for begin in range(part.begin, part.end, _CHUNK_NBYTES):
            file, end = files.get(part.path), min(begin + _CHUNK_NBYTES, part.end)
            # a damaged shard may end inside the padding of its last member, which is then completed
            yield file.read(begin, max(begin, min(end, file.nbytes))).ljust(end - begin, b"\0")


def write_shard(
    path: str,
    ranges: Iterable[MemberRange],
    files: Files,
    fingerprint: Mapping[str, Any] | None,
    origins: Iterable[tuple[int, str | None]],
    *,
    footer: bool = True,
    fsync: bool = True,
) -> ShardIndex:
    """Write a shard from members of other shards, and return its index.

    `origins` contains the result of `ShardIndex.origin` for each sample, in order. Raises FormatError, and writes nothing, if
    the ranges do not form an intact tar.
    """
    output, nbytes = Output(path, fsync), 0
    try:
        for chunk in chain(read_members(ranges, files), [END_OF_ARCHIVE]):
            output.append([chunk], len(chunk))
            nbytes += len(chunk)
        output.flush()
        index = scan_shard(ShardFile(output.temporary).read, nbytes)
        index = dataclasses.replace(index, fingerprint=fingerprint, origins=Origins.of(origins))
        if footer:
            tail = build_footer(index)
            output.append([tail], len(tail))
        output.finish()
    except BaseException:
        output.drop()
        raise
    return index
