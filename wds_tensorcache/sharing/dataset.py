"""`SharedDataset`: any dataset, each sample loaded once and held once for all processes of a machine."""

from __future__ import annotations

import os
import threading
import warnings
import weakref
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch.utils.data import Dataset

from wds_tensorcache.codec.header import parse_header
from wds_tensorcache.codec.sample import check_binding, decode_body, decode_members, encode_views
from wds_tensorcache.codec.skeleton.types import allow_table
from wds_tensorcache.errors import EncodeError
from wds_tensorcache.sharing.folder import SharedFolder, base_folder, open_folder, write_file
from wds_tensorcache.sharing.segments import Full, Segments
from wds_tensorcache.sharing.table import TABLE, Table, create_table
from wds_tensorcache.storage.memory_pool import Pool
from wds_tensorcache.storage.range_locks import RangeLocks

__all__ = ["SharedDataset", "SharedStats"]

_LOCKS = "locks"


@dataclass(frozen=True, slots=True)
class SharedStats:
    """Counts of a SharedDataset.

    Attributes:
        hits, misses: Number of samples that this process took from shared memory, and that it loaded from the dataset.
        passed_through: Number of misses that were not added, because there was no room or they cannot be encoded.
        num_samples, nbytes: Number of samples that all processes share, and the bytes they take.
        holders: Process ids of the processes that hold the samples.
    """

    hits: int
    misses: int
    passed_through: int
    num_samples: int
    nbytes: int
    holders: tuple[int, ...]


class _Opened:
    """What one process has opened: a forked child opens its own, since the parent's locks would not exclude it."""

    def __init__(self, folder: SharedFolder, max_nbytes: int | None, evicts: bool) -> None:
        self.pid = os.getpid()
        self.locks = RangeLocks(folder.file(_LOCKS))
        self.table = Table(folder.file(TABLE))
        self.segments = Segments(folder.path, self.table, self.locks, max_nbytes, evicts, Pool(1 << 28))
        self.loading: dict[int, threading.Lock] = {}  # by index, the lock of the thread that loads the sample
        self.guard = threading.Lock()


class SharedDataset(Dataset[Any]):
    """A map-style dataset whose samples are loaded once, and then shared by all processes of this machine.

    The first access to a sample, by any process, loads it from `dataset` and encodes it into shared memory. Every later access
    returns the sample with lazy tensors, without a lock and without a copy. The memory is freed when the last process that
    holds it is gone, even if it was killed.

    Args:
        dataset: A map-style dataset: it has `len()`, and `dataset[i]` returns a sample for each `i` in `range(len(dataset))`.
        name: Name of the shared memory. Processes that pass the same name share it.
        max_nbytes: Maximum bytes of shared memory; None for no limit.
        directory: Folder for the files; by default shared memory, `/dev/shm`. A folder on a disk of this machine also works.
        eviction: What happens when there is no room: None returns further samples without adding them; `"lru"` removes
            those that were not used for the longest time. Tensors that are in use keep their memory.
        persistent: Keep the files after the last process is gone, for a later run.
        verify: Compare the digests of a sample with its bytes at every access.
        fingerprint: A text that describes the dataset, for example its version and transforms. Together with the dataset's type
            and length, it must be equal in all processes that share the memory.
        allow: Other classes that samples may contain.

    Raises:
        InvalidKeyError: `name` is not possible as a file name.
        StaleCacheError: The name is in use for a dataset with another fingerprint; the message contains both.
        PermissionError: Someone else made the files, or could change them.
        NotImplementedError: The system is not Linux.
        TypeError: The dataset has no length.

    Threads/fork/pickle: safe everywhere; a copy in another process shares the same memory.

    Memory: bytes live in the files of `directory`. `.load()` returns a private copy. `.load(copy=False)` returns a view: writing
        into it copies the pages for this process alone.
    """

    def __init__(
        self,
        dataset: Any,
        name: str,
        *,
        max_nbytes: int | None = None,
        directory: str | os.PathLike[str] | None = None,
        eviction: Literal["lru"] | None = None,
        persistent: bool = False,
        verify: bool = False,
        fingerprint: str = "",
        allow: Iterable[type] = (),
    ) -> None:
        if eviction not in (None, "lru"):
            raise ValueError(f"eviction={eviction!r}, expected None or 'lru'")
        if max_nbytes is not None and max_nbytes < 1:
            raise ValueError(f"max_nbytes={max_nbytes}, expected at least 1")
        if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
            raise TypeError(f"expected a map-style dataset with len() and dataset[i], got {type(dataset).__name__}")
        self.dataset = dataset
        self.name = name
        self._options = {
            "max_nbytes": max_nbytes,
            "directory": directory,
            "eviction": eviction,
            "persistent": persistent,
            "verify": verify,
            "fingerprint": fingerprint,
            "allow": tuple(allow),
        }
        self._length = len(dataset)
        self._max_nbytes, self._evicts, self._verify = max_nbytes, eviction == "lru", verify
        self._allow = allow_table(self._options["allow"])
        kind = type(dataset)
        described = {"type": f"{kind.__module__}.{kind.__qualname__}", "length": self._length, "fingerprint": fingerprint}
        self._folder = open_folder(base_folder(directory), name, described, persistent, self._create)
        self._unchecked: set[int] | None = set(range(self._length)) if self._folder.was_left else None
        self._opened = _Opened(self._folder, max_nbytes, self._evicts)
        self._hits = self._misses = self._passed = 0
        self._finalizer = weakref.finalize(self, self._folder.leave)

    def __reduce__(self) -> Any:
        return _reopen, (self.dataset, self.name, self._options)

    def _create(self, folder: str) -> None:
        write_file(os.path.join(folder, _LOCKS))
        create_table(os.path.join(folder, TABLE), self._length)

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Any:
        """Return the sample at `index`.

        Raises:
            IndexError: The index is out of range.
            OSError: There is no memory for the sample.
        """
        number = range(self._length)[index]
        found = self._find(number)
        return self._load(number) if found is None else found[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """Return the samples at `indices`; first those that no other process is loading now.

        The order lets processes that need the same samples load different ones.
        """
        numbers = [range(self._length)[index] for index in indices]
        found = {number: self._find(number) for number in numbers}
        later = []
        for number in [number for number, sample in found.items() if sample is None]:
            loaded = self._try_load(number)
            if loaded is None:
                later.append(number)
            found[number] = loaded
        for number in later:
            found[number] = (self._load(number),)
        result = []
        for number in numbers:
            sample = found[number]
            assert sample is not None
            result.append(sample[0])
        return result

    def __iter__(self) -> Iterator[Any]:
        return (self[index] for index in range(self._length))

    def stats(self) -> SharedStats:
        """Return counts of this process, and of the memory that all processes share."""
        opened = self._here()
        return SharedStats(
            self._hits,
            self._misses,
            self._passed,
            opened.table.count(),
            opened.segments.nbytes,
            tuple(self._folder.holders()),
        )

    def close(self) -> None:
        """Stop holding the shared memory; without another holder it is freed, unless tensors or `persistent` keep it."""
        self._finalizer()

    def __enter__(self) -> SharedDataset:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _here(self) -> _Opened:
        """Return what this process has opened; a forked child opens its own."""
        opened = self._opened
        if opened.pid != os.getpid():
            self._folder.hold_again()
            opened = self._opened = _Opened(self._folder, self._max_nbytes, self._evicts)
            self._hits = self._misses = self._passed = 0
        return opened

    def _find(self, number: int) -> tuple[Any] | None:
        """Return the sample, in a tuple, if it is in shared memory."""
        found = self._opened.segments.find(number)
        if found is None:
            return None
        skeleton, source = found
        if self._verify or (self._unchecked is not None and number in self._unchecked):
            sample = decode_members(skeleton, source.member, True, True, self._allow)
            if self._unchecked is not None:
                self._unchecked.discard(number)
        layout, digest = parse_header(source.member)
        sample = decode_body(skeleton, check_binding(skeleton, layout.nbytes, digest)[0], layout, source, True, self._allow)
        self._hits += 1
        return (sample,)

    def _try_load(self, number: int) -> tuple[Any] | None:
        """Load a sample, unless another thread or process is loading it now; then return None."""
        opened = self._here()
        with opened.guard:
            mine = opened.loading.setdefault(number, threading.Lock())
        if not mine.acquire(blocking=False):
            return None
        try:
            if not opened.locks.lock(number):
                return None
            try:
                return self._load_locked(opened, number)
            finally:
                opened.locks.unlock(number)
        finally:
            mine.release()

    def _load(self, number: int) -> Any:
        """Load a sample, or wait until another thread or process has loaded it."""
        opened = self._here()
        with opened.guard:
            mine = opened.loading.setdefault(number, threading.Lock())
        with mine, opened.locks.held(number):
            return self._load_locked(opened, number)[0]

    def _load_locked(self, opened: _Opened, number: int) -> tuple[Any]:
        found = self._find(number)
        if found is not None:
            return found
        sample = self.dataset[number]
        self._misses += 1
        try:
            opened.segments.append(number, encode_views(sample, self._allow))
        except (EncodeError, Full) as exc:
            self._passed += 1
            if isinstance(exc, EncodeError) and not getattr(self, "_has_warned", False):
                self._has_warned = True
                warnings.warn(f"{self.name}: samples are not shared, the first is {number}: {exc}", stacklevel=4)
            return (sample,)
        found = self._find(number)
        self._hits -= found is not None
        return (sample,) if found is None else found


def _reopen(dataset: Any, name: str, options: dict[str, Any]) -> SharedDataset:
    return SharedDataset(dataset, name, **options)
