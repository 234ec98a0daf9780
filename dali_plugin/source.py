"""Batches of a cache for `fn.external_source`: a pure function of epoch and iteration."""

from __future__ import annotations

import glob
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from itertools import compress, zip_longest
from typing import Any

import numpy as np
import torch

import wds_tensorcache as tc
from dali_plugin.base import Source, check_batches, what_is_carried
from dali_plugin.carriers import known_names, plain

__all__ = ["TensorCacheSource"]

Array = np.ndarray[Any, Any]


class TensorCacheSource(Source):
    """A source for `fn.external_source(source=…, num_outputs=source.num_outputs, batch=True, batch_info=True)`.

    Called with a `BatchInfo` it returns one batch: `[B, …]` for each tensor where shapes are equal, else a list of B; a list
    of B uint8 arrays for each member; and which samples they are, int64 `[B]`. `outputs` names them in this order.

    The batch depends on the epoch and the iteration alone, so pipelines resume exactly from DALI's checkpoints, and any
    number of processes (`parallel=True`) may make batches.

    Args:
        cache: A cache, or anything that `tc.open` takes.
        tensors: Their names, as in `cache.schema`, or patterns (`"text.*"`); all by default.
        members: Suffixes of other members, whose bytes arrive as they are: `["jpg"]`.
        batch_size: Samples in a batch.
        shuffle, seed: A new order every epoch, the same on all ranks.
        rank, world_size: Which part of every epoch this process has. All have as many batches.
        last_batch: What becomes of an epoch's last batch if it is not full. `"short"` cuts it to the same length on all
            ranks; at most `world_size - 1` rows of all ranks together are padding. `"pad"` fills it with padding; `"wrap"`
            with the epoch's first samples, which are not marked; `"drop"` drops it. `TensorCacheIterator.is_padding` marks.
        pin_memory: Read into page-locked memory, from which DALI copies to a GPU without a detour; needs a GPU.
        keep: How many batches stay in memory after they were returned: what DALI has not read yet, as it does not copy.

    Raises:
        KeyError: An unknown tensor or member; the message has those that are spelt alike.
        ValueError: Something out of range; a cache without samples, or without a batch of them.
        TypeError: A tensor's dtypes differ between samples.
        BatchError (of a batch): A sample has no tensor of such a name.

    Threads/fork/pickle: one thread at a time; pickles for DALI's worker processes, which open the shards themselves.
    """

    def __init__(
        self,
        cache: Any,
        tensors: Iterable[str] | None = None,
        members: Iterable[str] = (),
        *,
        batch_size: int,
        shuffle: bool = False,
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
        last_batch: str = "short",
        pin_memory: bool = False,
        keep: int = 8,
    ) -> None:
        check_batches(batch_size, rank, world_size, last_batch)
        is_open = isinstance(cache, (tc.TensorCache, tc.JoinedCache))
        self.cache = cache if is_open else tc.open(cache)
        if not len(self.cache):
            raise ValueError("the cache has no samples")
        schema = self.cache.schema
        self.tensors = list(schema) if tensors is None else known_names(tensors, schema, "tensor")
        self.members = known_names(members, self.cache.members, "member") if members else []
        self.schema = what_is_carried({name: schema[name] for name in self.tensors})
        self.pin = pin_memory
        self._narrow = self.cache.select([glob.escape(name) for name in self.tensors])
        self._order = tc.EpochOrder(len(self.cache), shuffle=shuffle, seed=seed)
        self.batch_size = batch_size
        self._rank, self._world_size = rank, world_size
        self._last_batch = last_batch
        count = len(self.cache)
        self._per_rank = count // world_size if last_batch == "drop" else -(-count // world_size)
        self._kept: deque[Any] = deque(maxlen=keep)
        self._requests: dict[bytes, Any] = {}  # of batches that were not given yet, by the numbers of their samples
        self._num_made, self._num_given = 0, 0
        self._events: dict[int, Any] = {}  # of batches in pinned memory, by their number
        whole = self._per_rank // batch_size
        self.num_batches: int = whole if last_batch == "drop" else -(-self._per_rank // batch_size)
        if not self.num_batches:
            raise ValueError(f"{count} samples are no batch of {batch_size} on each of {world_size} ranks")
        self.settings = {"samples": count, "batch_size": batch_size, "shuffle": shuffle, "seed": seed}
        self.settings |= {"rank": rank, "world_size": world_size, "last_batch": last_batch}

    def keep_at_least(self, count: int) -> None:
        """Keep so many batches, of which DALI may not have read some yet."""
        if (self._kept.maxlen or 0) < count:
            self._kept = deque(self._kept, count)

    def __getstate__(self) -> dict[str, Any]:
        # for worker processes, which keep their own
        return vars(self) | {"_kept": deque(maxlen=self._kept.maxlen), "_requests": {}}

    def __len__(self) -> int:
        """Return how many batches an epoch has."""
        return self.num_batches

    def indices(self, epoch: int, iteration: int) -> Array:
        """Return which samples a batch has, int64 `[B]`.

        Raises:
            IndexError: The epoch has no such batch.
        """
        if not 0 <= iteration < len(self):
            raise IndexError(f"iteration {iteration} out of range [0, {len(self)})")
        rows, begin, count = self._rows(iteration)
        filler = (rows - count) % len(self.cache) if self._last_batch == "wrap" else begin + rows % count
        return self._order(epoch, np.where(rows < count, begin + rows, filler))

    def _rows(self, iteration: int) -> tuple[Array, int, int]:
        """Return this rank's rows of the batches of all ranks, the samples before these, and how many they have."""
        begin = iteration * self.batch_size
        end = begin + self.batch_size
        if self._last_batch == "short":
            end = min(end, self._per_rank)
        rows = np.arange(end - begin) * self._world_size + self._rank
        begin *= self._world_size
        return rows, begin, min(self.batch_size * self._world_size, len(self.cache) - begin)

    def is_padding(self, iteration: int, count: int) -> Array:
        """Return which rows of a batch only fill it, bool `[B]`; the same in every epoch."""
        rows, _, num_samples = self._rows(iteration)
        is_padding: Array = (rows >= num_samples) & (self._last_batch != "wrap")
        return is_padding

    def __call__(self, info: Any) -> tuple[Any, ...]:
        """Return the batch of a `BatchInfo`.

        Raises:
            StopIteration: The epoch is over.
            TypeError: DALI was not told to pass a `BatchInfo`, and every epoch would be the first one.
        """
        if not hasattr(info, "epoch_idx"):
            raise TypeError("fn.external_source(source, …) needs batch_info=True; without a pipeline use source.batch")
        if info.iteration >= len(self):
            raise StopIteration
        return self.batch(info.epoch_idx, info.iteration)

    def batch(self, epoch: int, iteration: int) -> tuple[Any, ...]:
        """Return a batch, in the order of `outputs`: for DALI's dynamic mode.

        Raises:
            IndexError: The epoch has no such batch.
        """
        numbers = self.indices(epoch, iteration)
        request = self.cache._request(numbers)
        batch = (*self._read(request), numbers)
        self._requests[numbers.tobytes()] = request
        if len(self._requests) > (self._kept.maxlen or 0):
            self._requests.pop(next(iter(self._requests)), None)
        if self.pin and len(self._kept) == self._kept.maxlen:
            self._wait_for(self._num_made - len(self._kept))
        self._kept.append(batch)
        self._num_made += 1
        if not self.pin:
            return batch
        are_pinned = [self.schema[name].kind == "tensor" for name in self.tensors]
        pinned = map(_pinned, compress(batch, are_pinned))
        return tuple(next(pinned) if is_pinned else value for value, is_pinned in zip_longest(batch, are_pinned))

    def was_given(self, stream: Any) -> None:
        """Note when a batch has left its pinned memory: torch knows nothing of DALI's transfers."""
        if self.pin and stream is not None:
            self._events[self._num_given] = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._events[self._num_given].record(stream)
        self._num_given += 1

    def _wait_for(self, number: int) -> None:
        event = self._events.pop(number, None)
        if event is not None:
            event.synchronize()
        else:
            torch.cuda.synchronize()

    def read(self, numbers: Sequence[int] | Array) -> list[Any]:
        """Return the tensors and then the members of these samples, as DALI takes them."""
        return self._read(self.cache._request(numbers))

    def _read(self, request: Any) -> list[Any]:
        read = self._narrow.read_tensors(request, collate="auto", pin_memory=self.pin) if self.tensors else {}
        result: list[Any] = []
        for name in self.tensors:
            if name not in read:
                raise tc.BatchError(f"sample {request.key(0)!r} has no tensor {name!r}")
            value = read[name]
            result.append(tuple(map(plain, value)) if isinstance(value, list) else plain(value))
        for suffix in self.members:
            result.append(tuple(np.frombuffer(raw, np.uint8) for raw in self.cache.read_members(request, suffix)))
        return result

    def fill(self, outputs: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Return the batch in the structure that was written, and apart from it what is no tensor of the cache.

        Args:
            outputs: By name, `"number"` among them, what a pipeline or an operator made of a batch of this source: tensors
                `[B, …]`, or lists of B, of torch, numpy or the dynamic mode. Tensors that are not there are left out, as
                `select` leaves them out.

        Raises:
            TypeError: An operator has computed with integers that were the bits of something else.
        """
        tensors, others, numbers = self._restored(outputs)
        # another process may have made the batch
        request = self._requests.pop(numbers.tobytes(), numbers)
        return self.cache.fill_batch(request, tensors), others


def _pinned(value: Any) -> Any:
    """Return arrays in page-locked memory as DALI's own tensors, which say that they are."""
    from nvidia.dali.tensors import TensorCPU, TensorListCPU

    if isinstance(value, tuple):
        return tuple(TensorCPU(one, is_pinned=True) for one in value)
    return TensorListCPU(value, is_pinned=True)
