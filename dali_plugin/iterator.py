"""Iterator over the nested batches of DALI pipelines."""

from __future__ import annotations

import difflib
import warnings
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from dali_plugin.source import NUMBER
from dali_plugin.tensors import as_torch

_SIMILAR = 0.8  # by difflib's measure: one wrong letter in a name of five


class TensorCacheIterator:
    """Iterator over the batches of DALI pipelines, one epoch per loop.

    The pipelines use `dali_plugin.fn.tensorcache` or `native_reader`, or read from `source`. A batch has the structure that
    `cache.read_batch` returns, with the pipeline's outputs in place of the tensors. An output has the tensor's true dtype, or
    the dtype to which an operator converted it. Values that are not tensors are decoded on first use. If a pipeline has more
    outputs, for example images, a batch is a pair of the structure and a dict of these outputs by name. A tensor whose shape
    differs between samples is a list of B. If `pipelines` is a list, even of one pipeline, the iterator returns lists with one
    batch of each pipeline.

    If a loop is abandoned, the next loop continues in the same epoch. After the end of an epoch, the next loop begins a new
    epoch.

    Attributes:
        is_padding: Rows of the most recent batch that are padding, a bool array `[B]` of numpy; a list of masks if `pipelines`
            is a list. None before the first batch.

    Args:
        pipelines: A pipeline, or a list or tuple of pipelines, built or not, each with its own source and its own rank.
        source: Source of the only pipeline. It is ignored if the pipeline uses `dali_plugin.fn`.
        copy: Copy all outputs into torch's memory. Use this if batches are freed while a CUDA graph is captured. To free
            its own memory, DALI synchronizes the device, which aborts the process during a capture.
        outputs: Names of the pipelines' outputs, in the order in which the pipelines return them: tensors, `"number"`, and
            any other names. By default, the names of the source's outputs. A new name causes a warning if it is similar to
            the name of a missing tensor. With `native_reader`, pass `"packed"` in place of the tensors' names.

    Raises:
        ValueError: `outputs` lacks `"number"` or repeats a name. There are no pipelines. A pipeline occurs twice, has no
            source, or differs from its source in batch size. With several pipelines, also if `source` is given, a pipeline
            reads a stream, or their numbers of batches differ.
        TypeError: An object in `pipelines` is not a pipeline.
        ValueError (when a batch is requested): The number of names differs from the number of the pipeline's outputs.
        KeyError (when a batch is requested): `outputs` lacks `"packed"` of a `native_reader`.
        TypeError (when a batch is requested): An operator computed with integers that hold the bits of another dtype, such as
            bfloat16.

    Memory: DALI's own, on the device of each output, with DALI's dynamic executor, its default. With other executors, or if
        `copy` is True, outputs are copied into torch's memory. Bool tensors of `tensorcache` are always copied. Aligned tensors
        of a `native_reader` are views of the samples' bytes: contiguous within each sample, but not across samples.
    Threads/fork/pickle: used by one thread, in the process that made the iterator; cannot be pickled.
    """

    def __init__(
        self, pipelines: Any, source: Any = None, *, outputs: Sequence[str] | None = None, copy: bool = False
    ) -> None:
        self._is_one = not isinstance(pipelines, (list, tuple))
        pipelines = [pipelines] if self._is_one else list(pipelines)
        if not pipelines or len(set(map(id, pipelines))) < len(pipelines):
            raise ValueError("expected a pipeline, or a list of different pipelines")
        if source is not None and len(pipelines) > 1:
            raise ValueError("source= is for a single pipeline; several pipelines need dali_plugin.fn in each")
        outputs = [outputs] if isinstance(outputs, str) else outputs
        self._pipes = [_Pipe(pipeline, source, outputs, copy) for pipeline in pipelines]
        self._source = self._pipes[0].source
        if len(pipelines) > 1 and {pipe.source.num_batches for pipe in self._pipes} != {self._source.num_batches or 0}:
            raise ValueError("the numbers of batches differ, or are unknown; make an iterator for each pipeline")
        self.is_padding: Any = None
        self._is_over = False
        self._iteration = 0
        self._has_stopped = True  # False if a loaded state is over, but the pipelines have not raised StopIteration yet

    def __len__(self) -> int:
        """Return the number of batches in an epoch; raise TypeError for streams."""
        return len(self._source)

    def __repr__(self) -> str:
        epoch = "over" if self._is_over else f"at batch {self._iteration}"
        return f"TensorCacheIterator({', '.join(repr(pipe.source) for pipe in self._pipes)}, epoch {epoch})"

    def __iter__(self) -> Iterator[Any]:
        if self._is_over:
            self.reset()
        return self

    def reset(self) -> None:
        """Begin the next epoch if no batch of this epoch is left. Otherwise do nothing.

        A stream's epoch is over only after the iterator has raised StopIteration.
        """
        if self._iteration == self._source.num_batches:
            next(self, None)  # ends the epoch
        if not self._is_over:
            return
        if not self._has_stopped and self._source.num_surplus is None:
            try:
                self._run()
            except StopIteration:
                self._has_stopped = True
        for pipe in self._pipes:
            pipe.pipeline.reset()
        self._is_over = False

    def __next__(self) -> Any:
        if self._is_over:
            raise StopIteration
        try:
            if self._source.num_surplus is not None and self._iteration == self._source.num_batches:
                # DALI's reader never raises StopIteration
                for _ in range(self._source.num_surplus):
                    self._run()
                raise StopIteration
            ran = self._run()
        except StopIteration:
            self._is_over, self._iteration = True, 0
            raise
        self._iteration += 1  # also if the batch is damaged
        results = [pipe.nest(outputs, self._iteration - 1) for pipe, outputs in zip(self._pipes, ran, strict=True)]
        batches, marks = map(list, zip(*results, strict=True))
        self.is_padding = marks[0] if self._is_one else marks
        return batches[0] if self._is_one else batches

    def state_dict(self) -> dict[str, Any]:
        """Return the position as checkpoints of DALI; the pipelines need `enable_checkpointing=True`.

        This builds the pipelines, so `load_state_dict` refuses a state afterwards.

        Raises:
            RuntimeError: A pipeline has no checkpoints; or a source is a stream, which cannot resume in the middle of an epoch
                (use `tc.ResumablePipeline` for that).
        """
        settings = [pipe.source.settings for pipe in self._pipes]
        if None in settings:
            raise RuntimeError(
                "a stream cannot resume in the middle of an epoch; tc.ResumablePipeline can, but only without DALI"
            )
        try:
            checkpoints = [pipe.pipeline.checkpoint() for pipe in self._pipes]
        except RuntimeError as exc:
            raise RuntimeError("the pipeline has no checkpoint; was it made with enable_checkpointing=True?") from exc
        return {
            "checkpoints": checkpoints,
            "over": self._is_over,
            "iteration": self._iteration,
            "settings": settings,
            "last_numbers": [pipe.source.last_number for pipe in self._pipes],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`, which must be loaded before the first batch.

        The pipelines need `enable_checkpointing=True`. Without it, DALI raises RuntimeError when the first batch is requested.

        Raises:
            RuntimeError: The pipelines are already built; DALI restores the state of a pipeline only while building it.
            ValueError: The state belongs to other samples, to batches in another order, or to another number of pipelines; or
                it is not from `state_dict`.
        """
        if any(pipe.pipeline._built for pipe in self._pipes):
            raise RuntimeError("the pipelines are built already; load the state into an iterator over new pipelines")
        if not isinstance(state, dict) or "checkpoints" not in state:
            raise ValueError(f"expected a state of TensorCacheIterator, got {state!r:.200}")
        if len(state["settings"]) != len(self._pipes):
            raise ValueError(f"the state belongs to {len(state['settings'])} pipelines, not {len(self._pipes)}")
        for pipe, settings in zip(self._pipes, state["settings"], strict=True):
            expected = pipe.source.settings or {}
            for name in expected | settings:
                if expected.get(name) != settings.get(name):
                    raise ValueError(
                        f"the state belongs to a source with {name}={settings.get(name)!r}, not {expected.get(name)!r}"
                    )
        for pipe, checkpoint, number in zip(self._pipes, state["checkpoints"], state["last_numbers"], strict=True):
            pipe.pipeline._checkpoint = checkpoint
            pipe.source.last_number = number
        self._is_over, self._iteration = state["over"], state["iteration"]
        self._has_stopped = not self._is_over

    def _run(self) -> list[Any]:
        for pipe in self._pipes:
            pipe.schedule()
        return [pipe.outputs() for pipe in self._pipes]


class _Pipe:
    def __init__(self, pipe: Any, source: Any, names: Sequence[str] | None, copy: bool) -> None:
        if not hasattr(pipe, "build"):
            raise TypeError(f"{pipe!r:.100} is not a pipeline; call the function that @pipeline_def decorates")
        self.pipeline = pipe
        self.source: Any = getattr(pipe, "tensorcache_source", source)
        if self.source is None:
            raise ValueError("the pipeline does not use dali_plugin.fn; pass its source as source=")
        self._names = list(names) if names is not None else self.source.outputs
        if NUMBER not in self._names or len(set(self._names)) != len(self._names):
            raise ValueError(
                f"outputs={self._names}: expected each name once, and {NUMBER!r} among them; the pipeline must also return "
                "this node, the last one that dali_plugin.fn returns"
            )
        self._warn_of_typos()
        if self.source.batch_size != pipe.max_batch_size:
            problem = f"batches of {self.source.batch_size} for a pipeline of batch_size={pipe.max_batch_size}"
            raise ValueError(f"{problem}; give source and pipeline the same batch_size")
        self._copy = copy
        self._has_gpu = pipe.device_id is not None and torch.cuda.is_available()
        # an event after the copies of the last outputs, if the pipeline overwrites its outputs
        self._copied: Any = None

    def _warn_of_typos(self) -> None:
        """Warn of output names that are similar to a missing output."""
        left_out = [name for name in self.source.outputs if name not in self._names]
        for name in self._names:
            near = [] if name in self.source.outputs else difflib.get_close_matches(name, left_out, 1, _SIMILAR)
            if near:
                problem = f"outputs={self._names} has {name!r}, which the source does not have, but lacks {near[0]!r}"
                warnings.warn(f"{problem}; is this a typo? If not, choose a less similar name", stacklevel=4)

    def schedule(self) -> None:
        """Let DALI begin the next batch, after copies of the last outputs."""
        if self._copied is not None:
            self._copied.synchronize()
            self._copied = None
        self.pipeline.schedule_run()

    def outputs(self) -> Any:
        # with the dynamic executor, the caller's CUDA stream waits for the outputs; otherwise this call waits for the GPU
        with self._on_device():
            return self.pipeline.outputs(self._stream() if self.pipeline.exec_dynamic else None)

    def nest(self, ran: Sequence[Any], iteration: int) -> tuple[Any, Any]:
        """Return the nested batch of outputs, and the mask of its padding."""
        if len(ran) != len(self._names):
            raise ValueError(
                f"the pipeline has {len(ran)} outputs, but {len(self._names)} names: {', '.join(self._names)}; pass outputs="
            )
        is_shared = not self.pipeline.exec_dynamic  # other executors write the next batch into the same memory
        with self._on_device():
            stream = self._stream()
            outputs = {
                name: as_torch(output, is_shared or self._copy) for name, output in zip(self._names, ran, strict=True)
            }
            # now the stream waits for the outputs, and so for DALI's copies of the source's batch; other executors have waited
            self.source.note_handed_over(None if is_shared else stream)
            if is_shared and stream is not None:
                self._copied = stream.record_event()
            count = len(outputs[NUMBER])
            batch, extra = self.source.nest(outputs)
        return (batch, extra) if extra else batch, self.source.is_padding(iteration, count)

    def _on_device(self) -> AbstractContextManager[Any]:
        # hazard: DALI uses the default stream of the current GPU
        return torch.cuda.device(self.pipeline.device_id) if self._has_gpu else nullcontext()

    def _stream(self) -> Any:
        return torch.cuda.current_stream(self.pipeline.device_id) if self._has_gpu else None
