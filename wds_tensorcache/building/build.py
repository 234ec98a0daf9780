"""Make a cache of a dataset: a function over batches, written behind its back, and taken up where it was left."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from wds_tensorcache.building.progress import Progress
from wds_tensorcache.building.source import Item, Source
from wds_tensorcache.building.unbatch import unbatch
from wds_tensorcache.loading.opening import open
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
    **options: Any,
) -> Any:
    """Make a cache of what a function, say a model on a GPU, makes of a dataset.

    Called again, it goes on: samples that finished shards have are not computed again. Broken off at any point and called
    again with the same arguments, it makes the same bytes as a run that was not.

    Args:
        source: A map-style dataset (`len`, `[i]`), or any iterable.
        fn: Called with a list of up to `batch_size` items, in the caller's thread; returns as many samples in a list, or
            a nest of tensors and lists `[B, …]`, which is cut along the first dimension. Samples are written by another
            thread while `fn` computes the next: it need not wait for a device.
        out: The folder.
        fingerprint: How `fn` makes them: model, revision, dtype, scaling, crop, …, in what JSON holds. A folder with another
            one is refused: `tc.open(out, expect=fingerprint)` is how readers check it.
        batch_size: Items per call.
        keys: The samples' keys: one for each item of a map-style dataset, or a function of an item. By default an item's
            `"__key__"` if it is a dict that has one, else its number.
        digest: Returns a text that differs when an item does. It is kept as a member `digest.txt`; items whose text is
            another one than the cache's are computed again, and take the old ones' place at once when all are written: until
            then the folder reads as before, and while files are renamed (killed there: until the next call) it is refused. With
            `manifest=False`, readers see both until then.
        workers: Processes that read a map-style dataset, as of torch's `DataLoader`.
        progress: Show rate and time left, with `tqdm`; by default where it is installed and stderr is a terminal.
        pattern: Of the shards' names in the folder.
        options: Others of `ShardWriter`.

    Returns:
        The cache, opened.

    Raises:
        StaleCacheError: The folder has shards of another fingerprint.
        ValueError: `fn` returned something else than as many samples; two items have one key.
        Whatever `source` and `fn` raise: finished shards stay, and the next call goes on behind them.

    Memory: of two batches on their way to the shards, besides those of `fn`. On disk, shards that lose samples are there
        twice until all of them are written.
    """
    failed: list[BaseException] = []
    wanted = Source(source, keys, digest, batch_size, workers)
    path = os.path.join(os.fspath(out), pattern)
    seen: set[str] = set()
    with (
        ShardWriter(path, fingerprint=fingerprint, resume=True, **options) as sink,
        ThreadPoolExecutor(1, "tensorcache-build") as writing,
        Progress(wanted.count, progress) as bar,
    ):
        waiting: deque[Future[None]] = deque()
        pending: list[Item] = []

        def compute() -> None:
            items = [item.value for item in pending]
            made = fn(items)
            while len(waiting) >= _MAX_WRITING:
                waiting.popleft().result()
            waiting.append(writing.submit(_write, sink, list(pending), made, bar, failed))
            pending.clear()

        for item in wanted.items(lambda key: digest is None and key in sink):
            if item.key in seen:
                raise ValueError(f"two items have the key {item.key!r}")
            seen.add(item.key)
            places = sink.finished.find(item.key)
            if places and _is_same(sink, places[-1], item.digest):
                if len(places) > 1:
                    sink.keep_newest(item.key)
                bar.skip()
            else:
                if places:
                    sink.replace(item.key)
                pending.append(item)
            if len(pending) == batch_size:
                compute()
        if pending:
            compute()
        while waiting:
            waiting.popleft().result()
    return open(out, expect=fingerprint)


def _is_same(sink: ShardWriter, place: tuple[str, int], digest: str | None) -> bool:
    return digest is None or sink.finished.read_member(*place, DIGEST) == digest.encode()


def _write(sink: ShardWriter, items: list[Item], made: Any, bar: Progress, failed: list[BaseException]) -> None:
    if failed:
        return  # a sample before these is not there: shards are to end in front of it
    try:
        for item, sample in zip(items, unbatch(made, len(items)), strict=True):
            members = {} if item.digest is None else {DIGEST: item.digest}
            sink.write(item.key, sample, **members)
            bar.step()
    except BaseException as exc:
        failed.append(exc)
        raise
