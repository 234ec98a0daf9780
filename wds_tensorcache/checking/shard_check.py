"""Check every byte of a shard: its tar headers, both digests of each sample, every skeleton."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import xxhash

from wds_tensorcache.checking.pieces import Piece, append_piece
from wds_tensorcache.checking.places import find_places
from wds_tensorcache.checking.report import Fault
from wds_tensorcache.checking.walk import Break, End, Member, walk
from wds_tensorcache.codec.binding import had_preamble, parse_preamble
from wds_tensorcache.codec.header import DIGITS_END, MAX_HEADER_NBYTES, is_bound, parse_header
from wds_tensorcache.codec.layout import Layout
from wds_tensorcache.codec.reference import MemorySource
from wds_tensorcache.codec.sample import check_binding, decode_body, list_references
from wds_tensorcache.errors import FormatError, Kind, TensorCacheError, UnsafeSkeletonError
from wds_tensorcache.shards.footer import declared_place
from wds_tensorcache.shards.index import ShardIndex
from wds_tensorcache.shards.index_builder import CacheEntry, IndexBuilder, split_suffix
from wds_tensorcache.shards.names import SKELETON, TENSORS, split_member
from wds_tensorcache.shards.sidecar import stored
from wds_tensorcache.shards.tar.archive import rebuild_header
from wds_tensorcache.shards.tar.skipped import Skipped
from wds_tensorcache.storage.files import Identity, ShardFile
from wds_tensorcache.storage.readahead import Digest, ReadAhead, Readers

__all__ = ["Checked", "check_shard"]

_NOWHERE = MemorySource(b"")
_MAX_WAITING = 32  # samples
_HEADER_NBYTES = 1 << 10  # most headers of tensors are shorter


@dataclass(slots=True)
class _Member:
    """A member of a sample, read once: what is needed of its bytes when the sample is complete."""

    begin: int
    nbytes: int
    prefix: str  # `NAME.` or nothing
    half_of: str | None  # a cache: which of its suffixes it has
    text: bytes = b""  # the skeleton, or the header of the tensors
    digest: Digest | None = None  # of all bytes, but those up to the tensors' own digits
    error: Exception | None = None


@dataclass(slots=True)
class _Sample:
    """Members of one key that lie side by side, and what was found of them."""

    key: str
    stem: str  # what names of its members begin with
    first: int
    members: dict[str, _Member] = field(default_factory=dict)
    pieces: list[Piece] = field(default_factory=list)
    faults: list[tuple[int, str, Kind]] = field(default_factory=list)
    rebuilt: list[tuple[int, str]] = field(default_factory=list)  # members that had no header
    is_unverified: bool = False
    needs: list[str] = field(default_factory=list)  # names of classes that are not in `allow=`


@dataclass(slots=True)
class Checked:
    """What was found in one shard.

    Attributes:
        faults: In the order in which they were met.
        index: Of the samples without fault.
        damaged: Keys of samples with a fault.
        needs: Names of classes that skeletons need and `allow=` has not.
        doubtful: Keys of samples that need some, and have no digest that tells whether that is as it was written.
        lost: Keys of samples of which an index tells, and which are not in the shard; filled by `check_beside`.
        pieces: What is to be kept, of samples without fault and of no sample: whole members, with the headers that some lack.
        end: Offset of the end-of-archive marker, None if none was found.
        is_broken: Whether there are bytes in which no member could be read, or members behind the end-of-archive marker.
    """

    path: str
    nbytes: int
    identity: Identity  # of the file
    faults: list[Fault] = field(default_factory=list)
    index: ShardIndex = None  # type: ignore[assignment]  # when all is checked
    damaged: set[str] = field(default_factory=set)
    needs: set[str] = field(default_factory=set)
    doubtful: set[str] = field(default_factory=set)
    lost: set[str] = field(default_factory=set)
    pieces: list[Piece] = field(default_factory=list)
    end: int | None = None
    is_broken: bool = False
    num_samples: int = 0
    num_damaged: int = 0
    num_unverified: int = 0
    num_unread: int = 0

    def fault(self, key: str | None, offset: int | None, what: str, kind: Kind) -> None:
        """Add a fault."""
        self.faults.append(Fault(self.path, key, offset, what, kind))


def check_shard(path: str, allow: Mapping[tuple[str, str], type], readers: Readers) -> Checked:
    """Return what one pass over all bytes of a shard finds; two where a key's first whole sample has no cache, but another.

    Args:
        path: Of the shard.
        allow: `allow_table`'s result.
        readers: Who read it.

    Raises:
        OSError: It cannot be opened. One that cannot be read somewhere has a fault there.

    Memory: what is read ahead, the index, and the skeletons and headers of one sample.
    """
    file = ShardFile(path)
    better: dict[str, int] = {}
    found = _check_all(file, allow, readers, better)
    return _check_all(file, allow, readers, better) if better else found


def _check_all(
    file: ShardFile, allow: Mapping[tuple[str, str], type], readers: Readers, better: dict[str, int]
) -> Checked:
    """Return what a pass finds. Of two samples of one key, the first without fault counts, or where `better` says.

    Put into `better` where that has no cache, but another has.
    """
    found = Checked(file.path, file.nbytes, file.identity)
    builder = IndexBuilder()
    loose, common = list[Piece](), list[Piece]()
    good: dict[str, bool] = {}  # whether it has a cache
    wanted = dict(better)
    with ReadAhead(file, readers) as ahead:
        for sample in _read_ones(_samples(found, file, ahead, loose, common), ahead):
            caches, others = _check(sample, allow)
            found.num_samples += 1
            if sample.key in good:
                if caches and not sample.faults and not good[sample.key]:
                    better.setdefault(sample.key, sample.first)
                sample.faults.append((sample.first, "another sample before it has the same key", "duplicate"))
            elif wanted.get(sample.key, sample.first) != sample.first:
                sample.faults.append((sample.first, "another sample has the same key, and a whole cache", "duplicate"))
            for offset, what, kind in sample.faults:
                found.fault(sample.key, offset, what, kind)
            for offset, suffix in sample.rebuilt:
                what = f"the tar header of {suffix!r} is lost; its index and its digests say that its bytes are whole"
                found.fault(sample.key, offset, what, "header")
            if sample.faults:
                found.num_damaged += 1
                found.damaged.add(sample.key)
                continue
            good[sample.key] = bool(caches)
            found.num_unverified += sample.is_unverified
            if sample.needs:
                found.num_unread += 1
                found.needs.update(sample.needs)
                if sample.is_unverified:
                    found.doubtful.add(sample.key)
            builder.add(sample.key, caches, others)
            for piece in sample.pieces:
                append_piece(found.pieces, piece)
    found.damaged -= good.keys()  # the key of two samples, of which one is good
    last = max((piece[1] for pieces in (loose, found.pieces) for piece in pieces[-1:]), default=0)
    loose += (piece for piece in common if piece[1] < last)  # no archive may end with them
    if loose:
        parts, found.pieces = sorted(found.pieces + loose), []
        for piece in parts:
            append_piece(found.pieces, piece)
    found.faults.sort(key=lambda fault: (fault.offset is None, fault.offset))
    found.index = builder.finish(file.nbytes if found.end is None else found.end)
    return found


def _read_ones(samples: Iterator[_Sample], ahead: ReadAhead) -> Iterator[_Sample]:
    """Yield samples whose bytes are all done, as soon as they are."""
    waiting: deque[_Sample] = deque()
    for sample in samples:
        waiting.append(sample)
        if len(waiting) == _MAX_WAITING:
            ahead.hash()
        while waiting and waiting[0].pieces[-1][1] <= ahead.done:
            yield waiting.popleft()
    ahead.finish()
    yield from waiting


def _samples(
    found: Checked, file: ShardFile, ahead: ReadAhead, loose: list[Piece], common: list[Piece]
) -> Iterator[_Sample]:
    """Yield a shard's samples; put into `found` where it is no tar, and into `loose` and `common` what is of no sample."""
    sample: _Sample | None = None
    declared = stored(file, lambda each: declared_place(each.read, each.nbytes, file.nbytes), lenient=True)
    end = next((end for _, end in declared), None)
    for part in walk(ahead.read, file.nbytes, end, find_places(file)):
        if isinstance(part, Member):
            name, first, begin, nbytes, behind, is_rebuilt = part
            piece = first, behind, rebuild_header(name, nbytes) if is_rebuilt else b""
            if sample is not None and name.startswith(sample.stem) and "/" not in name[len(sample.stem) :]:
                suffix = name[len(sample.stem) :].lower()
            else:
                split = split_member(name)
                if split is None:
                    loose.append(piece)
                    continue
                if sample is not None:
                    yield sample
                sample = _Sample(split[0], f"{split[0]}.", first)
                suffix = split[1].lower()
            member = _read(ahead, suffix, begin, nbytes)
            if sample.members.setdefault(suffix, member) is not member:
                sample.faults.append((first, f"member {name!r:.100} occurs twice", "duplicate"))
            if is_rebuilt:
                sample.rebuilt.append((begin, suffix))
            append_piece(sample.pieces, piece)
        elif isinstance(part, Break):
            lost = f"; nothing could be read from byte {part.offset} to {part.end}" if part.offset < part.end else ""
            found.fault(None, part.offset, part.reason + lost, part.kind)
            found.is_broken = True
        elif isinstance(part, Skipped):
            (common if part.is_common else loose).append((part.begin, part.end, b""))
        elif isinstance(part, End):
            found.end = part.offset
            if part.behind is not None:
                what = (
                    f"members behind the end-of-archive marker, which is at byte {part.offset}: readers do not see them"
                )
                found.fault(None, part.behind, what, "trailing")
                found.is_broken = True
            if file.nbytes < part.offset + 1024:
                found.fault(None, part.offset, "the file ends inside of the end-of-archive marker", "truncated")
    if sample is not None:
        yield sample


def _read(ahead: ReadAhead, suffix: str, begin: int, nbytes: int) -> _Member:
    """Read every byte of a member."""
    member = _Member(begin, nbytes, *split_suffix(suffix))
    try:
        if member.half_of == SKELETON:
            member.text = ahead.read(begin, begin + nbytes)
            return member
        rest = begin
        if member.half_of == TENSORS:
            member.text = ahead.read(begin, begin + min(_HEADER_NBYTES, nbytes))
            length = 8 + int.from_bytes(member.text[:8], "little")
            if length > _HEADER_NBYTES:
                member.text = ahead.read(begin, begin + min(length, nbytes, MAX_HEADER_NBYTES))
            rest = begin + min(DIGITS_END, nbytes)
        # of other members nothing says what their bytes should be: that they can be read is all there is to know
        member.digest = ahead.digest(rest, begin + nbytes)
    except (TensorCacheError, OSError) as exc:
        member.error = exc
    return member


def _check(
    sample: _Sample, allow: Mapping[tuple[str, str], type]
) -> tuple[list[CacheEntry], list[tuple[str, int, int]]]:
    """Return caches and other members as the index keeps them; put into `sample` what is wrong with it."""
    caches: list[CacheEntry] = []
    others: list[tuple[str, int, int]] = []
    members = sample.members
    for suffix, member in members.items():
        begin, half_of, digest = member.begin, member.half_of, member.digest
        try:
            error = member.error or (digest and digest.error)
            if error:
                raise error
            other = TENSORS if half_of == SKELETON else SKELETON
            half = None if half_of is None else members.get(member.prefix + other)
            if half_of is None or (half is None and half_of == TENSORS and not is_bound(member.text[:64])):
                others.append((suffix, begin, member.nbytes))
            elif half is None:
                missing = member.prefix + other
                sample.faults.append((begin, f"member {missing!r} is missing beside {suffix!r}", "missing"))
            elif half_of == SKELETON and half.digest is not None and half.digest.error is None:
                found = _check_cache(sample, member, half, half.digest.value, allow)
                caches += () if found is None else (found,)
        except (TensorCacheError, OSError) as exc:
            kind = exc.kind if isinstance(exc, FormatError) else "unreadable"
            sample.faults.append((begin, f"{suffix!r}: {exc}", kind))
    return caches, others


def _check_cache(
    sample: _Sample, skeleton: _Member, tensors: _Member, found: int, allow: Mapping[tuple[str, str], type]
) -> CacheEntry | None:
    """Return a cache as the index keeps it; put into `sample` what is wrong with it. None if its header is no header.

    Raises:
        FormatError: The skeleton cannot be understood, or does not belong to the tensors.
    """
    begin, nbytes, text = tensors.begin, tensors.nbytes, skeleton.text
    try:
        layout, digest = parse_header(tensors.text, nbytes)
    except FormatError as exc:
        sample.faults.append((begin, f"{skeleton.prefix + TENSORS!r}: {exc}", exc.kind))
        return None
    entry = CacheEntry(skeleton.prefix[:-1], skeleton.begin, skeleton.nbytes, begin, layout, digest, None)
    body, body_digest = check_binding(text, nbytes, digest)
    declared = parse_preamble(text)[2] if digest is None else digest
    if digest is None or body_digest is None:
        sample.is_unverified = True
    if digest is not None and found != digest:
        sample.faults.append(
            (begin, "the safetensors member is damaged: its digest does not match its bytes", "damaged")
        )
    elif digest is None and found == declared:
        sample.faults.append((begin, "the safetensors member is damaged where it declares its digest", "damaged"))
    if body_digest is None and digest is not None and had_preamble(text, nbytes, digest):
        sample.faults.append((skeleton.begin, "the skeleton is damaged where its preamble begins", "damaged"))
    if body_digest is not None and xxhash.xxh3_64_intdigest(memoryview(text)[body:]) != body_digest:
        what = "the skeleton is damaged: its digest does not match its bytes"
        sample.faults.append((skeleton.begin, what, "damaged"))
    else:
        entry.references = _decode(sample, text, body, entry.layout, allow)
    return entry


def _decode(
    sample: _Sample, text: bytes, body: int, layout: Layout, allow: Mapping[tuple[str, str], type]
) -> tuple[str, ...] | None:
    """Return how a skeleton refers to its tensors, None if it needs classes in `allow=`."""
    try:
        return list_references(text, body, layout)  # decodes it, or matches it with a template of one that was
    except UnsafeSkeletonError as exc:
        if exc.needs is None:
            raise
    try:
        decode_body(text, body, layout, _NOWHERE, True, allow)
    except UnsafeSkeletonError as exc:
        if exc.needs is None:
            raise
        sample.needs.append(exc.needs)
    return None  # as every index has it, of a sample that needs `allow=`
