"""Build a cache: run a function over a dataset in batches while a background thread writes the results."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from wds_tensorcache.errors import StaleCacheError
from wds_tensorcache.reading.open_cache import open
from wds_tensorcache.shards.fingerprint import as_fingerprint, check_same
from wds_tensorcache.writing.build_items import Item, Source
from wds_tensorcache.writing.fill import DIGEST, Progress, Target, fill
from wds_tensorcache.writing.finished import FinishedShards, Place, load_finished
from wds_tensorcache.writing.new_folder import check_new
from wds_tensorcache.writing.pattern import DEFAULT_NAME, ShardPattern
from wds_tensorcache.writing.versions import OldCache, Part, write_version
from wds_tensorcache.writing.writer import MAX_SAMPLES, ShardWriter
from wds_tensorcache.writing.writer_lock import WriterLock

__all__ = ["build"]

_Function = Callable[[list[Any]], Any]


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
    workers: int = 0,
    progress: bool | None = None,
    max_samples: int = MAX_SAMPLES,
    **options: Any,
) -> Any:
    """Build a cache of what a function, for example a model on a GPU, computes from a dataset.

    Called again, it resumes after the last finished shard. Items whose samples are there are not computed again, except those
    that share a batch with one that is. Batches are the same however often the build was interrupted, and so are the bytes of
    the shards, if `fn` computes the same from the same batch.

    A cache is written once. Where items change or go, build a *version*, a new folder: `build(items, fn, "v2", reuse="v1",
    digest=…)` takes the samples whose key and digest are those of an item from `v1`, and computes the others. Samples of items
    that changed take the places of the old ones, new samples follow in new shards, and samples without an item are left out.
    Sample indices stay if nothing is left out. Shards without a change are hard links to those of `v1`, or copies where the
    file system cannot link them: never write into a shard in place. `v1` stays as it is.

    The indexes of finished shards are trusted: a sample that was damaged since counts as finished, and is an error when it is
    read. `tc.verify` finds it; `tc.repair` writes the others into another folder, where `build` computes what was lost.

    Args:
        source: A map-style dataset (`len`, `[i]`), or any iterable. Without `reuse`, samples of items that are not in it stay.
        fn: Called with a list of up to `batch_size` items, in the caller's thread; returns as many samples in a list, or
            a nest of dicts of tensors, arrays and lists `[B, …]`, which is cut along the first dimension. What it returns is
            copied, from a device on its current stream, so that `fn` may use its memory again (objects of classes in `allow`
            that are no dataclasses are not); another thread writes the samples while it computes the next.
        out: A folder, or a pattern as of `ShardWriter`. With `reuse`, a new folder: it appears by one rename when the version
            is complete and on disk. If it is there and has just the samples of these items, it is opened.
        fingerprint: How `fn` makes the samples: model, revision, dtype, scaling, crop, …, in what JSON holds. A folder with
            another one is refused, also as `reuse`. Readers check it by `tc.open(out, expect=fingerprint)`.
        reuse: Folder of the cache to take samples from. New shards are named like its last one, unless `out` is a pattern.
            Computed samples wait in the hidden folder `.NAME.building` beside `out`, where the next call resumes if this one
            is interrupted. Without `digest` it goes by keys alone: delete that folder to compute all of them again.
        batch_size: Number of items per call. With `reuse`, batches have only items that are to be computed.
        keys: Keys of the samples: one for each item of a map-style dataset, or a function of an item. By default an item's
            `"__key__"` if it is a dict that has one, else its number, which is right as long as items neither change nor
            move. If keys are a function or in the items, all items are read again to resume.
        digest: Returns a text that differs when an item does, which is kept as a member `digest.txt`. Items whose text is
            another one, or whose sample has none, have changed.
        workers: Number of processes that read a map-style dataset, as of torch's `DataLoader`.
        progress: Show rate and time left, with `tqdm`; by default where it is installed and stderr is a terminal.
        max_samples: A shard takes no more samples; an interruption costs at most these.
        options: Others of `ShardWriter`; `allow` is `open`'s, too. A version always has a manifest.

    Returns:
        The cache, opened.

    Raises:
        StaleCacheError: The folder, or the one to reuse, has another fingerprint. Items have changed, and their samples are in
            `out` itself: finished samples of new items stay there.
        FileExistsError: Another call, in this process or another one, builds there; nothing is read or computed.
        FileNotFoundError: There is no cache to reuse, or `out` has other files than a cache.
        KeyRuleError: A key is no key.
        ValueError: `fn` returned something else than as many samples; two items have one key; the source is empty; the folder
            has shards of other names. The cache to reuse is `out`, lists shards outside of its folder, or has samples with
            other caches than one without a name.
        TypeError: The source is no dataset, the fingerprint nothing that JSON holds, or a digest no text.
        FormatError: A finished shard, or one to reuse, is damaged, or was changed meanwhile.
        Whatever `source` and `fn` raise: finished shards stay, and the next call resumes after them.

    Memory: of two batches that are being written, besides those of `fn`; with workers, of what they read ahead.
    """
    made = as_fingerprint(fingerprint)
    pattern = ShardPattern(os.fsdecode(out))
    _check(pattern, options)
    items = Source(source, keys, digest, batch_size, workers)
    options |= {"fingerprint": made, "max_samples": max_samples}
    folder = pattern.folder or os.curdir
    with Progress(items.count, progress) as bar:
        if reuse is None:
            _extend(items, fn, pattern, bar, options)
        elif not pattern.is_numbered:
            raise ValueError(f"out={os.fspath(out)!r} with reuse=: expected a folder, or a pattern with a number")
        elif os.path.isdir(folder) and os.path.isdir(reuse) and os.path.samefile(folder, reuse):
            raise ValueError(f"reuse={os.fspath(reuse)!r} is out itself; expected a new folder for the new version")
        elif os.path.isdir(folder) and os.listdir(folder):
            there = _load_checked(folder, made)
            fill(_missing(items, there.shards, None, folder, bar), fn, bar)
            with contextlib.suppress(FileExistsError), _claimed(os.path.realpath(folder)) as waiting:
                shutil.rmtree(waiting, ignore_errors=True)  # a killed call may have left it
        else:
            name = None if pattern.is_default else pattern.name
            old = _load_checked(reuse, made)
            _build_version(items, fn, check_new(folder), old, name, bar, options)
    return open(folder, expect=made, allow=options.get("allow", ()))


def _load_checked(folder: str | os.PathLike[str], made: dict[str, Any]) -> OldCache:
    """Return a cache whose samples can be taken for those of this build."""
    old = OldCache(folder)
    for path, index in old.shards.indexes.items():
        check_same(path, index.fingerprint, made)
        if len(index.keys) and (list(index.caches) != [""] or index.caches[""].rows is not None):
            raise ValueError(f"{path}: expected one cache without a name in every sample, got {list(index.caches)}")
    return old


def _check(pattern: ShardPattern, options: Mapping[str, Any]) -> None:
    """Raise unless a cache can be built there."""
    for name in ("resume", "overwrite"):
        if name in options:
            raise TypeError(f"build always resumes with what is in the folder: {name}= has no place here")
    if not options.get("footer", True) and not options.get("manifest", True):
        raise ValueError("without footer and manifest, nothing keeps the fingerprint")


def _extend(items: Source, fn: _Function, pattern: ShardPattern, bar: Progress, options: dict[str, Any]) -> None:
    """Write the samples that are not in a folder."""
    folder = pattern.folder or os.curdir
    for name in sorted(os.listdir(folder)) if os.path.isdir(folder) else ():
        if name.endswith(".tar") and not name.startswith(".") and not pattern.covers(name):
            raise ValueError(
                f"{folder} has {name}, which is none of {pattern.name!r}: pass its pattern, or build into another folder"
            )
    try:
        sink = ShardWriter(str(pattern), resume=True, **options)
    except StaleCacheError as exc:
        raise StaleCacheError(f"{exc}; build into another folder, or delete this one") from exc
    with _noting(sink, folder), sink:
        fill(_missing(items, sink.finished, sink, folder, bar), fn, bar)


def _missing(
    items: Source, there: FinishedShards, sink: ShardWriter | None, folder: str, bar: Progress
) -> Iterator[list[Target]]:
    """Yield all batches, with the writer for samples that are not there.

    Raises:
        StaleCacheError: At the end, if items have changed: nothing is computed after the first of these. Without a writer,
            also if samples have no item, or items no sample.
    """
    seen: set[str] = set()
    num_changed = 0
    for batch in items.batches(lambda key: not items.has_digests and key in there):
        targets: list[Target] = []
        for item in _each_once(batch, seen):
            places = there.find(item.key)
            targets.append((item, None if places else sink))
            if places:
                bar.skip()
            if places or sink is None:
                num_changed += not any(_is_right(there, place, item) for place in places)
        if not num_changed:
            yield targets
    num_gone = 0 if sink is not None else sum(key not in seen for index in there.indexes.values() for key in index.keys)
    if num_changed or num_gone:
        what = f"{num_changed} of {len(seen)} items have changed since the samples in {folder!r} were made"
        what += f", and {num_gone} samples have no item" * (num_gone > 0)
        raise StaleCacheError(f"{what}; build a new version, into another folder, with reuse={folder!r}")
    _check_any(seen or there)


def _build_version(
    items: Source, fn: _Function, out: str, old: OldCache, name: str | None, bar: Progress, options: dict[str, Any]
) -> None:
    """Compute what cannot be reused, and let the folder of the version appear.

    What is computed goes into a cache of its own, so that an interrupted build resumes as any other does.
    """
    options = {**options, "manifest": True}  # for fingerprints of shards without a footer
    with _claimed(out) as folder:
        pattern = ShardPattern(os.path.join(folder, DEFAULT_NAME))
        try:
            check_new(out)  # another call may have built it until now
            try:
                sink = ShardWriter(str(pattern), resume=True, **options)
            except StaleCacheError:  # of another fingerprint
                sink = ShardWriter(str(pattern), overwrite=True, **options)
            seen: set[str] = set()
            with _noting(sink, folder), sink:
                there, sink.finished = sink.finished, FinishedShards({})  # what is stale there is written again
                fill(_stale(items, old, there, sink, seen, bar), fn, bar)
                _check_any(seen)
            paths = list(pattern.existing().values())
            computed = load_finished(paths, dict.fromkeys(paths, options["fingerprint"]))
            parts = _put_together(old, computed, seen, name)
            write_version(out, old, parts, computed, fsync=options.get("fsync", True))
            pattern.remove(paths)
        finally:
            if not pattern.existing():
                shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def _claimed(out: str) -> Iterator[str]:
    """Give the folder where samples of a version wait, which no other process uses meanwhile."""
    folder = os.path.join(os.path.dirname(out), f".{os.path.basename(out)}.building")
    os.makedirs(folder, exist_ok=True)
    with contextlib.closing(WriterLock(ShardPattern(os.path.join(folder, "version.tar")))):
        yield folder


def _put_together(old: OldCache, computed: FinishedShards, seen: set[str], name: str | None) -> list[Part]:
    """Return the shards of a version: the old ones, without samples of items that are gone, and new ones."""
    for part in old.parts.values():
        part.gone.update(key for key in old.shards.indexes[part.path].keys if key not in seen)
    parts, urls = list(old.parts.values()), old.next_urls(name)
    for path, index in computed.indexes.items():
        are_new = [
            key in seen and key not in old.shards and computed.find(key)[-1] == (path, row)
            for row, key in enumerate(index.keys)
        ]
        if any(are_new):
            gone = {key for key, is_new in zip(index.keys, are_new, strict=True) if not is_new}
            parts.append(Part(next(urls), path, computed, gone))
    return parts


def _stale(
    items: Source, old: OldCache, computed: FinishedShards, sink: ShardWriter, seen: set[str], bar: Progress
) -> Iterator[list[Target]]:
    """Yield batches of the items that cannot be reused, with the writer for those that are not computed yet.

    Put into the parts of `old` which samples they take the places of.
    """
    todo: list[Target] = []
    for batch in items.batches(lambda key: not items.has_digests and key in old.shards):
        for item in _each_once(batch, seen):
            places = old.shards.find(item.key)
            right = next((place for place in places if _is_right(old.shards, place, item)), None)
            for place in places:  # of several samples of one key, one stays
                if place != (right or places[0]):
                    old.parts[place[0]].gone.add(item.key)
                elif right is None:
                    old.parts[place[0]].changed.add(item.key)
            found = computed.find(item.key)
            is_there = right is not None or (bool(found) and _is_right(computed, found[-1], item))
            if is_there:
                bar.skip()
            if right is None:
                todo.append((item, None if is_there else sink))
        while len(todo) >= items.batch_size:
            yield todo[: items.batch_size]
            del todo[: items.batch_size]
    if todo:
        yield todo


def _check_any(found: Collection[str] | FinishedShards) -> None:
    if not len(found):
        raise ValueError("the source has no items")


def _each_once(batch: Iterable[Item], seen: set[str]) -> Iterator[Item]:
    """Yield items, and put their keys into `seen`.

    Raises:
        ValueError: A key is there already.
    """
    for item in batch:
        if item.key in seen:
            raise ValueError(f"two items have the key {item.key!r}")
        seen.add(item.key)
        yield item


def _is_right(finished: FinishedShards, place: Place, item: Item) -> bool:
    return item.digest is None or finished.read_member(place, DIGEST) == item.digest.encode()


@contextlib.contextmanager
def _noting(sink: ShardWriter, folder: str) -> Iterator[None]:
    """Note in an exception what was finished before it."""
    before = sink.num_finished
    try:
        yield
    except BaseException as exc:
        if hasattr(exc, "add_note"):  # from Python 3.11 on
            what = f"{sink.num_finished - before} samples of this call"
            exc.add_note(f"tc.build: finished shards stay in {folder!r}, {what}; called again, it resumes there")
        raise
