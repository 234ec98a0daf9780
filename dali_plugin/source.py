"""Batches of a cache for `fn.external_source`: a pure function of epoch and iteration."""

from __future__ import annotations

import difflib
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

import wds_tensorcache as tc
from dali_plugin.carriers import carried

__all__ = ["NUMBER", "TensorCacheSource"]

Array = np.ndarray[Any, Any]
NUMBER = "number"  # the output that says which samples a batch has
LAST_BATCH = ("fill", "partial", "drop")


class TensorCacheSource:
    """A source for `fn.external_source(source=…, num_outputs=source.num_outputs, batch=True, batch_info=True)`.

    Called with a `BatchInfo` it returns one batch: `[B, …]` for each tensor where shapes are equal, else a list of B; a list
    of B uint8 arrays for each member; and which samples they are, int64 `[B]`. `outputs` names them in this order.

    The batch depends on the epoch and the iteration alone, so pipelines resume exactly from DALI's checkpoints, and any
    number of processes (`parallel=True`) may make batches.

    Args:
        cache: A cache, or anything that `tc.open` takes.
        tensors: Their names, as in `cache.schema`; all by default.
        members: Suffixes of other members, whose bytes arrive as they are: `["jpg"]`.
        batch_size: Samples in a batch.
        shuffle, seed: A new order every epoch, the same on all ranks.
        rank, world_size: Which part of every epoch this process has. All have as many batches.
        last_batch: `"fill"` fills the last batch up with the first samples of the epoch, `"partial"` leaves it short,
            `"drop"` drops it. With several ranks, up to `world_size - 1` samples come twice unless it is dropped.
        keep: How many batches stay in memory after they were returned: what DALI has not read yet, as it does not copy.

    Raises:
        KeyError: An unknown tensor or member; the message has those that are spelt alike.
        ValueError: Something out of range; a cache without samples.
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
        last_batch: str = "fill",
        keep: int = 8,
    ) -> None:
        if batch_size < 1 or not 0 <= rank < world_size:
            raise ValueError(f"batch_size={batch_size}, rank={rank} of world_size={world_size}: out of range")
        if last_batch not in LAST_BATCH:
            raise ValueError(f"last_batch={last_batch!r}, expected one of {', '.join(LAST_BATCH)}")
        is_open = isinstance(cache, (tc.TensorCache, tc.JoinedCache))
        self.cache = cache if is_open else tc.open(cache)
        if not len(self.cache):
            raise ValueError("the cache has no samples")
        schema = self.cache.schema
        self.tensors = list(schema) if tensors is None else _known(tensors, list(schema), "tensor")
        self.members = _known(members, list(self.cache.members), "member") if members else []
        self.schema = {name: schema[name] for name in self.tensors}
        self._narrow = self.cache.select([_escape(name) for name in self.tensors])
        self._order = tc.EpochOrder(len(self.cache), shuffle=shuffle, seed=seed)
        self.batch_size = batch_size
        self._rank, self._world_size = rank, world_size
        self._last_batch = last_batch
        count = len(self.cache)
        self._per_rank = count // world_size if last_batch == "drop" else -(-count // world_size)
        self._kept: deque[Any] = deque(maxlen=keep)

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_kept": deque(maxlen=self._kept.maxlen)}  # for worker processes, which keep their own

    outputs = property(
        lambda self: [*self.tensors, *self.members, NUMBER], doc="The names of what a batch has, in its order."
    )
    num_outputs = property(lambda self: len(self.outputs), doc="How many there are.")

    def __len__(self) -> int:
        """Return how many batches an epoch has."""
        whole = self._per_rank // self.batch_size
        return whole if self._last_batch == "drop" else -(-self._per_rank // self.batch_size)

    def numbers(self, epoch: int, iteration: int) -> Array:
        """Return which samples a batch has, int64 `[B]`.

        Raises:
            IndexError: The epoch has no such batch.
        """
        if not 0 <= iteration < len(self):
            raise IndexError(f"iteration {iteration} out of range [0, {len(self)})")
        begin = iteration * self.batch_size
        end = begin + self.batch_size
        if self._last_batch == "partial":
            end = min(end, self._per_rank)
        positions = (np.arange(begin, end) * self._world_size + self._rank) % len(self.cache)
        return self._order(epoch, positions)

    def __call__(self, info: Any) -> tuple[Any, ...]:
        """Return the batch of a `BatchInfo`; of an int, that of epoch 0.

        Raises:
            StopIteration: The epoch is over.
        """
        iteration = getattr(info, "iteration", info)
        if iteration >= len(self):
            raise StopIteration
        numbers = self.numbers(getattr(info, "epoch_idx", 0), iteration)
        batch = (*self.read(numbers), numbers)
        self._kept.append(batch)
        return batch

    def read(self, numbers: Sequence[int] | Array) -> list[Any]:
        """Return the tensors and then the members of these samples, as DALI takes them."""
        read = self._narrow.read_tensors(numbers, collate="auto") if self.tensors else {}
        result: list[Any] = []
        for name in self.tensors:
            value = read[name]
            result.append(tuple(map(_plain, value)) if isinstance(value, list) else _plain(value))
        for suffix in self.members:
            result.append(tuple(np.frombuffer(raw, np.uint8) for raw in self.cache.read_members(numbers, suffix)))
        return result


def _plain(value: Any) -> Array:
    """Return a tensor or array as an array of a dtype that DALI has. Memory: aliases it."""
    value = carried(value)
    array: Array = value if isinstance(value, np.ndarray) else value.numpy()
    return array


def _known(names: Iterable[str], known: list[str], what: str) -> list[str]:
    names = [names] if isinstance(names, str) else list(names)
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, known, cutoff=0.3) or known[:8]
            raise KeyError(f"no {what} is called {name!r}; there are {', '.join(map(repr, near)) or 'none'}")
    return names


def _escape(name: str) -> str:
    return "".join(f"[{c}]" if c in "*?[" else c for c in name)
