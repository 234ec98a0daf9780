"""Where an epoch begins, told to worker processes that may live for one epoch each."""

from __future__ import annotations

from collections.abc import Sequence

import torch

__all__ = ["SharedPosition"]

_MAX_WORKERS = 1024
_NO_TOKEN = -1  # torch's are not negative


class SharedPosition:
    """Where the epoch of all workers begins, and the next one, in memory that all of them see.

    Workers may live for one epoch each, and the first may have ended it before the last has begun. So the first that begins
    writes down where, and no lock is needed: what comes next is read before the question who was first. A worker that begins
    twice begins another epoch.
    """

    def __init__(self, position: Sequence[int]) -> None:
        table = torch.tensor([position] * 3, dtype=torch.int64, device="cpu")
        self._next, self._began, self._given = table.share_memory_()  # type: ignore[no-untyped-call]
        numbers = torch.zeros(2 + _MAX_WORKERS, dtype=torch.int64, device="cpu")
        self._numbers = numbers.share_memory_()  # type: ignore[no-untyped-call]
        self._numbers[0] = _NO_TOKEN

    next = property(lambda self: self._next.tolist(), doc="Where the next epoch begins.")
    given = property(lambda self: self._given.tolist(), doc="Where the user has put it last.")
    num_given = property(lambda self: self._numbers[1].item(), doc="How often that was.")

    def begin(self, token: int, worker: int) -> list[int]:
        """Return where an epoch begins whose workers all have this token."""
        position: list[int] = self.next
        has_begun = 2 + worker % _MAX_WORKERS
        if self._numbers[0].item() == token and not self._numbers[has_begun].item():
            position = self._began.tolist()
        else:
            self._began.copy_(torch.tensor(position))
            self._numbers[2:] = 0
            self._numbers[0] = token
        self._numbers[has_begun] = 1
        return position

    def end(self, position: Sequence[int]) -> None:
        """Let the next epoch begin there."""
        self._next.copy_(torch.tensor(position))

    def give(self, position: Sequence[int]) -> None:
        """Let the next epoch begin there, for workers that live on, too."""
        self._given.copy_(torch.tensor(position))
        self._numbers[1] += 1
        self._numbers[0] = _NO_TOKEN
        self.end(position)
