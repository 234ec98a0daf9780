"""Load each sample once, however many threads and processes want it."""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, overload

from wds_tensorcache.codec.header import parse_header
from wds_tensorcache.codec.layout import Layout
from wds_tensorcache.codec.reference import MemorySource
from wds_tensorcache.codec.sample import check_binding, decode_body, decode_members, encode_views, match_body
from wds_tensorcache.codec.skeleton.template import Template
from wds_tensorcache.codec.skeleton.types import Allowed
from wds_tensorcache.errors import EncodeError
from wds_tensorcache.sharing.folder import SharedFolder
from wds_tensorcache.sharing.segments import Full, Members, Segments, SegmentSource, members_in_memory
from wds_tensorcache.sharing.table import TABLE, Table
from wds_tensorcache.storage.memory_pool import Pool
from wds_tensorcache.storage.range_locks import RangeLocks

__all__ = ["LOCKS", "Found", "Samples", "SharedStats"]

LOCKS = "locks"  # name of the file; byte i is the lock of sample i


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


@dataclass(slots=True, eq=False)
class Found:
    """An encoded sample, parsed. Objects of samples with large tensors are kept for the next hit.

    Attributes:
        skeleton, body: The skeleton, and the offset of its body.
        layout, source: Layout and bytes of the tensors.
        matched: A template and the list from which it builds the sample; None if no template matches.
        named: The layout with the strings of the references, once it is known.
    """

    skeleton: bytes
    body: int
    layout: Layout
    source: MemorySource
    matched: tuple[Template, list[Any]] | None
    named: Layout | None = None

    def build(self, allow: Allowed) -> Any:
        """Return the sample, with lazy tensors; its containers are new at each call."""
        if self.matched is None:
            return decode_body(self.skeleton, self.body, self.layout, self.source, True, allow)
        template, made = self.matched
        return template.build(made.copy())


def _parse(members: Members) -> Found:
    skeleton, source = members
    layout, digest = parse_header(source.member)
    body, _ = check_binding(skeleton, layout.nbytes, digest)
    return Found(skeleton, body, layout, source, match_body(skeleton, body, layout, source))


@dataclass(slots=True)
class _Loaded:
    """A sample, either encoded or, if it cannot be encoded, as the dataset returned it."""

    found: Found | None
    sample: Any = None
    error: EncodeError | None = None


class Samples:
    """The samples of a dataset, in shared memory or loaded into it on demand.

    Args:
        dataset: The dataset.
        folder: The folder in shared memory.
        max_nbytes, evicts, pool: As in `Segments`.
        verify: Compare digests at every access.
        allow: Other classes that samples may contain, as `allow_table` returns them.
    """

    def __init__(
        self,
        dataset: Any,
        folder: SharedFolder,
        max_nbytes: int | None,
        evicts: bool,
        pool: Pool,
        verify: bool,
        allow: Allowed,
    ) -> None:
        self.dataset, self.folder = dataset, folder
        self._verify, self._allow = verify, allow
        # after a crash of the machine, files on a disk may lack some of their bytes
        self._doubtful = bytearray(b"\1" * len(dataset)) if folder.is_doubtful else None
        self._is_closed = False
        self._of_thread = threading.local()
        self._pid = os.getpid()
        self._table = Table(folder.file(TABLE), len(dataset))
        self._segments = Segments(folder.path, self._table, max_nbytes, evicts, pool)
        self._hits = self._misses = self._passed = 0
        self._has_warned = False

    def close(self) -> None:
        """Stop holding the folder."""
        self._is_closed = True
        self.folder.leave()

    def get(self, number: int) -> Any:
        """Return a sample, with lazy tensors."""
        found = self._find(number)
        return found.build(self._allow) if found is not None else self._decode(self._load(number))

    def get_many(self, numbers: Sequence[int]) -> list[Any]:
        """Return samples; first load those that no other process is loading now."""
        return list(map(self._decode, self._load_many(numbers)))

    def encoded(self, numbers: Sequence[int]) -> list[Found]:
        """Return encoded samples, loading them like `get_many`.

        Raises:
            EncodeError: A sample cannot be encoded.
        """
        result = []
        for number, loaded in zip(numbers, self._load_many(numbers), strict=True):
            if loaded.error is not None:
                raise loaded.error.at(f"sample {number}")
            assert loaded.found is not None
            result.append(loaded.found)
        return result

    def build(self, found: Found) -> Any:
        """Return an encoded sample with lazy tensors."""
        return found.build(self._allow)

    def present(self) -> list[int]:
        """Return the indices of the samples in shared memory."""
        return self._table.present()

    def stats(self) -> SharedStats:
        """Return counts of this process, and of the memory that all processes share."""
        self._enter()
        return SharedStats(
            self._hits,
            self._misses,
            self._passed,
            len(self._table.present()),
            self._segments.nbytes,
            tuple(self.folder.holders()),
        )

    def _enter(self) -> None:
        """Raise ValueError after `close`. In a forked child, hold the folder for it, and begin to count anew."""
        if self._is_closed:
            raise ValueError(f"{self.folder.path}: this SharedDataset is closed")
        if self._pid != os.getpid():
            self.folder.hold_again()
            self._pid = os.getpid()
            self._hits = self._misses = self._passed = 0

    def _find(self, number: int) -> Found | None:
        """Return a sample if it is in shared memory."""
        self._enter()
        segments = self._segments
        found: Found | None = segments.kept(number)
        if found is None:
            members = segments.find(number)
            if members is None:
                return None
            found = _parse(members)
            if found.matched is not None and isinstance(found.source, SegmentSource):
                segments.keep(number, found.source, found)
        if self._verify or (self._doubtful is not None and self._doubtful[number]):
            decode_members(found.skeleton, found.source.member, True, True, self._allow)
            if self._doubtful is not None:
                self._doubtful[number] = 0
        self._hits += 1
        return found

    def _decode(self, loaded: _Loaded) -> Any:
        return loaded.sample if loaded.found is None else loaded.found.build(self._allow)

    def _load_many(self, numbers: Sequence[int]) -> list[_Loaded]:
        found: dict[int, _Loaded | None] = {}
        for number in numbers:
            here = self._find(number)
            found[number] = None if here is None else _Loaded(here)
        missing = [number for number, loaded in found.items() if loaded is None]
        for number in missing:
            found[number] = self._load(number, wait=False)
        for number in missing:
            if found[number] is None:
                found[number] = self._load(number)
        return [loaded for number in numbers if (loaded := found[number]) is not None]

    @overload
    def _load(self, number: int) -> _Loaded: ...
    @overload
    def _load(self, number: int, *, wait: bool) -> _Loaded | None: ...
    def _load(self, number: int, *, wait: bool = True) -> _Loaded | None:
        """Load a sample. If another thread or process is loading it now, wait for that one, or return None."""
        self._enter()
        mine = self._of_thread.__dict__.setdefault("numbers", set())  # the samples that this thread is loading
        if number in mine:
            raise RecursionError(f"to load sample {number}, the dataset needs sample {number} itself")
        # Every load has its own locks, so that they exclude threads, too, and are released whatever interrupts it.
        locks = RangeLocks(self.folder.file(LOCKS))
        try:
            if not locks.lock(number, wait=wait and not mine):
                # Hazard: two samples that need each other. A thread that loads a sample never waits for another one.
                return self._load_locked(number, None) if mine else None
            mine.add(number)
            try:
                return self._load_locked(number, locks)
            finally:
                mine.discard(number)
        finally:
            locks.unlock(0, 0)  # forked children may have the file open, too
            locks.close()

    def _load_locked(self, number: int, locks: RangeLocks | None) -> _Loaded:
        """Load a sample whose lock is held, and add it to the shared memory; without `locks`, do not add it."""
        found = self._find(number)
        if found is not None:
            return _Loaded(found)
        sample = self.dataset[number]
        self._misses += 1
        try:
            encoded = encode_views(sample, self._allow)
        except EncodeError as exc:
            self._passed += 1
            if not self._has_warned:
                self._has_warned = True
                warnings.warn(f"sample {number} of {self.folder.path} is not shared: {exc}", stacklevel=5)
            return _Loaded(None, sample, exc)
        members = None
        try:
            if locks is None:
                raise Full("another thread or process adds the sample")
            self._segments.append(number, encoded, locks)
        except Full:
            self._passed += 1
        else:
            members = self._segments.find(number)  # None if it was removed just now
        return _Loaded(_parse(members_in_memory(encoded) if members is None else members))
