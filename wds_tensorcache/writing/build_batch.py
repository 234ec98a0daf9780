"""The computation of a build's batches, in the caller's thread. A background thread cuts and writes their samples."""

from __future__ import annotations

import itertools
import os
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, wait
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch

from wds_tensorcache.arguments import user_level
from wds_tensorcache.codec.dtypes import true_dtype
from wds_tensorcache.codec.header import Form
from wds_tensorcache.codec.reference import parse_reference
from wds_tensorcache.codec.skeleton.writer import SkeletonWriter
from wds_tensorcache.codec.tree import rebuild
from wds_tensorcache.errors import EncodeError, StaleCacheError, add_note, format_count
from wds_tensorcache.progress import Progress
from wds_tensorcache.shards.index import ShardIndex
from wds_tensorcache.storage.folder import Folder
from wds_tensorcache.storage.threads import Threads
from wds_tensorcache.writing.build_compare import DIGEST
from wds_tensorcache.writing.build_failures import Failure, Failures
from wds_tensorcache.writing.build_items import Item, Items, add_note_of
from wds_tensorcache.writing.item_digest import digest_item
from wds_tensorcache.writing.writer import PackedSample, ShardWriter

Target = tuple[Item, bool]  # an item of a batch, and whether its sample is missing
_MAX_WRITING = 2  # batches being written or waiting, while the next batch is computed


@dataclass(frozen=True, slots=True)
class Job:
    """The arguments of a call of `build`. `options` are for `ShardWriter`."""

    items: Items
    fn: Callable[[list[Any]], Any]
    bar: SampleProgress
    options: dict[str, Any]
    allows_failures: bool
    checks_finite: bool

    def open_failures(self, folder: Folder, names: list[str], sink: ShardWriter | None = None) -> Failures:
        try:
            return Failures(folder, names, self.items.is_own, self.items.rank, self.items.world_size)
        except Exception:
            if sink is not None:
                sink.close()  # a damaged list must not keep the folder locked
            raise


def compute(
    job: Job, batches: Iterable[list[Target]], sink: ShardWriter, failures: Failures, earlier: Iterable[ShardIndex]
) -> None:
    """Run the function on batches with missing samples, and write these.

    If the items record failures, the missing samples of a failed batch are computed one by one. An item that fails again is
    added to `failures`.

    The caller's thread shows the progress after each batch. At the end, also after an error, `sink` is closed, which keeps the
    samples of its unfinished shard. Then the first error of either thread is raised. A tensor causes a warning if it differs in
    dtype or number of dimensions from earlier samples or from the `earlier` indexes.
    """
    kinds, num_before, records = _TensorKinds(), sink.num_finished, job.items.records
    failed: list[BaseException] = []
    waiting: deque[Future[None]] = deque()

    def write(batch: Batch, missing: list[Item | None]) -> None:
        if failed:
            return  # samples written after a failed batch would leave a gap in the shard
        try:
            for item, sample in zip(missing, batch.rows(), strict=True):
                if item is not None:
                    try:
                        packed = sink._pack(item.key, sample, _members_of(item))
                        if job.checks_finite:
                            _check_finite(item.key, sample, sink)
                    except Exception as exc:
                        if not records:
                            raise
                        failures.add(Failure.of(item.number, item.key, exc))
                        continue
                    packed.item_digest = item.origin
                    sink._place(packed)
                    kinds.check(packed)
                    job.bar.num_new += 1
        except BaseException as exc:
            failed.append(exc)
            raise

    def submit(batch: list[Target]) -> None:
        with add_note_of(partial(_describe_all, batch)):
            returned = job.fn([item.value for item, _ in batch])
        while len(waiting) >= _MAX_WRITING:
            waiting.popleft().result()
        # without the values of items, which may be large
        missing = [replace(item, value=None) if is_missing else None for item, is_missing in batch]
        with add_note_of(partial(_describe_all, batch)):
            copied = Batch(returned, len(batch), partial(_describe, batch))
        waiting.append(thread.submit(write, copied, missing))

    def attempt(part: list[Target], before: Mapping[int, int] | None = None) -> list[Target]:
        """Compute a batch; return the items to retry one by one."""
        if any(is_missing for _, is_missing in part):
            try:
                submit(part if before is None else [(job.items.read_again(i, before[i.number]), True) for i, _ in part])
            except Exception as exc:
                # Hazard: an error of the writer is no failure of the item.
                if failed or not records:
                    raise
                if len(part) > 1:
                    return [target for target in part if target[1]]
                failures.add(Failure.of(part[0][0].number, part[0][0].key, exc))
        return []

    with Threads(1, "tensorcache-build") as thread:
        try:
            for index in earlier:
                kinds.add(index)
            for batch in batches:
                part, before = batch, dict[int, int]()
                if records:
                    part = [target for target in batch if target[0].failure is None]
                    for item, is_missing in batch:
                        if item.failure is not None and is_missing:
                            failures.add(replace(item.failure, key=item.key))
                    before = {
                        item.number: item.origin or digest_item(item.value) for item, is_missing in part if is_missing
                    }
                for target in attempt(part):
                    attempt([target], before)
                failures.reached = batch[-1][0].number
                job.bar.show_count()
            while waiting:
                waiting.popleft().result()
                job.bar.show_count()
            job.bar.show_count()  # counts finished samples after the last batch
        except BaseException as exc:
            wait(waiting)  # batches that were computed before are kept
            failed.append(exc)
    try:
        failures.save(is_complete=not failed)
    except BaseException as exc:
        failed.append(exc)
    try:
        sink.close()
    except Exception as lost:
        if failed:
            add_note(failed[0], f"tc.build: the samples of the unfinished shard are lost: {lost}")
        failed.append(lost)
    if failed:
        count = sink.num_finished - num_before
        if count or not isinstance(failed[0], (StaleCacheError, TypeError, ValueError)):
            fault = f"with {count} samples of this call; call it again to resume"
            add_note(failed[0], f"tc.build: finished shards stay in {failures.folder.path or os.curdir!r}, {fault}")
        try:
            raise failed[0]
        finally:
            failed.clear()  # a reference cycle with the traceback


def _members_of(item: Item) -> dict[str, Any]:
    if item.digest is None:
        return {**item.members}
    if DIGEST in item.members:
        raise ValueError(f"sample {item.key!r} has a member {DIGEST!r} already, so leave out digest=")
    return {**item.members, DIGEST: item.digest}


def _describe(batch: list[Target], row: int) -> str:
    item, _ = batch[row]
    return f"item {item.number} (key {item.key!r})"


def _check_finite(key: str, sample: Any, sink: ShardWriter) -> None:
    writer = SkeletonWriter(sink._allow)  # gives the tensors their names, and reads lazy tensors
    writer.save(sample)
    for name, tensor in writer.tensors.items():
        if tensor.kind == "ndarray" and tensor.true.attribute not in (None, "complex128"):
            continue  # text and times
        dtype, _ = true_dtype("tensor", tensor.true.stored, tensor.true.attribute)
        assert isinstance(dtype, torch.dtype)
        if not (dtype.is_floating_point or dtype.is_complex) or "float4" in str(dtype) or not len(tensor.flat):
            continue  # torch cannot view an empty tensor as another dtype
        values = torch.from_numpy(np.array(tensor.flat)).view(dtype)
        if dtype.itemsize == 1 or dtype is torch.complex32:  # `isfinite` is missing or wrong for some of these
            values = values.to(torch.complex64 if dtype.is_complex else torch.float32)
        if num_bad := len(values) - int(torch.isfinite(values).sum()):
            fault = f"tensor {name!r} has {num_bad:,} values of {len(values):,} that are NaN or infinite"
            raise ValueError(
                f"sample {key!r}: {fault}; correct fn, or pass on_error='record', which leaves out the item"
            )


class _TensorKinds:
    """Dtypes and dimension counts of tensors in earlier samples, by name."""

    def __init__(self) -> None:
        self._kinds: dict[str, str] = {}
        self._warned: set[str] = set()
        self._last: tuple[Form, tuple[str, ...] | None] | None = None

    def add(self, index: ShardIndex) -> None:
        for form, texts in zip(index.layouts.forms, index.layouts.references, strict=True):
            self._kinds = dict(_kinds_of(form, texts)) | self._kinds

    def check(self, sample: PackedSample) -> None:
        """Warn once for each tensor that differs from the first such tensor."""
        for cache in sample.caches:
            form = cache.layout.form, cache.references
            for name, kind in _kinds_of(*form) if form != self._last else ():
                expected = self._kinds.setdefault(name, kind)
                if kind != expected and name not in self._warned:
                    self._warned.add(name)
                    fault = f"tensor {name!r} is {kind}, but {expected} in earlier samples of this build"
                    message = f"tc.build: sample {sample.key!r}: {fault}; such samples cannot share a batch"
                    warnings.warn(message, stacklevel=user_level())
            self._last = form


def _kinds_of(form: Form, texts: tuple[str, ...] | None) -> Iterator[tuple[str, str]]:
    for (name, stored, ndim), text in zip(form.entries, texts or itertools.repeat(None), strict=False):
        attribute = None if text is None else parse_reference(text)[2]
        yield name, f"{attribute or stored} with {ndim} dimension{'s' * (ndim != 1)}"


def _describe_all(batch: list[Target]) -> str:
    return f"fn was called with a batch of {len(batch)}, from {_describe(batch, 0)} to {_describe(batch, -1)}"


class Batch:
    """The samples that `fn` returned: a list, or nested dicts of rows.

    Values in the dicts are tensors, arrays and lists with one row for each sample.

    Raises:
        EncodeError: The batch is nested too deeply, or contains itself.
        ValueError: A sample is None, or the batch or a value in its dicts is a tuple or lacks `count` rows.

    Memory: tensors and arrays are copied, so that `fn` may reuse its memory. Copies from a device go to pinned memory,
        on the device's current stream; `rows` waits for them.
    """

    def __init__(self, returned: Any, count: int, describe: Callable[[int], str]) -> None:
        devices: set[torch.device] = set()

        def copy(leaf: Any) -> Any:
            if isinstance(leaf, (np.ndarray, bytearray)):
                return leaf.copy()
            if not isinstance(leaf, torch.Tensor):
                return leaf  # lazy tensors of a cache, whose bytes do not change
            if leaf.device.type == "cpu":
                return leaf.detach().clone()
            devices.add(leaf.device)
            return leaf.detach().to("cpu", non_blocking=True)

        def copy_nested(value: Any) -> Any:
            if isinstance(value, Mapping):  # not only a dict, as in `rebuild`
                return {name: copy_nested(part) for name, part in value.items()}
            return rebuild(value, copy)

        try:
            _check(returned, count)
            for i, sample in enumerate(returned if isinstance(returned, list) else ()):
                if sample is None:
                    fault = f"fn returned None for {describe(i)}, expected a sample"
                    raise ValueError(f"{fault}; leave such items out of the source")
            self._returned, self._count = copy_nested(returned), count
        except RecursionError:
            raise EncodeError("what fn returned is nested too deeply, or contains itself") from None
        self._events = [torch.accelerator.current_stream(device).record_event() for device in devices]

    def rows(self) -> list[Any]:
        """Return the samples as views, after copies from devices have ended."""
        for event in self._events:
            event.synchronize()
        return list(_rows(self._returned, self._count))


def _check(value: Any, count: int, path: str = "") -> None:
    if isinstance(value, Mapping) and (value or path):
        for name, part in value.items():
            _check(part, count, f"{path}.{name}" if path else f"{name}")
        return
    where = f" at {path!r:.100}" if path else ""
    if isinstance(value, tuple):
        raise ValueError(f"fn returned a tuple{where}; return a dict of tensors by name, or a list of samples")
    is_sequence = isinstance(value, list) or (isinstance(value, (torch.Tensor, np.ndarray)) and value.ndim)
    if not is_sequence or len(value) != count:
        rows = format_count(len(value), "row") if is_sequence else f"a {type(value).__name__} without rows"
        raise ValueError(f"fn returned {rows}{where}, expected one row for each of {count} items")


def _rows(value: Any, count: int) -> Any:
    if isinstance(value, Mapping):
        parts = {name: _rows(part, count) for name, part in value.items()}
        return [{name: rows[i] for name, rows in parts.items()} for i in range(count)]
    return value


class SampleProgress(Progress):
    """The progress of a build in samples.

    `num_old` counts samples that were finished before this call, which do not change the rate. `num_new` counts all other
    samples.

    Threads: one thread calls `show_count` and changes `num_old`; another thread changes `num_new`.
    """

    def __init__(self, show: bool | Callable[[int, int | None], object] | None, total: int | None) -> None:
        super().__init__(show, total, unit=" samples", smoothing=0.05)
        self.num_old = self.num_new = 0
        self.show_count()

    def show_count(self) -> None:
        self.show(self.num_old + self.num_new, self.num_old)
