"""Versions of a cache: new folders that reuse its shards and samples."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import replace
from itertools import count

from xxhash import xxh3_64_hexdigest

from wds_tensorcache.reading.find_shards import find_shards
from wds_tensorcache.shards.dali_index import check_replaceable
from wds_tensorcache.shards.manifest import FoundShard, Manifest
from wds_tensorcache.shards.names import dali_index_path, safe_key, sidecar_path
from wds_tensorcache.storage.folder import folder_of
from wds_tensorcache.storage.locks import find_writer
from wds_tensorcache.writing.build_batch import Job, Target, compute
from wds_tensorcache.writing.build_compare import Comparison, refuse_shared
from wds_tensorcache.writing.build_failures import Failures
from wds_tensorcache.writing.build_items import NO_ITEMS, each_once
from wds_tensorcache.writing.copy_shards import NewShard, OldShard, Run, write_cache
from wds_tensorcache.writing.new_folder import check_local, check_new, has_entries
from wds_tensorcache.writing.pattern import DEFAULT_NAME, ShardPattern
from wds_tensorcache.writing.pattern_lock import WriterLock
from wds_tensorcache.writing.resume import FinishedShards, list_new, load_finished
from wds_tensorcache.writing.writer import ShardWriter

# samples of the old cache, by path and row, that a version leaves out (None), or the keys whose new samples replace them
_Changes = dict[tuple[str, int], "str | None"]
_LAST_NUMBER = re.compile(r"(.*?)([0-9]+)([^0-9]*)", re.DOTALL).fullmatch


def drop(
    source: str | os.PathLike[str], out: str | os.PathLike[str], keys: Iterable[str], *, fsync: bool = True
) -> None:
    """Write a version of a cache without some of its samples.

    Shards that lose no sample become hard links, so never write into a shard in place. They are copies if the file system has
    no links. Other shards are rewritten under the same names, with the members of the remaining samples unchanged byte for
    byte. Digests are not checked: `tc.verify` finds damage. A shard without remaining samples is not written. If the
    call is killed or interrupted, `out` is either complete or unchanged, and the same call resumes.

    Args:
        source: Folder of the cache; its files are not changed.
        out: Folder of the version: a new folder, or an empty folder, which is replaced.
        keys: Keys of the samples to drop, with all their members. Of a key in several shards, all samples are dropped. Without
            keys, the version has all samples.
        fsync: Wait for the disk before the folder appears.

    Raises:
        FileExistsError: `out` is not empty, or another process writes it. Or `out` is a file, the current folder or a mount
            point. Or a shard has the name that the `.idx` or `.index` of another shard needs.
        FileNotFoundError: `source` does not exist, or has no shards.
        FormatError: The tar of a shard or the manifest is damaged, or was changed during the call. Or `tc.open` would warn that
            it leaves out tars of the folder.
        KeyError: The cache has no sample with one of the keys.
        OSError: A file cannot be read or written, for example because the disk is full.
        TypeError: `keys` is a str or bytes.
        ValueError: No sample would remain; `source` is not a local folder; or `out` is a url or an empty string.
    """
    if isinstance(keys, (str, bytes)):
        raise TypeError(f"keys={keys!r:.100}, expected a collection of keys")
    out, old = check_new(out), OldCache(source)
    changes: _Changes = {}
    for key in keys:
        places = old.shards.find(key) if isinstance(key, str) else []
        if not places:
            safe = safe_key(key) if isinstance(key, str) and key else ""
            hint = f"; pass the key of this name: {safe!r:.100}" if old.shards.find(safe) else ""
            raise KeyError(f"{old.folder} has no sample {key!r:.100}{hint}")
        changes |= dict.fromkeys(places)
    _write_version(out, old, changes, set(), FinishedShards({}, old.shards.files), None, fsync)


class OldCache:
    """The cache from which a version is made.

    `urls` contains, by path, the url of each shard relative to the folder.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        check_local(folder, "the old cache of a version")
        self.folder = os.fsdecode(folder)
        shards = find_shards(self.folder, copies=True).shards
        if not os.path.isdir(self.folder):
            raise ValueError(f"{self.folder!r} is not a folder; expected the folder of a cache")
        self.shards = load_finished(shards)
        self.urls = {path: os.path.relpath(path, self.folder).replace(os.sep, "/") for path in self.shards.indexes}

    def next_urls(self, name: str | None) -> Iterator[str]:
        """Yield urls for new shards, numbered after the old shards.

        `name` is the pattern of their names; by default, they are named like the last old shard.
        """
        folder, last = os.path.split(list(self.urls.values())[-1])
        match = _LAST_NUMBER(last)
        if name is None and match is not None and "%" not in last:
            name = f"{match[1]}%0{len(match[2])}d{match[3]}"
        pattern = ShardPattern(os.path.join(folder, name or DEFAULT_NAME))
        names = [os.path.basename(url) for url in self.urls.values() if os.path.dirname(url) == folder]
        number = max((number for number in map(pattern.number, names) if number is not None), default=-1)
        yield from map(pattern.path, count(number + 1))


def build_version(job: Job, out: str, old: OldCache, name: str | None) -> bool:
    """Compute the samples that cannot be reused. On one process, also write the version. Return whether it was written.

    Computed samples are first written to a hidden cache, as in a build without `reuse=`. A later call resumes from this cache,
    even if other ranks have written it.
    """
    options = {**job.options, "manifest": True}  # keeps the fingerprints of shards without a footer
    job, items, folder, fingerprint = replace(job, options=options), job.items, _hidden(out), options["fingerprint"]
    # samples with another fingerprint have other names, so they are not used
    prefix = xxh3_64_hexdigest(json.dumps(fingerprint, sort_keys=True).encode())[:8]
    pattern = ShardPattern(os.path.join(folder, f"{prefix}-{DEFAULT_NAME}")).of_rank(items.rank, items.world_size)
    keys: set[str] = set()
    try:
        if items.world_size > 1:
            _, failures = _compute(job, old, pattern, keys)
            failures.report(job.allows_failures)
            return False
        with closing(WriterLock(ShardPattern(os.path.join(folder, "version.tar")))):
            if has_entries(out):
                raise FileExistsError(f"{out}: another call has written this version since this one started")
            changes, failures = _compute(job, old, pattern, keys)
            failures.report(job.allows_failures, folder=out if job.allows_failures else None)
            # an earlier call may have computed such a sample, before its item changed
            failed = {failure.key for failure in failures.new.values()}
            changes = {place: None if key in failed else key for place, key in changes.items()}
            with closing(WriterLock(pattern)):  # from here on, no rank may add samples
                stored = [FoundShard(path, fingerprint=fingerprint) for _, path in pattern.shards_by_age()]
                computed = load_finished(stored, old.shards.files)
                others = {failures.name: failures.content()} if failures.new else None
                _write_version(out, old, changes, keys - failed, computed, name, options.get("fsync", True), others)
                shutil.rmtree(folder, ignore_errors=True)
        return True
    finally:
        with contextlib.suppress(OSError):
            os.rmdir(folder)  # unless there is something to resume from


def remove_abandoned(out: str) -> None:
    """Delete the computed samples of a complete version. They stay while another call is still computing."""
    folder = _hidden(os.path.realpath(out))
    if os.path.isdir(folder) and not find_writer(folder):
        shutil.rmtree(folder, ignore_errors=True)


def _hidden(out: str) -> str:
    return os.path.join(os.path.dirname(out), f".{os.path.basename(out)}.building")


def _compute(job: Job, old: OldCache, pattern: ShardPattern, keys: set[str]) -> tuple[_Changes, Failures]:
    """Compute the missing samples of this rank, and fill `keys`."""
    changes: _Changes = {}
    sink = ShardWriter(str(pattern), resume=True, **job.options)
    folder = folder_of(pattern.folder, job.options.get("fsync", True))
    failures = job.open_failures(folder, folder.names(), sink)
    finished, ages = sink.finished, pattern.shards_by_age()
    indexes = {path: finished.indexes[path] for _, path in ages if path in finished.indexes}
    # with numbers after the shards of all ranks, also of other world sizes, the newest sample of a key is the last
    sink._number = 1 + max((number for number, _ in ages), default=-1)
    batches = _stale(job, old, FinishedShards(indexes, finished.files), pattern, keys, changes)
    compute(job, batches, sink, failures, (*old.shards.indexes.values(), *indexes.values()))
    for path, index in old.shards.indexes.items():
        changes |= {(path, row): None for row, key in enumerate(index.keys) if key not in keys}
    if job.items.world_size > 1:
        new = list_new(pattern, finished, job.options)
        refuse_shared(new, pattern, keys, "call build on one process, which computes the missing samples")
    return changes, failures


def _stale(
    job: Job, old: OldCache, computed: FinishedShards, pattern: ShardPattern, keys: set[str], changes: _Changes
) -> Iterator[list[Target]]:
    """Yield batches of items to compute; fill `keys` and `changes`."""
    # Batches are the same after an interruption, because they include the items that this rank has computed. The items that
    # ranks of another world size have computed are left out.
    items, todo = job.items, list[Target]()
    comparison, newer = Comparison(items, old.shards, old.folder), Comparison(items, computed, old.folder)
    has_origins = any(i.origins is not None and i.origins.digest is not None for i in old.shards.indexes.values())
    reads_all = items.compares and has_origins
    for batch in items.batches(lambda key: not reads_all and key in old.shards):
        for item in each_once(batch, keys, old.shards.stored_key):
            places, newest = old.shards.find(item.key), computed.find(item.key)[-1:]
            # it is unknown whether an unreadable item has changed, perhaps since a call that has computed its sample
            is_read = item.failure is None
            right = comparison.find_right(item, places) if is_read else None
            if places:  # if several samples have this key, keep one of them
                changes |= dict.fromkeys(places)
                if right is None:
                    changes[places[0]] = item.key
                else:
                    del changes[right]
            is_finished = right is not None or (is_read and newer.find_right(item, newest) is not None)
            job.bar.num_old += is_finished
            is_own = not newest or pattern.covers(os.path.basename(newest[0][0]))
            if right is None and (is_own or not is_finished):
                todo.append((item, not is_finished))
        job.bar.show_count()
        if len(todo) >= items.batch_size:
            comparison.warn()
        while len(todo) >= items.batch_size:
            yield todo[: items.batch_size]
            del todo[: items.batch_size]
    comparison.warn()
    if todo:
        yield todo
    if not items.num_all:
        raise ValueError(NO_ITEMS)


def _write_version(
    out: str,
    old: OldCache,
    changes: _Changes,
    keys: Collection[str],
    computed: FinishedShards,
    name: str | None,
    fsync: bool,
    others: Mapping[str, bytes] | None = None,
) -> None:
    """Write the old shards with the changes, then the new samples."""
    shards = {path: OldShard(path, index, computed.files) for path, index in computed.indexes.items()}

    def newest(key: str) -> Run:
        path, row = computed.find(key)[-1]
        return shards[path], row, row + 1

    plan: list[NewShard] = []
    for path, url in old.urls.items():
        shard = OldShard(path, old.shards.indexes[path], old.shards.files)
        new = {row: changes[path, row] for row in range(len(shard.index.keys)) if (path, row) in changes}
        _add(plan, url, shard, {row: None if key is None else newest(key) for row, key in new.items()})
    urls = old.next_urls(name)
    for path, shard in shards.items():
        skipped = [
            row
            for row, key in enumerate(shard.index.keys)
            if key not in keys or key in old.shards or computed.find(key)[-1] != (path, row)
        ]
        _add(plan, urls, shard, dict.fromkeys(skipped))
    if not any(end - begin for part in plan for _, begin, end in part.runs):
        raise ValueError(f"{old.folder}: no sample would remain, so nothing was written")
    write_cache(out, plan, old.shards.files, extra=Manifest.of(folder_of(old.folder)).extra, fsync=fsync, others=others)


def _add(plan: list[NewShard], url: str | Iterator[str], old: OldShard, changes: Mapping[int, Run | None]) -> None:
    """Plan a shard without the changed rows, or with their replacements."""
    runs, begin, count = list[Run](), 0, len(old.index.keys)
    for row, replacement in sorted(changes.items()):
        runs += [(old, begin, row)] * (begin < row)
        runs += [] if replacement is None else [replacement]
        begin = row + 1
    runs += [(old, begin, count)] * (begin < count or not count)
    if runs:
        # with a footer, a sidecar and an `.idx` only if the old shard has one, too
        sidecar, idx = sidecar_path(old.path), dali_index_path(old.path)
        check_replaceable(idx, sidecar)
        url = url if isinstance(url, str) else next(url)
        plan.append(NewShard(url, runs, old.has_footer, os.path.exists(sidecar), os.path.exists(idx)))
