"""Batches of a stream of samples, remote shards say, for `fn.external_source`."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import Any

import numpy as np
from torch.utils.data import default_collate

import wds_tensorcache as tc
from dali_plugin.base import Source, check_batches, what_is_carried
from dali_plugin.carriers import Carried, check_ndim, known_names, plain

__all__ = ["TensorCacheStream"]

Array = np.ndarray[Any, Any]


class TensorCacheStream(Source):
    """A source like `TensorCacheSource` over a stream: a `wds.DataPipeline` that ends in `tc.decode()`.

    Shuffling, splitting among ranks and everything else is the stream's own. Each epoch iterates over it once more; it cannot
    be resumed in the middle.

    Args:
        stream: Any iterable of samples that can be iterated over again and again.
        tensors: Names of the tensors; by default all of the first sample, which is read for that.
        members: Other fields of the samples, of bytes: `["jpg"]`.
        batch_size: Samples in a batch.
        field: The field of the samples that has the nested tensors.
        last_batch: `"short"` leaves the last batch short, `"drop"` drops it. A stream cannot fill it.
        keep: How many batches stay in memory after they were returned.

    Raises:
        KeyError: The first sample has no such tensor or member.
        BatchError (of a batch): The structures or dtypes of two samples differ.
    """

    num_batches = None

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
        check_batches(batch_size, 0, 1, last_batch)
        if last_batch in ("pad", "wrap"):
            raise ValueError(
                f"last_batch={last_batch!r}: a stream cannot fill its last batch; expected 'short' or 'drop'"
            )
        self._stream = stream
        self._field = field
        begun = iter(stream)
        if begun is stream:
            raise ValueError(f"{stream!r:.100} can be iterated over once; a stream is iterated over in every epoch")
        first = next(begun, None)
        if first is None:
            raise ValueError("the stream has no samples")
        if not isinstance(first, dict) or not isinstance(first.get("__key__", ""), str):
            raise ValueError("the stream gives batches, expected samples: dicts that end in tc.decode()")
        if field not in first:
            known = ", ".join(first)
            raise KeyError(f"samples have no field {field!r}, but {known}; does the stream end in tc.decode()?")
        found = tc.named_tensors(first[field])
        if not found:
            raise ValueError(
                f"{field!r} has no lazy tensors; does the stream end in tc.decode(), which leaves them lazy?"
            )
        self._is_all = tensors is None
        self.tensors = list(found) if tensors is None else known_names(tensors, found, "tensor")
        self.members = known_names(members, [name for name in first if isinstance(first[name], bytes)], "member")
        self._found = {name: Carried(_kind(found[name]), found[name].dtype) for name in self.tensors}
        self.schema = what_is_carried(self._found)
        self.batch_size = batch_size
        self._last_batch = last_batch
        self._iterator: Iterator[Any] = iter(())
        self._iteration, self._count, self._keep = 0, 0, keep
        self._kept: OrderedDict[int, tuple[list[Any], Any]] = OrderedDict()  # by the number of a batch's first sample

    def keep_at_least(self, count: int) -> None:
        """Keep so many batches, of which DALI may not have given some yet."""
        self._keep = max(self._keep, count)

    def __len__(self) -> int:
        raise TypeError("a stream does not know how many batches it has")

    def __call__(self, info: Any) -> tuple[Any, ...]:
        """Return the next batch.

        Raises:
            StopIteration: The stream is over.
            RuntimeError: Another batch than the next one, or the first, is asked for.
        """
        iteration = getattr(info, "iteration", info)
        if iteration == 0:
            self._iterator, self._iteration = iter(self._stream), 0
        if iteration != self._iteration:
            raise RuntimeError(f"a stream has its batches in turn, {self._iteration} is next: not {iteration}")
        samples = list(islice(self._iterator, self.batch_size))
        if not samples or (self._last_batch == "drop" and len(samples) < self.batch_size):
            raise StopIteration
        self._iteration += 1
        if any(self._field not in sample for sample in samples):
            raise tc.BatchError(f"a sample of the stream has no field {self._field!r}")
        nested = [sample[self._field] for sample in samples]
        members = [tuple(np.frombuffer(sample[name], np.uint8) for sample in samples) for name in self.members]
        numbers = np.arange(self._count, self._count + len(samples))
        batch = (*self._batch(nested), *members, numbers)
        self._kept[self._count] = nested, batch
        self._count += len(samples)
        while len(self._kept) > self._keep:
            self._kept.popitem(last=False)
        return batch

    def _batch(self, samples: list[Any]) -> Iterator[Any]:
        """Yield the tensors of a batch as DALI takes them."""
        found = [tc.named_tensors(sample) for sample in samples]
        if self._is_all and (more := [name for tensors in found for name in tensors if name not in self.schema]):
            raise tc.BatchError(f"a sample of the stream has tensor {more[0]!r}, but the first one has not")
        for name in self.tensors:
            if any(name not in tensors for tensors in found):
                raise tc.BatchError(f"a sample of the stream has no tensor {name!r}")
            lazies = [tensors[name] for tensors in found]
            known = self._found[name]
            for lazy in lazies:
                if Carried(_kind(lazy), lazy.dtype) != known:
                    raise tc.BatchError(f"tensor {name!r} is {known.dtype}, but in one sample it is {lazy.dtype}")
                check_ndim(name, lazy.ndim, lazy.dtype)
            if any(lazy.shape != lazies[0].shape for lazy in lazies):
                yield tuple(plain(lazy.load()) for lazy in lazies)
            elif known.kind == "ndarray":
                yield plain(np.stack([lazy.load() for lazy in lazies]))
            else:
                yield plain(default_collate(lazies))

    def fill(self, outputs: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Return a batch in the structure of its first sample, and apart from it what is no tensor of the stream.

        Raises:
            RuntimeError: The batch is older than those that are kept.
        """
        tensors, others, numbers = self._restored(outputs)
        return tc.fill_samples([self._sample(number) for number in numbers.tolist()], tensors), others

    def _sample(self, number: int) -> Any:
        for begin, (samples, _) in self._kept.items():
            if begin <= number < begin + len(samples):
                return samples[number - begin]
        raise RuntimeError(f"the batch is not among the last {self._keep}; use a larger keep")


def _kind(lazy: Any) -> str:
    return "ndarray" if isinstance(lazy, tc.LazyArray) else "tensor"
