"""Make a cache of a dataset: a function over batches, written behind its back, and taken up where it was left."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from wds_tensorcache.building.progress import Progress
from wds_tensorcache.building.source import Item, Source
from wds_tensorcache.building.unbatch import Batch
from wds_tensorcache.errors import StaleCacheError
from wds_tensorcache.loading.opening import open
from wds_tensorcache.shards.fingerprint import as_fingerprint
from wds_tensorcache.shards.pattern import ShardPattern
from wds_tensorcache.shards.writer import ShardWriter

__all__ = ["build"]

DIGEST = "digest.txt"  # the member that says of what a sample was made
_MAX_WRITING = 2  # batches on their way to the shards, while the next one is computed


def build(
    source: Any,
    fn: Callable[[list[Any]], Any],
    out: str | os.PathLike[str],
    *,
    fingerprint: Mapping[str, Any],
    batch_size: int = 32,
    keys: Sequence[str] | Callable[[Any], str] | None = None,
    digest: Callable[[Any], str] | None = None,
    workers: int = 0,
    progress: bool | None = None,
    pattern: str = "%06d.tar",
    max_samples: int = 1000,
    **options: Any,
) -> Any:
    """Make a cache of what a function, say a model on a GPU, makes of a dataset.

    Called again, it goes on behind the last finished shard. Items whose samples are there are not computed again, but for those
    that share a batch with one that is: batches are the same however often it was broken off, and so are the shards' bytes if
    `fn` makes the same of the same batch.

    Args:
        source: A map-style dataset (`len`, `[i]`), or any iterable. Samples of items that are no longer in it stay.
        fn: Called with a list of up to `batch_size` items, in the caller's thread; returns as many samples in a list, or
            a nest of dicts of tensors, arrays and lists `[B, …]`, which is cut along the first dimension. What it returns is
            copied, from a device on its current stream, so that `fn` may use its memory again; samples are written by
            another thread while it computes the next.
        out: The folder.
        fingerprint: How `fn` makes them: model, revision, dtype, scaling, crop, …, in what JSON holds. A folder with another
            one is refused: `tc.open(out, expect=fingerprint)` is how readers check it.
        batch_size: Items per call.
        keys: The samples' keys: one for each item of a map-style dataset, or a function of an item. By default an item's
            `"__key__"` if it is a dict that has one, else its number, which is right as long as items neither change nor
            move. If keys are a function or in the items, all items are read again to go on.
        digest: Returns a text that differs when an item does. It is kept as a member `digest.txt`; items whose text is
            another one than the cache's, or of which it has none, are computed again, in batches of their own. The new
            samples replace the old ones at once when all are written, and are the last ones of the cache from then on. Until
            then the folder reads as before, and while files are renamed (killed there: until the next call) it is refused.
            With `manifest=False`, readers see both until then.
        workers: Processes that read a map-style dataset, as of torch's `DataLoader`.
        progress: Show rate and time left, with `tqdm`; by default where it is installed and stderr is a terminal.
        pattern: Of the shards' names in the folder.
        max_samples: Of a shard: what a break costs at most. More of them make fewer files.
        options: Others of `ShardWriter`; `allow` is `open`'s, too.

    Returns:
        The cache, opened.

    Raises:
        StaleCacheError: The folder has shards of another fingerprint.
        KeyRuleError: A key is no key.
        ValueError: `fn` returned something else than as many samples; two items have one key; the source is empty; the folder
            has shards of other names.
        TypeError: The source is no dataset, the fingerprint nothing that JSON holds, or a digest no text.
        FormatError: A finished shard is damaged.
        Whatever `source` and `fn` raise: finished shards stay, and the next call goes on behind them.

    Memory: of two batches on their way to the shards, besides those of `fn`; with workers, of what they read ahead. On disk,
        shards that lose samples are there twice until all of them are written.
    """
    made = as_fingerprint(fingerprint)
    path = _check(out, pattern, options)
    items = Source(source, keys, digest, batch_size, workers)
    try:
        sink = ShardWriter(path, fingerprint=made, resume=True, max_samples=max_samples, **options)
    except StaleCacheError as exc:
        raise StaleCacheError(f"{exc}; build into another folder, or delete this one") from exc
    try:
        with sink, Progress(items.count, progress) as bar:
            count = _fill(sink, items, fn, batch_size, digest is not None, bar)
            if not count and not sink.num_finished:
                raise ValueError("the source has no items")
    except BaseException as exc:
        if hasattr(exc, "add_note"):  # from Python 3.11 on
            there = f"{sink.num_finished} samples are in finished shards of {os.fspath(out)!r}"
            exc.add_note(f"tc.build: {there}; called again, it goes on behind them.")
        raise
    return open(out, expect=made, allow=options.get("allow", ()))


def _check(out: str | os.PathLike[str], pattern: str, options: Mapping[str, Any]) -> str:
    """Return the pattern with its folder, if a cache can be built there."""
    for name in ("resume", "overwrite"):
        if name in options:
            raise TypeError(f"build always goes on with what is in the folder: {name}= has no place here")
    if not options.get("footer", True) and not options.get("manifest", True):
        raise ValueError("without footer and manifest, nothing keeps the fingerprint")
    if os.path.basename(pattern) != pattern:
        raise ValueError(f"pattern={pattern!r}, expected a file's name, such as '%06d.tar'")
    folder = os.fspath(out)
    ours = ShardPattern(pattern)
    for name in sorted(os.listdir(folder)) if os.path.isdir(folder) else ():
        if name.endswith(".tar") and not name.startswith(".") and not ours.covers(name):
            raise ValueError(
                f"{folder} has {name}, which is none of pattern={pattern!r}: build into a folder of its own"
            )
    return os.path.join(folder, pattern)


@dataclass(frozen=True, slots=True)
class _Wanted:
    """An item, and what is known of its sample.

    Attributes:
        needed: It is not there, or was made of something else.
        is_new: It was not there before this build, be it broken off any number of times, began to replace samples.
        is_changed: It was, made of something else.
    """

    item: Item
    needed: bool
    is_new: bool
    is_changed: bool


def _fill(
    sink: ShardWriter, source: Source, fn: Callable[[list[Any]], Any], batch_size: int, has_digests: bool, bar: Progress
) -> int:
    """Write what is not there yet; return how many items there are."""
    failed: list[BaseException] = []
    waiting: deque[Future[None]] = deque()
    changed: list[_Wanted] = []  # what older samples were made of, whose batches are of such items alone
    seen: set[str] = set()

    def look(item: Item) -> _Wanted:
        if item.key in seen:
            raise ValueError(f"two items have the key {item.key!r}")
        seen.add(item.key)
        places = sink.finished.find(item.key)
        held = [sink.is_held(shard) for shard, _ in places]
        needed = not places or not (
            item.digest is None or sink.finished.read_member(*places[-1], DIGEST) == item.digest.encode()
        )
        if not needed:
            if len(places) > 1:
                sink.keep_newest(item.key)
            bar.skip()
        elif places:
            sink.replace(item.key)
        return _Wanted(item, needed, is_new=all(held), is_changed=not all(held) and (needed or any(held)))

    def compute(batch: list[_Wanted]) -> None:
        if not any(wanted.needed for wanted in batch):
            return
        made = Batch(fn([wanted.item.value for wanted in batch]), len(batch))
        while len(waiting) >= _MAX_WRITING:
            waiting.popleft().result()
        names = [(wanted.item.key, wanted.item.digest) if wanted.needed else None for wanted in batch]
        waiting.append(writing.submit(_write, sink, names, made, bar, failed))

    with ThreadPoolExecutor(1, "tensorcache-build") as writing:
        for items in source.batches(lambda key: not has_digests and key in sink):
            batch = [look(item) for item in items]
            if any(wanted.is_new for wanted in batch):
                compute(batch)
            else:
                changed += [wanted for wanted in batch if wanted.is_changed]
            while len(changed) >= batch_size:
                compute(changed[:batch_size])
                del changed[:batch_size]
        compute(changed)
        while waiting:
            waiting.popleft().result()
    return len(seen)


def _write(
    sink: ShardWriter,
    names: list[tuple[str, str | None] | None],
    batch: Batch,
    bar: Progress,
    failed: list[BaseException],
) -> None:
    if failed:
        return  # a sample before these is not there: shards are to end in front of it
    try:
        for name, sample in zip(names, batch.rows(), strict=True):
            if name is not None:
                key, digest = name
                sink.write(key, sample, **({} if digest is None else {DIGEST: digest}))
                bar.step()
    except BaseException as exc:
        failed.append(exc)
        raise
