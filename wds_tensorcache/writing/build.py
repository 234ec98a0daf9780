"""`build`: caches computed by running a function over a dataset."""

from __future__ import annotations

import inspect
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from itertools import chain
from typing import Any, Literal

from wds_tensorcache.arguments import check_options, user_level
from wds_tensorcache.errors import FormatError, StaleCacheError, list_names
from wds_tensorcache.ranks import find_rank
from wds_tensorcache.reading.cache import Cache, TensorCache
from wds_tensorcache.reading.open_cache import open
from wds_tensorcache.reading.store import Store
from wds_tensorcache.shards.fingerprint import as_fingerprint, check_same
from wds_tensorcache.shards.index import ShardIndex
from wds_tensorcache.storage.files import Files
from wds_tensorcache.storage.folder import folder_of
from wds_tensorcache.storage.memory_pool import Pool
from wds_tensorcache.writing.build_batch import Job, SampleProgress, Target, compute
from wds_tensorcache.writing.build_compare import DIGEST, Comparison, refuse_shared
from wds_tensorcache.writing.build_failures import Failures, list_failures
from wds_tensorcache.writing.build_items import NO_ITEMS, Items, each_once
from wds_tensorcache.writing.new_folder import check_local, check_new, has_entries
from wds_tensorcache.writing.pattern import ShardPattern
from wds_tensorcache.writing.resume import FinishedShards, list_new
from wds_tensorcache.writing.versions import OldCache, build_version, remove_abandoned
from wds_tensorcache.writing.writer import MAX_SAMPLES, ShardWriter


def build(
    source: Any,
    fn: Callable[[list[Any]], Any],
    out: str | os.PathLike[str],
    *,
    fingerprint: Mapping[str, Any],
    reuse: str | os.PathLike[str] | None = None,
    batch_size: int = 32,
    keys: Sequence[str] | Callable[[Any], str] | None = None,
    digest: Callable[[Any], str] | None = None,
    num_workers: int = 0,
    rank: int | None = None,
    world_size: int | None = None,
    progress: bool | Callable[[int, int | None], object] | None = None,
    max_samples: int = MAX_SAMPLES,
    on_error: Literal["raise", "record"] = "raise",
    allow_failures: bool = False,
    check: Literal["finite"] | None = None,
    **options: Any,
) -> TensorCache:
    """Build a cache: run a function over a dataset in batches.

    If interrupted, call `build` again: it resumes after the last finished shard, with the same items in each batch. `fn` runs
    on each whole batch that lacks a sample. After an error or Ctrl-C, all samples computed before are kept. After a kill, the
    samples of the unfinished shard are computed again. Finished samples are never overwritten, and their indexes are trusted:
    `tc.verify` finds damaged samples.

    Several ranks (processes, on any number of machines) build one cache if all of them call `build` with the same arguments
    and a shared folder. Each rank computes its share of the batches, and writes its own shards, such as `r3of8-000000.tar`. Any
    number of ranks can resume. The cache is complete when every rank has returned.

    If keys are the positions of items, items are compared with the digests in finished shards (see docs/building.md). An
    item that differs is an error, and so are fewer items than samples. Plain values, paths, arrays and tensors can be compared.
    A call that resumes warns once of other items.

    If items change, build a *version*: `build(items, fn, "v2", reuse="v1", digest=…)` takes samples with the same key and
    digest from `v1`, and computes all other samples. On several ranks, each rank computes its share; then a call with
    `rank=0, world_size=1` writes the version. Unchanged shards are hard links to the shards of `v1`, so never write into a
    shard in place.

    Args:
        source: A map-style dataset (`len`, `[i]`) or an iterable. Or WebDataset shards without a cache: `tc.open` of them, a
            view of it, or a list of their paths or urls, which end in `.tar`. Then an item is a dict of `__key__`, `__url__`
            and the bytes of each member. The new shards have these members, byte for byte, and the cache.
        fn: Function called in the caller's thread with a list of up to `batch_size` items. It returns a list with a sample
            for each item, or nested dicts of tensors, arrays and lists `[B, …]`, which `build` cuts into samples. A tensor
            whose dtype or number of dimensions differs from earlier samples causes a warning, once for each name.
        out: A folder, or a pattern as for `ShardWriter`, also at a url. With `reuse`, a new local folder, which appears by one
            rename when the version is complete. An existing version is opened if it has exactly the samples of these items.
        fingerprint: Description of how `fn` makes the samples (model, revision, dtype, crop, …), as JSON values. A cache with
            a different fingerprint is refused, as `out` and as `reuse`. Readers check it with `tc.open(out,
            expect=fingerprint)`.
        reuse: Folder of the cache to take samples from. New shards are named like its last shard, with the next numbers,
            unless `out` is a pattern.
        batch_size: Number of items per call. With `reuse`, batches contain only items whose samples must be computed.
        keys: Keys of the samples, as a list with one key for each item of a map-style dataset, or as a function of an item.
            By default, items of a cache with shards keep their keys, and a dict's key is its `"__key__"`. The key of any
            other item is its position in nine digits, such as `000000007`. The string `"position"` makes all keys positions,
            and items are not compared.
        digest: Function from an item to a text, which is stored as the member `digest.txt`. An item has changed if its text
            differs from the stored text, or if none is stored.
        num_workers: Number of worker processes that read a map-style dataset; 0 reads it in this process. It must be 0 for an
            iterable.
        rank, world_size: Rank of this process, and the number of ranks; by default from torch.distributed, else from torchrun's
            environment, else one process. All ranks must have the same items in the same order. If the source of each rank has
            only its own items, pass `rank=0, world_size=1`, `keys` and a folder for each rank.
        progress: Show a bar of `tqdm`; by default on rank 0, if `tqdm` is installed and stderr is a terminal. Or a function
            `progress(done, total)` of the numbers of finished samples and of all samples of this rank. `total` is None if
            the source has no length.
        max_samples: Maximum number of samples in a shard. A killed process loses the unfinished shard and up to three
            batches; at a url, also up to two shards that were being uploaded.
        on_error: Treatment of an item that fails. `"raise"` raises the error and ends the call. If a batch fails, `"record"`
            tries its items one by one, and writes the samples of items that succeed. It lists the items that cannot be read,
            or whose key, digest or sample cannot be made or stored, in the folder's file `failures.jsonl`. A rank has its own
            file, such as `failures-r3of8.jsonl`. Each call tries these items again, and the file then lists only items that
            still fail. Errors of an iterable source itself, of the writer and of arguments end the call.
        allow_failures: With `on_error="record"`, warn of items that have failed, and return the cache without their samples.
        check: With `"finite"`, a tensor or array that contains NaN or infinity is an error of its item. Single numbers are not
            checked.
        options: Other options of `ShardWriter`; `allow` also applies to the returned cache. A version always has a manifest.

    Returns:
        The cache, opened. On several ranks, it contains the shards that all ranks have finished so far, perhaps none;
        until a version is written, it is empty. With `allow_failures`, it is also empty if no item has a sample.

    Raises:
        BuildError: Items have failed, with `on_error="record"`. All other samples are in `out`; with `reuse`, they are in the
            hidden folder from which the next call resumes.
        StaleCacheError: `out` or `reuse` has a different fingerprint. Or items have changed, moved or been removed, or are in
            another order on this rank, but `out` contains their old samples. Finished samples of new items stay in `out`.
        FileExistsError: Another call is building in the same folder, as the same rank or with another world size. Or `out` is a
            file or, with `reuse`, the current folder or a mount point.
        FileNotFoundError: There is no cache to reuse; or with `reuse`, `out` contains files but no cache. Or a path in a list
            of shards does not exist.
        InvalidKeyError: Some reader of shards would misread a key; `safe_key` makes a key of any text. Or a member of an item
            has a name that the cache needs.
        ValueError: Arguments are invalid or exclude each other. `fn` returned fewer or more samples than items, a tuple, None
            for an item, or with `check`, NaN or infinity. Two items have the same key, or the source is empty. `out` contains
            shards with other names, or shards of the source. `reuse` is the same folder as `out`, or has named caches or
            samples without a cache. A list of paths names shards that have a cache. Two ranks have the same key, different
            items or batch sizes. Or several ranks have `footer=False` or the path of a single shard.
        TypeError: The source is not a dataset, `fn` is not a function, `keys` is a set, or an option is unknown or has a wrong
            type. Or JSON cannot represent the fingerprint, a digest is not a str, or a worker process cannot send an item.
        EncodeError, OSError: A sample cannot be represented; or a file cannot be read or written.
        ImportError: A url, or `progress=True`, needs a package that is not installed.
        FormatError: A finished or reused shard is damaged, or was changed during the call. Or `source` is a cache, and
            `tc.open` has warned that it leaves out shards of the folder, or members of a shard. Or it would warn so of `reuse`.
        Exception: `source`, `keys`, `digest` or `fn` raised it. From Python 3.11 on, a note names the item, or the batch.

    Memory: results of `fn` are copied, so `fn` may reuse its memory; copies from a device run on its current stream. Objects
        of classes in `allow` that are not dataclasses are not copied. While `fn` computes a batch, up to two earlier batches
        wait in memory or are being written.
    """
    if not callable(fn):
        raise TypeError(f"fn={fn!r:.100}, expected a function of a list of items: tc.build(items, fn, out)")
    fingerprint = as_fingerprint(fingerprint)
    pattern = ShardPattern(os.fsdecode(out))
    check_options(
        build,
        options,
        [name for name in inspect.signature(ShardWriter).parameters if name not in ("pattern", "resume", "overwrite")],
    )
    if not options.get("footer", True) and not options.get("manifest", True):
        raise ValueError("footer=False, manifest=False: the fingerprint needs one of the two to be stored in")
    if reuse is not None:
        check_local(out, "a version that is built with reuse=")
    if on_error not in ("raise", "record"):
        raise ValueError(f"{on_error=!r:.100}: expected 'raise' or 'record'")
    if check not in (None, "finite"):
        raise ValueError(f"{check=!r:.100}: expected None or 'finite'")
    if allow_failures and on_error == "raise":
        raise ValueError(
            "allow_failures=True with on_error='raise', which ends at the first error; pass on_error='record'"
        )
    rank, world_size = find_rank(rank, world_size)
    fault = f"rank={rank}, world_size={world_size}"
    if world_size > 1 and not pattern.is_numbered:
        raise ValueError(f"{fault}: expected a folder or a pattern with a number such as %06d, got {str(pattern)!r}")
    if world_size > 1 and not options.get("footer", True):
        raise ValueError(f"{fault}, footer=False: ranks need the footers to find the samples of other ranks")
    folder = pattern.folder or os.curdir
    if isinstance(source, Cache):
        folders = {os.path.dirname(path) for path in source._paths() if pattern.is_in_build(os.path.basename(path))}
        if os.path.realpath(folder) in map(os.path.realpath, folders):
            raise ValueError(f"out={os.fspath(out)!r} contains shards of the source itself; build into another folder")
        source._check_complete()
    _warn_of_members(source)
    items = Items(source, keys, digest, batch_size, num_workers, rank, world_size, records=on_error == "record")
    options |= {"fingerprint": fingerprint, "max_samples": max_samples}
    with closing(SampleProgress(False if rank and progress is None else progress, items.num_items)) as bar:
        job = Job(items, fn, bar, options, allow_failures, check == "finite")
        if reuse is None:
            _extend(job, pattern.of_rank(rank, world_size) if world_size > 1 else pattern)
            if (world_size > 1 or allow_failures) and not pattern.build_shards(folder_of(folder).names()):
                return _no_samples(fingerprint)
            remove_abandoned(folder)
        elif not pattern.is_numbered:
            raise ValueError(f"out={os.fspath(out)!r} with reuse=: expected a folder, or a pattern with a number")
        elif os.path.isdir(folder) and os.path.isdir(reuse) and os.path.samefile(folder, reuse):
            raise ValueError(f"reuse={os.fspath(reuse)!r} is out itself; write the new version to a new folder")
        elif not has_entries(folder):
            name, old = None if pattern.is_default else pattern.name, _load_checked(reuse, fingerprint)
            if not build_version(job, check_new(folder), old, name):
                return _no_samples(fingerprint)
        else:
            finished = _load_checked(folder, fingerprint).shards
            remove_abandoned(folder)
            local = folder_of(folder)
            failures = job.open_failures(local, local.names())
            for _ in _missing(job, finished, folder, set(), failures, is_complete=True):
                bar.show_count()
            bar.show_count()
            failures.report(allow_failures, f"build a new version in another folder, with reuse={folder!r}")
    cache: TensorCache = open(folder, expect=fingerprint, allow=options.get("allow", ()))
    return cache


def _warn_of_members(source: Any) -> None:
    """Warn if the new cache would lack members of the source."""
    # other members are copied only from shards without a cache
    names = [name for name in source.members if name != DIGEST] if isinstance(source, Cache) else []
    if names and not (isinstance(source, TensorCache) and not source._store.shards[0].has_cache):
        problem = (
            f"samples of the source have a cache, and other members, which the new cache lacks: {list_names(names)}"
        )
        warnings.warn(f"tc.build: {problem}; tc.join of both caches has them", stacklevel=user_level())


def _no_samples(fingerprint: dict[str, Any]) -> TensorCache:
    """Return an empty cache, for a rank that returns early."""
    return TensorCache(Store([], Files(), Pool(0), 1, fingerprint))


def _load_checked(folder: str | os.PathLike[str], fingerprint: dict[str, Any]) -> OldCache:
    """Load a cache to reuse; refuse another fingerprint, or named caches."""
    old = OldCache(folder)
    for path, index in old.shards.indexes.items():
        try:
            check_same(path, index.fingerprint, fingerprint)
        except StaleCacheError as exc:
            raise StaleCacheError(
                f"{exc}; leave out reuse= to compute all samples, or pass the old fingerprint if its samples are still right"
            ) from exc
        if len(index.keys) and (list(index.caches) != [""] or index.caches[""].rows is not None):
            counts = {name: len(of) for name, of in index.caches.items()}
            fault = f"{len(index.keys)} samples have caches with these names and numbers of samples: {counts}"
            raise ValueError(f"{path}: {fault}; expected one cache without a name in every sample")
    return old


def _extend(job: Job, pattern: ShardPattern) -> None:
    """Write the samples that a pattern's folder does not contain yet."""
    items, folder = job.items, pattern.folder or os.curdir
    files = folder_of(folder, job.options.get("fsync", True))
    names = files.names()
    for name in names:
        if name.endswith(".tar") and not name.startswith(".") and not pattern.is_in_build(name):
            raise ValueError(
                f"{folder} contains {name}, which does not match {pattern.name!r}; pass a pattern that matches all its "
                "shards, or build into another folder"
            )
    sink = ShardWriter(str(pattern), resume=True, **job.options)
    failures = job.open_failures(files, names, sink)
    seen: set[str] = set()
    batches = _missing(job, sink.finished, folder, seen, failures)
    compute(job, batches, sink, failures, sink.finished.indexes.values())
    # at a url, no lock refuses ranks of another world size that run at the same time
    if items.world_size > 1 or files.is_remote:
        new = list_new(pattern, sink.finished, job.options)
        _check_shared(items, pattern, sink.finished.indexes, new, seen)
        foreign = {path: index for path, index in new.items() if not pattern.covers(os.path.basename(path))}
        Comparison(items, FinishedShards(foreign, sink.finished.files), folder).check(after=items.num_all)
    failures.report(job.allows_failures)


def _check_shared(
    items: Items,
    pattern: ShardPattern,
    earlier: Mapping[str, ShardIndex],
    new: Mapping[str, ShardIndex],
    seen: set[str],
) -> None:
    """Raise ValueError if another rank has computed items of this rank."""
    # Hazard: some items may then belong to no rank.
    # Earlier shards of other ranks rightly contain such items if all ranks now have another batch size, or if items with
    # keys have moved. Then this rank's earlier shards contain samples of other ranks, or all items have samples.
    remedy = f"build a new version on one process, with reuse={pattern.folder!r}, which keeps one sample of each key"
    refuse_shared(new, pattern, seen, remedy)
    own_earlier = [index for path, index in earlier.items() if pattern.covers(os.path.basename(path))]
    if not seen.issuperset(chain.from_iterable(index.keys for index in own_earlier)):
        return
    keys = {key for index in (*earlier.values(), *new.values()) for key in index.keys}
    num_missing = items.num_all - len(keys)
    if num_missing > 0 and num_missing > sum(f.key not in keys for f in list_failures(folder_of(pattern.folder))):
        foreign = {path: index for path, index in earlier.items() if pattern.is_of_other_rank(os.path.basename(path))}
        remedy = "call build here once more with rank=0, world_size=1, which computes the missing samples"
        refuse_shared(foreign, pattern, seen, remedy)


def _missing(
    job: Job,
    finished: FinishedShards,
    folder: str,
    seen: set[str],
    failures: Failures,
    is_complete: bool = False,
) -> Iterator[list[Target]]:
    """Yield batches up to the first changed item, then count all changes."""
    # With `is_complete`, a sample without an item and an item without a sample are errors, too. `seen` gets all keys.
    items = job.items
    comparison = Comparison(items, finished, folder)
    num_new, is_checked = 0, False
    for batch in items.batches(finished.is_finished):
        targets: list[Target] = []
        for item in each_once(batch, seen, finished.stored_key):
            places = finished.find(item.key)
            for path, row in places:
                if not finished.has_cache(path, row):
                    fault = f"sample {item.key!r} has lost its cache, and has only other members"
                    raise FormatError(f"{path}: {fault}; delete the shard, and call build again to compute its samples")
            targets.append((item, not places))
            if places:
                job.bar.num_old += 1
                comparison.find_right(item, places)
            if is_complete and not places:
                is_listed = items.records and item.number in failures.earlier
                failures.new |= {item.number: failures.earlier[item.number]} if is_listed else {}
                num_new += not is_listed
        if not comparison.has_changed() and not num_new:
            if not is_checked and any(is_missing for _, is_missing in targets):
                comparison.check(after=targets[-1][0].number)
                is_checked = True
            yield targets
    comparison.check()
    num_gone = 0
    if is_complete and items.world_size > 1:  # this rank does not know the keys of other ranks
        num_gone = max(0, len(finished) - items.num_all)
    elif is_complete:
        num_gone = sum(key not in seen for index in finished.indexes.values() for key in index.keys)
    num_changed = len(comparison.changed) + num_new
    if num_changed or num_gone:
        fault = f"{num_changed} of {len(seen)} items have changed{' or are new' * is_complete}"
        fault += f" since the samples in {folder!r} were made" + f", and {num_gone} samples have no item" * (
            num_gone > 0
        )
        if items.has_digests and not any(DIGEST in index.members for index in finished.indexes.values()):
            fault += "; the folder has no digests to compare, because it was built without digest="
        raise StaleCacheError(f"{fault}; build a new version in another folder, with reuse={folder!r}")
    if not items.num_all and not len(finished):
        raise ValueError(NO_ITEMS)
