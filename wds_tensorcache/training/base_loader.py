"""What `tc.Loader` and `tc.torch_loader` share: a plan of steps, the position of the last batch given, and its state."""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from wds_tensorcache.training.batch_info import BatchInfo
from wds_tensorcache.training.step_sampler import StepSampler

__all__ = ["BaseLoader"]


class BaseLoader(ABC):
    """Batches of a `StepSampler`'s steps, in an order that can be left and resumed at every step.

    The state is that of the last batch given, in spite of what was read ahead: a few integers, the same on all ranks. Every
    loader takes it, with any batch size, number of ranks and number of workers: it goes on with just the samples that were
    not used yet.
    """

    _plan: StepSampler
    _running: weakref.ref[Any] | None = None
    _num_iterations = 0

    def __len__(self) -> int:
        """Return how many batches an epoch has, on every rank."""
        return len(self._plan)

    @property
    def epoch(self) -> int:
        """The epoch in which the next batch is."""
        return self._plan.epoch

    def set_epoch(self, epoch: int) -> None:
        """Let the next iteration begin that epoch; after `load_state_dict` with that one, nothing changes.

        Of a mix, each cache goes on where it stands.

        Raises:
            ValueError: `epoch` is out of range.
        """
        num_moves = self._plan._num_moves
        self._plan.set_epoch(epoch)
        if self._plan._num_moves != num_moves:
            self._end()

    def with_info(self) -> Iterable[tuple[Any, BatchInfo]]:
        """Return the same batches, each in a pair with its `BatchInfo`; each iteration over the result is an epoch."""
        return _WithInfo(self)

    def __iter__(self) -> Iterator[Any]:
        """Begin an epoch; after `load_state_dict`, go on in the one that was left. Ends what is still iterating."""
        return self._begin(with_info=False)

    def _begin(self, *, with_info: bool) -> Iterator[Any]:
        self._end()
        self._num_iterations += 1
        running: Iterator[Any] = self._make_iterator(with_info=with_info)
        self._running = weakref.ref(running)
        return running

    def _check_current(self, number: int) -> None:
        if number != self._num_iterations:
            raise RuntimeError("another iteration of this loader has begun, which ended this one")

    @abstractmethod
    def _make_iterator(self, *, with_info: bool) -> Any:
        """Return an iterator over an epoch, with `close` and `planned`."""

    def set_weights(self, weights: Any) -> int:
        """Change the weights, of the samples or of the mix (`{"a": 0.5, …}`), from the first step that was not begun.

        Returns:
            Number of the first step that has the new weights.

        Raises:
            ValueError: The loader has no weights, or these do not fit.
        """
        running = self._running() if self._running is not None else None
        return self._change_weights(weights, running.planned if running is not None else 0)

    def _change_weights(self, weights: Any, planned: int) -> int:
        now = self._plan._position.step
        step = max(now, planned)
        self._plan._weights.change(step, weights, now)
        return step

    def state_dict(self) -> dict[str, Any]:
        """Return the state after the last batch given; for JSON, and the same on all ranks.

        A few integers; and the weights of samples, if there are any: some bytes for each.
        """
        return self._plan._state(self._plan._position)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on after the last batch of a state, with the batch size and number of ranks that this loader has.

        Weights are those of the state; call `set_weights` afterwards for others.

        Raises:
            ValueError: It is of another dataset, or of a loader with another seed, shuffle or mix, or no state at all.
        """
        position = self._plan._load(state)
        self._end()
        self._plan._move(self._plan._settled(position), is_resumed=True)  # a larger step may not be left

    def close(self) -> None:
        """End the iteration and its threads; the position is kept, and the caches stay open."""
        self._end()

    def _end(self) -> None:
        running = self._running() if self._running is not None else None
        self._running = None
        if running is not None:
            running.close()


class _WithInfo:
    def __init__(self, loader: BaseLoader) -> None:
        self._loader = loader

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        return self._loader._begin(with_info=True)
