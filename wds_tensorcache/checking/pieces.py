"""Pieces of a damaged shard that are kept: whole members, with new headers for those that have lost their own."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from wds_tensorcache.storage.files import ShardFile

__all__ = ["Piece", "append_piece", "read_pieces"]

# bytes [begin, end) of a shard, and headers to write before them if they have lost their own
Piece = tuple[int, int, bytes]
_CHUNK_NBYTES = 1 << 22


def append_piece(pieces: list[Piece], piece: Piece) -> None:
    """Append a piece, or make the last one longer."""
    if pieces and pieces[-1][1] == piece[0] and not piece[2]:
        pieces[-1] = pieces[-1][0], piece[1], pieces[-1][2]
    else:
        pieces.append(piece)


def read_pieces(file: ShardFile, pieces: Iterable[Piece]) -> Iterator[bytes]:
    """Yield the bytes of pieces of a shard, chunk by chunk."""
    for first, last, header in pieces:
        if header:
            yield header
        for begin in range(first, last, _CHUNK_NBYTES):
            end = min(begin + _CHUNK_NBYTES, last)
            # the shard may have been cut short inside the padding after a member
            yield file.read(begin, max(begin, min(end, file.nbytes))).ljust(end - begin, b"\0")
