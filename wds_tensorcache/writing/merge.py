"""Caches merged into one, or written into shards of another length."""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from itertools import accumulate, chain
from math import ceil
from typing import Any

import numpy as np

from wds_tensorcache.errors import InvalidKeyError, StaleCacheError
from wds_tensorcache.progress import Progress, ProgressOption
from wds_tensorcache.reading.find_shards import CachePaths, find_shards
from wds_tensorcache.shards.fingerprint import SOURCE, as_text, check_fingerprint
from wds_tensorcache.shards.key_table import KeyTable
from wds_tensorcache.shards.tar import BLOCK
from wds_tensorcache.storage.files import Files
from wds_tensorcache.writing.copy_shards import CopyReport, NewShard, OldShard, Run, write_cache
from wds_tensorcache.writing.new_folder import check_new
from wds_tensorcache.writing.pattern import DEFAULT_NAME
from wds_tensorcache.writing.resume import load_finished
from wds_tensorcache.writing.writer import MAX_SAMPLES, check_limits

_NUM_SHOWN = 3  # repeated keys in an error


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
    """Write the samples of a cache into shards of another length. Their order stays, and `source` is not changed.

    The new shards are `000000.tar`, `000001.tar`, … All members are copied with their tar headers, byte for byte. Digests are
    not checked: `tc.verify` finds damage. A new shard that equals an old shard is a hard link to it, so never
    write into a shard in place. Each new shard has the fingerprint of its samples. A new shard starts wherever the fingerprint
    of the samples changes.

    The folder appears by one rename when it is complete. A killed or interrupted call leaves a hidden folder next to `out`,
    and repeating the call resumes from it. A call with other arguments for the same `out` deletes that folder.

    Args:
        source: Shards, as in `tc.open`.
        out: A new folder, or an empty folder, which is replaced.
        max_samples, max_nbytes, dali_index, fsync: As in `ShardWriter`.
        progress: As in `tc.build`; counts samples.

    Raises:
        FileExistsError: `out` is not empty, or another process writes it. Or `out` is a file, the current folder or a mount
            point.
        FileNotFoundError: A file does not exist, or there are no shards.
        FormatError: The tar of a shard is damaged, was changed during the call, or does not match its index. Or the manifest is
            damaged or stale. Or `tc.open` would warn that it leaves out tars of the folder.
        ImportError: `progress` is True, and `tqdm` is not installed.
        InvalidKeyError: A key occurs in several shards.
        OSError: A file cannot be read or written, for example because the disk is full.
        TypeError: `source` is not a path, a pattern or a list of them; or `max_samples` or `max_nbytes` is not a number.
        ValueError: `max_samples` or `max_nbytes` is less than 1; there are no samples; `source` or `out` is a url; or `out` is
            an empty string.
    """
    limits: Any = {"max_samples": max_samples, "max_nbytes": max_nbytes}
    return merge([source], out, **limits, dali_index=dali_index, fsync=fsync, progress=progress)


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
    """Concatenate the samples of several caches in a new cache. See `reshard`.

    Args:
        sources: Caches, as in `tc.open`.
        out, max_samples, max_nbytes, dali_index, fsync, progress: As in `reshard`.
        prefixes: Prefix of the keys of each cache, such as `"photos/"`; by default none. Members of a cache with a prefix get
            new tar headers. Its tar entries that belong to no sample, such as folders, are left out.
        mixed: Merge caches even if their fingerprints differ. All samples of a shard still have one fingerprint. Without
            `mixed`, fingerprints of imports may differ only in `source`, the folder of the files: the new cache lists these
            folders.

    Raises:
        InvalidKeyError: A key occurs several times; or a reader would misread a key with its prefix.
        StaleCacheError: A cache has a fingerprint that the first cache does not have, and `mixed` is False.
        ValueError: There are no sources, or not as many prefixes as sources.
        TypeError: `sources` is a single path, or is not a sequence.
        And the errors of `reshard`.
    """
    if isinstance(sources, (str, os.PathLike)):
        raise TypeError(f"sources={os.fspath(sources)!r:.100}, expected a list of caches")
    if isinstance(prefixes, str):
        raise TypeError(f"{prefixes=!r:.100}, expected a list of prefixes")
    check_limits(max_samples, max_nbytes)
    prefixes = list(prefixes) or [""] * len(sources)
    if not sources or len(prefixes) != len(sources):
        raise ValueError(f"{len(sources)} caches and {len(prefixes)} prefixes, expected one prefix for each cache")
    out, files = check_new(out, "choose a new folder"), Files()
    parts = [_load(source, prefix, files) for source, prefix in zip(sources, prefixes, strict=True)]
    shards = [shard for part in parts for shard in part]
    if not mixed:
        _unite_sources(shards)
        _check_fingerprints(parts)
    _check_keys(shards)
    plan = [
        NewShard(DEFAULT_NAME % number, runs, dali_index=dali_index)
        for number, runs in enumerate(_divide(shards, max_samples, max_nbytes))
    ]
    if not plan:
        raise ValueError(f"{shards[0].path}: no shard has a sample, so nothing was written")
    with closing(Progress(progress, sum(len(shard.keys) for shard in shards), unit=" samples", smoothing=0)) as bar:
        return write_cache(out, plan, files, fsync=fsync, show=bar.show)


def _load(source: CachePaths, prefix: str, files: Files) -> list[OldShard]:
    shards = find_shards(source, local_for="merged or resharded", copies=True).shards
    indexes = load_finished(shards, files).indexes
    return [OldShard(shard.path, indexes[shard.path], files, prefix) for shard in shards]


def _unite_sources(shards: list[OldShard]) -> None:
    """Give imported shards one fingerprint if only their source folders differ."""
    alike: dict[str, tuple[list[OldShard], list[Any]]] = {}  # shards, and all their source folders
    for shard in shards:
        fingerprint = shard.fingerprint or {}
        if "format" in fingerprint and SOURCE in fingerprint:
            settings = {name: value for name, value in fingerprint.items() if name != SOURCE}
            group, folders = alike.setdefault(as_text(settings), ([], []))
            group.append(shard)
            source = fingerprint[SOURCE]
            folders += [name for name in (source if isinstance(source, list) else [source]) if name not in folders]
    for group, folders in alike.values():
        for shard in group if len(folders) > 1 else ():
            shard.fingerprint = {**(shard.fingerprint or {}), SOURCE: folders}


def _check_fingerprints(parts: list[list[OldShard]]) -> None:
    """Raise StaleCacheError if a fingerprint does not occur in the first cache."""
    texts, first = {as_text(shard.fingerprint) for shard in parts[0]}, parts[0][0]
    for shard in chain.from_iterable(parts[1:]):
        if as_text(shard.fingerprint) not in texts:
            stored, expected = shard.fingerprint, first.fingerprint
            pair = [{name: part[name] for name in part if name != SOURCE} for part in (stored or {}, expected or {})]
            # the error names one of these fields, not the folder of an import
            if stored and as_text(pair[0]) != as_text(pair[1]):
                stored, expected = pair
            try:
                check_fingerprint(shard.path, stored, expected or {})
                raise StaleCacheError(
                    f"{shard.path} was made with {stored!r:.500}, but {first.path} with {expected!r:.500}"
                )
            except StaleCacheError as exc:
                raise StaleCacheError(f"{exc}; merge them with --mixed (mixed=True) if they belong together") from exc


def _check_keys(shards: list[OldShard]) -> None:
    """Raise InvalidKeyError if a key occurs in several shards."""
    table = KeyTable((shard.keys, None) for shard in shards)
    repeated = table.shared()
    if repeated:
        starts = [0, *accumulate(len(shard.keys) for shard in shards)]
        paths = [shards[bisect_right(starts, at) - 1].path for at in table.find(repeated[0])[:2]]
        listed = ", ".join(f"{key!r:.100}" for key in repeated[:_NUM_SHOWN]) + ", …" * (len(repeated) > _NUM_SHOWN)
        fault = f"repeated keys: {len(repeated):,}, {listed}; the first one is in {' and '.join(paths)}"
        raise InvalidKeyError(
            f"{fault}. To merge other samples with equal keys, give each cache a prefix: --prefix (prefixes=). "
            "To put two caches of the same samples together, read them with tc.join"
        )


def _divide(shards: Iterable[OldShard], max_samples: int, max_nbytes: int) -> Iterator[list[Run]]:
    """Yield the samples of each new shard. Shards end where `ShardWriter` with the same limits would end them."""
    runs: list[Run] = []
    count = nbytes = 0
    for shard in shards:
        if runs and as_text(shard.fingerprint) != as_text(runs[0][0].fingerprint):
            yield runs
            runs, count, nbytes = [], 0, 0
        totals, row = np.cumsum(_sizes(shard)), 0
        while row < len(totals):
            if count >= max_samples or nbytes >= max_nbytes:
                yield runs
                runs, count, nbytes = [], 0, 0
            before = totals.item(row - 1) if row else 0
            filling = int(np.searchsorted(totals, before + max_nbytes - nbytes))  # the sample that makes the shard full
            # as in `ShardWriter`, `max_samples` may be a float, for example infinity
            end = ceil(min(len(totals), row + max_samples - count, filling + 1))
            runs.append((shard, row, end))
            count, nbytes, row = count + end - row, nbytes + totals.item(end - 1) - before, end
    if runs:
        yield runs


def _sizes(shard: OldShard) -> Any:
    """Return the number of bytes of each sample in a new shard."""
    if not shard.prefix:
        return np.diff(shard.ends, prepend=0)
    members = shard.members
    return np.bincount(members.rows, BLOCK + members.sizes + -members.sizes % BLOCK).astype(np.int64)
