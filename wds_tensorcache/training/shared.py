"""Where an epoch begins, told to worker processes that may live for one epoch each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

__all__ = ["SharedPosition", "token_of"]

_MAX_WORKERS = 256
_NUM_RECORDS = 61
_NO_TOKEN = -1  # torch's are not negative


class SharedPosition:
    """Where the epoch of all workers begins, and the next one, in memory that all of them see.

    A position is a list of integers, of which the first is the epoch. Workers may live for one epoch each, and the first may
    have ended it before the last has begun. So the first that begins writes down where, and no lock is needed: what comes next
    is read before the question who was first, and whoever else believes to be the first writes the same.

    A token is a number that the workers of one iteration share, and others mostly do not; each has a record, for the workers of
    an iteration that was left may be late, while those of another have begun. Workers that live on count their epochs. Records
    are used in turn: whoever finds none of its token takes the one behind the last, which it has looked up before.
    """

    def __init__(self, position: Sequence[int]) -> None:
        def filled(*shape: int, value: int = 0) -> torch.Tensor:
            return torch.full(shape, value, dtype=torch.int64, device="cpu")

        places = torch.tensor([position] * 2, dtype=torch.int64, device="cpu")
        records = filled(_NUM_RECORDS, 3 + len(position), value=_NO_TOKEN)
        records[:, 1:3] = 0
        resumed = filled(_MAX_WORKERS, 1 + len(position), value=_NO_TOKEN)
        marks = filled(_NUM_RECORDS, 2, _MAX_WORKERS)
        self.__setstate__((places, torch.tensor([_NO_TOKEN, 0, _NO_TOKEN, 0]), records, marks, resumed))

    def __getstate__(self) -> tuple[torch.Tensor, ...]:
        return self._places, self._numbers, self._records, self._marks, self._resumed

    def __setstate__(self, state: tuple[torch.Tensor, ...]) -> None:
        # what torch sends to its workers is shared still; what was pickled or copied otherwise begins a life of its own
        shared = [each if each.is_shared() else each.clone().share_memory_() for each in state]  # type: ignore[no-untyped-call]
        # next and given; the last token, how often a position was given, for which token it counts, and the last record; by
        # record its token, epochs begun, those before the workers that there are now, and where the last began; by record and
        # worker which of these it began, and ended; by worker where a state was taken
        self._places, self._numbers, self._records, self._marks, self._resumed = shared
        self._num_mine = 0  # epochs that this process began

    next = property(lambda self: self._places[0].tolist(), doc="Where the next epoch begins.")
    given = property(lambda self: self._places[1].tolist(), doc="Where the user has put it last.")
    num_given = property(lambda self: self._numbers[1].item(), doc="How often that was.")
    is_begun = property(lambda self: self._numbers[0].item() != _NO_TOKEN, doc="Whether workers have begun since then.")

    def is_last(self, token: int) -> bool:
        """Return whether no workers of another iteration came later, and no position was given."""
        return bool(self._numbers[0] == token)

    def begin(self, token: int, worker: int, position: Sequence[int] | None = None) -> list[int]:
        """Return where an epoch begins whose workers all have this token; `position` is where, if it is not the next one."""
        found: list[int] = self.next if position is None else list(position)
        row, record = _row(worker), self._record(token)
        self._num_mine += 1
        number = self._records[record, 1].item()  # first, since it is written last
        token_of_all, _, before, *began = self._records[record].tolist()
        mine = before + self._num_mine
        is_another = self._num_mine == 1 and self._marks[record, 0, row] >= mine  # process with this worker's id
        if token_of_all == token and mine <= number and not is_another:
            self._marks[record, 0, row] = mine
            return list(began)
        self._records[record, 3:] = torch.tensor(found)
        self._records[record, 0] = token
        self._records[record, 2] = number + 1 - self._num_mine
        self._records[record, 1] = self._marks[record, 0, row] = number + 1
        self._numbers[3] = record
        if position is None:
            self._numbers[0] = token
        return found

    def end(self, token: int, worker: int, num_workers: int, position: Sequence[int]) -> None:
        """Let the next epoch begin there, once all workers have ended the one that they began last."""
        record = self._record(token)
        begun, ended = self._marks[record]
        ended[worker] = begun[worker]
        if bool((ended[:num_workers] == self._records[record, 1]).all()):
            self.put(position, token)

    def _record(self, token: int) -> int:
        """Return the record of a token, or the one that it may take."""
        last = int(self._numbers[3].item())
        found = (self._records[:, 0] == token).nonzero()
        return int(found[0].item()) if len(found) else (last + 1) % _NUM_RECORDS

    def put(self, position: Sequence[int], token: int | None = None) -> None:
        """Let the next epoch begin there, unless workers of a later iteration than the token's have begun."""
        if token is None or self.is_last(token):
            self._places[0] = torch.tensor(position)

    def give(self, position: Sequence[int]) -> None:
        """Let the next epoch begin there, for workers that live on, too."""
        self._places[1] = torch.tensor(position)
        self._numbers[1] += 1
        self._numbers[0] = _NO_TOKEN
        self.put(position)

    def resume(self, token: int, worker: int, position: Sequence[int], num_seen: int = 0) -> bool:
        """Note where the state of a worker was taken; return whether the user has put the iteration elsewhere before.

        Args:
            num_seen: How many of the positions that were given are dealt with.
        """
        is_given = (not self.is_begun and self.num_given != num_seen) or bool(self._numbers[2] == token)
        if is_given:
            self._numbers[2] = token  # before the next line, which the other workers will see
        self._numbers[0] = token
        self._resumed[_row(worker)] = torch.tensor([token, *position])
        return is_given

    def resumed(self, token: int, num_workers: int) -> list[list[int]] | None:
        """Return where the states of all workers were taken; None if some have not noted it."""
        rows: list[list[int]] = self._resumed[:num_workers].tolist()
        return [row[1:] for row in rows] if all(row[0] == token for row in rows) else None


def token_of(info: Any) -> int:
    """Return a number that all workers of an iteration share, from torch's `WorkerInfo`."""
    return int(info.seed - info.id) ^ int(info.num_workers)


def _row(worker: int) -> int:
    if worker >= _MAX_WORKERS:
        raise ValueError(f"worker {worker}: there may be {_MAX_WORKERS}")
    return worker
