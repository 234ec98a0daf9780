"""Samples that are loaded once for all threads and processes."""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from wds_tensorcache.arguments import user_level
from wds_tensorcache.codec.header import Layout, parse_header
from wds_tensorcache.codec.reference import MemorySource
from wds_tensorcache.codec.sample import check_binding, decode_body, decode_members, encode_views, match_body
from wds_tensorcache.codec.skeleton.template import Template
from wds_tensorcache.codec.skeleton.types import Allowed
from wds_tensorcache.errors import EncodeError, FormatError
from wds_tensorcache.sharing.folder import LOCKS, SharedFolder, folder_holders
from wds_tensorcache.sharing.segments import Full, Members, Segments, SegmentSource
from wds_tensorcache.sharing.table import TABLE, Table
from wds_tensorcache.storage.locks import RangeLocks
from wds_tensorcache.storage.memory_pool import Pool

Array = np.ndarray[Any, Any]
# Parsed samples with large tensors and short skeletons are kept for the next hit; each takes up to tens of KB.
_MAX_KEPT = 1 << 14
_MAX_KEPT_NBYTES = 1 << 12  # of their skeletons


@dataclass(frozen=True, slots=True)
class SharedStats:
    """Counts of a SharedDataset.

    Attributes:
        hits: Number of samples that this process took from shared memory.
        misses: Number of samples that this process loaded from the dataset.
        passed_through: Number of misses that this process did not add to the shared memory. There was no room, or the sample
            cannot be encoded. Or another thread or process was loading the sample, and waiting for it could have caused a
            deadlock.
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
    """An encoded sample whose headers are parsed.

    Attributes:
        body: Offset of the body in the skeleton.
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
        """Return the sample, with lazy tensors and new containers."""
        if self.matched is None:
            return decode_body(self.skeleton, self.body, self.layout, self.source, True, allow)
        template, values = self.matched
        return template.build(values.copy())


def _parse(members: Members) -> ParsedSample:
    skeleton, source = members
    layout, digest = parse_header(source.member)
    body, _ = check_binding(skeleton, layout.nbytes, digest)
    return ParsedSample(skeleton, body, layout, source, match_body(skeleton, body, layout, source))


@dataclass(slots=True)
class _Unencodable:
    """A sample of the dataset that cannot be encoded, and the error."""

    sample: Any
    error: EncodeError

    def build(self, allow: Allowed) -> Any:
        return self.sample


class Samples:
    """The samples of a dataset, in shared memory or loaded on demand. This object holds the folder until `close`.

    Threads/fork: safe everywhere. Threads of one process may lose counts of `hits` and `misses`.
    """

    def __init__(
        self, dataset: Any, folder: SharedFolder, max_nbytes: int | None, pool: Pool, verify: bool, allow: Allowed
    ) -> None:
        self.dataset, self.folder, self.allow = dataset, folder, allow
        self._verify = verify
        # after a crash of the machine, files on a disk may lack some of their bytes
        self._doubtful = bytearray(b"\1" * len(dataset)) if folder.is_doubtful else None
        self._is_closed = False
        self._thread_local = threading.local()
        self._pid = os.getpid()
        self._table = Table(folder.path_of(TABLE), len(dataset))
        self._segments = Segments(folder.path, self._table, max_nbytes, pool)
        self._kept: dict[int, ParsedSample] = {}
        self._hits = self._misses = self._passed = 0
        self._has_warned = False

    def close(self) -> None:
        """Drop maps and kept samples. Stop holding the folder once no load is running."""
        self._is_closed = True
        self._kept.clear()
        self._segments.close()
        # Otherwise a running load could add a file while the folder is being removed, so that the folder would remain.
        if not self.folder.loads:
            self.folder.leave()

    def get(self, index: int) -> Any:
        """Return a sample with lazy tensors. If it cannot be encoded, return it as the dataset does."""
        parsed = self._find(index)
        return self.get_many([index])[0] if parsed is None else parsed.build(self.allow)

    def get_many(self, indices: Sequence[int]) -> list[Any]:
        """Return samples as `get` does. This waits last for samples that another thread or process is loading."""
        return [loaded.build(self.allow) for loaded in self._load_many(indices)]

    def get_parsed(self, indices: Sequence[int]) -> list[ParsedSample]:
        """Return parsed samples; load missing samples in the order of `get_many`.

        Raises:
            EncodeError: A sample cannot be encoded.
        """
        parsed = []
        for index, loaded in zip(indices, self._load_many(indices), strict=True):
            if isinstance(loaded, _Unencodable):
                raise loaded.error.at(f"sample {index}")
            parsed.append(loaded)
        return parsed

    def peek(self, index: int) -> Any:
        """Return a sample with lazy tensors, or None if it is absent. This counts no hit."""
        parsed = self._find(index)
        if parsed is None:
            return None
        self._hits -= 1
        return parsed.build(self.allow)

    def find_present(self) -> Array:
        """Return the mask of the samples in shared memory, bool `[len(dataset)]`."""
        self._enter()
        return self._table.find_present()

    def stats(self) -> SharedStats:
        self._enter()
        return SharedStats(
            self._hits,
            self._misses,
            self._passed,
            int(self._table.find_present().sum()),
            self._segments.nbytes,
            tuple(folder_holders(self.folder.path)),
        )

    def _enter(self) -> None:
        """Raise ValueError after `close`. In a forked child, hold the folder for this process, and reset its counts."""
        if self._is_closed:
            raise ValueError(f"{self.folder.path}: this SharedDataset is closed")
        if self._pid != os.getpid():
            self.folder.hold_again()
            self._pid = os.getpid()
            self._hits = self._misses = self._passed = 0

    def _find(self, index: int) -> ParsedSample | None:
        """Return a sample and count a hit, or return None."""
        self._enter()
        parsed = self._kept.get(index)
        if parsed is None:
            members = self._segments.find(index)
            if members is None:
                return None
            parsed = _parse(members)
            is_small = len(parsed.skeleton) <= _MAX_KEPT_NBYTES and len(self._kept) < _MAX_KEPT
            if is_small and parsed.matched is not None and isinstance(parsed.source, SegmentSource):
                self._kept[index] = parsed
        if self._verify or (self._doubtful is not None and self._doubtful[index]):
            try:
                decode_members(parsed.skeleton, parsed.source.member, True, True, self.allow)
            except FormatError as exc:
                raise exc.at(f"{self.folder.path}, sample {index} (tc.shared_clear frees all samples)") from exc
            if self._doubtful is not None:
                self._doubtful[index] = 0
        self._hits += 1
        return parsed

    def _load_many(self, indices: Sequence[int]) -> list[ParsedSample | _Unencodable]:
        """Find samples; load missing samples, and wait for other loads last."""
        samples: dict[int, ParsedSample | _Unencodable | None] = {index: self._find(index) for index in indices}
        missing = [index for index, loaded in samples.items() if loaded is None]
        for wait in (False, True):
            for index in missing:
                samples[index] = samples[index] or self._load(index, wait)
        return [loaded for index in indices if (loaded := samples[index]) is not None]

    def _load(self, index: int, wait: bool) -> ParsedSample | _Unencodable | None:
        """Load a sample; without `wait`, return None if it is being loaded."""
        # before `_enter`, so that either this thread sees a `close`, or `close` sees this load
        self.folder.loads.append(index)
        try:
            self._enter()
            return self._load_alone(index, wait)
        finally:
            if index in self.folder.loads:  # a child that was forked in this load has cleared them
                self.folder.loads.remove(index)
            if self._is_closed:
                self.close()

    def _load_alone(self, index: int, wait: bool) -> ParsedSample | _Unencodable | None:
        """Load a sample under its lock; see `_load`."""
        loading = self._thread_local.__dict__.setdefault("indices", set())  # the samples that this thread is loading
        if index in loading:
            problem = f"to load sample {index}, the dataset reads sample {index} itself from the SharedDataset"
            raise RecursionError(f"{problem}; remove that cycle")
        # Every load opens the file again, so that its locks exclude other threads, too. An interrupted load releases them.
        locks = RangeLocks(self.folder.path_of(LOCKS))
        try:
            if not locks.lock(index, wait=wait and not loading):
                # Deadlock of two samples that need each other. A thread that loads a sample never waits for another load.
                return self._load_locked(index, None) if loading else None
            loading.add(index)
            try:
                return self._load_locked(index, locks)
            finally:
                loading.discard(index)
        finally:
            locks.unlock(0, 0)  # closing is not enough while a child that was forked just now has the file open
            locks.close()

    def _load_locked(self, index: int, locks: RangeLocks | None) -> ParsedSample | _Unencodable:
        """Load a sample; add it to the memory if `locks` is given."""
        parsed = self._find(index)
        if parsed is not None:
            return parsed
        sample = self.dataset[index]
        self._misses += 1
        try:
            encoded = encode_views(sample, self.allow)
        except EncodeError as exc:
            self._passed += 1
            if not self._has_warned:
                self._has_warned = True
                warnings.warn(f"sample {index} of {self.folder.path} is not shared: {exc}", stacklevel=user_level())
            return _Unencodable(sample, exc)
        try:
            if locks is None:
                raise Full("another thread or process is adding the sample")
            self._segments.append(index, encoded, locks)
        except Full:
            self._passed += 1
        # from the memory of this process if the sample was not added
        members = self._segments.find(index) or (
            encoded.skeleton,
            MemorySource(b"".join((encoded.header, *encoded.buffers))),
        )
        return _parse(members)
