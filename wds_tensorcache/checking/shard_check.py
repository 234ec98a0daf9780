"""A check of every byte of a shard. It covers tar headers, both digests of each sample, and every skeleton."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

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
from wds_tensorcache.storage.files import File, Identity, ShardFile
from wds_tensorcache.storage.readahead import ReadAhead, Readers
from wds_tensorcache.writing.copy_shards import MemberRange, append_range

_NOWHERE = MemorySource(b"")
_HEADER_NBYTES = 1 << 10  # most headers of tensors are shorter


@dataclass(slots=True)
class _Member:
    """A member of a sample. All its bytes were read, unless there is an `error`."""

    begin: int
    nbytes: int
    half: Half | None  # the half of a cache that the suffix names, if any
    text: bytes = b""  # the skeleton, or the header of the tensors
    digest: int = 0  # for tensors, the digest of the bytes after the stored digest
    error: Exception | None = None


@dataclass(slots=True)
class _Sample:
    """Adjacent members with the same key, and their faults."""

    key: str
    first: int
    members: dict[str, _Member] = field(default_factory=dict)
    ranges: list[MemberRange] = field(default_factory=list)
    faults: list[tuple[int, str, Kind]] = field(default_factory=list)
    caches: list[CacheEntry] = field(default_factory=list)
    others: list[tuple[str, int, int]] = field(default_factory=list)  # suffix, offset and length of other members
    has_rebuilt: bool = False  # True if a member has lost its header
    is_unverified: bool = False
    needs: str | None = None  # the name of a class that is not in `allow=`


@dataclass(slots=True)
class Checked:
    """Findings in one shard.

    Attributes:
        report: Faults and counts.
        index: Index of the samples without a fault.
        fingerprint: Fingerprint in an index of the shard, or else in a manifest; None if there is none.
        damaged: Keys of samples with a fault, unless another sample with the key is intact.
        doubtful: Keys of samples without a digest whose skeletons need a class that is not in `allow=`.
        ranges: Whole members to keep, with new headers for members that lost their headers: all members of samples without a
            fault, and files that belong to no sample.
        end: Offset of the end-of-archive marker; None if there is none.
        is_broken: True if there are bytes in which no member could be read, or members after the end-of-archive marker.
        copy_of: Path of the shard whose copy has replaced this shard; None if this shard is no copy.
    """

    path: str
    nbytes: int
    identity: Identity  # of the file
    report: Report
    index: ShardIndex = None  # type: ignore[assignment]  # set after the last sample is checked
    fingerprint: Mapping[str, Any] | None = None
    damaged: set[str] = field(default_factory=set)
    doubtful: set[str] = field(default_factory=set)
    ranges: list[MemberRange] = field(default_factory=list)
    end: int | None = None
    is_broken: bool = False
    copy_of: str | None = None

    def fault(self, key: str | None, offset: int | None, problem: str, kind: Kind) -> None:
        self.report.faults.append(Fault(self.path, key, offset, problem, kind))


def check_shard(
    path: str, allow: Mapping[tuple[str, str], type], readers: Readers, reach: Callable[[int], object]
) -> Checked:
    """Check a shard in one pass over its bytes. After each sample, call `reach` with the offset of its end.

    Of samples with the same key, the sample with the most caches is kept. Of samples with equally many caches, samples with
    their own headers come first, then the earliest in the shard. If the kept sample is not the first with the key, or a sample
    has lost a cache, there is a second pass.

    Raises:
        OSError: The file cannot be opened. Bytes that cannot be read are reported as a fault.
    """
    # a map is of no use to a single pass: its page faults take longer than the copies of `pread`
    file = ShardFile(path, may_map=False)
    excluded: dict[int | str, tuple[str, Kind]] = {}
    checked = _check_all(file, allow, readers, reach, excluded)
    return _check_all(file, allow, readers, reach, excluded) if excluded else checked


def _check_all(
    file: ShardFile,
    allow: Mapping[tuple[str, str], type],
    readers: Readers,
    reach: Callable[[int], object],
    excluded: dict[int | str, tuple[str, Kind]],
) -> Checked:
    """Check a shard without `excluded`, and add the next pass's exclusions."""
    report = Report(num_shards=1, nbytes=file.nbytes)
    checked = Checked(file.path, file.nbytes, file.identity, report)
    builder = IndexBuilder()
    kept: dict[str, tuple[int, bool, int]] = {}  # number of caches, whether no header was lost, and offset, by key
    with ReadAhead(file, readers) as ahead:
        for sample in _samples(checked, file, ahead):
            key, first = sample.key, sample.first
            reach(sample.ranges[-1].end)
            report.num_samples += 1
            _check(sample, allow)
            rank = len(sample.caches), not sample.has_rebuilt
            exclusion = excluded.get(first, excluded.get(key))
            if exclusion is not None:
                sample.faults.append((first, *exclusion))
            elif key in kept:
                if not sample.faults and rank > kept[key][:2]:
                    excluded[kept[key][2]] = "another sample has the same key, and more intact caches", "duplicate"
                    kept[key] = *rank, first
                sample.faults.append((first, "an earlier sample has the same key", "duplicate"))
            for fault in sample.faults:
                checked.fault(key, *fault)
            if sample.faults:
                report.num_damaged += 1
                checked.damaged.add(key)
                continue
            kept[key] = *rank, first
            report.num_unverified += sample.is_unverified
            if sample.needs is not None:
                report.num_unread += 1
                report.needs.add(sample.needs)
                checked.doubtful.update([key] * sample.is_unverified)
            builder.add(key, sample.caches, sample.others)
            for span in sample.ranges:
                append_range(checked.ranges, span.path, span.begin, span.end, span.header)
    if report.faults:
        # Hazard: a partial sample would count as finished when the cache is built again.
        listed = _count_caches(file)
        problem = "members of a cache are lost: the index of the shard lists more caches"
        excluded |= {key: (problem, "lost") for key, (count, *_) in kept.items() if count < listed.get(key, 0)}
    checked.damaged -= kept.keys()  # another sample with such a key has no fault
    parts, checked.ranges = sorted(checked.ranges), []
    for span in parts:
        append_range(checked.ranges, span.path, span.begin, span.end, span.header)
    report.faults.sort(key=lambda fault: (fault.offset is None, fault.offset))
    checked.index = builder.finish(file.nbytes if checked.end is None else checked.end)
    return checked


def _count_caches(file: ShardFile) -> dict[str, int]:
    """Return the number of each sample's caches in the index, by key."""

    def parse(part: File) -> ShardIndex | None:
        # lost bytes may have changed the length of the shard, but a sidecar with another length may belong to another shard
        return read_index(part.read, part.nbytes, None if part is file else file.nbytes)

    index = next(parse_both(file, parse, lenient=True), None)
    if index is None:
        return {}
    counts = np.zeros(len(index.keys), np.int64)
    for cache in index.caches.values():
        counts[slice(None) if cache.rows is None else cache.rows] += 1
    return dict(zip(index.keys, counts.tolist(), strict=True))


def _samples(checked: Checked, file: ShardFile, ahead: ReadAhead) -> Iterator[_Sample]:
    """Yield the samples of a shard; record all other findings in `checked`."""
    sample: _Sample | None = None
    stem = ""
    for part in Salvage(file, ahead.read):
        if not isinstance(part, Member):
            _note_damage(checked, part)
            continue
        name, first, begin, nbytes, end, is_rebuilt = part
        header = rebuild_header(name, nbytes) if is_rebuilt else b""
        if sample is not None and name.startswith(stem) and "/" not in name[len(stem) :]:
            suffix = name[len(stem) :].lower()
        else:
            split = split_member(name)
            if split is None:
                append_range(checked.ranges, file.path, first, end, header)
                continue
            if sample is None or sample.key != split[0]:
                if sample is not None:
                    yield sample
                sample = _Sample(split[0], first)
            suffix, stem = split[1].lower(), name[: len(name) - len(split[1])]
        member = _read(ahead, suffix, begin, nbytes)
        if sample.members.setdefault(suffix, member) is not member:
            sample.faults.append((first, f"member {name!r:.100} occurs twice", "duplicate"))
        if is_rebuilt:
            sample.has_rebuilt = True
            problem = f"the tar header of member {suffix!r} is lost; index and digests show that its bytes are intact"
            checked.fault(sample.key, begin, problem, "header")
        append_range(sample.ranges, file.path, first, end, header)
    if sample is not None:
        yield sample


def _note_damage(checked: Checked, part: Break | End) -> None:
    offset = part.offset
    if isinstance(part, Break):
        lost = f"; no member could be read from byte {offset} to {part.end}" if offset < part.end else ""
        lost += "; everything from there on is missing" if part.kind == "truncated" else ""
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
    """Read every byte of a member; errors are stored in the result."""
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
                member.text = ahead.read(begin, begin + min(length, nbytes, 8 + MAX_HEADER_NBYTES))
            rest = begin + min(DIGITS_END, nbytes)
        # other members have no digest: they must only be readable
        member.digest = ahead.digest(rest, begin + nbytes)
    except (TensorCacheError, OSError) as exc:
        member.error = exc
    return member


def _check(sample: _Sample, allow: Mapping[tuple[str, str], type]) -> None:
    """Replace a sample's members by its faults, caches and other members."""
    members, sample.members = sample.members, {}
    for suffix, member in members.items():
        half = member.half
        try:
            if member.error is not None:
                raise member.error
            if half is not None and half.other not in members:
                half = find_half(suffix, members, partial(is_bound, member.text[:64]), hint="")
            if half is None:
                sample.others.append((suffix, member.begin, member.nbytes))
            elif half.is_skeleton and members[half.other].error is None:
                _check_cache(sample, half, member, members[half.other], allow)
        except (TensorCacheError, OSError) as exc:
            kind = exc.kind if isinstance(exc, FormatError) else "unreadable"
            sample.faults.append((member.begin, f"{suffix!r}: {exc}", kind))


def _check_cache(
    sample: _Sample, half: Half, skeleton: _Member, tensors: _Member, allow: Mapping[tuple[str, str], type]
) -> None:
    """Add a cache's faults and its index entry to the sample."""
    begin, nbytes, text = tensors.begin, tensors.nbytes, skeleton.text
    try:
        layout, digest = parse_header(tensors.text, nbytes)
    except FormatError as exc:
        sample.faults.append((begin, f"{half.other!r}: {exc}", exc.kind))
        return
    entry = CacheEntry(half.name, skeleton.begin, skeleton.nbytes, begin, layout, digest, None)
    sample.caches.append(entry)
    body, body_digest = check_binding(text, nbytes, digest)
    if digest is None or body_digest is None:
        sample.is_unverified = True
    if digest is not None and tensors.digest != digest:
        problem = "the safetensors member is damaged: its digest does not match its bytes"
        sample.faults.append((begin, problem, "damaged"))
    elif digest is None and tensors.digest == parse_preamble(text)[2]:
        problem = "the safetensors member is damaged where it declares its digest"
        sample.faults.append((begin, problem, "damaged"))
    if body_digest is not None and xxhash.xxh3_64_intdigest(memoryview(text)[body:]) != body_digest:
        problem = "the skeleton is damaged: its digest does not match its bytes"
        sample.faults.append((skeleton.begin, problem, "damaged"))
        return
    try:
        entry.references, entry.further = list_references(text, body, layout)
    except UnsafeSkeletonError as exc:
        if exc.needs is None:
            raise
        try:  # every index lacks the references of a sample that needs `allow=`
            decode_body(text, body, layout, _NOWHERE, True, allow)
        except UnsafeSkeletonError as needy:
            if needy.needs is None:
                raise
            sample.needs = needy.needs
