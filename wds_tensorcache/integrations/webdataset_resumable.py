"""webdataset streams that resume from a saved state, at the next sample."""

from __future__ import annotations

import heapq
import os
import warnings
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import astuple, dataclass
from functools import partial
from typing import Any, NoReturn, TypeAlias

import numpy as np
import torch
import xxhash
from torch.utils.data import IterableDataset, default_collate, get_worker_info
from torch.utils.data._utils.collate import default_collate_fn_map
from webdataset.handlers import reraise_exception
from webdataset.pipeline import DataPipeline
from webdataset.shardlists import split_by_node, split_by_worker
from webdataset.tariterators import tarfile_samples

from wds_tensorcache.arguments import as_int, user_level
from wds_tensorcache.errors import format_count
from wds_tensorcache.integrations.webdataset_tar import Stopped, TarSamples
from wds_tensorcache.integrations.webdataset_urls import find_urls, is_remote, open_url, shown_url
from wds_tensorcache.ranks import find_rank, is_distributed
from wds_tensorcache.shards.expansion import MAX_EXPANDED_NBYTES, check_option
from wds_tensorcache.shards.manifest import ShardEntry, check_listed, stored_digest
from wds_tensorcache.shards.tar import BLOCK
from wds_tensorcache.storage.remote.retry import ObjectInfo
from wds_tensorcache.storage.urls import reveal
from wds_tensorcache.training.order import EpochOrder
from wds_tensorcache.training.sampler import warn_of_earlier_epoch

POSITION = "__position__"
VERSION = 2  # version 1 divided the shards among ranks differently
Urls: TypeAlias = "str | os.PathLike[str] | Iterable[str | os.PathLike[str]]"
_PREFIX = "tensorcache-position:"
_DOES_ITSELF = (split_by_node, split_by_worker, tarfile_samples)
_KEY_BITS = 30
_NUM_KEYS = 1 << _KEY_BITS
_MAX_EPOCH = 1 << (62 - _KEY_BITS)
_NUM_RECENT = 64  # iterations that are remembered, so that their late workers find the epoch
_NUM_WORKERS = 1024


class ResumablePipeline(IterableDataset[Any]):
    """A dataset like `wds.DataPipeline(shards, tarfile_to_samples(), *stages)` that can resume from a saved state.

    Each iteration yields one epoch, also in `DataLoader` workers. `state_dict` lists the samples of the epoch that were
    returned. After `load_state_dict`, these samples are not decoded again, and finished shards are not read. All other
    samples follow, in the order of an uninterrupted run. Only samples that a stage held back, to shuffle or batch them, may
    come in a different order. Samples that a stage dropped are passed to it again.

    Each sample contains its position in the field `"__position__"`. Items of the last stage must contain this field: they may
    be dicts, batches of dicts, or tuples, for example from `wds.to_tuple("jpg", "__position__")`.

    This package's clients read remote shards (`s3://`, `gs://`, `az://`, `http(s)://`, `hf://`), as in `tc.open`, with requests
    in flight for the next few MiB, retries, and `If-Match`. After `load_state_dict`, a remote shard is read from its first
    sample that is not done. If the shard has changed or is compressed, or the server sends no ETag and no date, it is read from
    its beginning.

    Ranks, and then the workers of a rank, get about the same number of bytes. If not all shards are local files, they get
    about the same number of shards. So ranks may have different numbers of samples. Each worker has its own state.
    torchdata's `StatefulDataLoader` collects these states, and resumes with the same number of workers.

    Args:
        urls: The shards of all ranks: a list, a pattern with braces, a folder, a manifest, or `"train-*.tar"`. A remote url is
            a manifest if it ends with `.json`, a folder if it ends with `/`, and a pattern if its last part has wildcards. In
            an object store, a url without a dot in its last part is a folder, too. Any other remote url is a shard, unlike
            in `tc.open`. A string in a list is always a shard. webdataset's `gopen` opens all other strings, and runs a
            string that starts with `pipe:` as a command. A `PathLike`, the name of a file, and any name from a folder, a
            manifest, or a path with wildcards or braces are never run as commands.
        stages: Stages of webdataset, or compatible functions: `tc.decode()`, `wds.shuffle(1000)`, `wds.batched(32)`.
        batch_size: Number of items of the last stage in a batch; None yields single items. Pass `batch_size=None` to the
            `DataLoader`, which would otherwise batch these batches. Without `steps`, the last batch of each worker may be
            smaller.
        steps: Number of batches of each rank in each epoch, all of `batch_size` items. `"shortest"` is the number of full
            batches of the rank with the fewest samples in epoch 0. `"longest"` is the number of batches that the rank with the
            most samples fills or begins. For both, a manifest must list the samples. The workers of a rank share its steps. A
            worker with too few samples passes its shards to the stages again. A worker with more samples leaves out the rest of
            the epoch, and `DataLoader` workers without shards have no steps. Each worker warns once that samples are repeated
            or left out.
        collate: Function of a list of items that returns a batch; torch's `default_collate` by default. Not called without
            `batch_size`.
        shuffle: True for a new order of the shards in each epoch; the samples of a shard keep their order.
        seed: Seed of this order; equal on all ranks.
        rank, world_size, group: As for `StepSampler`.
        handler, select_files, rename_files, max_expanded_nbytes: As for `tarfile_to_samples`.

    Raises:
        FileNotFoundError: No file matches a local string, a folder has no shards, or a manifest does not exist.
        TypeError: `urls` has a type that is not listed above, or a number is not an integer.
        ValueError: There are no shards, or fewer shards than ranks. Or a stage splits or reads shards, as this class does. Or
            `steps` has no `batch_size`, or needs numbers of samples that no manifest lists. With `"shortest"`, a rank has less
            than one batch. Or a number is out of range.

    Raises (when iterating):
        KeyError: An item lacks `"__position__"`.
        RuntimeError: A later iteration has begun, `set_epoch` or `load_state_dict` was called after this one began, or the
            state was loaded in another process.
        ValueError: No item leaves the last stage in a whole pass over a worker's shards, but `steps` needs items. Or a stage is
            not a function.
        FormatError, OSError, ImportError: As for `tarfile_to_samples`; FormatError also if a shard does not match its manifest.

    Memory: for each remote shard that is being read, up to 20 MiB.
    """

    def __init__(
        self,
        urls: Urls,
        *stages: Any,
        batch_size: int | None = None,
        steps: int | str | None = None,
        collate: Callable[[list[Any]], Any] = default_collate,
        shuffle: bool = True,
        seed: int = 0,
        rank: int | None = None,
        world_size: int | None = None,
        group: Any = None,
        handler: Callable[[Exception], bool] = reraise_exception,
        select_files: Callable[[str], bool] | None = None,
        rename_files: Callable[[str], str] | None = None,
        max_expanded_nbytes: int = MAX_EXPANDED_NBYTES,
    ) -> None:
        shards = find_urls(urls)
        self._urls, self._listed = [url for url, _ in shards], [listed for _, listed in shards]
        entries = [None if listed is None else listed.entry for listed in self._listed]
        if not self._urls:
            raise ValueError("no shards")
        for stage in stages:
            if getattr(stage, "f", stage) in _DOES_ITSELF or isinstance(stage, TarSamples):
                raise ValueError(
                    f"stage {stage!r:.200}: this class itself divides the shards among ranks and reads them; remove the stage"
                )
        self._stages = stages
        self._order = EpochOrder(len(self._urls), shuffle=shuffle, seed=seed)
        # a trainer may initialize torch.distributed later
        self._is_rank_open = rank is None and group is None and not is_distributed()
        self._rank, self._world_size = find_rank(rank, world_size, group, is_final=not self._is_rank_open)
        self._handler = handler
        self._tars = TarSamples(handler, select_files, rename_files, check_option(max_expanded_nbytes))
        self._loads = _loads(self._urls)
        self._digest = _digest_of(self._urls, self._loads, entries)
        self._batch_size = None if batch_size is None else as_int("batch_size", batch_size)
        if self._batch_size is not None and self._batch_size < 1:
            raise ValueError(f"batch_size={batch_size}, expected 1 or more, or None for single items")
        self._collate = collate
        self._num_samples = [None if entry is None else entry.num_samples for entry in entries]
        self._wanted_steps = steps
        self._check_ranks()
        self._epochs = _SharedEpochs()
        self._pid = os.getpid()
        self._iteration = 0
        self._has_warned = False  # of samples that set_epoch left out
        self._has_several = False  # items of a sample
        self._move(0, {}, is_over=False)

    def _check_ranks(self) -> None:
        if len(self._urls) < self._world_size:
            is_url = len(self._urls) == 1 and is_remote(self._urls[0])
            hint = "the url of a folder ends with '/'" if is_url else "`tensorcache reshard` makes more, shorter shards"
            counts = f"{format_count(len(self._urls), 'shard')} for {self._world_size} ranks"
            raise ValueError(f"{counts}: some ranks would have none; {hint}")
        self._steps = self._count_steps(self._wanted_steps)

    def _find_rank(self) -> None:
        """Take over the rank if torch.distributed has been initialized since."""
        if not self._is_rank_open:
            return
        rank, world_size = find_rank(None, None)
        if (rank, world_size) != (self._rank, self._world_size):
            self._rank, self._world_size = rank, world_size
            self._check_ranks()
        self._is_rank_open = not is_distributed()

    def __getstate__(self) -> dict[str, Any]:
        self._find_rank()  # for spawned workers, which do not know the rank
        return vars(self)

    def _count_steps(self, steps: int | str | None) -> int | None:
        if steps is None:
            return None
        if self._batch_size is None:
            raise ValueError(
                f"steps={steps!r} counts batches: also pass batch_size=, and batch_size=None to the DataLoader"
            )
        if not isinstance(steps, str):
            count = as_int("steps", steps)
            if count < 1:
                raise ValueError(f"steps={steps}, expected 1 or more, 'shortest' or 'longest'")
            return count
        if steps not in ("shortest", "longest"):
            raise ValueError(f"steps={steps!r:.100}, expected a number, 'shortest' or 'longest'")
        counts = [count for count in self._num_samples if count is not None]
        if len(counts) < len(self._urls):
            raise ValueError(
                f"steps={steps!r}: no manifest lists the samples of {len(self._urls) - len(counts)} of {len(self._urls)} "
                "shards; `tensorcache index FOLDER` writes a manifest.json: pass its path or its folder as urls, "
                "or pass steps= as a number"
            )
        order = self._order(0, range(len(self._urls))).tolist()
        totals = [sum(counts[shard] for shard in part) for part in _divide(order, self._loads, self._world_size)]
        if steps == "longest":
            return max(1, -(-max(totals) // self._batch_size))  # the last batch is filled with repeated samples
        total = min(totals)
        if total < self._batch_size:
            raise ValueError(
                f"steps={steps!r}: rank {totals.index(total)} has {total} samples, less than one batch of {self._batch_size}; "
                "pass a smaller batch_size=, or steps='longest' to repeat samples"
            )
        return total // self._batch_size

    def __len__(self) -> int:
        """Return the number of batches of this rank in an epoch. Raise TypeError without `steps`."""
        self._find_rank()
        if self._steps is None:
            raise TypeError("a stream has no length without steps=; pass batch_size= and steps=")
        return self._steps

    def __bool__(self) -> bool:
        return True

    @property
    def num_repeated(self) -> int:
        """Number of repeated samples in this process's batches of the epoch.

        Repeated samples come from a further pass over the shards. Warnings of `DataLoader` workers show the numbers of the
        workers.
        """
        return self._progress.num_repeated

    @property
    def num_left_out(self) -> int | None:
        """Number of this process's samples that the epoch's batches have not used. It is 0 if the shards are repeated.

        It is None if no manifest lists the samples of some shard. Warnings of `DataLoader` workers show the numbers of the
        workers.
        """
        if self._progress.num_passes:
            return 0
        counts = [self._num_samples[shard] for shard in self._shards()]
        return (
            None if None in counts else sum(count for count in counts if count is not None) - self._progress.num_samples
        )

    def _move(self, epoch: int, done: dict[int, _Done], *, is_over: bool) -> None:
        """Set the position of the next iteration, and end the current one."""
        self._iteration += 1
        self._epoch, self._done, self._is_over, self._is_next = epoch, done, is_over, True
        self._progress = _Progress()
        if get_worker_info() is None:
            self._epochs.put(epoch if is_over else epoch - 1)

    def _enter(self) -> Any:
        """Return torch's `WorkerInfo`; in a new process, reset the inherited position."""
        self._find_rank()
        if self._pid != os.getpid():
            if self._is_next and (self._done or self._is_over):
                raise RuntimeError(
                    "the state was loaded in another process, and does not apply here; for workers, use StatefulDataLoader"
                )
            self._pid, self._iteration = os.getpid(), 0
            self._done, self._is_over, self._is_next = {}, False, False
            self._progress = _Progress()
        return get_worker_info()

    def __iter__(self) -> Iterator[Any]:
        """Begin the next or the chosen epoch, or resume a loaded state.

        An older iteration then raises RuntimeError.
        """
        info = self._enter()
        self._iteration += 1
        if info is not None:
            # immediately, because torchdata requests the state before the first item
            self._begin(info)
        return self._items(self._iteration, info)

    def _begin(self, info: Any) -> None:
        # a chosen position is outdated if the main process finished its epoch, or workers have begun epochs since
        is_replaced = info is None and (self._is_over or self._epochs.is_in_workers())
        is_given, self._is_next = self._is_next and not is_replaced, False
        epoch = self._epochs.begin(info, self._iteration, self._epoch if is_given else None)
        if not is_given:
            self._epoch, self._done, self._is_over, self._progress = epoch, {}, False, _Progress()

    def _items(self, iteration: int, info: Any) -> Iterator[Any]:
        if iteration == self._iteration:
            if info is None:
                # at the first item, because torchdata makes iterators that it does not use
                self._begin(info)
            if self._is_over:
                return  # this worker is done, but other workers have samples left in the epoch
        share = self._share()
        done, progress = self._done, self._progress
        batch: list[tuple[Any, list[tuple[int, int]], dict[int, _Done], bool]] = []
        num_passes = progress.num_passes
        while share is None or progress.num_batches < share:
            is_whole, is_empty = not done, True
            for item in DataPipeline(partial(self._samples, done), *self._stages):
                if iteration != self._iteration:
                    raise RuntimeError("a later iteration of this stream ended this one; iterate over one at a time")
                positions = list(_positions(item))
                if not positions:
                    raise KeyError(
                        f"an item of the last stage has no {POSITION!r}, from which the stream knows which samples are done; "
                        "let the stages pass it on, or apply this stage to the items of the stream"
                    )
                is_empty = False
                batch.append((item, positions, done, num_passes > 0))
                if len(batch) < (self._batch_size or 1):
                    continue
                # only a whole batch moves the position, so that a state never skips items that wait for their batch
                self._done, progress.num_passes = done, num_passes
                yield self._finish(batch)
                if share is not None and progress.num_batches == share:
                    break
            if share is None:
                if batch:
                    yield self._finish(batch)
                break
            if is_empty and is_whole:
                raise ValueError(
                    f"no item left the last stage in a pass over the shards of rank {self._rank}, but its worker needs "
                    f"{share:,} batches; let the stages drop fewer samples, or use fewer workers or other shards"
                )
            if progress.num_batches < share:
                done, num_passes = {}, num_passes + 1
        if iteration == self._iteration:
            self._is_over = True
            self._warn_of_epoch(share)

    def _finish(self, batch: list[tuple[Any, list[tuple[int, int]], dict[int, _Done], bool]]) -> Any:
        """Mark a batch as done, empty it, and return its collated items."""
        items = [item for item, *_ in batch]
        for _, positions, done, is_repeated in batch:
            num_new = sum(done.setdefault(shard, _Done()).add(index) for shard, index in positions)
            self._has_several = self._has_several or num_new < len(positions)
            if is_repeated:
                self._progress.num_repeated += num_new
            else:
                self._progress.num_samples += num_new
        self._progress.num_batches += 1
        batch.clear()
        if self._batch_size is None:
            return items[0]
        collated = self._collate(items)
        if isinstance(collated, dict):
            for field, value in collated.items():
                if isinstance(value, (list, tuple)) and value and all(map(_is_position, value)):
                    collated[field] = _Batched(value)
        return _Batched(collated) if type(collated) is list else collated

    def _share(self) -> int | None:
        """Return this worker's number of steps, in proportion to its samples."""
        if self._steps is None:
            return None
        worker, num_workers = _find_worker()
        parts = _divide(self._shards_of_rank(), self._loads, num_workers)
        totals = [sum(self._num_samples[shard] or 0 for shard in part) for part in parts]
        if None in self._num_samples or not any(totals):
            totals = [sum(self._loads[shard] for shard in part) for part in parts]
        before, total = sum(totals[:worker]), max(1, sum(totals))
        return self._steps * (before + totals[worker]) // total - self._steps * before // total

    def _warn_of_epoch(self, share: int | None) -> None:
        """Warn once for each worker of samples repeated or left out."""
        worker, _ = _find_worker()
        has_warned = self._epochs.has_warned
        if share is None or has_warned[worker % _NUM_WORKERS]:
            return
        progress, num_left_out = self._progress, self.num_left_out
        if not progress.num_repeated and num_left_out == 0:
            return
        has_warned[worker % _NUM_WORKERS] = True
        rest = (
            "an unknown number were left out, because no manifest lists them"
            if num_left_out is None
            else f"{num_left_out:,} were left out"
        )
        warnings.warn(
            f"epoch {self._epoch}, rank {self._rank}, worker {worker}: {share:,} steps used {progress.num_samples:,} samples; "
            f"{progress.num_repeated:,} were repeated, and {rest}. Later epochs do not warn",
            stacklevel=user_level(),
        )

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next iteration. If a loaded state stopped within this epoch, the iteration resumes there.

        An iteration that has begun before raises RuntimeError at its next item. The first call that leaves out unused samples
        of an earlier epoch warns. So does each call that discards a loaded state of a later epoch.

        Raises:
            TypeError: `epoch` is not an integer.
            ValueError: `epoch` is not in `[0, 2^32)`.
            RuntimeError: The state was loaded in another process.
        """
        epoch = as_int("epoch", epoch)
        if not 0 <= epoch < _MAX_EPOCH:
            raise ValueError(f"epoch={epoch}, expected 0 or more, and less than {_MAX_EPOCH}")
        self._enter()
        if self._is_next and (self._done or self._is_over):
            warn_of_earlier_epoch(epoch, self._epoch + self._is_over)
        num_used = sum(sum(done.edges[1::2]) - sum(done.edges[::2]) for done in self._done.values())
        if num_used and epoch > self._epoch and not (self._is_over or self._has_warned):
            self._has_warned = True
            warnings.warn(
                f"set_epoch({epoch}) leaves out the rest of epoch {self._epoch}, of which {num_used:,} samples were used; "
                "iterate to its end to use them. Ignore this if epochs end early on purpose; later epochs do not warn",
                stacklevel=user_level(),
            )
        is_resumed = self._is_next and epoch == self._epoch and not self._is_over
        progress = self._progress
        self._move(epoch, self._done if is_resumed else {}, is_over=False)
        if is_resumed:
            self._progress = progress

    def _samples(self, all_done: dict[int, _Done]) -> Iterator[dict[str, Any]]:
        for shard in self._shards():
            done = all_done.setdefault(shard, _Done())
            if done.edges == [0, done.count]:  # all samples of the shard
                continue
            try:
                yield from self._samples_of(shard, done)
            except Exception as exc:  # the handler decides, as in every stage of webdataset
                if isinstance(exc, Stopped) or not self._handler(exc):
                    return

    def _samples_of(self, shard: int, done: _Done) -> Iterator[dict[str, Any]]:
        """Yield the samples of a shard that are not done."""
        url, listed = self._urls[shard], self._listed[shard]
        source, first = {"url": url}, (0, 0)
        if is_remote(url):
            source["stream"] = stream = open_url(url)
            # an unchanged shard is read from its first sample that is not done
            start = done.first_start()
            if start is None or done.info != stream.info:
                done.starts, done.info = {}, stream.info
            else:
                first = start[0], start[1]
                stream.skip(first[1])
        elif listed is not None and listed.entry is not None and listed.entry.digest is not None:
            check_listed(url, listed.entry, listed.manifest, digest=stored_digest(url))
        count = first[0]
        samples = self._tars.samples_of(source, lambda index: index not in done, first=first, listed=listed)
        for index, sample, following in samples:
            count = index + 1
            if done.info is not None and following is not None and count not in done:
                done.starts[count] = following
            if sample is not None:
                yield {**sample, POSITION: f"{_PREFIX}{shard}:{index}"}
        done.count = count

    def _shards(self) -> list[int]:
        """Return this worker's shards in the epoch's order."""
        worker, num_workers = _find_worker()
        return _divide(self._shards_of_rank(), self._loads, num_workers)[worker]

    def _shards_of_rank(self) -> list[int]:
        # ranks first: the workers of one rank must not take all shards while another rank has none
        order = self._order(self._epoch, range(len(self._urls))).tolist()
        return _divide(order, self._loads, self._world_size)[self._rank]

    def state_dict(self) -> dict[str, Any]:
        """Return the epoch and its samples returned so far, for JSON.

        Warns if a stage has made several items of a sample, which is done after the first of them.

        Raises:
            RuntimeError: Workers have read the samples; `StatefulDataLoader.state_dict` collects their states. Or the state was
                loaded in another process.
        """
        info = self._enter()
        if info is None and self._epochs.is_in_workers():
            raise RuntimeError("workers have the state; call StatefulDataLoader.state_dict, which collects it")
        if self._has_several:
            warnings.warn(
                "a stage makes several items of a sample: a stream that resumes from this state may leave out items of the "
                "last sample; let the stage return one list of all items of a sample",
                stacklevel=user_level(),
            )
        done = {str(shard): [list(done.edges), done.count] for shard, done in self._done.items() if done.edges}
        starts = {str(shard): start for shard, done in self._done.items() if (start := done.first_start()) is not None}
        state = {"version": VERSION, "epoch": self._epoch, "over": self._is_over, "done": done, "starts": starts}
        return state | {"progress": list(astuple(self._progress)), "of": self._identity()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume at the point at which the state was saved.

        An iteration that has begun before raises RuntimeError at its next item.

        Raises:
            ValueError: The state is damaged, has another version, or belongs to other shards, another order, another rank or
                worker, or another number of ranks or workers. With `steps`, also another `batch_size` or number of steps.
            RuntimeError: Another process has loaded a state, which this process has inherited.
        """
        self._enter()
        identity = self._identity()
        fields = state if isinstance(state, Mapping) else {}
        version, epoch, is_over = map(fields.get, ("version", "epoch", "over"))
        if version != VERSION:
            raise ValueError(
                f"the state has version {version!r:.20}, expected {VERSION}: another version divides the shards among ranks "
                f"and workers differently; without the state, set_epoch({epoch!r:.20}) starts its epoch again"
            )
        if fields.get("of") != identity:
            raise ValueError(f"the state belongs to a different stream: {fields.get('of')!r:.500}; this is {identity}")
        if type(epoch) is not int or not 0 <= epoch < _MAX_EPOCH or type(is_over) is not bool:
            raise ValueError(f"the state is damaged: epoch {epoch!r:.100}, over {is_over!r:.100}")
        progress = fields.get("progress", None if self._steps is not None else [0, 0, 0, 0])  # older states lack it
        if not isinstance(progress, list) or len(progress) != 4 or not _are_counts(*progress):
            raise ValueError(f"the state is damaged: progress {progress!r:.100}")
        self._move(epoch, _parse_done(fields.get("done"), fields.get("starts", {}), len(self._urls)), is_over=is_over)
        self._progress = _Progress(*progress)

    def _identity(self) -> dict[str, Any]:
        worker, num_workers = _find_worker()
        return {
            "shards": f"{len(self._urls)}, digest {self._digest}",
            "seed": self._order.seed if self._order.shuffle else None,
            "rank": self._rank,
            "world_size": self._world_size,
            "worker": worker,
            "num_workers": num_workers,
        } | ({} if self._steps is None else {"batch_size": self._batch_size, "steps": self._steps})


class _SharedEpochs:
    """Shared memory in which an iteration's workers agree on its epoch. They send no messages to the main process.

    All workers of an iteration have the same base seed, which is the worker's seed minus its index. The first worker registers
    the next epoch under this base seed. The other workers find the epoch there, even if the next iteration has begun elsewhere.
    No lock is needed, because all workers of an iteration write the same value into the same cell.

    Attributes:
        has_warned: For each worker, whether it has warned of samples that are repeated or left out.

    Threads/fork/pickle: forked and spawned processes share the cells; a copy by `pickle` or `deepcopy` is independent.
    """

    def __init__(self) -> None:
        # A row for each recent iteration. The first cell has its epoch + 1, and its key, which is 0 for an iteration in the
        # main process. Then each worker has a cell: epoch + 1 once it has begun this epoch.
        self._cells = torch.zeros((_NUM_RECENT, 1 + _NUM_WORKERS), dtype=torch.int64)
        self.has_warned = torch.zeros(_NUM_WORKERS, dtype=torch.bool)
        self.__setstate__({})

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        for cells in (self._cells, self.has_warned):
            cells.share_memory_()  # type: ignore[no-untyped-call]  # no change if they are shared

    def begin(self, info: Any, turn: int, epoch: int | None = None) -> int:
        """Return the epoch that a worker or the main process begins.

        Args:
            info: torch's `WorkerInfo`; None in the main process.
            turn: Count of iterations in this process.
            epoch: Chosen or loaded epoch; if None, the epoch of the iteration's other workers, or else the next epoch.
        """
        begun, by_worker = np.split(self._cells.numpy(), [1], axis=1)
        following = int(begun.max()) >> _KEY_BITS
        if info is None:
            return self.put(following if epoch is None else epoch)
        key = 1 + hash((info.seed - info.id, info.num_workers, turn)) % (_NUM_KEYS - 1)
        by_worker = by_worker[:, info.id % _NUM_WORKERS]
        if epoch is None:
            listed = int((begun[begun % _NUM_KEYS == key] >> _KEY_BITS).max(initial=0))
            # torch.manual_seed may start several iterations with the same seed, and so the same key. If this worker
            # already began the epoch of that key, this is a new iteration.
            epoch = listed - 1 if listed and listed != by_worker[(listed - 1) % _NUM_RECENT] else following
        else:
            self._cells[begun[:, 0] >> _KEY_BITS > epoch + 1] = 0
        begun[epoch % _NUM_RECENT] = (epoch + 1 << _KEY_BITS) + key
        by_worker[epoch % _NUM_RECENT] = epoch + 1
        return epoch

    def put(self, epoch: int) -> int:
        """Record the epoch of the main process, and return it. The next iteration begins the next epoch."""
        self._cells.zero_()
        self._cells[0, 0] = epoch + 1 << _KEY_BITS
        return epoch

    def is_in_workers(self) -> bool:
        """Return whether workers, and not the main process, began the last epoch."""
        return int(self._cells[:, 0].max()) % _NUM_KEYS != 0


@dataclass
class _Progress:
    """The part of its epoch that a process has yielded.

    Attributes:
        num_passes: Number of finished passes over its shards; always 0 without `steps`.
        num_batches: Number of batches.
        num_samples, num_repeated: Number of samples of the first pass, and of later passes, in these batches.
    """

    num_passes: int = 0
    num_batches: int = 0
    num_samples: int = 0
    num_repeated: int = 0


class _Done:
    """The returned samples of a shard, and the offsets of further samples.

    Attributes:
        edges: Ranges of sample indices, half open, as ascending `[begin, end, begin, end, ...]`.
        count: Number of samples in the shard; None until the whole shard was read.
        starts: Byte offsets of samples that are not done, by sample index; empty for a local shard.
        info: State of the remote object to which `starts` belong; None for a local shard.
    """

    def __init__(self, edges: Iterable[int] = (), count: int | None = None) -> None:
        self.edges = list(edges)
        self.count = count
        self.starts: dict[int, int] = {}
        self.info: ObjectInfo | None = None

    def __contains__(self, index: int) -> bool:
        return bisect_right(self.edges, index) % 2 == 1

    def add(self, index: int) -> bool:
        """Add a sample; return False if it was already done."""
        self.starts.pop(index, None)
        at = bisect_right(self.edges, index)
        if at % 2:
            return False
        new = [index, index + 1]
        before, after = self.edges[at - 1 : at] == new[:1], self.edges[at : at + 1] == new[1:]
        self.edges[at - before : at + after] = new[before : 2 - after]
        return True

    def first_start(self) -> list[Any] | None:
        """Return index and offset of the first sample that is not done. Also return the remote object's length and tag.

        Return None if the offset or the tag is unknown.
        """
        first = self.edges[1] if self.edges[:1] == [0] else 0
        begin = self.starts.get(first)
        if not begin or self.info is None or self.info.tag is None:  # only a tag shows whether the object has changed
            return None
        return [first, begin, self.info.nbytes, self.info.tag]


def _find_worker() -> tuple[int, int]:
    """Return this worker's index and the number of workers."""
    info = get_worker_info()
    return (0, 1) if info is None else (info.id, info.num_workers)


def _parse_done(samples: Any, starts: Any, num_shards: int) -> dict[int, _Done]:
    """Parse a state's finished samples by shard; refuse a damaged state."""
    try:
        done = {int(shard): _Done(edges, count) for shard, (edges, count) in samples.items()}
        for shard, ranges in done.items():
            edges = ranges.edges if ranges.count is None else [*ranges.edges, ranges.count]
            is_ascending = ranges.edges == sorted(set(ranges.edges)) and edges == sorted(edges)
            if not 0 <= shard < num_shards or len(ranges.edges) % 2 or not is_ascending or not _are_counts(*edges):
                raise ValueError(f"shard {shard} of {num_shards} has {edges!r:.100}, expected ascending ranges")
        for shard, (index, begin, nbytes, tag) in starts.items():
            is_start = _are_counts(index, begin, nbytes) and 0 < begin < nbytes and begin % BLOCK == 0
            if not is_start or type(tag) is not str:
                raise ValueError(f"shard {shard} starts at {[index, begin, nbytes, tag]!r:.200}")
            done[int(shard)].starts = {index: begin}
            done[int(shard)].info = ObjectInfo(nbytes, tag)
    except (AttributeError, KeyError, TypeError, ValueError) as exc:
        raise ValueError(f"the state is damaged: {exc}; it lists {samples!r:.200} and {starts!r:.200}") from exc
    return done


def _are_counts(*values: Any) -> bool:
    return all(type(value) is int and value >= 0 for value in values)


def _is_position(value: Any) -> bool:
    return isinstance(value, str) and value.startswith(_PREFIX)


def _positions(item: Any) -> Iterator[tuple[int, int]]:
    """Yield the shard and the index of each sample in an item."""
    if isinstance(item, str):
        if _is_position(item):
            shard, _, index = item[len(_PREFIX) :].partition(":")
            yield int(shard), int(index)
    elif isinstance(item, Mapping):
        yield from _positions(item.get(POSITION))
    elif isinstance(item, (list, tuple)):
        for part in item:
            yield from _positions(part)


class _Batched(list[Any]):
    """A batch, or its positions. `default_collate` refuses it, so a DataLoader cannot silently make batches of batches."""


def _refuse_batches(batch: list[Any], *, collate_fn_map: Any = None) -> NoReturn:
    raise ValueError("the stream's items are batches: pass batch_size=None to the DataLoader, or to the stream")


default_collate_fn_map.setdefault(_Batched, _refuse_batches)


def _divide(shards: list[int], loads: list[int], num_parts: int) -> list[list[int]]:
    """Return the shards of all parts. Each shard in turn goes to the part with the smallest load so far."""
    # a heap, since 10^5 shards may be divided among 10^4 ranks
    totals = [(0, index) for index in range(num_parts)]
    parts: list[list[int]] = [[] for _ in range(num_parts)]
    for shard in shards:
        total, least = totals[0]
        heapq.heapreplace(totals, (total + loads[shard], least))
        parts[least].append(shard)
    return parts


def _digest_of(urls: list[str], loads: list[int], entries: list[ShardEntry | None]) -> str:
    """Return a digest of all shards' names, loads and manifest entries."""
    # without queries, which change, unless some urls differ only in their queries
    names = [shown_url(url) for url in urls]
    if len(set(names)) < len(set(urls)):
        names = [reveal(url) for url in urls]
    # lengths of local shards are among the loads, by which shards are divided
    counts = [
        None if entry is None else (entry.num_samples, entry.nbytes if is_remote(url) else None, entry.digest)
        for url, entry in zip(urls, entries, strict=True)
    ]
    has_counts = any(count is not None and any(count) for count in counts)
    parts = [*names, repr(loads), *([repr(counts)] if has_counts else [])]
    return xxhash.xxh3_64_hexdigest("\n".join(parts).encode("utf-8", "surrogateescape"))


def _loads(urls: list[str]) -> list[int]:
    """Return lengths in bytes if all shards are local files, else ones."""
    paths = [url if os.path.lexists(url) else url.removeprefix("file:") for url in urls]
    return [os.path.getsize(path) for path in paths] if all(map(os.path.isfile, paths)) else [1] * len(urls)
