"""Batches for training: read ahead by threads, in an order that can be left and taken up at every step."""

from __future__ import annotations

import operator
import weakref
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from wds_tensorcache.reading.batch.assemble import check_collate
from wds_tensorcache.reading.cache import TensorCache
from wds_tensorcache.reading.join import JoinedCache
from wds_tensorcache.training.batch_info import BatchInfo
from wds_tensorcache.training.buckets import block_sizes, buckets_of
from wds_tensorcache.training.iteration import Iteration
from wds_tensorcache.training.order import BlockOrder, EpochOrder
from wds_tensorcache.training.ranks import find_rank
from wds_tensorcache.training.state import check_state, fingerprint_of, order_digest, position_from, state_of
from wds_tensorcache.training.steps import Course, Permuted, Position, Step
from wds_tensorcache.training.weights import Weights, caches_of

__all__ = ["Loader"]

Array = np.ndarray[Any, Any]
LAST = ("pad", "drop", "wrap")


class Loader:
    """Iterates over an epoch of a cache: pairs of a batch, as `read_batch` returns it, and its `BatchInfo`.

    Which samples a step has is a pure function of seed, epoch and how many samples were used, on all ranks together. So
    `state_dict` is a few integers, right at every step in spite of what was read ahead, and can be loaded by any number of
    ranks and with any batch size: they go on with just the samples that were not used yet.

    Args:
        cache: That of `tc.open`, or joined ones; None with `mix`.
        batch_size: Samples in a batch of one rank.
        shuffle: A new order of all samples in each epoch; `"blocks"` has shards in a random order, and mixes samples that are
            within `window` of each other, for remote shards.
        seed: Of everything random; the same on all ranks.
        rank, world_size: Of the data-parallel processes; from torch.distributed or torchrun's environment by default.
        group: A process group or a DeviceMesh of one dimension that has these instead: with tensor or pipeline parallelism
            the global rank is wrong.
        last: `"pad"` fills the last step with rows that are marked; `"drop"` drops it; `"wrap"` fills it with the epoch's
            first samples, not marked. All ranks have as many batches, always.
        drop_last: Short for `last="drop"`.
        device, pin, collate, pad_value: As of `read_batch`.
        threads: How many batches are read at a time; 0 reads in the caller's thread, when a batch is asked for.
        prefetch: How many batches are read ahead.
        weights: One for each sample: they are drawn in proportion, with replacement, as many as the cache has per epoch.
        mix: `{"a": (cache, 0.7), "b": (other, 0.3)}`: each step has samples of one of these, chosen in proportion. Each cache
            begins its next epoch when it is used up; an epoch has as many samples as all caches together, rounded up to
            whole steps, without padding, as with `weights`.
        bucket_by: The name of a tensor: the samples of a step have one shape of it. Or a function of what `cache.filter`'s
            predicate is given. Every bucket's last step is filled up.
        window: Of `shuffle="blocks"`, in samples.

    Raises:
        ValueError: What excludes each other, or is out of range.

    Memory: `prefetch` batches and one, besides the caller's.
    Threads/fork/pickle: one thread iterates, any may `close`; use it in the process that made it. An iteration that is left,
        or `close`, ends its threads, and the next one is the next epoch.
    """

    def __init__(
        self,
        cache: Any = None,
        batch_size: int = 1,
        *,
        shuffle: bool | str = True,
        seed: int = 0,
        rank: int | None = None,
        world_size: int | None = None,
        group: Any = None,
        last: str = "pad",
        drop_last: bool = False,
        device: torch.device | str | None = None,
        pin: bool = False,
        threads: int = 2,
        prefetch: int = 2,
        weights: Any = None,
        mix: Mapping[str, tuple[Any, float]] | None = None,
        bucket_by: Any = None,
        collate: Any = "stack",
        pad_value: Any = 0,
        window: int = 4096,
    ) -> None:
        if (cache is None) == (mix is None):
            raise ValueError("a cache, or mix= with several")
        modes = {"weights": weights, "mix": mix, "buckets": bucket_by}
        if sum(each is not None for each in modes.values()) > 1:
            raise ValueError("weights, mix and bucket_by exclude each other")
        batch_size, seed, window, threads, prefetch = map(operator.index, (batch_size, seed, window, threads, prefetch))
        if batch_size < 1 or threads < 0 or prefetch < 0:
            raise ValueError(f"batch_size={batch_size}, threads={threads}, prefetch={prefetch}: out of range")
        if last not in LAST or (drop_last and last == "wrap"):
            raise ValueError(f"last={last!r}, drop_last={drop_last}: expected one of {', '.join(LAST)}")
        if shuffle not in (True, False, "blocks"):
            raise ValueError(f"shuffle={shuffle!r}, expected True, False or 'blocks'")
        shuffle = shuffle if isinstance(shuffle, str) else bool(shuffle)
        check_collate(collate)
        last = "drop" if drop_last else last
        rank, world_size = find_rank(rank, world_size, group)
        caches = [cache] if mix is None else caches_of(mix)
        for each in caches:
            if not isinstance(each, (TensorCache, JoinedCache)) or not len(each):
                raise ValueError(f"{each!r:.200} is no cache with samples; open it with tc.open")

        def order(each: Any, number: int, members: Array | None = None) -> Any:
            if shuffle == "blocks":
                return BlockOrder(block_sizes(each, members), window=window, seed=seed + number)
            return EpochOrder(len(each if members is None else members), shuffle=bool(shuffle), seed=seed + number)

        self._names: list[Any] = [None] if mix is None else list(mix)
        streams: list[Any] = [Permuted(order(each, number)) for number, each in enumerate(caches)]
        if bucket_by is not None:
            found = buckets_of(cache, bucket_by)
            self._names = list(found)
            caches = [cache] * len(found)
            streams = [Permuted(order(cache, at, members), members) for at, members in enumerate(found.values())]
        self._weights = Weights(weights, mix, len(caches[0]), seed)
        self._course = Course(
            streams, batch_size, rank, world_size, last, seed, self._weights.of_streams if mix is not None else None
        )
        self._caches = caches
        self._single = [each._single_threaded() for each in caches]
        self._read_options = {"device": device, "pin": pin, "collate": collate, "pad_value": pad_value}
        self._threads, self._prefetch = threads, prefetch
        self._settings = {
            "seed": seed,
            "shuffle": shuffle,
            "mode": next((name for name, each in modes.items() if each is not None), "all"),
            "streams": list(map(str, self._names)),
            "order": order_digest(streams),
        }
        if not len(self):
            raise ValueError(
                f"{sum(map(len, streams))} samples do not fill one step of {batch_size} on {world_size} ranks"
            )
        self._position = self._course.start
        self._is_resumed = False
        self._is_flushed = False
        self._fingerprint: str | None = None
        self._dealt = (0, 1)
        self._running: Any = None
        self._num_iterations = 0

    def __len__(self) -> int:
        """Return how many batches an epoch has, on every rank."""
        return self._course.num_steps()

    @property
    def epoch(self) -> int:
        """The epoch in which the next batch is."""
        return self._position.epoch

    @property
    def is_in_epoch(self) -> bool:
        """Whether the epoch has begun."""
        return self._position.used > 0

    def set_epoch(self, epoch: int) -> None:
        """Let the next iteration begin that epoch; after `load_state_dict` with that one, nothing changes.

        Of a mix, each cache goes on where it stands.
        """
        epoch = operator.index(epoch)
        if not 0 <= epoch < 1 << 62:
            raise ValueError(f"epoch={epoch}, expected 0 or more")
        if self._is_resumed and epoch == self._position.epoch:
            return
        self.close()
        self._position = replace(self._course.next_epoch(self._position), epoch=epoch)
        self._is_resumed = False

    def __iter__(self) -> Iteration:
        """Begin an epoch; after `load_state_dict`, go on in the one that was left. Ends what is still iterating."""
        self.close()
        self._num_iterations += 1
        running = Iteration(self)
        self._running = weakref.ref(running)
        return running

    def _begin_epoch(self) -> Position:
        """Return where an iteration begins."""
        if self._position.used and not self._is_resumed:
            self._position = self._course.next_epoch(self._position)
        self._is_resumed = False
        return self._position

    def _settled(self, at: Position) -> Position:
        """Return where training stands: at the next epoch's beginning if this one is over."""
        return self._course.next_epoch(at) if self._course.is_over(at) else at

    def _read(self, step: Step, stream: Any) -> Any:
        with nullcontext() if stream is None else torch.cuda.stream(stream):
            return self._single[step.stream].read_batch(step.numbers, **self._read_options)

    def _info(self, step: Step) -> BatchInfo:
        padding = torch.from_numpy(step.is_padding)
        if self._read_options["device"] is not None:
            padding = padding.to(self._read_options["device"])
        name, cache = self._names[step.stream], self._caches[step.stream]
        return BatchInfo(step.numbers, padding, step.at.epoch, step.at.step, name, cache)

    def set_weights(self, weights: Any, *, strict: bool = False) -> int:
        """Change the weights, of the samples or of the mix (`{"a": 0.5, …}`), and return the first step that has the new ones.

        Args:
            strict: From the next batch on, which throws away what was read ahead; else from the first that was not begun.

        Raises:
            ValueError: The loader has no weights, or these do not fit.
        """
        running = self._running() if self._running is not None and not strict else None
        step = max(self._position.step, running.planned if running is not None else 0)
        self._weights.change(step, weights, self._position.step)
        self._is_flushed |= strict
        return step

    def state_dict(self) -> dict[str, Any]:
        """Return where the loader stands, behind the last batch that it gave; for JSON, and the same on all ranks.

        A few integers, and the weights of samples, where there are any: some bytes for each.
        """
        weights = self._weights.state(self._position.step)
        return state_of(self._position, self._settings, self._identity(), weights)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was taken, with whatever batch size and number of ranks this loader has.

        Weights are those of the state: `set_weights` afterwards, where they are to be others.

        Raises:
            ValueError: It is of another dataset, or of a loader with another seed, shuffle or mix, or no state at all.
        """
        check_state(state, self._settings, self._identity())
        position = position_from(state, self._course)
        self._weights.load(state["weights"])
        self.close()
        self._position = self._settled(position)  # a larger step may not be left
        self._is_resumed = True

    def _identity(self) -> str:
        if self._fingerprint is None:
            is_mixed = self._settings["mode"] == "mix"
            self._fingerprint = fingerprint_of(self._caches if is_mixed else self._caches[:1])
        return self._fingerprint

    def position(self) -> list[int]:
        """Return where the loader stands, as integers of which there are always as many."""
        at = self._position
        return [at.epoch, at.used, at.step, at.began, *at.counts]

    def go_to(self, position: Sequence[int]) -> None:
        """Let the next iteration begin where another loader like this one stands."""
        epoch, used, step, began, *counts = position
        self._position = Position(epoch, tuple(counts), used, step, began)
        self._is_resumed = True

    def after_this_epoch(self) -> list[int]:
        """Return where the next epoch begins if this one is left where the loader stands."""
        at = self._course.next_epoch(self._position)
        return [at.epoch, at.used, at.step, at.began, *at.counts]

    def for_worker(self) -> Loader:
        """Return a loader like this one for a worker process, which reads when it is asked."""
        made = object.__new__(Loader)
        vars(made).update(vars(self), _threads=0, _prefetch=0, _running=None, _is_flushed=False, _is_resumed=False)
        return made

    def deal(self, worker: int, num_workers: int) -> None:
        """From where the loader stands, have only every `num_workers`-th step, the first after `worker` others."""
        self._dealt = worker, num_workers

    def __reduce__(self) -> Any:
        raise TypeError("a Loader stays in its process; IterableCache goes to workers, state_dict into checkpoints")

    def close(self) -> None:
        """End the iteration and its threads; where the loader stands is kept, and the caches stay open."""
        running = self._running() if self._running is not None else None
        self._running = None
        if running is not None:
            running.close()

    def __enter__(self) -> Loader:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
