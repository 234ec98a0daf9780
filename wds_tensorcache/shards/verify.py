"""Check every byte of a shard: its tar headers, both digests of each sample, every skeleton."""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TypeVar

import xxhash

from wds_tensorcache.codec.header import DIGITS_END, MAX_HEADER_NBYTES, Layout, is_bound, parse_header
from wds_tensorcache.codec.preamble import had_preamble, parse_preamble
from wds_tensorcache.codec.reference import MemorySource
from wds_tensorcache.codec.sample import check_binding, decode_body, list_references
from wds_tensorcache.errors import FormatError, TensorCacheError, UnsafeSkeletonError
from wds_tensorcache.shards.footer import declared_end
from wds_tensorcache.shards.index import ShardIndex
from wds_tensorcache.shards.indexing import CacheEntry, IndexBuilder, split_suffix
from wds_tensorcache.shards.names import SKELETON, TENSORS, split_member
from wds_tensorcache.shards.report import Fault
from wds_tensorcache.shards.storage import Identity, ShardFile
from wds_tensorcache.shards.walk import Break, End, Member, walk

__all__ = ["Checked", "check_shard", "in_order"]

_Job = TypeVar("_Job")
_Result = TypeVar("_Result")

_WINDOW_NBYTES = 1 << 19  # what a thread reads at once, and has in its core's cache when it is hashed
_JOB_NBYTES = 1 << 23
_JOB_SAMPLES = 256
_NOWHERE = MemorySource(b"")
_LOCAL = threading.local()


@dataclass(slots=True)
class _Sample:
    """Members of one key that lie side by side, and what was found of them."""

    key: str
    first: int
    end: int = 0
    members: dict[str, tuple[int, int]] = field(default_factory=dict)
    pieces: list[tuple[int, int]] = field(default_factory=list)  # of the shard, headers included
    faults: list[tuple[int, str]] = field(default_factory=list)
    caches: list[CacheEntry] = field(default_factory=list)
    others: list[tuple[str, int, int]] = field(default_factory=list)
    is_unverified: bool = False
    is_unread: bool = False


@dataclass(slots=True)
class Checked:
    """What was found in one shard.

    Attributes:
        faults: In the order in which they were met.
        index: Of the samples without fault.
        damaged: Keys of samples with a fault.
        pieces: What is to be kept, as ranges of bytes: whole members, of samples without fault and of no sample.
        end: Offset of the end-of-archive marker, None if none was found.
        is_broken: Whether there are bytes in which no member could be read.
    """

    path: str
    nbytes: int
    identity: Identity  # of the file
    faults: list[Fault] = field(default_factory=list)
    index: ShardIndex = None  # type: ignore[assignment]  # when all is checked
    damaged: set[str] = field(default_factory=set)
    pieces: list[tuple[int, int]] = field(default_factory=list)
    end: int | None = None
    is_broken: bool = False
    num_samples: int = 0
    num_damaged: int = 0
    num_unverified: int = 0
    num_unread: int = 0

    def fault(self, key: str | None, offset: int | None, what: str) -> None:
        """Add a fault."""
        self.faults.append(Fault(self.path, key, offset, what))


def check_shard(
    path: str, allow: Mapping[tuple[str, str], type], pool: ThreadPoolExecutor | None = None, threads: int = 1
) -> Checked:
    """Return what one pass over all bytes of a shard finds.

    Args:
        path: Of the shard.
        allow: `allow_table`'s result.
        pool: Runs `threads` parts of the shard at a time; None checks in this thread.

    Raises:
        OSError: It cannot be opened. One that cannot be read somewhere has a fault there.

    Memory: half a mebibyte for each thread, the index, and one skeleton at a time.
    """
    file = ShardFile(path)
    found = Checked(path, file.nbytes, file.identity)
    builder = IndexBuilder()
    loose: list[tuple[int, int]] = []
    good: set[str] = set()
    for job in in_order(_jobs(found, file, loose), lambda job: _check_all(file, job, allow), pool, threads):
        for sample in job:
            found.num_samples += 1
            if sample.key in good:
                sample.faults.append((sample.first, "another sample before it has the same key"))
            for offset, what in sample.faults:
                found.fault(sample.key, offset, what)
            if sample.faults:
                found.num_damaged += 1
                found.damaged.add(sample.key)
                continue
            good.add(sample.key)
            found.num_unverified += sample.is_unverified
            found.num_unread += sample.is_unread
            builder.add(sample.key, sample.caches, sample.others)
            for piece in sample.pieces:
                _append(found.pieces, piece)
    found.damaged -= good  # the key of two samples, of which one is good
    if loose:
        merged: list[tuple[int, int]] = []
        for piece in sorted(found.pieces + loose):
            _append(merged, piece)
        found.pieces = merged
    found.faults.sort(key=lambda fault: (fault.offset is None, fault.offset))
    found.index = builder.finish(file.nbytes if found.end is None else found.end)
    return found


def _append(pieces: list[tuple[int, int]], piece: tuple[int, int]) -> None:
    if pieces and pieces[-1][1] == piece[0]:
        pieces[-1] = pieces[-1][0], piece[1]
    else:
        pieces.append(piece)


def _samples(found: Checked, file: ShardFile, loose: list[tuple[int, int]]) -> Iterator[_Sample]:
    """Yield a shard's samples; put into `found` where it is no tar, and into `loose` what is of no sample."""
    sample: _Sample | None = None
    end = None
    with contextlib.suppress(OSError, FormatError):
        end = declared_end(file.read, file.nbytes)
    for part in walk(file.read, file.nbytes, end):
        if isinstance(part, Member):
            split = split_member(part.name)
            if split is None:
                loose.append((part.first, part.end))
                continue
            key, suffix = split[0], split[1].lower()
            if sample is None or sample.key != key:
                if sample is not None:
                    yield sample
                sample = _Sample(key, part.first)
            if suffix in sample.members:
                sample.faults.append((part.first, f"member {part.name!r:.100} occurs twice"))
            sample.members.setdefault(suffix, (part.begin, part.nbytes))
            _append(sample.pieces, (part.first, part.end))
            sample.end = part.begin + part.nbytes
        elif isinstance(part, Break):
            what = part.what.partition(": ")[2] if part.what.startswith("byte ") else part.what
            lost = f"; nothing could be read from byte {part.offset} to {part.end}"
            found.fault(None, part.offset, what + lost)
            found.is_broken = True
        elif isinstance(part, End):
            found.end = part.offset
            if part.first < part.offset:
                loose.append((part.first, part.offset))
            if file.nbytes < part.offset + 1024:
                found.fault(None, part.offset, "the file ends inside of the end-of-archive marker")
    if sample is not None:
        yield sample


def _jobs(found: Checked, file: ShardFile, loose: list[tuple[int, int]]) -> Iterator[list[_Sample]]:
    job: list[_Sample] = []
    for sample in _samples(found, file, loose):
        job.append(sample)
        if sample.end - job[0].first >= _JOB_NBYTES or len(job) >= _JOB_SAMPLES:
            yield job
            job = []
    if job:
        yield job


def in_order(
    jobs: Iterable[_Job], run: Callable[[_Job], _Result], pool: ThreadPoolExecutor | None, threads: int
) -> Iterator[_Result]:
    """Yield what `run` returns of each job, in their order; at most twice as many as threads are ahead of the caller."""
    waiting: deque[Future[_Result]] = deque()
    for job in jobs:
        if pool is None:
            yield run(job)
            continue
        waiting.append(pool.submit(run, job))
        if len(waiting) > 2 * threads:
            yield waiting.popleft().result()
    while waiting:
        yield waiting.popleft().result()


class _Window:
    """What was read of a shard, in memory that its thread uses again."""

    def __init__(self, file: ShardFile) -> None:
        if not hasattr(_LOCAL, "memory"):
            _LOCAL.memory = memoryview(bytearray(_WINDOW_NBYTES))
        self._file, self._memory = file, _LOCAL.memory
        self._begin = self._end = 0

    def load(self, begin: int, end: int) -> None:
        self._begin = self._end = begin
        self._file.read_into([self._memory[: end - begin]], begin)
        self._end = end

    def read(self, begin: int, end: int) -> memoryview:
        if self._begin <= begin and end <= self._end:
            return self._memory[begin - self._begin : end - self._begin]  # type: ignore[no-any-return]
        return memoryview(self._file.read(begin, end))

    def digest(self, begin: int, end: int) -> int:
        if self._begin <= begin and end <= self._end:
            return xxhash.xxh3_64_intdigest(self._memory[begin - self._begin : end - self._begin])
        digest = xxhash.xxh3_64()
        for at in range(begin, end, _WINDOW_NBYTES):
            self.load(at, min(at + _WINDOW_NBYTES, end))
            digest.update(self._memory[: self._end - at])
        return digest.intdigest()

    def touch(self, begin: int, end: int) -> None:
        """Read bytes of which nothing says what they should be: that they can be read is all there is to know."""
        if not (self._begin <= begin and end <= self._end):
            self.digest(begin, end)


def _check_all(file: ShardFile, job: list[_Sample], allow: Mapping[tuple[str, str], type]) -> list[_Sample]:
    window, loaded = _Window(file), 0
    for number, sample in enumerate(job):
        if number >= loaded:
            loaded = number + 1
            while loaded < len(job) and job[loaded].end - sample.first <= _WINDOW_NBYTES:
                loaded += 1
            if sample.end - sample.first <= _WINDOW_NBYTES:
                # if this fails, each sample is read by itself, so that the one that cannot be is known
                with contextlib.suppress(OSError, FormatError):
                    window.load(sample.first, job[loaded - 1].end)
        _check(window, sample, allow)
    return job


def _check(window: _Window, sample: _Sample, allow: Mapping[tuple[str, str], type]) -> None:
    for suffix, (begin, nbytes) in sample.members.items():
        prefix, kind = split_suffix(suffix)
        try:
            if kind is None:
                window.touch(begin, begin + nbytes)
                sample.others.append((suffix, begin, nbytes))
                continue
            skeleton, tensors = sample.members.get(prefix + SKELETON), sample.members.get(prefix + TENSORS)
            if kind == TENSORS and skeleton is None and not _declares(window, begin, nbytes):
                window.touch(begin, begin + nbytes)
                sample.others.append((suffix, begin, nbytes))
            elif skeleton is None or tensors is None:
                missing = prefix + (TENSORS if kind == SKELETON else SKELETON)
                sample.faults.append((begin, f"member {missing!r} is missing beside {suffix!r}"))
            elif kind == SKELETON:
                sample.caches.append(_check_cache(window, sample, prefix[:-1], skeleton, tensors, allow))
        except (TensorCacheError, OSError) as exc:
            sample.faults.append((begin, f"{suffix!r}: {exc}"))


def _declares(window: _Window, begin: int, nbytes: int) -> bool:
    return is_bound(window.read(begin, begin + min(64, nbytes)))


def _check_cache(
    window: _Window,
    sample: _Sample,
    name: str,
    skeleton: tuple[int, int],
    tensors: tuple[int, int],
    allow: Mapping[tuple[str, str], type],
) -> CacheEntry:
    """Return a cache as the index keeps it; put into `sample` what is wrong with it.

    Raises:
        FormatError: One half cannot be understood.
    """
    begin, nbytes = tensors
    length = int.from_bytes(window.read(begin, begin + min(8, nbytes)), "little")
    layout, digest = parse_header(window.read(begin, begin + min(8 + length, nbytes, MAX_HEADER_NBYTES)), nbytes)
    text = bytes(window.read(skeleton[0], skeleton[0] + skeleton[1]))
    body, body_digest = check_binding(text, nbytes, digest)
    declared = parse_preamble(text)[2] if digest is None else digest
    if digest is None or body_digest is None:
        sample.is_unverified = True
    if declared is not None:
        found = window.digest(begin + DIGITS_END, begin + nbytes) if nbytes >= DIGITS_END else 0
        if digest is not None and found != digest:
            sample.faults.append((begin, "the safetensors member is damaged: its digest does not match its bytes"))
        elif digest is None and found == declared:
            sample.faults.append((begin, "the safetensors member is damaged where it declares its digest"))
    else:
        window.touch(begin, begin + nbytes)
    if body_digest is None and digest is not None and had_preamble(text, nbytes, digest):
        sample.faults.append((skeleton[0], "the skeleton is damaged where its preamble begins"))
    if body_digest is not None and xxhash.xxh3_64_intdigest(memoryview(text)[body:]) != body_digest:
        sample.faults.append((skeleton[0], "the skeleton is damaged: its digest does not match its bytes"))
        return CacheEntry(name, *skeleton, begin, layout, digest, None)
    return CacheEntry(name, *skeleton, begin, layout, digest, _decode(sample, text, body, layout, allow))


def _decode(
    sample: _Sample, text: bytes, body: int, layout: Layout, allow: Mapping[tuple[str, str], type]
) -> tuple[str, ...] | None:
    """Return how a skeleton refers to its tensors, None if it needs classes in `allow=`."""
    try:
        return list_references(text, body, layout)  # decodes it, or matches it with a template of one that was
    except UnsafeSkeletonError as exc:
        if "allow=" not in str(exc):
            raise
    try:
        decode_body(text, body, layout, _NOWHERE, True, allow)
    except UnsafeSkeletonError as exc:
        if "allow=" not in str(exc):
            raise
        sample.is_unread = True
    return None  # as every index has it, of a sample that needs `allow=`
