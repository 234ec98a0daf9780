"""What all sources of batches have in common."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch

from dali_plugin.carriers import Carried, as_value, check_ndim, known_names, restored

__all__ = ["NUMBER", "Source", "check_batches", "what_is_carried"]

NUMBER = "number"  # the output that says which samples a batch has
LAST_BATCH = ("short", "pad", "wrap", "drop")


class Source:
    """Batches for a pipeline, and the structure that they were cut from.

    Attributes:
        tensors, members: Their names, in the order of the outputs.
        schema: What the tensors are as they come out of a pipeline.
        as_float: Of which `fn.tensorcache` makes float32 nodes.
        batch_size: Samples in a batch.
        num_batches: Of an epoch; None if nobody knows.
        num_surplus: How many batches DALI gives beyond these before the next epoch; None if StopIteration ends an epoch.
        settings: What must be equal for a checkpoint to fit; None if there can be none.
        last_number: Sample index of the last row given, for sources that repeat it; part of checkpoints.
    """

    tensors: list[str]
    members: list[str]
    schema: dict[str, Carried]
    as_float: tuple[str, ...] = ()
    batch_size: int
    num_batches: int | None
    num_surplus: int | None = None
    settings: dict[str, Any] | None = None
    last_number: int = -1

    outputs = property(
        lambda self: [*self.tensors, *self.members, NUMBER], doc="The names of what a batch has, in its order."
    )
    num_outputs = property(lambda self: len(self.outputs), doc="How many there are.")

    def use_float(self, names: Iterable[str]) -> None:
        """Say that bfloat16 tensors come out of the pipeline as float32.

        Raises:
            KeyError, TypeError: No such tensor, or one that is not bfloat16.
        """
        names = known_names(names, self.tensors, "tensor of this source")
        for name in names:
            if self.schema[name].dtype is not torch.bfloat16:
                raise TypeError(f"as_float takes bfloat16 tensors, but {name!r} is {self.schema[name].dtype}")
            self.schema[name] = Carried("tensor", torch.float32)
        self.as_float += tuple(names)

    def was_given(self, stream: Any) -> None:
        """Hear that the pipeline has given its next batch, on a CUDA stream if there is one."""

    def is_padding(self, iteration: int, count: int) -> np.ndarray[Any, Any]:
        """Return which of the last batch's `count` rows only fill it, bool `[count]`."""
        return np.zeros(count, np.bool_)

    def _restored(self, outputs: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any], Any]:
        """Return tensors, others, and the numbers of the samples."""
        if NUMBER not in outputs:
            raise KeyError(f"no {NUMBER!r} among {', '.join(outputs)}: the last one of what a batch has")
        tensors, others = restored({name: as_value(value) for name, value in outputs.items()}, self.schema)
        numbers = others.pop(NUMBER)
        return tensors, others, torch.as_tensor(numbers).cpu().numpy().reshape(-1)


def check_batches(batch_size: int, rank: int, world_size: int, last_batch: str) -> None:
    """Raise ValueError unless all are in range."""
    if batch_size < 1 or not 0 <= rank < world_size:
        raise ValueError(f"batch_size={batch_size}, rank={rank} of world_size={world_size}: out of range")
    if last_batch not in LAST_BATCH:
        raise ValueError(f"last_batch={last_batch!r}, expected one of {', '.join(LAST_BATCH)}")


def what_is_carried(schema: Mapping[str, Any]) -> dict[str, Carried]:
    """Return what tensors are.

    Raises:
        TypeError: A tensor's dtypes differ between samples, or a batch of it has too many dimensions.
    """
    for name, known in schema.items():
        if isinstance(known.dtype, tuple):
            raise TypeError(f"tensor {name!r} is {' and '.join(map(str, known.dtype))}; nodes of DALI have one dtype")
        if getattr(known, "shape", None) is not None:
            check_ndim(name, len(known.shape), known.dtype)
    return {name: Carried(known.kind, known.dtype) for name, known in schema.items()}
