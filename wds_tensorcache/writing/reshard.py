"""Write the samples of caches into new shards. The bytes of all members are copied, never decoded."""

from __future__ import annotations

import contextlib
import json
import os
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any

import numpy as np
from xxhash import xxh3_64_hexdigest

from wds_tensorcache.errors import FormatError, InvalidKeyError, StaleCacheError
from wds_tensorcache.progress import Progress, ProgressOption
from wds_tensorcache.reading.find_shards import CachePaths, find_shards
from wds_tensorcache.shards.after_end import load_whole
from wds_tensorcache.shards.dali_index import write_dali_index
from wds_tensorcache.shards.fingerprint import SOURCE
from wds_tensorcache.shards.index import MemberTable, ShardIndex
from wds_tensorcache.shards.index_paths import dali_index_path
from wds_tensorcache.shards.key_table import Keys, KeyTable
from wds_tensorcache.shards.manifest import MANIFEST, Listing
from wds_tensorcache.shards.names import check_key, check_suffixes
from wds_tensorcache.shards.tar.headers import BLOCK, build_tar_header
from wds_tensorcache.storage.atomic import find_temporary, fsync_folder, remove_stray
from wds_tensorcache.storage.files import Files, Identity
from wds_tensorcache.writing.copy_members import MemberRange, write_shard
from wds_tensorcache.writing.new_folder import check_new, new_folder
from wds_tensorcache.writing.pattern import DEFAULT_NAME
from wds_tensorcache.writing.resume import load_finished
from wds_tensorcache.writing.writer import MAX_SAMPLES

__all__ = ["CopyReport", "merge", "reshard"]

Array = np.ndarray[Any, Any]
_NUM_ROWS = 64  # samples to copy before the progress is shown again
_NUM_SHOWN = 3  # of repeated keys, in an error


@dataclass(slots=True)
class CopyReport:
    """The counts of `merge` or `reshard`.

    Attributes:
        num_samples: Number of samples in the new cache.
        num_shards: Number of its shards.
        num_shards_resumed: Number of these shards that an interrupted call had finished.
        nbytes: Total length of the shards.
    """

    num_samples: int = 0
    num_shards: int = 0
    num_shards_resumed: int = 0
    nbytes: int = 0

    def __str__(self) -> str:
        resumed = f", {self.num_shards_resumed:,} of an interrupted call" if self.num_shards_resumed else ""
        shards, samples = "s" * (self.num_shards != 1), "s" * (self.num_samples != 1)
        return (
            f"{self.num_shards:,} shard{shards}{resumed}, {self.num_samples:,} sample{samples}, {self.nbytes:,} bytes"
        )


@dataclass(slots=True)
class _OldShard:
    """A shard to copy samples from: sample `i` ends at byte `ends[i]`, and needs `sizes[i]` bytes in a new shard."""

    path: str
    index: ShardIndex
    prefix: str
    fingerprint: str = field(init=False)
    identity: Identity
    keys: Keys = field(init=False)
    table: MemberTable = field(init=False)
    ends: Array = field(init=False)
    sizes: Array = field(init=False)

    def __post_init__(self) -> None:
        self.fingerprint = json.dumps(self.index.fingerprint, sort_keys=True)
        self.table = table = self.index.members_in_order()
        ends = table.begins + table.sizes + -table.sizes % BLOCK
        last = np.flatnonzero(np.diff(table.rows, append=len(self.index.keys)))
        if (np.diff(table.rows) < 0).any() or len(last) != len(self.index.keys):
            raise FormatError("the index does not list the samples in their order", kind="index").at(self.path)
        self.ends = ends[last]
        self.ends[-1:] = self.index.end
        if self.prefix:
            self.keys = _with_prefix(self.index, self.prefix)
            self.sizes = np.bincount(table.rows, ends - table.begins + BLOCK, len(last)).astype(np.int64)
        else:
            self.keys = self.index.keys
            self.sizes = np.diff(self.ends, prepend=0)

    def origin(self, row: int) -> tuple[int, str | None]:
        """Return the origin of a sample, see `ShardIndex.origin`."""
        digest, name = self.index.origin(row)
        return digest, name and self.prefix + name

    def ranges(self, begin: int, end: int) -> Iterator[tuple[int, list[MemberRange]]]:
        """Yield the ranges of samples `[begin, end)` with the numbers of samples in them."""
        for first in range(begin, end, _NUM_ROWS):
            last = min(first + _NUM_ROWS, end)
            if self.prefix:
                yield last - first, list(self._renamed(first, last))
            else:  # also copies entries that belong to no sample, such as folders
                yield (
                    last - first,
                    [MemberRange(self.path, self.ends.item(first - 1) if first else 0, self.ends.item(last - 1))],
                )

    def _renamed(self, first: int, last: int) -> Iterator[MemberRange]:
        table = self.table
        for at in range(*np.searchsorted(table.rows, [first, last]).tolist()):
            name = f"{self.keys[table.rows.item(at)]}.{table.suffixes[table.kinds.item(at)]}"
            begin, nbytes = table.begins.item(at), table.sizes.item(at)
            yield MemberRange(self.path, begin, begin + nbytes + -nbytes % BLOCK, build_tar_header(name, nbytes))


def _with_prefix(index: ShardIndex, prefix: str) -> Keys:
    """Return the keys with a prefix; raise InvalidKeyError if a reader would misread the name of a member."""
    keys = [prefix + key for key in index.keys]
    suffixes = index.members_in_order().suffixes
    for key in keys:
        check_key(key)
        check_suffixes(key, suffixes)
    raws = [key.encode() for key in keys]
    return Keys(np.frombuffer(b"".join(raws), np.uint8), np.array([*accumulate(map(len, raws))], np.uint64))


_Run = tuple[_OldShard, int, int]  # consecutive samples `[begin, end)` of a shard


def reshard(
    source: CachePaths,
    out: str | os.PathLike[str],
    *,
    max_samples: int = MAX_SAMPLES,
    max_nbytes: int = 1 << 30,
    dali_index: bool = True,
    fsync: bool = True,
    progress: ProgressOption = None,
) -> CopyReport:
    """Write the samples of a cache into shards of another length, in the same order; `source` is not changed.

    All members are copied with their tar headers, byte for byte. Each new shard has the fingerprint of its samples. A new shard
    starts at each sample whose fingerprint differs from that of the sample before it.

    The folder appears by one rename when it is complete. A killed or interrupted call leaves a hidden folder next to `out`,
    and the same call after it resumes. A call with other arguments for the same `out` deletes that folder.

    Args:
        source: Shards, as in `tc.open`.
        out: A new folder, or an empty one, which is replaced.
        max_samples, max_nbytes, dali_index, fsync: As in `ShardWriter`.
        progress: As in `tc.build`; counts samples.

    Raises:
        FileExistsError: `out` is not empty, or another process writes it.
        FileNotFoundError: A file does not exist, or there are no shards.
        FormatError: A shard is damaged, was changed during the call, or does not match its index.
        InvalidKeyError: A key occurs in several shards.
        OSError: A file cannot be read or written, for example because the disk is full.
        ValueError: `max_samples` or `max_nbytes` is less than 1.
    """
    return merge(
        [source],
        out,
        max_samples=max_samples,
        max_nbytes=max_nbytes,
        dali_index=dali_index,
        fsync=fsync,
        progress=progress,
    )


def merge(
    sources: Sequence[CachePaths],
    out: str | os.PathLike[str],
    *,
    prefixes: Sequence[str] = (),
    mixed: bool = False,
    max_samples: int = MAX_SAMPLES,
    max_nbytes: int = 1 << 30,
    dali_index: bool = True,
    fsync: bool = True,
    progress: ProgressOption = None,
) -> CopyReport:
    """Write the samples of several caches into one new cache, one cache after the other; see `reshard`.

    Args:
        sources: Caches, each as in `tc.open`.
        out, max_samples, max_nbytes, dali_index, fsync, progress: As in `reshard`.
        prefixes: Prefix of the keys of each cache, such as `"photos/"`; by default none. Members of a cache with a prefix get
            new tar headers. Its tar entries that belong to no sample, such as folders, are left out.
        mixed: Merge caches even if their fingerprints differ. All samples of a shard still have one fingerprint. Fingerprints
            of imports may also differ in `source`, the folder of the files: the new cache lists these folders.

    Raises:
        InvalidKeyError: A key occurs several times; or a reader would misread a key with its prefix.
        StaleCacheError: Caches have different fingerprints, and `mixed` is False.
        ValueError: There are no sources, or not as many prefixes as sources.
        And the errors of `reshard`.
    """
    if max_samples < 1 or max_nbytes < 1:
        raise ValueError(f"max_samples={max_samples}, max_nbytes={max_nbytes}: both expected at least 1")
    prefixes = list(prefixes) or [""] * len(sources)
    if not sources or len(prefixes) != len(sources):
        raise ValueError(f"{len(sources)} caches and {len(prefixes)} prefixes, expected one prefix for each cache")
    out, files = check_new(out, "choose a new folder"), Files()
    parts = [_load(source, prefix, files) for source, prefix in zip(sources, prefixes, strict=True)]
    shards = [shard for part in parts for shard in part]
    if not mixed:
        _unite_sources(shards)
        _check_fingerprints(sources, parts)
    _check_keys(shards)
    plan = list(_plan(shards, max_samples, max_nbytes))
    about = [[os.path.abspath(shard.path), shard.identity, shard.prefix] for shard in shards]
    token = xxh3_64_hexdigest(json.dumps([about, max_samples, max_nbytes, dali_index]).encode("utf-8", "surrogatepass"))
    with new_folder(out, fsync, token) as folder:
        report, listing = CopyReport(), Listing()
        for stray in find_temporary(folder, ".*"):
            remove_stray(stray)
        with closing(Progress(progress, sum(len(shard.keys) for shard in shards), unit=" samples", smoothing=0)) as bar:
            for number, runs in enumerate(plan):
                path = os.path.join(folder, DEFAULT_NAME % number)
                index = _resumed(path, runs)
                report.num_shards_resumed += index is not None
                if index is None:
                    index = _write(path, runs, files, fsync, lambda count: bar.show(report.num_samples + count))
                if dali_index:
                    with contextlib.suppress(InvalidKeyError):  # DALI's index cannot contain some names
                        write_dali_index(dali_index_path(path), index, fsync)
                listing.add(path, index)
                report.num_shards += 1
                report.num_samples += len(index.keys)
                report.nbytes += os.path.getsize(path)
                bar.show(report.num_samples)
        listing.write(os.path.join(folder, MANIFEST), listing.entries, fsync)
        if fsync:
            fsync_folder(folder)
    return report


def _load(source: CachePaths, prefix: str, files: Files) -> list[_OldShard]:
    found = find_shards(source, local_for="merged or resharded", copies=True)
    indexes = load_finished({path: (listed, made) for path, listed, made in found}, files).indexes
    return [_OldShard(path, indexes[path], prefix, files.get(path).identity) for path, *_ in found]


def _unite_sources(shards: list[_OldShard]) -> None:
    """Give shards of imports the same fingerprint if they differ only in the folders from which they were imported."""
    alike: dict[str, list[_OldShard]] = {}
    for shard in shards:
        made = shard.index.fingerprint
        if made is not None and "format" in made and SOURCE in made:
            others = {name: value for name, value in made.items() if name != SOURCE}
            alike.setdefault(json.dumps(others, sort_keys=True), []).append(shard)
    for some in alike.values():
        folders: list[Any] = []
        for shard in some:
            source = (shard.index.fingerprint or {})[SOURCE]
            folders += [each for each in (source if isinstance(source, list) else [source]) if each not in folders]
        for shard in some:
            if len(folders) > 1:
                shard.index = replace(shard.index, fingerprint={**(shard.index.fingerprint or {}), SOURCE: folders})
                shard.fingerprint = json.dumps(shard.index.fingerprint, sort_keys=True)


def _check_fingerprints(sources: Sequence[CachePaths], parts: list[list[_OldShard]]) -> None:
    """Raise StaleCacheError unless the shards of all caches have the same fingerprints."""
    first = {shard.fingerprint: shard.index.fingerprint for shard in parts[0]}
    for source, part in zip(sources[1:], parts[1:], strict=True):
        other = {shard.fingerprint: shard.index.fingerprint for shard in part}
        if other.keys() != first.keys():
            left, right = (next(iter(each.values())) for each in (first, other))
            what = f"{source} was made with {_differing(right, left)}, but {sources[0]} with {_differing(left, right)}"
            raise StaleCacheError(f"{what}; merge them with --mixed (mixed=True) if they belong together")


def _differing(mine: Mapping[str, Any] | None, other: Mapping[str, Any] | None) -> str:
    if mine is None or other is None:
        return "no fingerprint" if mine is None else f"{dict(mine)!r:.300}"
    fields = {name: value for name, value in mine.items() if name not in other or other[name] != value}
    return f"{fields!r:.300}" if fields else "several fingerprints"


def _check_keys(shards: list[_OldShard]) -> None:
    """Raise InvalidKeyError if a key occurs in several shards; the index of one shard has no key twice."""
    table = KeyTable((shard.keys, None) for shard in shards)
    repeated = table.shared()
    if repeated:
        starts = [0, *accumulate(len(shard.keys) for shard in shards)]
        paths = [shards[bisect_right(starts, at) - 1].path for at in table.find(repeated[0])[:2]]
        listed = ", ".join(f"{key!r:.100}" for key in repeated[:_NUM_SHOWN]) + ", …" * (len(repeated) > _NUM_SHOWN)
        what = f"repeated keys: {len(repeated):,}, {listed}; the first one is in {' and '.join(paths)}"
        raise InvalidKeyError(
            f"{what}. To merge other samples with equal keys, give each cache a prefix: --prefix (prefixes=). "
            "To put two caches of the same samples together, read them with tc.join"
        )


def _plan(shards: Iterable[_OldShard], max_samples: int, max_nbytes: int) -> Iterator[list[_Run]]:
    """Yield the samples of each new shard, which ends where a shard of `ShardWriter` with these limits would end."""
    runs: list[_Run] = []
    count = nbytes = 0
    for shard in shards:
        if runs and shard.fingerprint != runs[0][0].fingerprint:
            yield runs
            runs, count, nbytes = [], 0, 0
        totals, row = np.cumsum(shard.sizes), 0
        while row < len(totals):
            if count >= max_samples or nbytes >= max_nbytes:
                yield runs
                runs, count, nbytes = [], 0, 0
            before = totals.item(row - 1) if row else 0
            filling = int(np.searchsorted(totals, before + max_nbytes - nbytes))  # the sample that makes the shard full
            end = min(len(totals), row + max_samples - count, filling + 1)
            runs.append((shard, row, end))
            count, nbytes, row = count + end - row, nbytes + totals.item(end - 1) - before, end
    if runs:
        yield runs


def _write(path: str, runs: list[_Run], files: Files, fsync: bool, show: Callable[[int], object]) -> ShardIndex:
    """Write a new shard; scan it, and return the index from this scan."""

    def ranges() -> Iterator[MemberRange]:
        done = 0
        for shard, begin, end in runs:
            for count, some in shard.ranges(begin, end):
                yield from some
                done += count
                show(done)

    try:
        origins = (shard.origin(row) for shard, begin, end in runs for row in range(begin, end))
        index = write_shard(path, ranges(), files, runs[0][0].index.fingerprint, origins, fsync=fsync)
        if _contents([(index.keys, index.members_in_order(), 0, len(index.keys))]) != _expected(runs):
            raise FormatError(
                "the index and the shard differ in samples; see `tensorcache verify` (tc.verify)", kind="index"
            )
    except FormatError as exc:
        raise exc.at(", ".join(dict.fromkeys(shard.path for shard, *_ in runs))) from exc
    for shard, *_ in runs:
        files.get(shard.path).check_unchanged()
    return index


def _resumed(path: str, runs: list[_Run]) -> ShardIndex | None:
    """Return the index of a new shard that an interrupted call has finished; None if there is no such shard."""
    if not os.path.exists(path):
        return None
    with contextlib.suppress(FormatError):
        index = load_whole(path)
        if _contents([(index.keys, index.members_in_order(), 0, len(index.keys))]) == _expected(runs):
            return index
    os.remove(path)
    return None


def _expected(runs: list[_Run]) -> list[Any]:
    return _contents((shard.keys, shard.table, begin, end) for shard, begin, end in runs)


def _contents(parts: Iterable[tuple[Keys, MemberTable, int, int]]) -> list[Any]:
    """Return key, suffix, length and declared digest of each member of samples `[begin, end)`, in order."""
    found: list[Any] = []
    for keys, table, begin, end in parts:
        some = slice(*np.searchsorted(table.rows, [begin, end]).tolist())
        kinds = table.kinds[some].tolist()
        digests = [
            0 if cache is None else cache.digest.item(number)
            for cache, number in zip(map(table.caches.__getitem__, kinds), table.numbers[some].tolist(), strict=True)
        ]
        names = [keys.raw(row) for row in table.rows[some].tolist()]
        suffixes = [table.suffixes[kind] for kind in kinds]
        found += zip(names, suffixes, table.sizes[some].tolist(), digests, strict=True)
    return found
