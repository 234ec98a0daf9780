"""Make a cache of a dataset: a function over batches, written behind its back, and taken up where it was left."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from wds_tensorcache.errors import StaleCacheError
from wds_tensorcache.reading.open_cache import open
from wds_tensorcache.shards.fingerprint import as_fingerprint
from wds_tensorcache.writing.build_items import Source
from wds_tensorcache.writing.fill import fill
from wds_tensorcache.writing.pattern import ShardPattern
from wds_tensorcache.writing.progress import Progress
from wds_tensorcache.writing.writer import ShardWriter

__all__ = ["build"]


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

    The indexes of finished shards are trusted: a sample that was damaged since counts as finished, and is an error when it is
    read. `tc.verify` finds it; `tc.repair` writes the others into another folder, where `build` computes what was lost.

    Args:
        source: A map-style dataset (`len`, `[i]`), or any iterable. Samples of items that are no longer in it stay.
        fn: Called with a list of up to `batch_size` items, in the caller's thread; returns as many samples in a list, or
            a nest of dicts of tensors, arrays and lists `[B, …]`, which is cut along the first dimension. What it returns is
            copied, from a device on its current stream, so that `fn` may use its memory again (objects of classes in `allow`
            that are no dataclasses are not); samples are written by another thread while it computes the next.
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
        FileExistsError: Another call, in this process or another one, builds there; nothing is read or computed.
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
    folder = os.fsdecode(out)
    _check(folder, pattern, options)
    items = Source(source, keys, digest, batch_size, workers)
    try:
        sink = ShardWriter(
            os.path.join(folder, pattern), fingerprint=made, resume=True, max_samples=max_samples, **options
        )
    except StaleCacheError as exc:
        raise StaleCacheError(f"{exc}; build into another folder, or delete this one") from exc
    try:
        with sink, Progress(items.count, progress) as bar:
            if digest is None and sink.is_replacing:
                raise ValueError(f"a build with digest= was broken off in {folder!r}: finish it with digest= first")
            count = fill(sink, items, fn, batch_size, digest is not None, bar)
            if not count and not sink.num_finished:
                raise ValueError("the source has no items")
    except BaseException as exc:
        if hasattr(exc, "add_note"):  # from Python 3.11 on
            count = sink.num_finished - len(sink.finished)
            exc.add_note(
                f"tc.build: finished shards stay in {folder!r}, {count} samples of this call; called again, it goes on there"
            )
        raise
    return open(folder, expect=made, allow=options.get("allow", ()))


def _check(folder: str, pattern: str, options: Mapping[str, Any]) -> None:
    """Raise unless a cache can be built there."""
    for name in ("resume", "overwrite"):
        if name in options:
            raise TypeError(f"build always goes on with what is in the folder: {name}= has no place here")
    if not options.get("footer", True) and not options.get("manifest", True):
        raise ValueError("without footer and manifest, nothing keeps the fingerprint")
    if os.path.basename(pattern) != pattern:
        raise ValueError(f"pattern={pattern!r}, expected a file's name, such as '%06d.tar'")
    if not folder:
        raise ValueError("out='', expected a folder")
    ours = ShardPattern(pattern)
    for name in sorted(os.listdir(folder)) if os.path.isdir(folder) else ():
        if name.endswith(".tar") and not name.startswith(".") and not ours.covers(name):
            raise ValueError(
                f"{folder} has {name}, which is none of pattern={pattern!r}: build into a folder of its own"
            )
