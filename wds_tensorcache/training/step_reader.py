"""The batch of a step, its record, and the caller's transforms."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from typing import Any, TypeAlias

# Imported before threads read batches: a child that is forked while a thread imports a module waits for it forever.
import numpy.ma  # noqa: F401, np.unique imports it
import torch

import wds_tensorcache.reading.batch.assemble
import wds_tensorcache.shards.load_index  # noqa: F401
from wds_tensorcache.errors import TensorCacheError, add_note
from wds_tensorcache.reading.batch_info import BatchInfo
from wds_tensorcache.reading.choose import Alternatives, Randomness
from wds_tensorcache.reading.schema import TensorSchema, merge_schema
from wds_tensorcache.reading.seeds import stream_seed
from wds_tensorcache.training.plan import Step

Transform: TypeAlias = "Callable[[Any, BatchInfo], Any]"


class StepReader:
    """An immutable reader of the batches of steps, in any process. `names` are the names of the streams."""

    def __init__(self, caches: Sequence[Any], names: Sequence[Any], seed: int, alternatives: Alternatives) -> None:
        self._caches, self._names, self.alternatives = list(caches), list(names), alternatives
        # equal indices in different caches of a mix are different samples
        self._seeds = [stream_seed(seed, "samples", source) for source in range(len(caches))]

    def single_threaded(self) -> StepReader:
        reader = copy(self)
        reader._caches = [cache._single_threaded() for cache in self._caches]
        return reader

    def schema(self) -> dict[str, TensorSchema]:
        merged: dict[str, TensorSchema] = {}
        for cache in self._caches:
            schema = self.alternatives.schema_of(cache.schema)
            merged |= {name: merge_schema(merged.get(name), tensor) for name, tensor in schema.items()}
        return merged

    def read(self, step: Step, options: dict[str, Any]) -> Any:
        """Return the batch of a step. Raise RuntimeError if the caller's code raises StopIteration."""
        cache = self._caches[step.source]
        try:
            return cache._read_chosen(step.indices, self._randomness(step), **options)
        except StopIteration as exc:
            # hazard: it would end the epoch without an error
            raise _stopped(step) from exc

    def request(self, step: Step) -> Any:
        """Return the request for a step's samples; see `read` for errors."""
        cache = self._caches[step.source]
        try:
            return cache._request_chosen(step.indices, self._randomness(step))
        except StopIteration as exc:
            raise _stopped(step) from exc

    def request_structure(self, indices: Any) -> Any:
        """Return a request for samples of the only cache, for their structure."""
        return self._caches[0]._request_chosen(indices, Randomness(alternatives=self.alternatives, choices={}))

    def info(
        self, step: Step, is_padding: torch.Tensor | None = None, collate: Any = None, edits: Sequence[Any] = ()
    ) -> BatchInfo:
        """Return the record of a step's batch; see `BatchInfo`. By default, the mask of padding is on the CPU."""
        is_padding = torch.from_numpy(step.is_padding.copy()) if is_padding is None else is_padding
        cache, name, randomness = self._caches[step.source], self._names[step.stream], self._randomness(step)
        at = step.epoch, step.number, name
        return BatchInfo(step.indices, is_padding, *at, cache, collate=collate, randomness=randomness, edits=edits)

    def _randomness(self, step: Step) -> Randomness:
        return Randomness(self._seeds[step.source], step.epochs, self.alternatives)


def _stopped(step: Step) -> RuntimeError:
    return RuntimeError(
        f"a dataset or a collate function raised StopIteration for the samples {step.indices[:8].tolist()}"
    )


def as_transforms(transform: Any) -> tuple[Transform, ...]:
    """Return the functions in `transform=`, in order; raise TypeError for anything else."""
    if transform is None:
        return ()
    transforms = (transform,) if callable(transform) or not isinstance(transform, Sequence) else tuple(transform)
    if not all(map(callable, transforms)):
        raise TypeError(
            f"transform={transform!r:.200}, expected a function of a batch and its BatchInfo, or a list of them"
        )
    return transforms


def apply_transforms(batch: Any, info: BatchInfo, transforms: Sequence[Transform]) -> Any:
    """Apply all transforms to a batch, in order.

    Raises:
        TensorCacheError: A transform raised it; a note names the transform and the step.
        RuntimeError: A transform returned None, or raised any other error, which becomes the cause of this error.
    """
    for transform in transforms:
        try:
            batch = transform(batch, info)
            if batch is None:
                raise ValueError("it returned None, expected the batch")
        except Exception as exc:
            # the repr of a transform may be slow: `DropText` has tensors, perhaps on a GPU
            name = getattr(transform, "__qualname__", None) or repr(transform)
            at = f"step {info.step} of epoch {info.epoch}, with the samples {info.keys!r:.200}"
            place = f"transform {name:.100} failed at {at}"
            if isinstance(exc, TensorCacheError):  # of a damaged sample, for example
                add_note(exc, place)
                raise
            raise RuntimeError(f"{place}: {type(exc).__name__}: {exc}") from exc
    return batch
