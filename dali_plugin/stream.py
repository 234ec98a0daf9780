"""Source of batches of a stream of samples, for `fn.external_source`."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

import numpy as np
from torch.utils.data import default_collate

import wds_tensorcache as tc
from dali_plugin.source import Array, BatchSource
from dali_plugin.tensors import is_tensor, match_names
from wds_tensorcache.codec.carriers import dali_carrier
from wds_tensorcache.errors import list_names

_REMEDY = "drop such samples, for example with wds.select, or name only tensors= and members= that all samples have"


class TensorCacheStream(BatchSource):
    """A source like `TensorCacheSource` over a stream of samples.

    The stream is, for example, a `wds.DataPipeline` that ends in `tc.decode()`. This class neither shuffles samples nor splits
    them among ranks: the stream that you pass must do both. Each epoch iterates over the stream again, from its start: an epoch
    cannot be resumed in the middle. The sample indices count the returned samples from 0, also across epochs.

    Args:
        stream: Any iterable of samples that can be iterated over several times.
        tensors: Names of the tensors; by default all tensors of the first sample. To find them, that sample is read in advance.
        members: Names of other fields of the samples, for example `["jpg"]`; these fields must contain bytes.
        batch_size: Number of samples in a batch.
        field: Field of the samples that contains the nested tensors.
        last_batch: `"short"` keeps a short last batch, `"drop"` drops it. A stream cannot pad it.
        keep: Number of batches to keep in memory after returning them.

    Raises:
        KeyError: The first sample has no such tensor or member.
        ValueError: The stream has no samples, cannot be iterated over again, or has no lazy tensors in `field`; or
            an option has a wrong value.
        BatchError (when a batch is requested or nested): A sample lacks `field`, a tensor or a member, or its dtypes differ
            from the first sample. Or the structures of two samples differ. Without `tensors`, also if a sample has a tensor
            that the first sample lacks.
    """

    def __init__(
        self,
        stream: Iterable[Any],
        tensors: Iterable[str] | None = None,
        members: Iterable[str] = (),
        *,
        batch_size: int,
        field: str = "tensorcache",
        last_batch: str = "short",
        keep: int = 8,
    ) -> None:
        if batch_size < 1:
            raise ValueError(f"batch_size={batch_size}, expected at least 1")
        if last_batch not in ("short", "drop"):
            raise ValueError(
                f"last_batch={last_batch!r}: a stream cannot fill its last batch; expected 'short' or 'drop'"
            )
        begun = iter(stream)
        if begun is stream:
            raise ValueError(
                f"{stream!r:.100} can be iterated over only once, but every epoch iterates over a stream again"
            )
        first: Any = next(begun, None)
        is_sample = isinstance(first, dict) and isinstance(first.get("__key__", ""), str)
        lazies = tc.flatten(first.get(field)) if is_sample else {}
        if not lazies:
            got = "nothing" if first is None else f"{first!r:.100}"
            got = f"a sample with the fields {list_names(first, field)}" if is_sample else got
            raise ValueError(
                f"the stream begins with {got}, expected samples from tc.decode(), with lazy tensors in {field!r:.100}"
            )
        self._stream, self._field = stream, field
        self._has_all = tensors is None
        self.tensors = list(lazies) if tensors is None else match_names(tensors, lazies, "tensor")
        self.members = match_names(members, [name for name in first if isinstance(first[name], bytes)], "member")
        self._stored = {name: dali_carrier(lazies[name].dtype) for name in self.tensors}
        self.schema = dict(self._stored)
        self.batch_size, self._last_batch = batch_size, last_batch
        self._shown = f"{batch_size=}, {last_batch=}"
        self._iterator: Iterator[Any] = iter(())
        self._iteration, self._count = 0, 0
        self._kept = deque(maxlen=keep)

    def __call__(self, info: Any) -> tuple[Any, ...]:
        """Return the next batch.

        Raises:
            StopIteration: The stream is over, or has too few samples left for a batch with `last_batch="drop"`.
            BatchError: A sample does not fit; see the class.
            RuntimeError: The requested batch is neither the next nor the first.
        """
        iteration = getattr(info, "iteration", info)
        if iteration == 0:
            self._iterator, self._iteration = iter(self._stream), 0
        if iteration != self._iteration:
            raise RuntimeError(
                f"expected iteration {self._iteration}, got {iteration}: a stream has its batches in order"
            )
        samples = list(islice(self._iterator, self.batch_size))
        if not samples or (self._last_batch == "drop" and len(samples) < self.batch_size):
            raise StopIteration
        self._iteration += 1
        by_sample = list(map(self._tensors_in, samples))
        nested = [sample[self._field] for sample in samples]
        members = [tuple(np.frombuffer(sample[name], np.uint8) for sample in samples) for name in self.members]
        numbers = np.arange(self._count, self._count + len(samples))
        batch = (*self._carry(by_sample), *members, numbers)
        self._kept.append((numbers, nested, batch))
        self._count += len(samples)
        return batch

    def _tensors_in(self, sample: dict[str, Any]) -> dict[str, Any]:
        """Return a sample's tensors by name; raise BatchError for a mismatch."""
        where, tensors = f"sample {sample.get('__key__')!r:.100} of the stream", tc.flatten(sample.get(self._field))
        lacking = [] if self._field in sample else [f"field {self._field!r}"]
        lacking += [f"tensor {name!r}" for name in self.tensors if name not in tensors]
        lacking += [f"member {name!r}" for name in self.members if name not in sample]
        if lacking:
            raise tc.BatchError(f"{where} has no {lacking[0]}; {_REMEDY}")
        for name, lazy in tensors.items():
            carrier = self._stored.get(name)
            if carrier is None and self._has_all:
                raise tc.BatchError(f"{where} has tensor {name!r}, which the first sample lacks; {_REMEDY}")
            if carrier is not None and lazy.dtype != carrier.true:
                raise tc.BatchError(f"tensor {name!r} is {carrier.true} at first, but {lazy.dtype} in {where}")
        return tensors

    def _carry(self, by_sample: list[dict[str, Any]]) -> Iterator[Any]:
        """Yield the tensors of a batch in the form that DALI accepts."""
        for name, carrier in self._stored.items():
            lazies = [tensors[name] for tensors in by_sample]
            if any(lazy.shape != lazies[0].shape for lazy in lazies):
                yield tuple(carrier.carry(lazy.load()) for lazy in lazies)
            elif is_tensor(carrier):
                yield carrier.carry(default_collate(lazies))
            else:
                yield carrier.carry(np.stack([lazy.load() for lazy in lazies]))

    def _nest(self, numbers: Array, tensors: dict[str, Any]) -> Any:
        return tc.nest([self._sample(number) for number in numbers.tolist()], tensors)

    def _sample(self, number: int) -> Any:
        for kept, samples, _ in self._kept:
            if kept[0] <= number <= kept[-1]:
                return samples[number - kept[0]]
        raise RuntimeError(
            f"keep={self._kept.maxlen}: this batch is older than all that are kept; use a larger keep, "
            "or pipeline.tensorcache_source if you passed this stream to fn.tensorcache"
        )
