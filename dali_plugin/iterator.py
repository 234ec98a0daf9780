"""Batches of DALI pipelines in the structure that was written."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from dali_plugin.base import NUMBER
from dali_plugin.carriers import as_torch

__all__ = ["TensorCacheIterator"]


class TensorCacheIterator:
    """Iterates over pipelines with `dali_plugin.fn.tensorcache` or `native_reader` in them, an epoch at a time.

    A batch is what `cache.read_batch` returns, with what the pipeline made of each tensor in that tensor's place, of its true
    dtype where no operator changed the one that DALI saw; small values are decoded when they are looked at. Other
    outputs (images that were decoded from a member) come beside it: then a batch is a pair of the structure and a dict of
    these by name. Tensors whose shapes differ are lists of B. With several pipelines, a batch is a list of these, one for each.

    A loop that is left goes on in the next one; after the epoch's end the next one begins the next epoch.

    Attributes:
        is_padding: Rows of the last batch that only fill it, bool `[B]`; a list of these with several pipelines.

    Args:
        pipelines: One or several, built or not, each with its own source (one rank each).
        source: Of the one pipeline, if it is not one that `dali_plugin.fn` made.
        outputs: What the pipelines' outputs are: names of tensors, `"number"`, and any others; by default the source's.

    Raises:
        ValueError: The outputs are not as many as the pipeline has, or the numbers of the samples are not among them; no
            pipelines, or the same one twice.
        TypeError (of a batch): An operator has computed with integers that were the bits of a bfloat16, say.

    Memory: DALI's own, on the pipeline's device; nothing is copied with DALI's dynamic executor, the default. Tensors of a
        `native_reader` are views of the samples' bytes: contiguous in each sample, not from one to the next.
    Threads/fork/pickle: one thread; neither.
    """

    def __init__(self, pipelines: Any, source: Any = None, *, outputs: Sequence[str] | None = None) -> None:
        self._is_one = not isinstance(pipelines, (list, tuple))
        self._pipelines = [pipelines] if self._is_one else list(pipelines)
        if not self._pipelines or len(set(map(id, self._pipelines))) < len(self._pipelines):
            raise ValueError("expected a pipeline, or several that are not the same")
        if source is not None and len(self._pipelines) > 1:
            raise ValueError("a source is of one pipeline; several have their own")
        if uncalled := [pipe for pipe in self._pipelines if not hasattr(pipe, "build")]:
            raise TypeError(f"{uncalled[0]!r:.100} is no pipeline; call the function that @pipeline_def decorates")
        self._sources = [source] if source is not None else [_source_of(pipe) for pipe in self._pipelines]
        outputs = [outputs] if isinstance(outputs, str) else outputs
        self._outputs = [list(outputs) if outputs is not None else one.outputs for one in self._sources]
        for pipe, one, names in zip(self._pipelines, self._sources, self._outputs, strict=True):
            if NUMBER not in names or len(set(names)) != len(names):
                raise ValueError(
                    f"outputs={names}: each once, and {NUMBER!r} among them, the last node, which pipelines return too"
                )
            if one.num_batches is None and len(self._pipelines) > 1:
                raise ValueError("streams may differ in length: give each pipeline over one its own iterator")
            if one.batch_size != pipe.max_batch_size or one.num_batches != self._sources[0].num_batches:
                raise ValueError("the pipelines have batches of other sizes, or other numbers of them")
        self.is_padding: Any = None
        self._is_built = False
        self._is_over = False
        self._iteration = 0
        self._is_to_be_ended = False  # whether the pipelines do not know yet that the epoch is over

    def __len__(self) -> int:
        """Return how many batches an epoch has; a stream does not know."""
        return len(self._sources[0])

    def __iter__(self) -> Iterator[Any]:
        if self._is_over:
            self.reset()
        return self

    def reset(self) -> None:
        """Begin the next epoch, when this one is over."""
        if self._is_to_be_ended and self._sources[0].num_surplus is None:
            self._build()
            try:
                self._run()
            except StopIteration:
                self._is_to_be_ended = False
        for pipe in self._pipelines:
            pipe.reset()
        self._is_over = False

    def __next__(self) -> Any:
        if self._is_over:
            raise StopIteration
        self._build()
        source = self._sources[0]
        try:
            if source.num_surplus is not None and self._iteration == source.num_batches:  # DALI's reader never stops
                for _ in range(source.num_surplus):
                    self._run()
                raise StopIteration
            ran = self._run()
        except StopIteration:
            self._is_over, self._iteration = True, 0
            raise
        batches = [self._batch(at, outputs) for at, outputs in enumerate(ran)]
        counts = [len(outputs[names.index(NUMBER)]) for outputs, names in zip(ran, self._outputs, strict=True)]
        marks = [one.is_padding(self._iteration, count) for one, count in zip(self._sources, counts, strict=True)]
        self.is_padding = marks[0] if self._is_one else marks
        self._iteration += 1
        return batches[0] if self._is_one else batches

    def state_dict(self) -> dict[str, Any]:
        """Return where the iterator is: DALI's checkpoints, of pipelines with `enable_checkpointing=True`.

        Raises:
            RuntimeError: A source is a stream, which cannot go on in the middle (`tc.resumable` can), or a pipeline has no
                checkpoints.
        """
        if any(source.settings is None for source in self._sources):
            raise RuntimeError("a stream cannot go on in the middle of an epoch; tc.resumable can, without a pipeline")
        self._build()
        try:
            checkpoints = [pipe.checkpoint() for pipe in self._pipelines]
        except RuntimeError as exc:
            raise RuntimeError("no checkpoint of the pipeline; was it made with enable_checkpointing=True?") from exc
        settings = [source.settings for source in self._sources]
        at = {"over": self._is_over, "iteration": self._iteration, "settings": settings}
        at["last_numbers"] = [source.last_number for source in self._sources]
        return {"checkpoints": checkpoints, **at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from `state`, which must be loaded before the first batch.

        Raises:
            RuntimeError: The pipelines are built already: that is when DALI restores them.
            ValueError: The state is of other samples, or of batches in another order.
        """
        if self._is_built or any(getattr(pipe, "_built", False) for pipe in self._pipelines):
            raise RuntimeError("the pipelines are built; load the state into an iterator over new ones")
        for source, settings in zip(self._sources, state["settings"], strict=True):
            mine = source.settings or {}
            if unlike := [name for name in mine | settings if mine.get(name) != settings.get(name)]:
                name = unlike[0]
                raise ValueError(f"the state is of a source with {name}={settings.get(name)!r}, not {mine.get(name)!r}")
        for pipe, checkpoint in zip(self._pipelines, state["checkpoints"], strict=True):
            pipe._checkpoint = checkpoint
        for source, number in zip(self._sources, state["last_numbers"], strict=True):
            source.last_number = number
        self._is_over, self._iteration = state["over"], state["iteration"]
        self._is_to_be_ended = state["over"]

    def _build(self) -> None:
        if not self._is_built:
            for pipe in self._pipelines:
                pipe.build()
            self._is_built = True

    def _run(self) -> list[Any]:
        """Return the outputs of each pipeline's next batch."""
        for pipe in self._pipelines:
            pipe.schedule_run()
        ran = []
        for pipe, source in zip(self._pipelines, self._sources, strict=True):
            stream = _stream_of(pipe)
            ran.append(pipe.outputs(stream))
            source.was_given(stream)
        return ran

    def _batch(self, at: int, ran: Sequence[Any]) -> Any:
        source, names = self._sources[at], self._outputs[at]
        if len(ran) != len(names):
            raise ValueError(f"the pipeline has {len(ran)} outputs, {len(names)} were named: {', '.join(names)}")
        is_shared = not self._pipelines[at].exec_dynamic  # other executors write the next batch into the same memory
        outputs = {name: as_torch(output, is_shared) for name, output in zip(names, ran, strict=True)}
        device = self._pipelines[at].device_id
        if is_shared and device is not None and torch.cuda.is_available():
            # the copies must be there before DALI overwrites what they are of
            torch.cuda.current_stream(device).synchronize()
        batch, others = source.fill(outputs)
        return (batch, others) if others else batch


def _source_of(pipe: Any) -> Any:
    source = getattr(pipe, "tensorcache_source", None)
    if source is None:
        raise ValueError("the pipeline has no dali_plugin.fn.tensorcache; pass its source")
    return source


def _stream_of(pipe: Any) -> Any:
    """Return the stream on which outputs will be used; None without a GPU, and for executors that wait for the GPU."""
    if pipe.device_id is None or not pipe.exec_dynamic or not torch.cuda.is_available():
        return None
    return torch.cuda.current_stream(pipe.device_id)
