"""Where an epoch begins, told to worker processes that may live for one epoch each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

__all__ = ["SharedPosition", "token_of"]

_MAX_WORKERS = 256
_NO_TOKEN = -1  # torch's are not negative


class SharedPosition:
    """Where the epoch of all workers begins, and the next one, in memory that all of them see.

    A position is a list of integers, of which the first is the epoch. Workers may live for one epoch each, and the first may
    have ended it before the last has begun. So the first that begins writes down where, and no lock is needed: what comes next
    is read before the question who was first, and whoever else believes to be the first writes the same.

    A token is a number that the workers of one iteration share, and others mostly do not. Workers that live on count their
    epochs, for one may be late for an epoch that was left already.
    """

    def __init__(self, position: Sequence[int]) -> None:
        table = torch.tensor([position] * 3, dtype=torch.int64, device="cpu")
        # the token, how often a position was given, epochs begun, those before the workers that there are now
        numbers = torch.zeros(4, dtype=torch.int64, device="cpu")
        numbers[0] = _NO_TOKEN
        workers = torch.zeros((2, _MAX_WORKERS), dtype=torch.int64, device="cpu")  # which of these each began and ended
        resumed = torch.full((_MAX_WORKERS, 1 + len(position)), _NO_TOKEN, dtype=torch.int64, device="cpu")
        self.__setstate__((table, numbers, workers, resumed))

    def __getstate__(self) -> tuple[torch.Tensor, ...]:
        return self._table, self._numbers, self._workers, self._resumed

    def __setstate__(self, state: tuple[torch.Tensor, ...]) -> None:
        # what torch sends to its workers is shared still; what was pickled or copied otherwise begins a life of its own
        shared = [each if each.is_shared() else each.clone().share_memory_() for each in state]  # type: ignore[no-untyped-call]
        self._table, self._numbers, self._workers, self._resumed = shared
        self._next, self._began, self._given = self._table
        self._has_begun, self._has_ended = self._workers
        self._num_mine = 0  # epochs that this process began

    next = property(lambda self: self._next.tolist(), doc="Where the next epoch begins.")
    given = property(lambda self: self._given.tolist(), doc="Where the user has put it last.")
    num_given = property(lambda self: self._numbers[1].item(), doc="How often that was.")
    is_begun = property(lambda self: self._numbers[0].item() != _NO_TOKEN, doc="Whether workers have begun since then.")

    def begin(self, token: int, worker: int, position: Sequence[int] | None = None) -> list[int]:
        """Return where an epoch begins whose workers all have this token; `position` is where, if it is not the next one."""
        found: list[int] = self.next if position is None else list(position)
        row = self._row(worker)
        self._num_mine += 1
        # in this order, and written in the other one
        token_of_all, _, number, before = self._numbers.tolist()
        mine = before + self._num_mine
        is_another = self._num_mine == 1 and self._has_begun[row] >= mine  # process with this worker's id
        if token_of_all == token and mine <= number and not is_another:
            self._has_begun[row] = mine
            return list(self._began.tolist())
        self._began.copy_(torch.tensor(found))
        self._numbers[0] = token
        self._numbers[3] = number + 1 - self._num_mine
        self._numbers[2] = self._has_begun[row] = number + 1
        return found

    def end(self, worker: int, num_workers: int, position: Sequence[int]) -> None:
        """Let the next epoch begin there, once all workers have ended the one that they began last."""
        self._has_ended[worker] = self._has_begun[worker]
        if bool((self._has_ended[:num_workers] == self._numbers[2]).all()):
            self.put(position)

    def put(self, position: Sequence[int]) -> None:
        """Let the next epoch begin there."""
        self._next.copy_(torch.tensor(position))

    def give(self, position: Sequence[int]) -> None:
        """Let the next epoch begin there, for workers that live on, too."""
        self._given.copy_(torch.tensor(position))
        self._numbers[1] += 1
        self._numbers[0] = _NO_TOKEN
        self.put(position)

    def resume(self, token: int, worker: int, position: Sequence[int]) -> None:
        """Note where the state of a worker was taken."""
        self._resumed[self._row(worker)] = torch.tensor([token, *position])

    def resumed(self, token: int, num_workers: int) -> list[list[int]]:
        """Return where the states of all workers were taken."""
        rows: list[list[int]] = self._resumed[:num_workers].tolist()
        if any(row[0] != token for row in rows):
            raise RuntimeError("some workers were given a state and others none")
        return [row[1:] for row in rows]

    def _row(self, worker: int) -> int:
        if worker >= _MAX_WORKERS:
            raise ValueError(f"worker {worker}: there may be {_MAX_WORKERS}")
        return worker


def token_of(info: Any) -> int:
    """Return a number that all workers of an iteration share, from torch's `WorkerInfo`."""
    return int(info.seed - info.id) ^ int(info.num_workers)
