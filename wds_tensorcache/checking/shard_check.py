"""Check every byte of a shard: its tar headers, both digests of each sample, and every skeleton."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import xxhash

from wds_tensorcache.checking.damaged_tar import Break, End, Member, Salvage
from wds_tensorcache.checking.report import Fault, Report
from wds_tensorcache.codec.binding import parse_preamble
from wds_tensorcache.codec.header import DIGITS_END, MAX_HEADER_NBYTES, is_bound, parse_header
from wds_tensorcache.codec.reference import MemorySource
from wds_tensorcache.codec.sample import check_binding, decode_body, list_references
from wds_tensorcache.errors import FormatError, Kind, TensorCacheError, UnsafeSkeletonError
from wds_tensorcache.shards.footer import read_index
from wds_tensorcache.shards.index import ShardIndex
from wds_tensorcache.shards.index_builder import CacheEntry, IndexBuilder
from wds_tensorcache.shards.load_index import parse_both
from wds_tensorcache.shards.names import Half, find_half, half_of, split_member
from wds_tensorcache.shards.tar import rebuild_header
from wds_tensorcache.storage.files import Identity, ShardFile
from wds_tensorcache.storage.readahead import Digest, ReadAhead, Readers
from wds_tensorcache.writing.copy_shards import MemberRange, append_range

_NOWHERE = MemorySource(b"")
_MAX_WAITING = 32  # samples
_LOST = -1  # in place of the offset of the sample to keep
_HEADER_NBYTES = 1 << 10  # most headers of tensors are shorter


@dataclass(slots=True)
class _Member:
    """A member of a sample, read once; it keeps the bytes that are checked when all members of the sample are read."""

    begin: int
    nbytes: int
    half: Half | None  # the half of a cache that the suffix names, if any
    text: bytes = b""  # the skeleton, or the header of the tensors
    digest: Digest | None = None  # of all bytes; for tensors, only of the bytes after their stored digest
    error: Exception | None = None


@dataclass(slots=True)
class _Sample:
    """Adjacent members with one key, and their faults."""

    key: str
    first: int
    members: dict[str, _Member] = field(default_factory=dict)
    ranges: list[MemberRange] = field(default_factory=list)
    faults: list[tuple[int, str, Kind]] = field(default_factory=list)
    rebuilt: list[tuple[int, str]] = field(default_factory=list)  # members whose headers were lost
    is_unverified: bool = False
    needs: list[str] = field(default_factory=list)  # names of classes that are not in `allow=`


@dataclass(slots=True)
class Checked:
    """Findings in one shard.

    Attributes:
        report: Faults and counts.
        index: Index of the samples without a fault.
        damaged: Keys of samples with a fault.
        doubtful: Keys of samples without a digest whose skeletons need a class that is not in `allow=`.
        ranges: Whole members to keep, with headers for those that lost theirs: all members of samples without a fault, and
            files that belong to no sample.
        end: Offset of the end-of-archive marker; None if there is none.
        is_broken: True if there are bytes in which no member could be read, or members after the end-of-archive marker.
        copy_of: Path of the shard that has replaced this one; None if none has.
    """

    path: str
    nbytes: int
    identity: Identity  # of the file
    report: Report
    index: ShardIndex = None  # type: ignore[assignment]  # set after the last sample is checked
    damaged: set[str] = field(default_factory=set)
    doubtful: set[str] = field(default_factory=set)
    ranges: list[MemberRange] = field(default_factory=list)
    end: int | None = None
    is_broken: bool = False
    copy_of: str | None = None

    def fault(self, key: str | None, offset: int | None, what: str, kind: Kind) -> None:
        """Add a fault."""
        self.report.faults.append(Fault(self.path, key, offset, what, kind))


def check_shard(
    path: str,
    allow: Mapping[tuple[str, str], type],
    readers: Readers,
    reach: Callable[[int], object] = lambda offset: None,
) -> Checked:
    """Check a shard in one pass over its bytes. After each sample, call `reach` with the offset of its end.

    If samples have the same key, one with the most caches is kept: if possible one with its own headers, and of these the
    first. If this is not the first sample with the key, or a sample has lost a cache, there is a second pass.

    Raises:
        OSError: The file cannot be opened. Bytes that cannot be read are reported as a fault.
    """
    file = ShardFile(path)
    better: dict[str, int] = {}
    checked = _check_all(file, allow, readers, better, reach)
    return _check_all(file, allow, readers, better, reach) if better else checked


def _check_all(
    file: ShardFile,
    allow: Mapping[tuple[str, str], type],
    readers: Readers,
    better: dict[str, int],
    reach: Callable[[int], object],
) -> Checked:
    """Check a shard in one pass. Keep the samples at the offsets in `better`, by key, and add better ones to it."""
    report = Report(num_shards=1, nbytes=file.nbytes)
    checked = Checked(file.path, file.nbytes, file.identity, report)
    builder = IndexBuilder()
    ranks: dict[str, tuple[int, bool]] = {}  # of the samples without a fault, by key
    wanted = dict(better)
    with ReadAhead(file, readers) as ahead:
        for sample in _complete(_samples(checked, file, ahead), ahead):
            key = sample.key
            reach(sample.ranges[-1].end)
            caches, others = _check(sample, allow)
            rank = len(caches), not sample.rebuilt
            report.num_samples += 1
            if key in ranks:
                if not sample.faults and rank > ranks[key]:
                    better[key], ranks[key] = sample.first, rank
                sample.faults.append((sample.first, "an earlier sample has the same key", "duplicate"))
            elif wanted.get(key) == _LOST:
                problem = "members of a cache are lost: the index of the shard lists more caches"
                sample.faults.append((sample.first, problem, "lost"))
            elif wanted.get(key, sample.first) != sample.first:
                sample.faults.append(
                    (sample.first, "another sample has the same key, and more intact caches", "duplicate")
                )
            for fault in sample.faults:
                checked.fault(key, *fault)
            for offset, suffix in sample.rebuilt:
                problem = (
                    f"the tar header of member {suffix!r} is lost; index and digests show that its bytes are intact"
                )
                checked.fault(key, offset, problem, "header")
            if sample.faults:
                report.num_damaged += 1
                checked.damaged.add(key)
                continue
            ranks[key] = rank
            report.num_unverified += sample.is_unverified
            report.num_unread += bool(sample.needs)
            report.needs.update(sample.needs)
            if sample.needs and sample.is_unverified:
                checked.doubtful.add(key)
            builder.add(key, caches, others)
            for span in sample.ranges:
                append_range(checked.ranges, span.path, span.begin, span.end, span.header)
    if report.faults:
        # Hazard: a partial sample would count as finished when the cache is built again.
        listed = _count_caches(file)
        better |= {key: _LOST for key, (count, _) in ranks.items() if count < listed.get(key, 0)}
    checked.damaged -= ranks.keys()  # another sample with such a key has no fault
    parts, checked.ranges = sorted(checked.ranges), []
    for span in parts:
        append_range(checked.ranges, span.path, span.begin, span.end, span.header)
    report.faults.sort(key=lambda fault: (fault.offset is None, fault.offset))
    checked.index = builder.finish(file.nbytes if checked.end is None else checked.end)
    return checked


def _count_caches(file: ShardFile) -> dict[str, int]:
    """Return the number of caches of each sample in the index of a shard, by key."""
    index = next(parse_both(file, lambda part: read_index(part.read, part.nbytes, file.nbytes), lenient=True), None)
    if index is None:
        return {}
    counts = np.zeros(len(index.keys), np.int64)
    for cache in index.caches.values():
        counts[slice(None) if cache.rows is None else cache.rows] += 1
    return dict(zip(index.keys, counts.tolist(), strict=True))


def _complete(samples: Iterator[_Sample], ahead: ReadAhead) -> Iterator[_Sample]:
    """Yield samples as soon as all their bytes are hashed."""
    waiting: deque[_Sample] = deque()
    for sample in samples:
        waiting.append(sample)
        if len(waiting) == _MAX_WAITING:
            ahead.hash()
        while waiting and waiting[0].ranges[-1].end <= ahead.done:
            yield waiting.popleft()
    ahead.finish()
    yield from waiting


def _samples(checked: Checked, file: ShardFile, ahead: ReadAhead) -> Iterator[_Sample]:
    """Yield the samples of a shard; record tar faults, and members that belong to no sample, in `checked`."""
    sample: _Sample | None = None
    for part in Salvage(file, ahead.read):
        if not isinstance(part, Member):
            _note_damage(checked, part)
            continue
        name, first, begin, nbytes, end, is_rebuilt = part
        header = rebuild_header(name, nbytes) if is_rebuilt else b""
        stem = "" if sample is None else f"{sample.key}."
        if sample is not None and name.startswith(stem) and "/" not in name[len(stem) :]:
            suffix = name[len(stem) :].lower()
        else:
            split = split_member(name)
            if split is None:
                append_range(checked.ranges, file.path, first, end, header)
                continue
            if sample is not None:
                yield sample
            sample, suffix = _Sample(split[0], first), split[1].lower()
        member = _read(ahead, suffix, begin, nbytes)
        if sample.members.setdefault(suffix, member) is not member:
            sample.faults.append((first, f"member {name!r:.100} occurs twice", "duplicate"))
        if is_rebuilt:
            sample.rebuilt.append((begin, suffix))
        append_range(sample.ranges, file.path, first, end, header)
    if sample is not None:
        yield sample


def _note_damage(checked: Checked, part: Break | End) -> None:
    offset = part.offset
    if isinstance(part, Break):
        lost = f"; no member could be read from byte {offset} to {part.end}" if offset < part.end else ""
        checked.fault(None, offset, part.reason + lost, part.kind)
        checked.is_broken = True
        return
    checked.end = offset
    if part.unseen is not None:
        problem = f"members from here on are after the end-of-archive marker at byte {offset}: readers do not see them"
        checked.fault(None, part.unseen, problem, "trailing")
        checked.is_broken = True
    if checked.nbytes < offset + 1024:
        checked.fault(None, offset, "the file ends inside the end-of-archive marker", "truncated")


def _read(ahead: ReadAhead, suffix: str, begin: int, nbytes: int) -> _Member:
    """Read every byte of a member."""
    member = _Member(begin, nbytes, half_of(suffix))
    try:
        if member.half is not None and member.half.is_skeleton:
            member.text = ahead.read(begin, begin + nbytes)
            return member
        rest = begin
        if member.half is not None:
            member.text = ahead.read(begin, begin + min(_HEADER_NBYTES, nbytes))
            length = 8 + int.from_bytes(member.text[:8], "little")
            if length > _HEADER_NBYTES:
                member.text = ahead.read(begin, begin + min(length, nbytes, MAX_HEADER_NBYTES))
            rest = begin + min(DIGITS_END, nbytes)
        # other members have no digest: they must only be readable
        member.digest = ahead.digest(rest, begin + nbytes)
    except (TensorCacheError, OSError) as exc:
        member.error = exc
    return member


def _check(
    sample: _Sample, allow: Mapping[tuple[str, str], type]
) -> tuple[list[CacheEntry], list[tuple[str, int, int]]]:
    """Return a sample's caches and other members for the index; add faults to `sample`."""
    caches: list[CacheEntry] = []
    others: list[tuple[str, int, int]] = []
    members = sample.members
    for suffix, member in members.items():
        begin, digest = member.begin, member.digest
        try:
            error = member.error or (digest and digest.error)
            if error:
                raise error
            half = member.half
            if half is not None and half.other not in members:
                try:
                    half = find_half(suffix, members, partial(is_bound, member.text[:64]), hint="")
                except FormatError as exc:
                    sample.faults.append((begin, exc.reason, exc.kind))
                    continue
            if half is None:
                others.append((suffix, begin, member.nbytes))
            elif half.is_skeleton:
                tensors = members[half.other]
                if tensors.digest is not None and tensors.digest.error is None:
                    entry = _check_cache(sample, half, member, tensors, tensors.digest.value, allow)
                    caches += () if entry is None else (entry,)
        except (TensorCacheError, OSError) as exc:
            kind = exc.kind if isinstance(exc, FormatError) else "unreadable"
            sample.faults.append((begin, f"{suffix!r}: {exc}", kind))
    return caches, others


def _check_cache(
    sample: _Sample,
    half: Half,
    skeleton: _Member,
    tensors: _Member,
    tensors_digest: int,
    allow: Mapping[tuple[str, str], type],
) -> CacheEntry | None:
    """Return the index entry of a cache, or None if the header of its tensors is damaged; add faults to `sample`."""
    begin, nbytes, text = tensors.begin, tensors.nbytes, skeleton.text
    try:
        layout, digest = parse_header(tensors.text, nbytes)
    except FormatError as exc:
        sample.faults.append((begin, f"{half.other!r}: {exc}", exc.kind))
        return None
    entry = CacheEntry(half.name, skeleton.begin, skeleton.nbytes, begin, layout, digest, None)
    body, body_digest = check_binding(text, nbytes, digest)
    declared = parse_preamble(text)[2] if digest is None else digest
    if digest is None or body_digest is None:
        sample.is_unverified = True
    if digest is not None and tensors_digest != digest:
        sample.faults.append(
            (begin, "the safetensors member is damaged: its digest does not match its bytes", "damaged")
        )
    elif digest is None and tensors_digest == declared:
        sample.faults.append((begin, "the safetensors member is damaged where it declares its digest", "damaged"))
    if body_digest is not None and xxhash.xxh3_64_intdigest(memoryview(text)[body:]) != body_digest:
        problem = "the skeleton is damaged: its digest does not match its bytes"
        sample.faults.append((skeleton.begin, problem, "damaged"))
    else:
        _decode(sample, text, body, entry, allow)
    return entry


def _decode(sample: _Sample, text: bytes, body: int, entry: CacheEntry, allow: Mapping[tuple[str, str], type]) -> None:
    """Decode a skeleton, and set its references to tensors and their further names in the index entry."""
    try:
        entry.references, entry.further = list_references(text, body, entry.layout)
        return
    except UnsafeSkeletonError as exc:
        if exc.needs is None:
            raise
    # every index lacks the references of a sample that needs `allow=`
    try:
        decode_body(text, body, entry.layout, _NOWHERE, True, allow)
    except UnsafeSkeletonError as exc:
        if exc.needs is None:
            raise
        sample.needs.append(exc.needs)
