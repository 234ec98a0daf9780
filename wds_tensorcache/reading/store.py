"""The state that a cache shares with its views."""

from __future__ import annotations

import contextlib
import weakref
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from wds_tensorcache.codec.header import Form
from wds_tensorcache.codec.skeleton.template import Template
from wds_tensorcache.codec.tree import further_names
from wds_tensorcache.errors import FormatError
from wds_tensorcache.shards.shard import Shard
from wds_tensorcache.storage.files import Files
from wds_tensorcache.storage.memory_pool import Pool
from wds_tensorcache.storage.threads import Threads, per_process

if TYPE_CHECKING:
    from wds_tensorcache.shards.key_table import KeyTable
    from wds_tensorcache.storage.node_cache.block_file import BlockFile

Array = np.ndarray[Any, Any]
_MAX_VALUES_NBYTES = 1 << 26  # of the kept values of a cache; decoding them again would take 3 us per sample
_VALUES_NBYTES = 150  # of a sample's values in memory, beyond the length of its skeleton
_NO_VALUES: Mapping[int, tuple[Any, ...]] = {}


class KeptValues:
    """The plain values of samples, kept in bounded memory after first use.

    Threads/fork: any thread; a forked child has a copy.
    """

    def __init__(self) -> None:
        self._values: dict[tuple[int, Template], dict[int, tuple[Any, ...]]] = {}
        self._left_nbytes = _MAX_VALUES_NBYTES

    def of(self, number: int, template: Template) -> Mapping[int, tuple[Any, ...]]:
        """Return the kept values of a shard's samples with `template`, by row."""
        return self._values.get((number, template), _NO_VALUES)

    def keep(self, number: int, row: int, template: Template, values: Sequence[Any], nbytes: int) -> None:
        """Keep a sample's values if there is room. Its skeleton has `nbytes` bytes."""
        if self._left_nbytes > 0:
            self._left_nbytes -= nbytes + _VALUES_NBYTES
            self._values.setdefault((number, template), {})[row] = tuple(values)  # garbage collections skip them


class Store:
    """The samples of several shards. A sample's `position` is its index among the samples of all shards.

    Threads/fork/pickle: safe everywhere. A forked child starts new threads; a copy in another process opens the files
        again.
    """

    def __init__(
        self,
        shards: Sequence[Shard],
        files: Files,
        pool: Pool,
        num_threads: int,
        fingerprint: Mapping[str, Any],
        left_out: str | None = None,
    ) -> None:
        self.shards = list(shards)
        self.files = files
        self.pool = pool
        self.num_threads = num_threads
        self.fingerprint = fingerprint
        self.left_out = left_out  # message about tars that are in the folders, but not in the cache
        self.starts = np.concatenate(
            [np.zeros(1, np.int64), np.cumsum([len(shard) for shard in shards], dtype=np.int64)]
        )
        self._starts = self.starts.tolist()
        self.number_dtype = np.min_scalar_type(len(self.shards))
        # a mask over all shards, True for remote shards; and the numbers of remote shards whose indexes are not loaded
        self.are_remote = np.array([shard.is_remote for shard in self.shards], np.bool_)
        self.has_remote = bool(self.are_remote.any())
        self._unloaded = {number for number, shard in enumerate(self.shards) if shard.is_remote and not shard.is_loaded}
        # local files of remote shards that contain all of their samples, by shard number
        self.whole_copies: dict[int, weakref.ref[BlockFile]] = {}
        self.values = KeptValues()
        self.schema: Mapping[str, Any] | None = None  # of all samples; see `reading.schema.whole_schema`
        self._examined: set[int] = set()  # numbers of shards that `find_names` has examined
        self._has_names: dict[Form, bool] = {}
        self._table: KeyTable | None = None
        # returns the threads that read alongside the caller's thread; None if `num_threads` is 1
        self.executor = _threads(num_threads)

    def __len__(self) -> int:
        return int(self._starts[-1])

    def __reduce__(self) -> Any:
        return Store, (self.shards, self.files, self.pool, self.num_threads, self.fingerprint, self.left_out)

    def single_threaded(self) -> Store:
        """Return a store with one thread that shares files and memory."""
        store = Store(self.shards, self.files, self.pool, 1, self.fingerprint, self.left_out)
        store.schema, store.whole_copies, store.values = self.schema, self.whole_copies, self.values
        return store

    def load_indexes(self, numbers: Iterable[int] | None = None) -> None:
        """Load the indexes of remote shards together, by default of all."""
        if self._unloaded:
            wanted = sorted(self._unloaded.intersection(self._unloaded if numbers is None else numbers))
            load_indexes([self.shards[number] for number in wanted])
            self._unloaded.difference_update(wanted)

    def find_names(self, numbers: Iterable[int] | None = None) -> bool:
        """Add names that old indexes lack, and return whether there were any.

        Shards with such names get new indexes. By default, all shards are examined, each only once. Cost: one skeleton of each
        form; if it has additional names, all skeletons of the shard.
        """
        has_new_names = False
        for number in range(len(self.shards)) if numbers is None else numbers:
            if number in self._examined:
                continue
            self._examined.add(number)
            shard = self.shards[number]
            for form, row in shard.forms() if shard.index.layouts.further is None else ():
                if form not in self._has_names:
                    with contextlib.suppress(FormatError):  # reading the sample raises it again
                        self._has_names[form] = bool(further_names(shard.sample(row)))
                if self._has_names.get(form):
                    self.shards[number] = shard.with_names()
                    self.schema, has_new_names = None, True
                    break
        return has_new_names

    def locate(self, position: int) -> tuple[Shard, int]:
        """Return the shard and row of a sample. A row is an index among the shard's samples with this cache."""
        if len(self.shards) == 1:
            return self.shards[0], position
        number = self.shard_number(position)
        return self.shards[number], position - self._starts[number]

    def shard_number(self, position: int) -> int:
        return bisect_right(self._starts, position) - 1

    def shard_numbers(self, positions: Array) -> Array:
        """Return the shard number of each position, in the narrowest dtype."""
        numbers: Array = np.searchsorted(self.starts, positions, "right").astype(self.number_dtype)
        return numbers - np.ones((), self.number_dtype)

    def key(self, position: int) -> str:
        shard, row = self.locate(position)
        return shard.key(row)

    def find(self, key: str) -> list[int]:
        """Return the positions of the samples with this key, ascending. Only a key in several shards has more than one."""
        if self._table is None:
            from wds_tensorcache.shards.key_table import KeyTable

            self.load_indexes()
            self._table = KeyTable((shard.index.keys, shard.columns.rows) for shard in self.shards if len(shard))
        return self._table.find(key)

    def all_keys(self) -> tuple[Array, Array] | None:
        """Return the bytes and lengths of all keys. Return None without shards, or if samples lack the cache."""
        self.load_indexes()
        if not self.shards or any(shard.columns.rows is not None for shard in self.shards):
            return None
        texts, lengths = zip(
            *((shard.index.keys.text, shard.index.keys.lengths()) for shard in self.shards), strict=True
        )
        return np.concatenate(texts), np.concatenate(lengths)

    def close(self) -> None:
        """Close files and threads, and return idle memory to the system."""
        threads, self.executor = self.executor, _threads(self.num_threads)
        if (executor := threads()) is not None:
            executor.shutdown()
        self.files.close()
        self.pool.close()


def load_indexes(shards: Iterable[Shard]) -> None:
    """Load the indexes of remote shards together. Local shards load theirs on first use."""
    waiting = [shard for shard in shards if shard.is_remote and not shard.is_loaded]
    if len(waiting) > 1:
        from wds_tensorcache.storage.remote.fetch import run_all

        # A scan waits for requests on other threads of the pool. If all threads of the pool ran scans, no scan would end.
        run_all([partial(shard.load, may_scan=False) for shard in waiting])
    for shard in waiting:
        shard.load()


def _threads(num_threads: int) -> Callable[[], Threads | None]:
    return per_process(lambda: Threads(num_threads - 1, "tensorcache") if num_threads > 1 else None)
