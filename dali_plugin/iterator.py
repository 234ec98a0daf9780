"""Batches of DALI pipelines in the structure that was written."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from torch.utils.dlpack import from_dlpack

from dali_plugin.carriers import restored
from dali_plugin.source import NUMBER, TensorCacheSource

__all__ = ["TensorCacheIterator"]


class TensorCacheIterator:
    """Iterates over pipelines with `dali_plugin.fn.tensorcache` in them, an epoch at a time.

    A batch is what `cache.read_batch` returns, with what the pipeline made of each tensor in that tensor's place, of its true
    dtype where no operator changed the one that DALI saw; small values are decoded when they are looked at. Other
    outputs (images that were decoded from a member) come beside it: then a batch is a pair of the structure and a dict of
    these by name. Tensors whose shapes differ are lists of B. With several pipelines, a batch is a list of these, one for each.

    Args:
        pipelines: One or several, built or not, each with its own source (one rank each).
        source: Of the one pipeline, if it is not one that `fn.tensorcache` made.
        outputs: What the pipelines' outputs are: names of tensors, `"number"`, and any others; by default the source's.

    Raises:
        ValueError: The outputs are not as many as the pipeline has, or the numbers of the samples are not among them.

    Memory: DALI's own, on the pipeline's device; nothing is copied with DALI's dynamic executor, the default.
    """

    def __init__(
        self, pipelines: Any, source: TensorCacheSource | None = None, *, outputs: Sequence[str] | None = None
    ) -> None:
        self._is_one = not isinstance(pipelines, (list, tuple))
        self._pipelines = [pipelines] if self._is_one else list(pipelines)
        self._sources = [source] if source is not None else [_source_of(pipe) for pipe in self._pipelines]
        self._outputs = [list(outputs) if outputs is not None else one.outputs for one in self._sources]
        for pipe, one, names in zip(self._pipelines, self._sources, self._outputs, strict=True):
            if NUMBER not in names or len(set(names)) != len(names):
                raise ValueError(f"outputs={names}: each once, and {NUMBER!r} among them")
            if len({len(other) for other in self._sources}) > 1 or one.batch_size != pipe.max_batch_size:
                raise ValueError("the pipelines have batches of other sizes, or other numbers of them")
        self._is_built = False
        self._is_over = False

    def __len__(self) -> int:
        """Return how many batches an epoch has."""
        return len(self._sources[0])

    def __iter__(self) -> Iterator[Any]:
        if self._is_over:
            self.reset()
        return self

    def reset(self) -> None:
        """Begin the next epoch, when this one is over."""
        for pipe in self._pipelines:
            pipe.reset()
        self._is_over = False

    def __next__(self) -> Any:
        if self._is_over:
            raise StopIteration
        self._build()
        try:
            for pipe in self._pipelines:
                pipe.schedule_run()
            ran = [pipe.outputs() for pipe in self._pipelines]
        except StopIteration:
            self._is_over = True
            raise
        batches = [self._batch(at, outputs) for at, outputs in enumerate(ran)]
        return batches[0] if self._is_one else batches

    def state_dict(self) -> dict[str, Any]:
        """Return where the iterator is: DALI's checkpoints, of pipelines with `enable_checkpointing=True`."""
        self._build()
        return {"checkpoints": [pipe.checkpoint() for pipe in self._pipelines], "over": self._is_over}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from `state`, which must be loaded before the first batch.

        Raises:
            RuntimeError: The pipelines have run already: DALI restores a pipeline when it is built.
        """
        if self._is_built:
            raise RuntimeError("the pipelines have run; load the state into an iterator over new ones")
        for pipe, checkpoint in zip(self._pipelines, state["checkpoints"], strict=True):
            pipe._checkpoint = checkpoint
        self._is_over = state["over"]

    def _build(self) -> None:
        if not self._is_built:
            for pipe in self._pipelines:
                pipe.build()
            self._is_built = True

    def _batch(self, at: int, ran: Sequence[Any]) -> Any:
        source, names = self._sources[at], self._outputs[at]
        if len(ran) != len(names):
            raise ValueError(f"the pipeline has {len(ran)} outputs, {len(names)} were named: {', '.join(names)}")
        is_shared = not self._pipelines[at].exec_dynamic  # other executors write the next batch into the same memory
        outputs = {name: _as_torch(output, is_shared) for name, output in zip(names, ran, strict=True)}
        numbers = outputs.pop(NUMBER).cpu().numpy().reshape(-1)
        tensors, others = {}, {}
        for name, value in outputs.items():
            known = source.schema.get(name)
            if known is None:
                others[name] = value
            elif isinstance(value, list):
                tensors[name] = [restored(one, known.kind, known.dtype) for one in value]
            else:
                tensors[name] = restored(value, known.kind, known.dtype)
        batch = source.cache.fill_batch(np.ascontiguousarray(numbers), tensors)
        return (batch, others) if others else batch


def _source_of(pipe: Any) -> TensorCacheSource:
    source = getattr(pipe, "tensorcache_source", None)
    if source is None:
        raise ValueError("the pipeline has no dali_plugin.fn.tensorcache; pass its source")
    found: TensorCacheSource = source
    return found


def _as_torch(output: Any, copy: bool) -> Any:
    """Return an output as `[B, …]`, or as a list of B where shapes differ. Memory: DALI's, which lives as long as needed."""
    if output.is_dense_tensor():
        dense = from_dlpack(output.as_tensor())
        return dense.clone() if copy else dense
    parts = [from_dlpack(one) for one in output]
    return [part.clone() for part in parts] if copy else parts
