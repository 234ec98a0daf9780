"""A loader as a dataset for torch's `DataLoader` and torchdata's `StatefulDataLoader`, with any number of workers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch.utils.data import IterableDataset, get_worker_info

from wds_tensorcache.loading.loader import Loader
from wds_tensorcache.loading.ranks import find_rank
from wds_tensorcache.loading.shared import SharedPosition

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
    order whatever their number. Threads in one process (`Loader` itself) are faster; this is for pipelines that are built
    on workers, and for work in Python on each batch.

    `state_dict` and `load_state_dict` are for `torchdata.stateful_dataloader.StatefulDataLoader`, which calls them in each
    worker and so needs as many of these as before.

    Args:
        cache, batch_size: As of `Loader`.
        setup: Called in each worker, with a `WorkerSetup`, before its first batch; for libraries that need setting up.
        options: Others of `Loader`. Its threads read in the main process only: workers are read ahead by torch.

    Threads/fork/pickle: for fork and spawn; ranks are those of the process that made it. An epoch that workers end counts, also
        where they live for one epoch; `set_epoch` says which one is next after one that was left.
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
        self._loader: Loader | None = None
        loader = self._make()
        self._length = len(loader)
        self._shared = SharedPosition(loader.position())
        self._num_given = 0
        self._began: list[int] = []

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_loader": None}

    def __len__(self) -> int:
        """Return how many batches an epoch has, of all workers together."""
        return self._length

    def __iter__(self) -> Iterator[Any]:
        is_new = self._loader is None
        loader, shared, info = self._current(), self._shared, get_worker_info()
        if not loader.is_resumed:
            if is_new and info is not None:
                loader.go_to(shared.begin(info.seed - info.id, info.id))  # the same number in all workers of an epoch
            elif shared.num_given != self._num_given:
                loader.go_to(shared.given)
            elif loader.is_in_epoch:  # it was left, by each worker somewhere else
                loader.go_to(self._began)
                loader.set_epoch(self._began[0] + 1)
        self._began = loader.position()
        self._num_given = shared.num_given
        yield from loader
        shared.end(loader.position())

    def set_epoch(self, epoch: int) -> None:
        """Let the next iteration be that epoch."""
        loader = self._make()
        loader.go_to(self._shared.next)
        loader.set_epoch(epoch)
        self._shared.give(loader.position())

    def state_dict(self) -> dict[str, Any]:
        """Return where this worker stands."""
        return self._current().state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was taken; see `Loader.load_state_dict`."""
        self._current().load_state_dict(state)

    def _make(self) -> Loader:
        info = get_worker_info()
        return Loader(**(self._options | ({} if info is None else {"threads": 0, "prefetch": 0})))

    def _current(self) -> Loader:
        """Return this process's loader."""
        if self._loader is None:
            info = get_worker_info()
            worker, num_workers = (0, 0) if info is None else (info.id, info.num_workers)
            self._loader = self._make()
            self._loader.stride = worker, max(1, num_workers)
            if self._setup is not None:
                rank, world_size = self._options["rank"], self._options["world_size"]
                seed = (self._options.get("seed", 0) * world_size + rank) * max(1, num_workers) + worker
                self._setup(WorkerSetup(rank, world_size, worker, num_workers, seed, self))
        return self._loader
