"""Source of batches for `fn.external_source`. A batch of a cache depends only on epoch and iteration."""

from __future__ import annotations

import copy
import os
import warnings
from collections import deque
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any, TypeVar

import numpy as np
import torch

import wds_tensorcache as tc
from dali_plugin.tensors import as_dali, as_value, carriers_of, is_tensor, match_names, restore
from wds_tensorcache.codec.carriers import Carrier, dali_carrier

Array = np.ndarray[Any, Any]
_Self = TypeVar("_Self", bound="BatchSource")
_REMEDY = "but DALI needs it in every sample; leave it out, or filter the cache"
NUMBER = "number"  # the name of the output with the sample indices of a batch


class BatchSource:
    """Base of all sources of batches for a pipeline.

    A source keeps its last batches, because DALI reads them later, and their samples or requests, which `nest` needs.
    """

    tensors: list[str]
    members: list[str]
    batch_size: int
    num_batches: int | None = None  # batches of an epoch; None for a stream
    num_surplus: int | None = None  # batches that DALI returns after an epoch; None if StopIteration ends it
    schema: dict[str, Carrier]  # the tensors as they leave a pipeline
    as_float: tuple[str, ...] = ()  # tensors that `fn.tensorcache` converts to float32
    _steps: dict[str, Any] | None = None  # the arguments of the steps; None if there can be no checkpoint
    last_number = -1  # last sample index returned, for a reader that repeats it; part of checkpoints
    _shown: str
    _kept: deque[tuple[Array, Any, Any]]  # sample indices, request and batch

    def _open(
        self,
        cache: Any,
        tensors: Iterable[str] | None,
        members: Iterable[str],
        steps: dict[str, Any],
        choose: Mapping[Any, Any] | None = None,
    ) -> None:
        """Open the cache of a source whose steps come from `tc.StepSampler`."""
        self.cache: Any = cache if isinstance(cache, tc.Cache) else tc.open(cache)
        self._sampler = tc.StepSampler(self.cache, **steps)
        self._reader = self._sampler._reader(choose)
        schema = self._reader.schema()
        self.tensors = list(schema) if tensors is None else match_names(tensors, schema, "tensor")
        counts = self.cache.members if members else {}
        self.members = match_names(members, counts, "member")
        if _counts_all(self.cache):
            counts = counts | {name: schema[name].num_samples for name in self.tensors if choose is None}
        for name in (*self.tensors, *self.members):
            if (count := counts.get(name, len(self.cache))) < len(self.cache):
                raise tc.BatchError(f"{count} of {len(self.cache)} samples have {name!r}, {_REMEDY}")
        self.batch_size, self.num_batches = steps["batch_size"], len(self._sampler)
        self._steps = {"order": 2, **steps}  # version 1 of the order had no number
        self._shown = self._sampler._shown

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._shown}, outputs={self.outputs})"

    def __len__(self) -> int:
        """Return the number of batches in an epoch; raise TypeError for streams."""
        if self.num_batches is None:
            raise TypeError("the number of batches of a stream is not known in advance")
        return self.num_batches

    @property
    def outputs(self) -> list[str]:
        """Names of a batch's parts, in order."""
        return [*self.tensors, *self.members, NUMBER]

    @property
    def settings(self) -> dict[str, Any] | None:
        """Samples and steps of this source. A checkpoint fits if they are equal; None if there can be no checkpoint."""
        return self._steps and {"samples": self._sampler._plan.dataset, **self._steps}

    @property
    def num_outputs(self) -> int:
        """Number of a batch's parts."""
        return len(self.outputs)

    def for_pipeline(self: _Self) -> _Self:
        """Return a copy for one pipeline. It keeps its own batches and dtypes, and shares the cache or the stream."""
        source = copy.copy(self)
        source.schema, source._kept = dict(self.schema), deque(maxlen=self._kept.maxlen)
        return source

    def use_float(self, names: Iterable[str]) -> None:
        """Declare that bfloat16 tensors leave the pipeline as float32. Raise KeyError or TypeError for any other name."""
        names = match_names(names, self.tensors, "tensor of this source")
        for name in names:
            if self.schema[name].true is not torch.bfloat16:
                raise TypeError(f"as_float takes bfloat16 tensors, but {name!r} is {self.schema[name].true}")
            self.schema[name] = dali_carrier(torch.float32)
        self.as_float += tuple(names)

    def keep_at_least(self, count: int) -> None:
        """Keep at least the last `count` batches."""
        # DALI may not have read them yet
        self._kept = deque(self._kept, max(count, self._kept.maxlen or 0))

    def note_handed_over(self, stream: Any) -> None:
        """Record that the pipeline has returned its next batch.

        `stream` is the CUDA stream that waits for DALI's copies of the batch, None if they are complete.
        """

    def is_padding(self, iteration: int, count: int) -> Array:
        """Return the mask of padding among a batch's `count` rows, bool `[count]`."""
        return np.zeros(count, np.bool_)

    def nest(self, outputs: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Return the nested batch, and a dict of all other outputs.

        Args:
            outputs: Outputs of a pipeline, or of operators, for a batch of this source, by name, including `"number"`. Each
                output is a tensor `[B, …]` or a list of B tensors, of torch, numpy or the dynamic mode. Tensors that are not
                given are left out of the result, as with `select`.

        Raises:
            KeyError: `outputs` lacks `"number"`.
            TypeError: `"number"` is not int64. Or an operator computed with integers that hold the bits of another dtype, such
                as bfloat16.
            RuntimeError: The source is a stream, and no longer keeps this batch.
            IndexError: A sample index is outside the cache.
            ValueError: `"number"` has no rows.
            BatchError: The samples of a batch from a stream differ in structure.
        """
        if NUMBER not in outputs:
            raise KeyError(f"no {NUMBER!r} among {', '.join(outputs)}; pass the last part of a batch by this name")
        tensors, extra = restore({name: as_value(value) for name, value in outputs.items()}, self.schema)
        numbers = torch.as_tensor(extra.pop(NUMBER)).cpu().numpy().reshape(-1)
        if numbers.dtype != np.int64:
            problem = f"{NUMBER!r} is of {numbers.dtype}, expected the sample indices, int64"
            raise TypeError(f"{problem}; do outputs= have the order in which the pipeline returns its nodes?")
        return self._nest(numbers, tensors), extra

    def _nest(self, numbers: Array, tensors: dict[str, Any]) -> Any:
        raise NotImplementedError


def _counts_all(cache: Any) -> bool:
    """Return whether the schema counts all samples, unlike a `SharedDataset`'s."""
    if isinstance(cache, tc.JoinedCache):
        return all(map(_counts_all, cache._caches))
    return isinstance(cache, tc.TensorCache)


class TensorCacheSource(BatchSource):
    """A source for `fn.external_source(source=…, num_outputs=source.num_outputs, batch=True, batch_info=True)`.

    A call with a `BatchInfo` returns one batch: a tuple of the parts that `outputs` names, in order. A tensor is an array
    `[B, …]`, or a tuple of B arrays if shapes differ. Dtypes that DALI lacks are integers, as in `dali_plugin.fn.tensorcache`.
    A member is a tuple of B uint8 arrays. The sample indices are int64 `[B]`. DALI's own tensors replace arrays in page-locked
    memory, and in `dali_plugin.fn.tensorcache` without `parallel`.

    A batch depends only on the epoch and the iteration. So pipelines resume exactly from DALI's checkpoints, and any number of
    processes (`parallel=True`) may make batches. Threads read the next batches of the epoch before DALI requests them.

    Args:
        cache: A cache, or anything that `tc.open` accepts.
        tensors: Names of tensors as in `cache.schema`, or patterns (`"text.*"`); all by default.
        members: Suffixes of other members, for example `["jpg"]`; their bytes arrive unchanged.
        batch_size: Number of samples in a batch.
        shuffle, seed: Use a new order in every epoch, the same on all ranks.
        rank, world_size: Rank of this process, and number of ranks. All ranks have the same number of batches.
        last_batch: As for `tc.StepSampler`: `"short"`, `"pad"`, `"wrap"` or `"drop"`. `TensorCacheIterator.is_padding`
            marks padding.
        choose: Alternatives as for `tc.Loader`, which chooses the same tensors. `tensors` then contains the names of the
            chosen tensors.
        pin_memory: Read into page-locked memory, from which DALI copies directly to a GPU; needs a GPU.
        keep: Number of batches to keep in memory after returning them, because DALI reads them later, without a copy.
        num_threads: Number of batches to read at the same time, each in its own thread. With 0, the thread that runs the
            pipeline reads each batch when DALI requests it, and no batch is read ahead.
        prefetch_batches: Number of batches to read ahead, up to the end of the epoch.

    Raises:
        KeyError: A tensor or member is unknown; the message lists similar names.
        ValueError: An argument is out of range, or a name occurs twice. The cache has no samples, or, with `"drop"`, fewer than
            `batch_size * world_size`. Or `choose` has an unknown form, or an alternative in it is not a tensor.
        TypeError: A tensor's dtypes differ between samples, or a number is not an integer.
        Exception: `tc.open` raised it.
        BatchError: A name or pattern in `choose` matches no tensor, or a sample lacks one of the tensors or members. With
            `choose` or a `SharedDataset`, a sample without a tensor is found only when its batch is requested.
        RuntimeError (when a batch is requested): `pin_memory` is True, but there is no GPU.

    Memory: `keep + prefetch_batches + 1` batches.
    Pipelines: each call of `dali_plugin.fn.tensorcache` makes a copy of the source for its pipeline. If you call
        `fn.external_source` yourself, make a source for each pipeline.
    Threads/fork/pickle: one thread at a time; pickles for DALI's worker processes, which open the shards themselves. A
        pickled copy reads nothing ahead. The threads end with the source.
    """

    num_batches: int
    layouts: Mapping[str, str] | None = None  # with these, calls return DALI's own tensors, with their layouts by name
    device_id: int | None = None  # the GPU of the pipeline, if the memory is page-locked
    _is_warned = False

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
        choose: Mapping[Any, Any] | None = None,
        pin_memory: bool = False,
        keep: int = 8,
        num_threads: int = 2,
        prefetch_batches: int = 2,
    ) -> None:
        steps = {"batch_size": batch_size, "shuffle": shuffle, "seed": seed, "rank": rank, "world_size": world_size}
        self._open(cache, tensors, members, steps | {"last_batch": last_batch}, choose)
        schema = self._reader.schema()
        self.schema = carriers_of({name: schema[name] for name in self.tensors})
        if missing := [name for name in self._reader.alternatives.names if name not in schema]:
            raise ValueError(
                f"choose={{{missing[0]!r}: …}}: DALI takes alternatives that are tensors, but these are other values"
            )
        if min(num_threads, prefetch_batches) < 0:
            raise ValueError(f"num_threads={num_threads}, prefetch_batches={prefetch_batches}: expected 0 or more")
        self._narrow = self.cache.select(self._reader.alternatives.patterns_for(self.tensors))
        # each thread reads whole batches, so reading one batch needs no further threads
        self._narrow_ahead = self._narrow._single_threaded()
        self._num_threads, self._num_ahead = num_threads, prefetch_batches
        self._kept = deque(maxlen=keep)
        self._is_pinned = pin_memory
        self._begin()

    def _begin(self) -> None:
        """Reset the state of this source for one pipeline in one process."""
        self._pool: ThreadPoolExecutor | None = None
        self._jobs: dict[tuple[int, int], Future[Any]] = {}  # the batches that are read ahead, by epoch and iteration
        self._pid = 0  # of the process that started the threads
        self._num_made, self._num_given = 0, 0
        # events after DALI's copies of batches in pinned memory, by batch number; None if the copies are complete
        self._events: dict[int, Any] = {}

    def __getstate__(self) -> dict[str, Any]:
        # worker processes get no batches, since they keep their own
        return {**vars(self), "_kept": deque(maxlen=self._kept.maxlen), "_pool": None, "_jobs": {}, "_num_threads": 0}

    def for_pipeline(self) -> TensorCacheSource:
        source = super().for_pipeline()
        source._num_threads = self._num_threads
        source._begin()
        return source

    def read_on_request(self) -> None:
        """Read no batches ahead."""
        # each of DALI's worker processes reads only a fraction of the batches
        self._num_threads = 0

    def indices(self, epoch: int, iteration: int) -> Array:
        """Return the sample indices of this rank's batch, int64 `[B]`. Raise IndexError if the epoch has no such batch."""
        indices: Array = self._step(epoch, iteration).indices
        return indices

    def _step(self, epoch: int, iteration: int) -> Any:
        if not 0 <= iteration < len(self):
            raise IndexError(f"iteration {iteration} out of range [0, {len(self)})")
        return self._sampler._step(epoch, iteration)

    def is_padding(self, iteration: int, count: int) -> Array:
        if iteration < len(self) - 1:
            return super().is_padding(iteration, count)
        return self._sampler._step(0, iteration).is_padding

    def __call__(self, info: Any) -> tuple[Any, ...]:
        """Return the batch of a `BatchInfo`.

        Raises:
            StopIteration: The epoch is over.
            BatchError: A sample lacks one of the tensors.
            FormatError, RemoteError: A shard is damaged or has changed, or a request failed.
            TypeError: DALI does not pass a `BatchInfo`, because `batch=True` or `batch_info=True` is missing.
        """
        if not hasattr(info, "epoch_idx") or hasattr(info, "idx_in_batch"):
            problem = f"DALI passed {type(info).__name__}, not BatchInfo"
            raise TypeError(
                f"{problem}; use fn.external_source(source, batch=True, batch_info=True, …), or source.batch"
            )
        if info.iteration >= len(self):
            raise StopIteration
        if not self._num_threads:
            return self._keep(*self._read_for_dali(self._narrow, info.epoch_idx, info.iteration))
        return self._keep(*self._read_next(info.epoch_idx, info.iteration))

    def batch(self, epoch: int, iteration: int) -> tuple[Any, ...]:
        """Return a batch, in the order of `outputs`, for DALI's dynamic mode.

        The parts have the types that a call of the source returns, without layouts. No batch is read ahead.

        Raises:
            IndexError: The epoch has no such batch.
            BatchError, FormatError, RemoteError: As for a call of the source.
        """
        return self._keep(*self._read(self._narrow, epoch, iteration, None))

    def _read_next(self, epoch: int, iteration: int) -> Any:
        """Return a batch, and let threads read the next batches."""
        if self._pid != os.getpid():
            # Hazard: a forked child must not wait for locks that its parent's threads may hold.
            self._pool, self._jobs = ThreadPoolExecutor(self._num_threads, "tensorcache-dali"), {}
            self._pid = os.getpid()
        assert self._pool is not None
        wanted = [(epoch, at) for at in range(iteration, min(iteration + self._num_ahead + 1, len(self)))]
        for discarded in self._jobs.keys() - wanted:
            self._jobs.pop(discarded).cancel()
        for request in wanted:
            if request not in self._jobs:
                self._jobs[request] = self._pool.submit(self._read_for_dali, self._narrow_ahead, *request)
        return self._jobs.pop((epoch, iteration)).result()

    def _read_for_dali(self, cache: Any, epoch: int, iteration: int) -> Any:
        # DALI assumes that page-locked memory belongs to the current GPU, which is GPU 0 in a new thread
        with torch.cuda.device(self.device_id) if self._is_pinned else nullcontext():
            return self._read(cache, epoch, iteration, self.layouts)

    def _read(self, cache: Any, epoch: int, iteration: int, layouts: Mapping[str, str] | None) -> Any:
        """Read a batch; return the arguments for `_keep`."""
        step = self._step(epoch, iteration)
        numbers, request = step.indices, self._reader.request(step)
        batch = (*self._tensors_of(cache, request), *self._members_of(request), numbers)
        return numbers, request, batch, self._as_dali(batch, layouts)

    def _keep(self, numbers: Array, request: Any, batch: tuple[Any, ...], for_dali: tuple[Any, ...]) -> tuple[Any, ...]:
        """Keep a batch until DALI has read it; return `for_dali`."""
        if self._is_pinned and len(self._kept) == self._kept.maxlen:
            # DALI may still be copying the oldest batch, whose pinned memory is reused once it is dropped here
            self._wait_for_copies(self._num_made - len(self._kept))
        self._kept.append((numbers, request, batch))
        self._num_made += 1
        return for_dali

    def _wait_for_copies(self, number: int) -> None:
        if number in self._events:
            event = self._events.pop(number)
            if event is not None:
                event.synchronize()
            return
        if not self._num_given and not self._is_warned:
            self._is_warned = True
            warnings.warn(
                "pin_memory=True without TensorCacheIterator waits for the whole GPU before each batch, because nothing tells "
                "the source when DALI has copied one; iterate with TensorCacheIterator, or leave pin_memory out",
                stacklevel=2,
            )
        torch.cuda.synchronize(self.device_id)

    def note_handed_over(self, stream: Any) -> None:
        # torch does not wait for DALI's copies before it reuses pinned memory, so an event marks their end
        if self._is_pinned:
            self._events[self._num_given] = None if stream is None else stream.record_event()
        self._num_given += 1

    def _tensors_of(self, cache: Any, request: Any) -> list[Any]:
        read = cache.read_tensors(request, collate="auto", pin_memory=self._is_pinned)
        values = [read.get(name) for name in self.tensors]
        for name, value in zip(self.tensors, values, strict=True):
            if value is None or (isinstance(value, list) and any(row is None for row in value)):
                lacking = next((i for i, row in enumerate(value or ()) if row is None), 0)
                raise tc.BatchError(f"sample {request.key(lacking)!r} has no tensor {name!r}, {_REMEDY}")
        return [
            tuple(dali_carrier(row.dtype).carry(row) for row in value)
            if isinstance(value, list)
            else dali_carrier(value.dtype).carry(value)
            for value in values
        ]

    def _members_of(self, request: Any) -> list[Any]:
        return [
            tuple(np.frombuffer(raw, np.uint8) for raw in self.cache.read_members(request, suffix))
            for suffix in self.members
        ]

    def _as_dali(self, batch: tuple[Any, ...], layouts: Mapping[str, str] | None) -> tuple[Any, ...]:
        """Replace arrays by DALI's tensors: all with `layouts`, otherwise pinned arrays."""
        for_dali = list(batch)
        for at, name in enumerate(self.outputs):
            is_pinned = self._is_pinned and at < len(self.tensors) and is_tensor(self.schema[name])
            if is_pinned or layouts is not None:
                for_dali[at] = as_dali(batch[at], (layouts or {}).get(name, ""), is_pinned)
        return tuple(for_dali)

    def _nest(self, numbers: Array, tensors: dict[str, Any]) -> Any:
        wanted = numbers.tobytes()
        for kept, request, _ in self._kept:
            if kept.tobytes() == wanted:
                return self.cache.nest(request, tensors)
        return self.cache.nest(self._reader.request_structure(numbers), tensors)  # another process made the batch
