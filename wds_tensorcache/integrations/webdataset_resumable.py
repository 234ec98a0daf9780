"""Streams of webdataset that go on in the shard and at the sample where they were."""

from __future__ import annotations

import operator
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeAlias

import xxhash
from torch.utils.data import IterableDataset, get_worker_info
from webdataset.handlers import reraise_exception
from webdataset.pipeline import DataPipeline
from webdataset.shardlists import split_by_node, split_by_worker
from webdataset.tariterators import tarfile_samples

from wds_tensorcache.integrations.webdataset_epochs import EpochLog
from wds_tensorcache.integrations.webdataset_tar import Stopped, TarSamples, open_path
from wds_tensorcache.integrations.webdataset_urls import find_urls
from wds_tensorcache.training.order import EpochOrder
from wds_tensorcache.training.ranks import find_rank

__all__ = ["ResumableStream", "resumable"]

POSITION = "__position__"
_PREFIX = "tensorcache-position:"
VERSION = 1
Urls: TypeAlias = "str | os.PathLike[str] | Iterable[str | os.PathLike[str]]"


def resumable(urls: Urls, *stages: Any, **options: Any) -> ResumableStream:
    """Return a dataset like `wds.DataPipeline(shards, tarfile_to_samples(), *stages)` that can be left and taken up again.

    Args:
        urls: Of the shards, which are shared out among ranks and workers here: a list, a pattern with braces, a folder, a
            manifest, or `"train-*.tar"`. Names that a folder, a manifest, a wildcard or braces give are paths, whatever they
            begin with, and so is a `PathLike`. What you type goes to webdataset's `gopen`, unless a file has just this name;
            `pipe:` runs a command only where your text, or one of its parts between `::`, begins with it.
        stages: Of webdataset, and others like them: `tc.decode()`, `wds.shuffle(1000)`, `wds.batched(32)`. What they yield
            keeps `sample["__position__"]`, else map behind the stream.
        options: Of `ResumableStream`.

    Raises:
        TypeError: `urls` are something else.
        ValueError: A stage does what the stream does itself, or ranks would have no shard.
    """
    return ResumableStream(urls, stages, **options)


class ResumableStream(IterableDataset[Any]):
    """What `resumable` returns: iterates over an epoch; `state_dict` says which samples of it have come out of the stages.

    After `load_state_dict` the samples that had come out are not decoded again, nor read where whole shards of them had.
    All others come: also those that a stage was holding back, to shuffle or to batch them, in another order then. Without
    such stages the sequence is that of an unbroken run.

    Every sample carries where it is from in `"__position__"`, and what the stages yield must still have it: dicts that they
    pass on, batches of such, and tuples with it, as of `wds.to_tuple("jpg", "__position__")`. Samples that a stage leaves out
    come into its hands again after resuming.

    Works with `DataLoader` and torchdata's `StatefulDataLoader`. Shards are shared out to ranks and workers by their bytes,
    where they are files, else by their number; ranks may so have different numbers of samples. Each worker has a state of its
    own, for as many of them as before.

    Args:
        urls: As of `resumable`.
        stages: As of `resumable`.
        shuffle: The shards, in a new order in each epoch.
        seed: Of that order, the same on all ranks.
        rank, world_size, group: As of `Loader`.
        handler, select_files, rename_files: As of `tarfile_to_samples`.

    Raises (when iterating):
        KeyError: The stages have lost `"__position__"`.
        FormatError: As of `tarfile_to_samples`.
    """

    def __init__(
        self,
        urls: Urls,
        stages: Iterable[Any],
        *,
        shuffle: bool = True,
        seed: int = 0,
        rank: int | None = None,
        world_size: int | None = None,
        group: Any = None,
        handler: Callable[[Exception], bool] = reraise_exception,
        select_files: Callable[[str], bool] | None = None,
        rename_files: Callable[[str], str] | None = None,
    ) -> None:
        found = find_urls(urls)
        self._urls = [url for url, _ in found]
        self._is_path = [is_path for _, is_path in found]
        if not self._urls:
            raise ValueError("no shards")
        self._stages = list(stages)
        for stage in self._stages:
            if getattr(stage, "f", stage) in (split_by_node, split_by_worker, tarfile_samples) or isinstance(
                stage, TarSamples
            ):
                raise ValueError(
                    f"stage {stage!r:.200}: the stream shares out and reads the shards itself; leave it out"
                )
        self._order = EpochOrder(len(self._urls), shuffle=shuffle, seed=operator.index(seed))
        self._rank, self._world_size = find_rank(rank, world_size, group)
        if len(self._urls) < self._world_size:
            raise ValueError(f"{len(self._urls)} shards for {self._world_size} ranks: some would have none")
        self._handler = handler
        self._read = TarSamples(handler, select_files, rename_files)
        self._loads = _loads(found)
        self._log = EpochLog()
        self._num_iterations = 0
        self._reset()

    def _reset(self) -> None:
        self._pid = os.getpid()
        self._epoch = 0
        self._done: dict[int, _Done] = {}  # by shard
        self._is_resumed = False
        self._is_over = False
        self._num_turns = 0  # iterations of this worker

    def _come_into(self) -> Any:
        """Return torch's `WorkerInfo`; in a worker that was forked, where this process stood means nothing."""
        if self._pid != os.getpid():
            if self._is_resumed:
                raise RuntimeError(
                    "the state was loaded by one process, for itself; StatefulDataLoader gives workers theirs"
                )
            self._reset()
        return get_worker_info()

    def __iter__(self) -> Iterator[Any]:
        """Begin an epoch; after `load_state_dict`, go on in the one that was left. Ends what is still iterating."""
        self._num_iterations += 1
        info = self._come_into()
        if info is not None:  # now, before torchdata asks for the state
            self._num_turns += 1
            if self._is_resumed:
                self._log.begin(info, self._num_turns, self._epoch)
            else:
                self._epoch, self._done, self._is_over = self._log.begin(info, self._num_turns), {}, False
        return self._items(self._num_iterations, info)

    def _items(self, iteration: int, info: Any) -> Iterator[Any]:
        is_resumed = self._is_resumed
        if info is None:
            of_workers = self._log.epoch_of_workers()
            if of_workers is not None and not is_resumed:
                self._epoch, self._done = of_workers + 1, {}
            elif self._is_over or (self._done and not is_resumed):
                self._epoch, self._done = self._epoch + 1, {}
            self._log.put(self._epoch)
        self._is_resumed = False
        if is_resumed and self._is_over and info is not None:
            return  # this worker had given all of its own, other ones had not
        self._is_over = False
        for item in DataPipeline(self._samples, *self._stages):
            if iteration != self._num_iterations:
                raise RuntimeError("another iteration of this stream has begun, which ended this one")
            found = list(_positions(item))
            if not found:
                raise KeyError(
                    f"what the stages yield has no {POSITION!r}, by which the stream knows what came out of them: let them "
                    "pass it on, or map behind the stream"
                )
            for shard, number in found:
                self._done.setdefault(shard, _Done()).add(number)
            yield item
        self._is_over = True

    def set_epoch(self, epoch: int) -> None:
        """Let the next iteration begin that epoch; after `load_state_dict` with that one, nothing changes."""
        epoch = operator.index(epoch)
        if not 0 <= epoch < 1 << 62:
            raise ValueError(f"epoch={epoch}, expected 0 or more")
        if self._is_resumed and epoch == self._epoch and not self._is_over:
            return
        self._num_iterations += 1
        self._epoch, self._done, self._is_resumed, self._is_over = epoch, {}, False, False
        self._log.put(epoch - 1)

    def _samples(self) -> Iterator[dict[str, Any]]:
        done = {shard: _Done(one.ranges, one.count) for shard, one in self._done.items()}  # before this iteration
        for shard in self._shards():
            before = done.get(shard, _Done())
            if before.is_all():
                continue
            count = 0

            def is_wanted(number: int, before: _Done = before) -> bool:
                nonlocal count
                count = number + 1
                return number not in before

            try:
                for number, sample in self._read.samples_of(self._opened(shard), is_wanted):
                    yield {**sample, POSITION: f"{_PREFIX}{shard}:{number}"}
            except Stopped:
                return
            except Exception as exc:  # the handler decides, as in every stage of webdataset
                if not self._handler(exc):
                    return
            else:
                self._done.setdefault(shard, _Done()).count = count

    def _opened(self, shard: int) -> dict[str, Any]:
        url = self._urls[shard]
        return {"url": url, "stream": open_path(url)} if self._is_path[shard] else {"url": url}

    def _shards(self) -> list[int]:
        """Return the shards of this rank and worker, in the epoch's order: each goes to who has least until then."""
        info = get_worker_info()
        worker, num_workers = (0, 1) if info is None else (info.id, info.num_workers)
        loads = [0] * (self._world_size * num_workers)
        mine = []
        for shard in self._order(self._epoch, range(len(self._urls))).tolist():
            least = loads.index(min(loads))
            loads[least] += self._loads[shard]
            if least == self._rank * num_workers + worker:
                mine.append(shard)
        return mine

    def state_dict(self) -> dict[str, Any]:
        """Return what came out of the stages in this epoch, for JSON.

        Raises:
            RuntimeError: Workers have the samples, and this is not one: their loader has the state.
        """
        info = self._come_into()
        if info is None and self._log.epoch_of_workers() is not None:
            raise RuntimeError("the workers have the state: StatefulDataLoader's state_dict collects it")
        done = {str(shard): [list(map(list, one.ranges)), one.count] for shard, one in self._done.items() if one.ranges}
        state = {"version": VERSION, "epoch": self._epoch, "over": self._is_over, "done": done}
        return state | {"of": self._identity(info)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was taken.

        Raises:
            ValueError: It is of other shards, of another order, or of another number of ranks or workers, or no state at all.
        """
        mine = self._identity(self._come_into())
        if not isinstance(state, Mapping) or state.get("version") != VERSION or state.get("of") != mine:
            of = state.get("of") if isinstance(state, Mapping) else state
            raise ValueError(f"the state is of another stream: of {of!r:.500}, this one is {mine}")
        epoch, is_over = state.get("epoch"), state.get("over")
        if type(epoch) is not int or not 0 <= epoch < 1 << 62 or type(is_over) is not bool:
            raise ValueError(f"the state is damaged: epoch {epoch!r:.100}, over {is_over!r:.100}")
        done = _done_from(state.get("done"), len(self._urls))
        self._num_iterations += 1
        self._epoch, self._is_over, self._done, self._is_resumed = epoch, is_over, done, True
        if get_worker_info() is None:
            self._log.put(epoch - 1)

    def _identity(self, info: Any) -> dict[str, Any]:
        worker, num_workers = (0, 1) if info is None else (info.id, info.num_workers)
        return {
            "shards": len(self._urls),
            "urls": xxhash.xxh3_64_hexdigest("\n".join(self._urls).encode("utf-8", "surrogateescape")),
            "nbytes": xxhash.xxh3_64_hexdigest(repr(self._loads).encode()),  # by which they are shared out
            "seed": self._order.seed if self._order.shuffle else None,
            "rank": self._rank,
            "world_size": self._world_size,
            "worker": worker,
            "num_workers": num_workers,
        }


class _Done:
    """Which samples of a shard came out: ranges `[first, last + 1]`, ascending; `count` of all, once the shard was read."""

    def __init__(self, ranges: Iterable[Iterable[int]] = (), count: int | None = None) -> None:
        self.ranges = [list(each) for each in ranges]
        self.count = count

    def __contains__(self, number: int) -> bool:
        return any(first <= number < end for first, end in self.ranges)

    def is_all(self) -> bool:
        return self.count is not None and self.ranges == [[0, self.count]]

    def add(self, number: int) -> None:
        at = len(self.ranges)
        while at and self.ranges[at - 1][0] > number:
            at -= 1
        if at and self.ranges[at - 1][1] >= number:
            self.ranges[at - 1][1] = max(self.ranges[at - 1][1], number + 1)
            at -= 1
        else:
            self.ranges.insert(at, [number, number + 1])
        if at + 1 < len(self.ranges) and self.ranges[at][1] >= self.ranges[at + 1][0]:
            self.ranges[at][1] = max(self.ranges[at][1], self.ranges.pop(at + 1)[1])


def _done_from(state: Any, num_shards: int) -> dict[int, _Done]:
    """Return what a state says came out."""
    done = {}
    try:
        for shard, (ranges, count) in state.items():
            flat = [number for each in ranges for number in each]
            if any(len(each) != 2 for each in ranges) or not all(type(number) is int for number in flat):
                raise ValueError("expected [first, last + 1]")
            if not 0 <= int(shard) < num_shards or flat != sorted(set(flat)) or any(number < 0 for number in flat):
                raise ValueError("numbers that no samples have")
            if count is not None and (type(count) is not int or (flat and count < flat[-1])):
                raise ValueError(f"count {count!r}")
            done[int(shard)] = _Done(ranges, count)
    except (AttributeError, TypeError, ValueError) as exc:
        raise ValueError(f"the state does not say what came out of the stages: {exc}: {state!r:.200}") from exc
    return done


def _positions(item: Any) -> Iterator[tuple[int, int]]:
    """Yield shard and number of each sample that `item` is made of."""
    if isinstance(item, str):
        if item.startswith(_PREFIX):
            shard, _, number = item[len(_PREFIX) :].partition(":")
            yield int(shard), int(number)
    elif isinstance(item, Mapping):
        yield from _positions(item.get(POSITION))
    elif isinstance(item, (list, tuple)):
        for one in item:
            yield from _positions(one)


def _loads(shards: list[tuple[str, bool]]) -> list[int]:
    """Return the bytes of each shard, or ones if not all are files."""
    paths = [url if is_path else url.removeprefix("file:") for url, is_path in shards]
    return [os.path.getsize(path) for path in paths] if all(map(os.path.isfile, paths)) else [1] * len(shards)
