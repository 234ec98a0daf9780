"""Load each sample once, however many threads and processes want it."""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, overload

import numpy as np

from wds_tensorcache.arguments import user_level
from wds_tensorcache.codec.header import Layout, parse_header
from wds_tensorcache.codec.reference import MemorySource
from wds_tensorcache.codec.sample import check_binding, decode_body, decode_members, encode_views, match_body
from wds_tensorcache.codec.skeleton.template import Template
from wds_tensorcache.codec.skeleton.types import Allowed
from wds_tensorcache.errors import EncodeError, FormatError
from wds_tensorcache.sharing.folder import SharedFolder
from wds_tensorcache.sharing.segments import Full, Members, Segments, SegmentSource, members_in_memory
from wds_tensorcache.sharing.table import TABLE, Table
from wds_tensorcache.storage.memory_pool import Pool
from wds_tensorcache.storage.range_locks import RangeLocks

Array = np.ndarray[Any, Any]
_MAX_KEPT_NBYTES = 1 << 12  # of the skeletons of samples that are kept
LOCKS = "locks"  # name of the file; byte i is the lock of sample i


@dataclass(frozen=True, slots=True)
class SharedStats:
    """Counts of a SharedDataset.

    Attributes:
        hits: Number of samples that this process took from shared memory.
        misses: Number of samples that this process loaded from the dataset.
        passed_through: Number of misses that this process did not add to the shared memory: there was no room, the sample
            cannot be encoded, or another thread or process was loading it and waiting could have been a deadlock.
        num_samples: Number of samples in shared memory, of all processes.
        nbytes: Bytes of shared memory that these samples take, without the table.
        holders: Process ids of the processes that hold the shared memory, ascending.
    """

    hits: int
    misses: int
    passed_through: int
    num_samples: int
    nbytes: int
    holders: tuple[int, ...]


@dataclass(slots=True, eq=False)
class ParsedSample:
    """An encoded sample whose headers are parsed. If its tensors are large, `Segments` keeps this object for the next hit.

    Attributes:
        skeleton: Bytes of the skeleton.
        body: Offset of the body in the skeleton.
        layout: Layout of the tensors.
        source: Bytes of the `.safetensors` member.
        matched: A template and the list from which it builds the sample; None if no template matches.
        named_layout: The layout with the strings of the references; None until a batch needs it.
    """

    skeleton: bytes
    body: int
    layout: Layout
    source: MemorySource
    matched: tuple[Template, list[Any]] | None
    named_layout: Layout | None = None

    def build(self, allow: Allowed) -> Any:
        """Return the sample, with lazy tensors; its containers are new at each call."""
        if self.matched is None:
            return decode_body(self.skeleton, self.body, self.layout, self.source, True, allow)
        template, made = self.matched
        return template.build(made.copy())


def _parse(members: Members) -> ParsedSample:
    skeleton, source = members
    layout, digest = parse_header(source.member)
    body, _ = check_binding(skeleton, layout.nbytes, digest)
    return ParsedSample(skeleton, body, layout, source, match_body(skeleton, body, layout, source))


@dataclass(slots=True)
class _Loaded:
    """A sample: parsed; or, if it cannot be encoded, as the dataset returned it, with the error."""

    parsed: ParsedSample | None
    sample: Any = None
    error: EncodeError | None = None


class Samples:
    """The samples of a dataset, in shared memory or loaded into it on demand.

    Args:
        dataset: Map-style dataset. `number` is an index in it, from 0 to `len(dataset) - 1`.
        folder: The folder in shared memory, which this object holds until `close`.
        max_nbytes, evicts, pool: As in `Segments`.
        verify: Compare digests at every access.
        allow: Other classes that samples may contain, as `allow_table` returns them.

    Threads/fork: safe everywhere. Threads of one process may lose counts of `hits` and `misses`.
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
        self._thread_local = threading.local()
        self._pid = os.getpid()
        self._table = Table(folder.path_of(TABLE), len(dataset))
        self._segments = Segments(folder.path, self._table, max_nbytes, evicts, pool)
        self._hits = self._misses = self._passed = 0
        self._has_warned = False

    def close(self) -> None:
        """Stop holding the folder once no load is running; drop the maps and the kept samples."""
        self._is_closed = True
        self._segments.close()
        self.folder.leave_if_idle()

    def get(self, number: int) -> Any:
        """Return a sample, with lazy tensors."""
        found = self._find(number)
        return found.build(self._allow) if found is not None else self._decode(self._load(number))

    def get_many(self, numbers: Sequence[int]) -> list[Any]:
        """Return samples, with lazy tensors; first load those that no other thread or process is loading now."""
        return list(map(self._decode, self._load_many(numbers)))

    def get_parsed(self, numbers: Sequence[int]) -> list[ParsedSample]:
        """Return parsed samples; load missing ones in the order of `get_many`.

        Raises:
            EncodeError: A sample cannot be encoded.
        """
        result = []
        for number, loaded in zip(numbers, self._load_many(numbers), strict=True):
            if loaded.error is not None:
                raise loaded.error.at(f"sample {number}")
            assert loaded.parsed is not None
            result.append(loaded.parsed)
        return result

    def build(self, parsed: ParsedSample) -> Any:
        """Return a parsed sample with lazy tensors."""
        return parsed.build(self._allow)

    def present(self) -> Array:
        """Return which samples are in shared memory, bool `[len(dataset)]`."""
        self._enter()
        return self._table.present()

    def stats(self) -> SharedStats:
        """Return counts of this process, and of the memory that all processes share."""
        self._enter()
        return SharedStats(
            self._hits,
            self._misses,
            self._passed,
            int(self._table.present().sum()),
            self._segments.nbytes,
            tuple(self.folder.holders()),
        )

    def _enter(self) -> None:
        """Raise ValueError after `close`. In a forked child, hold the folder for this process, and reset its counts."""
        if self._is_closed:
            raise ValueError(f"{self.folder.path}: this SharedDataset is closed")
        if self._pid != os.getpid():
            self.folder.hold_again()
            self._pid = os.getpid()
            self._hits = self._misses = self._passed = 0

    def peek(self, number: int) -> Any:
        """Return a sample, with lazy tensors, and do not count this as a hit or miss; None if it is not in shared memory."""
        hits = self._hits
        found = self._find(number)
        self._hits = hits
        return None if found is None else found.build(self._allow)

    def _find(self, number: int) -> ParsedSample | None:
        """Return a sample; None if it is not in shared memory."""
        self._enter()
        segments = self._segments
        found: ParsedSample | None = segments.kept(number)
        if found is None:
            members = segments.find(number)
            if members is None:
                return None
            found = _parse(members)
            is_small = len(found.skeleton) <= _MAX_KEPT_NBYTES
            if is_small and found.matched is not None and isinstance(found.source, SegmentSource):
                segments.keep(number, found.source, found)
        if self._verify or (self._doubtful is not None and self._doubtful[number]):
            try:
                decode_members(found.skeleton, found.source.member, True, True, self._allow)
            except FormatError as exc:
                raise exc.at(f"{self.folder.path}, sample {number} (tc.shared_clear frees all samples)") from exc
            if self._doubtful is not None:
                self._doubtful[number] = 0
        self._hits += 1
        return found

    def _decode(self, loaded: _Loaded) -> Any:
        return loaded.sample if loaded.parsed is None else loaded.parsed.build(self._allow)

    def _load_many(self, numbers: Sequence[int]) -> list[_Loaded]:
        """Find samples; load the missing ones, those that no other thread or process is loading first."""
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
        """Load a sample. If another thread or process is loading it now, wait for that one, or return None.

        Raises:
            RecursionError: This thread is loading the same sample already.
        """
        # before `_enter`, so that either this thread sees a `close`, or `close` sees this load
        self.folder.loads.append(number)
        try:
            self._enter()
            return self._load_alone(number, wait)
        finally:
            if number in self.folder.loads:  # a child that was forked in this load has cleared them
                self.folder.loads.remove(number)
            if self._is_closed:
                self._segments.close()
                self.folder.leave_if_idle()

    def _load_alone(self, number: int, wait: bool) -> _Loaded | None:
        """Load a sample under its lock; see `_load`."""
        mine = self._thread_local.__dict__.setdefault("numbers", set())  # the samples that this thread is loading
        if number in mine:
            what = f"to load sample {number}, the dataset reads sample {number} itself from the SharedDataset"
            raise RecursionError(f"{what}; remove that cycle")
        # Every load opens the file again, so that its locks exclude other threads, too. An interrupted load releases them.
        locks = RangeLocks(self.folder.path_of(LOCKS))
        try:
            if not locks.lock(number, wait=wait and not mine):
                # Deadlock of two samples that need each other. A thread that loads one never waits for another load.
                return self._load_locked(number, None) if mine else None
            mine.add(number)
            try:
                return self._load_locked(number, locks)
            finally:
                mine.discard(number)
        finally:
            locks.unlock(0, 0)  # closing is not enough while a child that was forked just now has the file open
            locks.close()

    def _load_locked(self, number: int, locks: RangeLocks | None) -> _Loaded:
        """Load a sample whose lock is held in `locks`, and add it to the shared memory; if `locks` is None, do not add it."""
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
                warnings.warn(f"sample {number} of {self.folder.path} is not shared: {exc}", stacklevel=user_level())
            return _Loaded(None, sample, exc)
        members = None
        try:
            if locks is None:
                raise Full("another thread or process is adding the sample")
            self._segments.append(number, encoded, locks)
        except Full:
            self._passed += 1
        else:
            members = self._segments.find(number)  # None if another process has evicted it already
        return _Loaded(_parse(members_in_memory(encoded) if members is None else members))
