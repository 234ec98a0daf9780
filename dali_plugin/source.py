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
from dali_plugin.carriers import Carried, known_names, plain, restored

__all__ = ["NUMBER", "TensorCacheSource", "check_batches", "what_is_carried"]

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
        as_float: bfloat16 tensors that `fn.tensorcache` makes float32 nodes of, exactly, for operators that compute.
        pin: Read into page-locked memory, from which DALI copies to a GPU without a detour; needs a GPU.
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
        as_float: Iterable[str] = (),
        pin: bool = False,
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
        self.as_float = known_names(as_float, self.tensors, "tensor of this source")
        self.schema = what_is_carried({name: schema[name] for name in self.tensors}, self.as_float)
        self.pin = pin
        self._narrow = self.cache.select([glob.escape(name) for name in self.tensors])
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
    num_batches = property(len, doc="Of an epoch.")
    num_surplus = None  # an epoch's end is said by StopIteration

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
        if not self.pin:
            return batch
        are_pinned = [self.schema[name].kind == "tensor" for name in self.tensors]
        pinned = map(_pinned, compress(batch, are_pinned))
        return tuple(next(pinned) if is_pinned else value for value, is_pinned in zip_longest(batch, are_pinned))

    def read(self, numbers: Sequence[int] | Array) -> list[Any]:
        """Return the tensors and then the members of these samples, as DALI takes them."""
        read = self._narrow.read_tensors(numbers, collate="auto", pin=self.pin) if self.tensors else {}
        result: list[Any] = []
        for name in self.tensors:
            value = read[name]
            result.append(tuple(map(plain, value)) if isinstance(value, list) else plain(value))
        for suffix in self.members:
            result.append(tuple(np.frombuffer(raw, np.uint8) for raw in self.cache.read_members(numbers, suffix)))
        return result

    def fill(self, outputs: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Return the batch in the structure that was written, and apart from it what is no tensor of the cache.

        Args:
            outputs: By name, `"number"` among them, what a pipeline or an operator made of a batch of this source: tensors
                `[B, …]`, or lists of B. Tensors that are not there are left out, as `select` leaves them out.

        Raises:
            TypeError: An operator has computed with integers that were the bits of something else.
        """
        tensors, others = restored(outputs, self.schema)
        numbers = torch.as_tensor(others.pop(NUMBER)).cpu().numpy().reshape(-1)
        return self.cache.fill_batch(numbers, tensors), others


def check_batches(batch_size: int, rank: int, world_size: int, last_batch: str) -> None:
    """Raise ValueError unless all are in range."""
    if batch_size < 1 or not 0 <= rank < world_size:
        raise ValueError(f"batch_size={batch_size}, rank={rank} of world_size={world_size}: out of range")
    if last_batch not in LAST_BATCH:
        raise ValueError(f"last_batch={last_batch!r}, expected one of {', '.join(LAST_BATCH)}")


def what_is_carried(schema: Mapping[str, Any], as_float: Iterable[str] = ()) -> dict[str, Carried]:
    """Return what tensors are as they go through a pipeline, those of `as_float` as float32.

    Raises:
        TypeError: A tensor's dtypes differ between samples, or one of `as_float` is not bfloat16.
    """
    found = {}
    for name, known in schema.items():
        if isinstance(known.dtype, tuple):
            raise TypeError(f"tensor {name!r} is {' and '.join(map(str, known.dtype))}; nodes of DALI have one dtype")
        found[name] = Carried(known.kind, known.dtype)
    for name in as_float:
        if found[name].dtype is not torch.bfloat16:
            raise TypeError(f"as_float takes bfloat16 tensors, but {name!r} is {found[name].dtype}")
        found[name] = Carried("tensor", torch.float32)
    return found


def _pinned(value: Any) -> Any:
    """Return arrays in page-locked memory as DALI's own tensors, which say that they are."""
    from nvidia.dali.tensors import TensorCPU, TensorListCPU

    if isinstance(value, tuple):
        return tuple(TensorCPU(one, is_pinned=True) for one in value)
    return TensorListCPU(value, is_pinned=True)
