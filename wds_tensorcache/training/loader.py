"""Batches for training, read ahead by threads."""

from __future__ import annotations

import operator
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch

from wds_tensorcache.reading.batch.assemble import check_collate
from wds_tensorcache.training.base_loader import BaseLoader
from wds_tensorcache.training.iteration import Iteration
from wds_tensorcache.training.step_sampler import StepOptions, StepSampler
from wds_tensorcache.training.steps import Step

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["Loader"]


class Loader(BaseLoader):
    """Iterates over an epoch of a cache: batches, as `read_batch` returns them, read ahead by threads.

    `for batch in loader`, or `for batch, info in loader.with_info()` for pairs with each batch's `BatchInfo`. The state is that
    of the last batch given: a few integers, which any loader takes, with any batch size and number of ranks.

    Args:
        cache, batch_size: As of `StepSampler`.
        device, pin_memory, collate, pad_value: As of `read_batch`.
        num_threads: Batches that are read at a time; 0 reads in the caller's thread, when a batch is asked for.
        prefetch_batches: Batches that are read ahead.
        steps: `shuffle`, `seed`, `rank`, `world_size`, `group`, `last_batch`, `weights`, `mix`, `bucket_by`, `window`: as of
            `StepSampler`.

    Raises:
        ValueError: Arguments exclude each other, or are out of range.

    Memory: `prefetch_batches` batches and one, besides the caller's.
    Threads/fork/pickle: one thread iterates, any may `close`; use it in the process that made it. An iteration that is left,
        or `close`, ends its threads, and the next one is the next epoch.
    """

    def __init__(
        self,
        cache: Any = None,
        batch_size: int = 1,
        *,
        device: torch.device | str | None = None,
        pin_memory: bool = False,
        num_threads: int = 2,
        prefetch_batches: int = 2,
        collate: Any = "stack",
        pad_value: Any = 0,
        **steps: Unpack[StepOptions],
    ) -> None:
        self._num_threads, self._prefetch_batches = operator.index(num_threads), operator.index(prefetch_batches)
        if min(self._num_threads, self._prefetch_batches) < 0:
            raise ValueError(f"num_threads={num_threads}, prefetch_batches={prefetch_batches}: expected 0 or more")
        check_collate(collate)
        self._plan = StepSampler(cache, batch_size, **steps)
        # the threads are the loader's
        self._caches = [each._single_threaded() for each in self._plan._caches]
        self._read_options = {"device": device, "pin_memory": pin_memory, "collate": collate, "pad_value": pad_value}
        self._is_flushed = False

    def _make_iterator(self, *, with_info: bool) -> Iteration:
        return Iteration(self, with_info=with_info)

    def _read(self, step: Step, stream: Any) -> Any:
        with nullcontext() if stream is None else torch.cuda.stream(stream):
            return step.cache_of(self._caches).read_batch(step.indices, **self._read_options)

    def set_weights(self, weights: Any, *, strict: bool = False) -> int:
        """Change the weights, of the samples or of the mix (`{"a": 0.5, …}`), and return the first step that has the new ones.

        Args:
            strict: From the next batch on, which throws away what was read ahead; else from the first that was not begun.

        Raises:
            ValueError: The loader has no weights, or these do not fit.
        """
        step = self._change_weights(weights, 0) if strict else super().set_weights(weights)
        self._is_flushed |= strict
        return step

    def __reduce__(self) -> Any:
        raise TypeError(
            "a Loader stays in its process; use torch_loader for worker processes, state_dict for checkpoints"
        )

    def __enter__(self) -> Loader:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
