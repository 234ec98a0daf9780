"""Plan of training: which samples each step has, on this rank, and from which position training goes on."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, TypedDict

import numpy as np
import torch
from torch.utils.data import Sampler

from wds_tensorcache.reading.cache import TensorCache
from wds_tensorcache.reading.join import JoinedCache
from wds_tensorcache.training.batch_info import BatchInfo, info_of
from wds_tensorcache.training.buckets import block_sizes, buckets_of
from wds_tensorcache.training.order import BlockOrder, EpochOrder
from wds_tensorcache.training.ranks import find_rank
from wds_tensorcache.training.state import check_state, fingerprint_of, order_digest, position_from, state_of
from wds_tensorcache.training.steps import Course, Permuted, Position, Step
from wds_tensorcache.training.weights import Weights, caches_of

__all__ = ["StepIterator", "StepOptions", "StepSampler"]

Array = np.ndarray[Any, Any]
LAST_BATCH = ("short", "pad", "wrap", "drop")


class StepOptions(TypedDict, total=False):
    """Options of `StepSampler` that every loader takes."""

    shuffle: bool | str
    seed: int
    rank: int | None
    world_size: int | None
    group: Any
    last_batch: str
    weights: Any
    mix: Mapping[str, tuple[Any, float]] | None
    bucket_by: Any
    window: int


class StepSampler(Sampler[Step]):
    """The steps of training in their order, as a sampler for torch's data loaders.

    Which samples a step has is a pure function of seed, epoch and how many samples were used, on all ranks together.
    `tc.torch_loader` and `tc.Loader` make one of these. For another data loader on a map-style dataset:

        sampler = tc.StepSampler(cache, 32, shuffle=True)
        loader = StatefulDataLoader(tc.StepDataset(sampler), batch_size=None, sampler=sampler, num_workers=4)

    Each iteration is the next epoch, also after one that was left. torchdata's `StatefulDataLoader` resumes exactly, with any
    `snapshot_every_n_steps`, but only with as many workers as before; a snapshot interval above 1 also needs the same batch
    size and number of ranks. After a state of a whole epoch, the first loop is empty if the state was taken in the loop. If
    `set_epoch` was called since the last iteration, with another epoch than the state's, that epoch begins. torch's plain
    `DataLoader` has no state: use `tc.torch_loader`.

    Args:
        cache: Cache of `tc.open`, or joined ones; None with `mix`.
        batch_size: Samples in a batch of one rank.
        shuffle: True for a new order of all samples in each epoch. `"blocks"` has shards in a random order, and mixes samples
            that are within `window` of each other, for remote shards.
        seed: Seed of everything random; the same on all ranks.
        rank, world_size: Number of this data-parallel process, and of all; by default from torch.distributed, or from the
            environment that torchrun sets.
        group: Process group, or DeviceMesh of one dimension, that has these instead: with tensor or pipeline parallelism the
            global rank is wrong.
        last_batch: What becomes of an epoch's last step if it is not full. All ranks have as many steps in any case, and as
            many rows in each. `"short"` cuts it to the same length on all ranks; at most `world_size - 1` rows of all
            ranks together are padding. `"pad"` fills it with padding; `"wrap"` with the epoch's first samples, which
            are not marked; `"drop"` drops it.
        weights: One weight for each sample: samples are drawn in proportion, with replacement. An epoch has as many as the
            cache, rounded up to whole steps, without padding (with `"drop"`, rounded down).
        mix: `{"a": (cache, 0.7), "b": (other, 0.3)}`: each step has samples of one of these, chosen in proportion. Each cache
            begins its next epoch when it is used up. An epoch has as many samples as all caches together, rounded as with
            `weights`.
        bucket_by: Name of a tensor: the samples of a step have one shape of it. Or a function of what `cache.filter`'s
            predicate is given. `last_batch` holds for the last step of every bucket.
        window: Samples that are mixed with `shuffle="blocks"`.

    Raises:
        ValueError: Arguments exclude each other, or are out of range.

    Memory: at most 64 KiB of the order for each cache or bucket; and `weights`.
    Threads/fork/pickle: for one thread at a time, in the process that made it.
    """

    def __init__(
        self,
        cache: Any = None,
        batch_size: int = 1,
        *,
        shuffle: bool | str = False,
        seed: int = 0,
        rank: int | None = None,
        world_size: int | None = None,
        group: Any = None,
        last_batch: str = "short",
        weights: Any = None,
        mix: Mapping[str, tuple[Any, float]] | None = None,
        bucket_by: Any = None,
        window: int = 4096,
    ) -> None:
        if (cache is None) == (mix is None):
            raise ValueError("a cache, or mix= with several")
        modes = {"weights": weights, "mix": mix, "buckets": bucket_by}
        if sum(each is not None for each in modes.values()) > 1:
            raise ValueError("weights, mix and bucket_by exclude each other")
        batch_size, seed, window = map(operator.index, (batch_size, seed, window))
        if batch_size < 1:
            raise ValueError(f"batch_size={batch_size}, expected at least 1")
        if last_batch not in LAST_BATCH:
            raise ValueError(f"last_batch={last_batch!r}, expected one of {', '.join(LAST_BATCH)}")
        if shuffle not in (True, False, "blocks"):
            raise ValueError(f"shuffle={shuffle!r}, expected True, False or 'blocks'")
        shuffle = shuffle if isinstance(shuffle, str) else bool(shuffle)
        rank, world_size = find_rank(rank, world_size, group)
        self._caches: list[Any] = [cache] if mix is None else caches_of(mix)
        for each in self._caches:
            if not isinstance(each, (TensorCache, JoinedCache)) or not len(each):
                raise ValueError(f"{each!r:.200} is no cache with samples; open it with tc.open")

        def order(each: Any, number: int, members: Array | None = None) -> Any:
            if shuffle == "blocks":
                return BlockOrder(block_sizes(each, members), window=window, seed=seed + number)
            return EpochOrder(len(each if members is None else members), shuffle=bool(shuffle), seed=seed + number)

        self._names: list[Any] = [None] if mix is None else list(mix)
        streams: list[Any] = [Permuted(order(each, number)) for number, each in enumerate(self._caches)]
        if bucket_by is not None:
            found = buckets_of(cache, bucket_by)
            self._names = list(found)
            streams = [Permuted(order(cache, at, members), members) for at, members in enumerate(found.values())]
        self._weights = Weights(weights, mix, len(self._caches[0]), seed)
        mixed = self._weights.of_streams if mix is not None else None
        self._course = Course(streams, batch_size, rank, world_size, last_batch, seed, mixed)
        self._step_size = batch_size * world_size
        self._settings = {
            "seed": seed,
            "shuffle": shuffle,
            "mode": next((name for name, each in modes.items() if each is not None), "all"),
            "streams": list(map(str, self._names)),
            "order": order_digest(streams),
        }
        if not len(self):
            count = sum(map(len, streams))
            raise ValueError(f"{count} samples do not fill one step of {batch_size} on {world_size} ranks")
        self._fingerprint: str | None = None
        self._position = self._course.start
        self._is_resumed = False  # the next iteration goes on at the position, in the middle of an epoch too
        self._chosen: int | None = None  # by set_epoch, since the last iteration began
        self._num_moves = 0  # how often the position was put elsewhere
        self._leader: Any = None  # weak reference to a TorchLoader's iteration, which moves the position itself
        self._is_elsewhere = False  # another data loader iterates, which does not say what it has given

    def __len__(self) -> int:
        """Return how many steps an epoch has, on every rank."""
        return self._course.num_steps()

    def __iter__(self) -> StepIterator:
        """Begin an epoch when the first step is asked for."""
        return StepIterator(self)

    @property
    def epoch(self) -> int:
        """The epoch in which the next step is."""
        return self._position.epoch

    def set_epoch(self, epoch: int) -> None:
        """Let the next iteration begin that epoch; after `load_state_dict` with that one, nothing changes.

        Of a mix, each cache goes on where it stands.

        Raises:
            ValueError: `epoch` is out of range.
        """
        epoch = operator.index(epoch)
        if not 0 <= epoch < 1 << 62:
            raise ValueError(f"epoch={epoch}, expected 0 or more")
        self._chosen = epoch
        if not (self._is_resumed and epoch == self._position.epoch):
            self._move(replace(self._course.next_epoch(self._position), epoch=epoch))

    def _move(self, position: Position, *, is_resumed: bool = False, is_elsewhere: bool = False) -> None:
        self._position, self._is_resumed, self._is_elsewhere = position, is_resumed, is_elsewhere
        self._num_moves += 1

    def _beginning(self) -> Position:
        """Return where the next iteration begins."""
        is_left = self._position.used and not self._is_resumed
        return self._course.next_epoch(self._position) if is_left else self._position

    def _settled(self, at: Position) -> Position:
        """Return where training stands: at the next epoch's beginning if this one is over."""
        return self._course.next_epoch(at) if self._course.is_over(at) else at

    def _step(self, at: Position) -> tuple[Step, Position]:
        """Return the step at a position where the epoch is not over, and the position after it."""
        return self._course.step(at, self._weights.drawn(at.step))

    def _info(self, step: Step, device: torch.device | str | None = None) -> BatchInfo:
        return info_of(step, self._names, step.cache_of(self._caches), device)

    def _state(self, at: Position) -> dict[str, Any]:
        return state_of(at, self._settings, self._identity(), self._weights.state(at.step))

    def _load(self, state: Mapping[str, Any]) -> Position:
        """Take the weights of a state, and return its position.

        Raises:
            ValueError: It is of another dataset or order, or no state; then nothing has changed.
        """
        check_state(state, self._settings, self._identity())
        position = position_from(state, self._course)
        self._weights.load(state["weights"])
        return position

    def _identity(self) -> str:
        if self._fingerprint is None:
            self._fingerprint = fingerprint_of(self._caches)
        return self._fingerprint


class StepIterator(Iterator[Step]):
    """The rest of an epoch's steps; torchdata's `StatefulDataLoader` calls `state_dict` and `load_state_dict`.

    A data loader makes several before it asks one for a step, so an epoch begins with its first step.
    """

    def __init__(self, sampler: StepSampler) -> None:
        self._sampler = sampler
        self._is_led = False
        self._at: Position | None = None  # None before the first step
        self._num_moves = -1
        self._count = 0
        self._last_saved: int | None = None  # count at the last state_dict, if the first one was before the first step
        self._every = 1

    def __next__(self) -> Step:
        sampler = self._sampler
        if self._at is None:
            self._at = sampler._beginning()
            self._is_led = sampler._leader is not None and sampler._leader() is not None
            self._leave()
        if sampler._course.is_over(self._at):
            if self._num_moves == sampler._num_moves:
                self._leave()
            raise StopIteration
        step, self._at = sampler._step(self._at)
        self._count += 1
        return step

    def _leave(self) -> None:
        """Let the next iteration begin the next epoch."""
        if not self._is_led and self._at is not None:
            self._sampler._move(self._sampler._course.next_epoch(self._at), is_elsewhere=True)
            self._sampler._chosen = None
        self._num_moves = self._sampler._num_moves

    def state_dict(self) -> dict[str, Any]:
        """Return the state after the last step, in the form of `tc.Loader`'s; at the end of an epoch it stays there."""
        # for workers, torchdata calls this before the first step, and then at each snapshot
        if self._last_saved is not None and self._count > self._last_saved:
            self._every = self._count - self._last_saved
        if self._count == 0 or self._last_saved is not None:
            self._last_saved = self._count
        state = self._sampler._state(self._sampler._beginning() if self._at is None else self._at)
        return state | {"step_size": self._sampler._step_size, "every": self._every}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on after the last step of a state.

        Raises:
            ValueError: It is of another dataset or order, or no state. Or it is of another batch size or number of ranks, and
                of `snapshot_every_n_steps` above 1: torchdata leaves out the batches given after it by their number.
        """
        sampler = self._sampler
        check_state(state, sampler._settings, sampler._identity())
        if state.get("every", 1) != 1 and state.get("step_size") != sampler._step_size:
            raise ValueError(
                f"the state was taken every {state['every']} steps of {state.get('step_size')} samples, and a step has "
                f"{sampler._step_size} now, so batches given after it cannot be left out; use snapshot_every_n_steps=1, or "
                "tc.torch_loader"
            )
        self._at, chosen = sampler._load(state), sampler._chosen
        if chosen is None or chosen == self._at.epoch:
            self._leave()
            return
        begin = replace(sampler._course.next_epoch(self._at), epoch=chosen)
        if sampler._course.is_over(self._at):  # nothing is left of it
            sampler._move(begin, is_elsewhere=True)
        else:
            self._at = begin
            self._leave()
