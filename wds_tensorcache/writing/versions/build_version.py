"""Build a version: all ranks compute samples into a hidden folder, and the last one puts the version together."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from typing import Any, Literal, TypeAlias

from xxhash import xxh3_64_hexdigest

from wds_tensorcache.shards.index_paths import DALI_SUFFIX
from wds_tensorcache.shards.manifest import MANIFEST, Catalog
from wds_tensorcache.storage.atomic import remove_stray
from wds_tensorcache.storage.files import Files
from wds_tensorcache.writing.build_batch import (
    SampleProgress,
    Target,
    compute,
    is_comparable,
    is_right,
    resumable,
    warn_of_positions,
)
from wds_tensorcache.writing.build_items import NO_ITEMS, Items, each_once
from wds_tensorcache.writing.new_folder import has_entries
from wds_tensorcache.writing.pattern import DEFAULT_NAME, ShardPattern
from wds_tensorcache.writing.pattern_lock import WriterLock
from wds_tensorcache.writing.resume import FinishedShards, load_finished
from wds_tensorcache.writing.versions.rank_parts import RankParts
from wds_tensorcache.writing.versions.write_version import OldCache, VersionShard, write_version
from wds_tensorcache.writing.writer import ShardWriter

__all__ = ["Outcome", "build_version", "remove_abandoned"]

Outcome: TypeAlias = Literal["complete", "incomplete", "found"]
_WAIT_S = 60.0  # other ranks hold the lock briefly, except while one of them writes the version
_DELETED = (".tar", DALI_SUFFIX, ".tmp")


def build_version(
    items: Items,
    fn: Callable[[list[Any]], Any],
    out: str,
    old: OldCache,
    name: str | None,
    bar: SampleProgress,
    options: dict[str, Any],
) -> Outcome:
    """Compute the samples that cannot be reused; when all ranks have done so, write the version.

    Computed samples are first written to a hidden cache, from which a call after an interruption resumes. Each rank leaves
    there which samples it reuses and which it has computed. The rank that finishes last writes the version.

    Returns:
        `"complete"` if the version was written; `"incomplete"` if another rank has not finished; `"found"` if another call
        has just written the version, so that nothing was read or computed.

    Raises:
        FileExistsError: Another call computes samples of this version, as the same rank or with another world size; or
            writes the version.
    """
    options = {**options, "manifest": True}  # keeps the fingerprints of shards without a footer
    folder, fingerprint = _hidden(out), options["fingerprint"]
    parts = RankParts(folder, old, fingerprint, items.rank, items.world_size)
    # samples with another fingerprint have other names, so they are not used
    prefix = xxh3_64_hexdigest(json.dumps(fingerprint, sort_keys=True).encode())[:8]
    pattern = ShardPattern(os.path.join(folder, f"{prefix}-{DEFAULT_NAME}")).of_rank(items.rank, items.world_size)
    claim = ShardPattern(os.path.join(folder, "rank-%d.tar")).of_rank(items.rank, items.world_size)
    try:
        with _claimed(claim):
            with _claimed(_version_lock(folder), _WAIT_S):
                if has_entries(out):
                    return "found"
                parts.forget()
                _remove_others(folder, prefix)
            seen = _compute(items, fn, old, pattern, bar, options)
            with _claimed(_version_lock(folder), _WAIT_S):
                parts.save(seen, items.num_all)
                whole = parts.collect(seen, items.num_all)
                if whole is None:
                    return "incomplete"
                paths = [path for _, path in pattern.shards_by_age()]
                computed = load_finished(dict.fromkeys(paths, (None, fingerprint)), old.shards.files)
                shards = _put_together(old, computed, whole, name)
                write_version(out, old, shards, computed, fsync=options.get("fsync", True))
                shutil.rmtree(folder, ignore_errors=True)
        return "complete"
    finally:
        with contextlib.suppress(OSError):
            os.rmdir(folder)  # unless there is something to resume from, or another rank


def remove_abandoned(out: str) -> None:
    """Delete the hidden folder of a version, if a killed call has left it after the version was complete."""
    folder = _hidden(out)
    if os.path.isdir(folder):
        with contextlib.suppress(FileExistsError), _claimed(_version_lock(folder)):
            shutil.rmtree(folder, ignore_errors=True)


def _hidden(out: str) -> str:
    return os.path.join(os.path.dirname(out), f".{os.path.basename(out)}.building")


def _version_lock(folder: str) -> ShardPattern:
    return ShardPattern(os.path.join(folder, "version.tar"))


@contextlib.contextmanager
def _claimed(pattern: ShardPattern, wait_s: float = 0.0) -> Iterator[None]:
    """Make the folder of a pattern, and hold the pattern's lock; wait for it if another process holds it.

    Raises:
        FileExistsError: Another process holds the lock.
    """
    until = time.monotonic() + wait_s
    while True:
        os.makedirs(pattern.folder, exist_ok=True)
        try:
            lock = WriterLock(pattern)
            break
        except FileNotFoundError:
            pass  # another process has just deleted the folder
        except FileExistsError:
            if time.monotonic() >= until:
                raise
        time.sleep(0.01)
    with contextlib.closing(lock):
        yield


def _remove_others(folder: str, prefix: str) -> None:
    """Delete the computed samples of calls with another fingerprint."""
    kept = (prefix, MANIFEST)
    names = [name for name in os.listdir(folder) if name.endswith(_DELETED) and not name.lstrip(".").startswith(kept)]
    if names:
        Catalog(folder).remove(*names)
    for name in names:
        path = os.path.join(folder, name)
        if name.endswith(".tmp"):
            remove_stray(path)  # keeps a file that another rank is writing
        else:
            with contextlib.suppress(OSError):
                os.remove(path)


def _compute(
    items: Items,
    fn: Callable[[list[Any]], Any],
    old: OldCache,
    pattern: ShardPattern,
    bar: SampleProgress,
    options: dict[str, Any],
) -> set[str]:
    """Compute this rank's samples that can neither be reused nor are computed already; return the keys of all its items."""
    sink = ShardWriter(str(pattern), resume=True, **options)
    seen: set[str] = set()
    with resumable(sink, pattern.folder), sink:
        known, ages = sink.finished.indexes, pattern.shards_by_age()
        there = FinishedShards({path: known[path] for _, path in ages if path in known}, sink.finished.files)
        sink.finished = FinishedShards({}, Files())  # stale samples are computed again
        # with numbers after those of all ranks, also of other world sizes, the newest sample of a key is the last one
        sink._number = 1 + max((number for number, _ in ages), default=-1)
        earlier = (*old.shards.indexes.values(), *known.values())
        compute(_stale(items, old, there, pattern, sink, seen, bar), fn, bar, sink, earlier)
        if items.is_empty:
            raise ValueError(NO_ITEMS)
    return seen


def _put_together(old: OldCache, computed: FinishedShards, seen: set[str], name: str | None) -> list[VersionShard]:
    """Return the shards of a version: the old shards without samples that have no item, then the shards of new items."""
    for part in old.parts.values():
        part.dropped_keys.update(key for key in old.shards.indexes[part.path].keys if key not in seen)
    parts, urls = list(old.parts.values()), old.next_urls(name)
    for path, index in computed.indexes.items():
        are_new = [
            key in seen and key not in old.shards and computed.find(key)[-1] == (path, row)
            for row, key in enumerate(index.keys)
        ]
        if any(are_new):
            gone = {key for key, is_new in zip(index.keys, are_new, strict=True) if not is_new}
            parts.append(VersionShard(next(urls), path, computed, gone))
    return parts


def _stale(
    items: Items,
    old: OldCache,
    computed: FinishedShards,
    pattern: ShardPattern,
    sink: ShardWriter,
    seen: set[str],
    bar: SampleProgress,
) -> Iterator[list[Target]]:
    """Yield batches of items that cannot reuse a sample, each item paired with `sink`, or with None if it is already computed.

    Batches are the same ones after an interruption, because they include the items that this rank has computed. The items
    that ranks of another world size have computed are left out. Record in `old.parts` which samples to drop and to replace.
    """
    todo: list[Target] = []
    has_origins = any(i.origins is not None and i.origins.digest is not None for i in old.shards.indexes.values())
    reads_all = items.has_digests or (items.compares and has_origins)
    has_warned = False
    for batch in items.batches(lambda key: not reads_all and key in old.shards):
        for item in each_once(batch, seen, old.shards.stored_key):
            places = old.shards.find(item.key)
            right = next((place for place in places if is_right(old.shards, place, item)), None)
            if places and not has_warned and not is_comparable(items, old.shards, places[0], item):
                has_warned = True
                warn_of_positions(old.folder, [item.number])
            for place in places:  # if several samples have this key, keep one of them
                if place != (right or places[0]):
                    old.parts[place[0]].dropped_keys.add(item.key)
                elif right is None:
                    old.parts[place[0]].changed_keys.add(item.key)
            found = computed.find(item.key)
            is_there = right is not None or (bool(found) and is_right(computed, found[-1], item))
            if is_there:
                bar.count(is_old=True)
            if right is None and (not is_there or pattern.covers(os.path.basename(found[-1][0]))):
                todo.append((item, None if is_there else sink))
        bar.show_count()
        while len(todo) >= items.batch_size:
            yield todo[: items.batch_size]
            del todo[: items.batch_size]
    if todo:
        yield todo
