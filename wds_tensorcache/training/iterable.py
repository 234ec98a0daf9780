"""A loader as a dataset for torch's `DataLoader` and torchdata's `StatefulDataLoader`, with any number of workers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import dropwhile, pairwise
from typing import Any

from torch.utils.data import IterableDataset, get_worker_info

from wds_tensorcache.training.loader import Loader
from wds_tensorcache.training.ranks import find_rank
from wds_tensorcache.training.shared import SharedPosition, token_of

__all__ = ["IterableCache", "WorkerSetup"]


@dataclass(frozen=True, slots=True)
class WorkerSetup:
    """What a worker is told before its first batch.

    Attributes:
        rank, world_size: Of the data-parallel process that it works for.
        worker, num_workers: Which of that process's workers it is; 0 of 0 is the process itself.
        seed: Another one in every worker of every rank, and the same each time.
        dataset: The `IterableCache`.
    """

    rank: int
    world_size: int
    worker: int
    num_workers: int
    seed: int
    dataset: Any


class IterableCache(IterableDataset[Any]):
    """The batches of a `Loader` as a dataset: for `DataLoader(dataset, batch_size=None, num_workers=…)`.

    The workers deal the steps out in turn, so each has as much to read as the others, and the batches come in the loader's own
    order whatever their number. `Loader` itself needs no workers; this is for pipelines that are built on them, and for work
    in Python on each batch.

    Each iteration is the next epoch, also after one that was left; `set_epoch` says which, and of a mix that workers left, each
    cache begins again where that epoch did.

    `torchdata.stateful_dataloader.StatefulDataLoader` calls `state_dict` and `load_state_dict` in each worker, and so needs as
    many of these as before; batch size and number of ranks may be others. **Another batch size needs
    `snapshot_every_n_steps=1`**, torchdata's default: between snapshots torchdata leaves out as many steps as were given, which
    are other samples then, and no worker can see that. With two workers or more it needs `batch_size=None`:
    a loader that takes several steps from a worker at a time gives them out of order, and its states are refused where a step
    is missing before the last. A state taken at the end of an epoch resumes at the next one. Where `set_epoch` was called
    since the last iteration, with another epoch than the state's, that one begins.

    Args:
        cache, batch_size: As of `Loader`.
        setup: Called in each worker, with a `WorkerSetup`, before its first batch; for libraries that need setting up.
        options: Others of `Loader`. Its threads read in the main process only: workers are read ahead by torch.

    Threads/fork/pickle: for fork and spawn, with up to 256 workers; ranks are those of the process that made it.
    """

    def __init__(
        self,
        cache: Any = None,
        batch_size: int = 1,
        *,
        setup: Callable[[WorkerSetup], Any] | None = None,
        **options: Any,
    ) -> None:
        rank, world_size = find_rank(
            options.pop("rank", None), options.pop("world_size", None), options.pop("group", None)
        )
        self._options = {"cache": cache, "batch_size": batch_size, "rank": rank, "world_size": world_size, **options}
        self._setup = setup
        self._loader: Loader | None = Loader(**self._options)
        self._length = len(self._loader)
        self._shared = SharedPosition(self._loader.position())
        self._num_given = 0
        self._dealt: Loader | None = None
        self._state: Mapping[str, Any] | None = None  # the last that was loaded
        self._is_resumed = False
        self._chosen: list[int] | None = None  # by set_epoch, before the state was loaded

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_loader": None, "_dealt": None}

    def __len__(self) -> int:
        """Return how many batches an epoch has, of all workers together."""
        return self._length

    def __iter__(self) -> Iterator[Any]:
        loader, info = self._current(), get_worker_info()
        if info is None:
            return self._of_one_process(loader)
        if not self._is_resumed:
            loader.go_to(self._shared.begin(token_of(info), info.id))  # before torchdata asks for the state
            return self._of_worker(loader, info)
        reached = self._reached(info)
        if reached is not None and not reached[0][1]:
            # the last worker to be given its state. Where that was taken behind a loop, torchdata leaves this epoch, perhaps
            # before any worker was asked for a batch, and begins it again
            self._shared.put(reached[0], token_of(info))
        return self._of_worker(loader, info)

    def _of_one_process(self, loader: Loader) -> Iterator[Any]:
        shared = self._shared
        if shared.is_begun:
            shared.give(shared.next)  # behind what workers have done
        if shared.num_given != self._num_given and not self._is_resumed:
            loader.go_to(shared.given)
        self._num_given, self._is_resumed = shared.num_given, False
        shared.put(loader.after_this_epoch())
        yield from loader
        shared.put(loader.position())

    def _of_worker(self, loader: Loader, info: Any) -> Iterator[Any]:
        shared, token, first = self._shared, token_of(info), 0
        if self._is_resumed:
            self._is_resumed = False
            reached = self._reached(info)
            if reached is None:
                raise RuntimeError("some workers were given a state and others none")
            loader.go_to(shared.begin(token, info.id, reached[0]))
            first = reached[1]
            if_left = loader.after_this_epoch() if loader.is_in_epoch else loader.position()
        else:
            if_left = loader.after_this_epoch()
        loader.deal((info.id - first) % info.num_workers, info.num_workers)
        shared.put(if_left, token)
        yield from loader
        shared.end(token, info.id, info.num_workers, loader.position())

    def _reached(self, info: Any) -> tuple[list[int], int] | None:
        """Return where all workers together were, and which of them has the next step; None if not all were given a state.

        Raises:
            ValueError: A step was not given, but a later one was: there is no single step to resume from.
        """
        positions = self._shared.resumed(token_of(info), info.num_workers)
        if positions is None:
            return None
        at = max(positions, key=lambda position: (position[0], position[2]))
        first = (positions.index(at) + 1) % info.num_workers if positions.count(at) == 1 else 0
        if self._chosen is not None and self._chosen[0] != at[0]:
            return self._chosen, first
        steps = sorted(position[2] for position in positions)
        # each worker is after its last step; workers that gave none are where the iteration began
        gaps = dropwhile(lambda gap: gap == 0, (after - before for before, after in pairwise(steps)))
        if any(gap != 1 for gap in gaps):
            raise ValueError(
                f"the workers of the state are at steps {', '.join(map(str, steps))}, expected steps that follow each other: "
                "batches in between were not given, and would be lost. A DataLoader with a batch_size takes several steps "
                "from one worker before the next; use batch_size=None, and the batch size of IterableCache"
            )
        return at, first

    def set_epoch(self, epoch: int) -> None:
        """Let the next iteration be that epoch; after `load_state_dict` with that one, nothing changes."""
        loader = self._current()
        if self._is_resumed and epoch == loader.epoch:
            return
        if self._shared.is_begun:
            loader.go_to(self._shared.next)
        loader.set_epoch(epoch)
        self._is_resumed = False
        self._shared.give(loader.position())

    def state_dict(self) -> dict[str, Any]:
        """Return where this process stands.

        Raises:
            RuntimeError: Workers have the batches, and this is not one: their loader has the state.
        """
        if get_worker_info() is None and self._shared.is_begun:
            raise RuntimeError("the workers have the state: StatefulDataLoader's state_dict collects it")
        return self._current().state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was taken; see `Loader.load_state_dict`."""
        loader, shared, info = self._current(), self._shared, get_worker_info()
        loader.load_state_dict(state)
        self._state, self._is_resumed = state, True
        if info is not None:
            is_chosen = shared.resume(token_of(info), info.id, loader.position(), self._num_given)
            self._chosen = shared.given if is_chosen else None
            return
        if not shared.is_begun and shared.num_given != self._num_given and shared.given[0] != loader.epoch:
            loader.go_to(shared.given)
        shared.give(loader.position())
        self._num_given = shared.num_given

    def _current(self) -> Loader:
        """Return this process's loader."""
        info = get_worker_info()
        if self._dealt is not None:
            return self._dealt
        if self._loader is None:
            self._loader = Loader(**self._options)
            if self._state is not None:
                self._loader.load_state_dict(self._state)  # its weights, too
        if info is None:
            return self._loader
        self._dealt, self._is_resumed = self._loader.for_worker(), False
        if self._setup is not None:
            rank, world_size = self._options["rank"], self._options["world_size"]
            seed = (self._options.get("seed", 0) * world_size + rank) * info.num_workers + info.id
            self._setup(WorkerSetup(rank, world_size, info.id, info.num_workers, seed, self))
        return self._dealt
