"""A shard again without some of its samples; the bytes of the others stay as they are."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from wds_tensorcache.checking.walk import Break, End, Skipped, walk
from wds_tensorcache.errors import TarFormatError
from wds_tensorcache.shards.footer import build_footer
from wds_tensorcache.shards.index import ShardIndex
from wds_tensorcache.shards.index_builder import scan_shard
from wds_tensorcache.shards.names import split_member
from wds_tensorcache.shards.remainder import check_end
from wds_tensorcache.shards.tar.archive import BLOCK, END_OF_ARCHIVE
from wds_tensorcache.storage.files import ShardFile
from wds_tensorcache.storage.output import Output

__all__ = ["Piece", "append_piece", "copy_pieces", "stage_without"]

# bytes [begin, end) of a shard, and headers to write before them if they have lost their own
Piece = tuple[int, int, bytes]
_CHUNK_NBYTES = 1 << 22


def append_piece(pieces: list[Piece], piece: Piece) -> None:
    """Append a piece, or make the last one longer."""
    if pieces and pieces[-1][1] == piece[0] and not piece[2]:
        pieces[-1] = pieces[-1][0], piece[1], pieces[-1][2]
    else:
        pieces.append(piece)


def stage_without(
    path: str, keys: Collection[str], fingerprint: Mapping[str, Any] | None, footer: bool = True, fsync: bool = True
) -> tuple[Output, ShardIndex] | None:
    """Write a shard without the samples of some keys; return it, complete, to be published in the shard's place, and its index.

    Args:
        path: Of the shard.
        keys: Of those samples.
        fingerprint: How it was made.
        footer: Put the index behind it.
        fsync: Wait for the disk.

    Returns:
        None, and there is no file, if no other sample is left.

    Raises:
        FormatError: It is no tar, or a damaged one; or what follows the end of the archive is no index.
        OSError: It cannot be read.
    """
    file = ShardFile(path)
    pieces, common = list[Piece](), list[Piece]()  # what stays
    is_left, num_samples, last = False, 0, None
    unread: list[OSError] = []

    def read(begin: int, end: int) -> bytes:
        try:
            return file.read(begin, end)
        except OSError as exc:
            unread.append(exc)
            raise

    for part in walk(read, file.nbytes):
        if unread:  # the walk goes on without these bytes
            raise unread[0]
        if isinstance(part, Break):
            raise TarFormatError(part.reason, offset=part.offset, kind=part.kind).at(path)
        if isinstance(part, End):
            check_end(file, part.offset, num_samples)
            break
        if isinstance(part, Skipped):
            (common if part.is_common else pieces).append((part.begin, part.end, b""))
            continue
        split = split_member(part.name)
        if split is not None and split[0] != last:
            num_samples, last = num_samples + 1, split[0]
        if split is None or split[0] not in keys:
            pieces.append((part.first, part.end, b""))
            is_left = True
    if not is_left:
        return None
    parts, pieces = pieces + [piece for piece in common if piece < pieces[-1]], []  # no archive may end with them
    for piece in sorted(parts):
        append_piece(pieces, piece)
    return _stage_pieces(file, pieces, path, fingerprint, footer, fsync)


def copy_pieces(
    file: ShardFile,
    pieces: Sequence[Piece],
    into: str,
    fingerprint: Mapping[str, Any] | None,
    footer: bool = True,
    fsync: bool = True,
) -> ShardIndex:
    """Write a shard of pieces of another, whole members in their order, and return its index.

    Raises:
        FormatError: They are no tar, or a damaged one. Nothing is written.
    """
    output, index = _stage_pieces(file, pieces, into, fingerprint, footer, fsync)
    output.publish(fsync)
    return index


def _stage_pieces(
    file: ShardFile,
    pieces: Sequence[Piece],
    into: str,
    fingerprint: Mapping[str, Any] | None,
    footer: bool,
    fsync: bool,
) -> tuple[Output, ShardIndex]:
    def read(begin: int, end: int) -> bytes:
        # a shard may have been cut short inside of the padding behind a member
        return file.read(begin, max(begin, min(end, file.nbytes))).ljust(end - begin, b"\0")

    total = sum(len(header) + last - first for first, last, header in pieces) + 2 * BLOCK
    index = replace(scan_shard(_joined(read, pieces), total), fingerprint=fingerprint)
    output = Output(into)
    try:
        for first, last, header in pieces:
            if header:
                output.append([header], len(header))
            for begin in range(first, last, _CHUNK_NBYTES):
                chunk = read(begin, min(begin + _CHUNK_NBYTES, last))
                output.append([chunk], len(chunk))
        tail = END_OF_ARCHIVE + (build_footer(index) if footer else b"")
        output.append([tail], len(tail))
        output.complete(fsync)
    except BaseException:
        output.drop()
        raise
    return output, index


def _joined(read: Callable[[int, int], bytes], pieces: Sequence[Piece]) -> Callable[[int, int], bytes]:
    """Return a function that reads pieces of a file as if they were one, with the end-of-archive marker behind them."""

    def read_joined(begin: int, end: int) -> bytes:
        found, at = [], 0
        for first, last, header in pieces:
            found.append(header[max(0, begin - at) : max(0, end - at)])
            at += len(header)
            low, high = max(begin, at), min(end, at + last - first)
            if low < high:
                found.append(read(first + low - at, first + high - at))
            at += last - first
        return b"".join(found).ljust(end - begin, b"\0")

    return read_joined
