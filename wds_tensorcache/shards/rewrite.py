"""A shard again without some of its samples; the bytes of the others stay as they are."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from wds_tensorcache.shards.footer import build_footer
from wds_tensorcache.shards.index import ShardIndex
from wds_tensorcache.shards.indexing import scan_shard
from wds_tensorcache.shards.names import split_member
from wds_tensorcache.shards.output import Output
from wds_tensorcache.shards.storage import ShardFile
from wds_tensorcache.shards.tar import BLOCK, END_OF_ARCHIVE, Scanner, padding

__all__ = ["copy_pieces", "stage_without"]

_CHUNK_NBYTES = 1 << 22


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
        FormatError: It is no tar, or a damaged one.
    """
    file = ShardFile(path)
    pieces: list[tuple[int, int]] = []  # [begin, end) of what stays
    end = 0
    for name, begin, nbytes in Scanner(file.read, file.nbytes):
        # headers of a member, also extended ones, lie between the end of the one before and its content
        piece = end, begin + nbytes + padding(nbytes)
        end = piece[1]
        split = split_member(name)
        if split is not None and split[0] in keys:
            continue
        if pieces and pieces[-1][1] == piece[0]:
            pieces[-1] = pieces[-1][0], piece[1]
        else:
            pieces.append(piece)
    return None if not pieces else _stage_pieces(file, pieces, path, fingerprint, footer, fsync)


def copy_pieces(
    file: ShardFile,
    pieces: Sequence[tuple[int, int]],
    into: str,
    fingerprint: Mapping[str, Any] | None,
    footer: bool = True,
    fsync: bool = True,
) -> ShardIndex:
    """Write a shard of pieces `[begin, end)` of another, whole members in their order, and return its index.

    Raises:
        FormatError: They are no tar, or a damaged one. Nothing is written.
    """
    output, index = _stage_pieces(file, pieces, into, fingerprint, footer, fsync)
    output.publish(fsync)
    return index


def _stage_pieces(
    file: ShardFile,
    pieces: Sequence[tuple[int, int]],
    into: str,
    fingerprint: Mapping[str, Any] | None,
    footer: bool,
    fsync: bool,
) -> tuple[Output, ShardIndex]:
    def read(begin: int, end: int) -> bytes:
        # a shard may have been cut short inside of the padding behind a member
        return file.read(begin, max(begin, min(end, file.nbytes))).ljust(end - begin, b"\0")

    total = sum(last - first for first, last in pieces) + 2 * BLOCK
    index = replace(scan_shard(_joined(read, pieces), total), fingerprint=fingerprint)
    output = Output(into)
    try:
        for first, last in pieces:
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


def _joined(read: Callable[[int, int], bytes], pieces: Sequence[tuple[int, int]]) -> Callable[[int, int], bytes]:
    """Return a function that reads pieces of a file as if they were one, with the end-of-archive marker behind them."""

    def read_joined(begin: int, end: int) -> bytes:
        found, at = [], 0
        for first, last in pieces:
            low, high = max(begin, at), min(end, at + last - first)
            if low < high:
                found.append(read(first + low - at, first + high - at))
            at += last - first
        return b"".join(found).ljust(end - begin, b"\0")

    return read_joined
