"""Bytes after the end of an archive: nothing but zeros and an index, or the shard is not written again."""

from __future__ import annotations

import contextlib

from wds_tensorcache.errors import FormatError, TarFormatError
from wds_tensorcache.shards.footer import TRAILER_NBYTES, declared_place
from wds_tensorcache.shards.index import ShardIndex
from wds_tensorcache.shards.reader import load_index, sidecar_path
from wds_tensorcache.shards.storage import ShardFile

__all__ = ["check_end", "load_whole"]

_CHUNK_NBYTES = 1 << 20
_REMEDY = "tc.verify says what is wrong, tc.repair saves the rest into another folder"


def load_whole(path: str) -> ShardIndex:
    """Return the index of a shard that is to be added to.

    Raises:
        FormatError: It is no shard, or a damaged one, or something follows its archive that is no index.
    """
    file = ShardFile(path)
    try:
        index = load_index(file)
    except FormatError as exc:
        found = type(exc)(f"{exc.reason}; {_REMEDY}", offset=exc.offset, kind=exc.kind)
        raise (found if exc.where is None else found.at(exc.where)) from exc
    check_end(file, index.end)
    return index


def check_end(file: ShardFile, end: int) -> None:
    """Raise TarFormatError unless a scan that found the end of the archive at byte `end` accounts for all of the file.

    Hazard: readers end at the first block of zeros. Where zeros have overwritten a header, or another tar follows, members
    follow it, and a shard that is cut there, or written again up to there, would lose them for good.
    """
    place = None
    if file.nbytes >= TRAILER_NBYTES:
        place = declared_place(file.read(file.nbytes - TRAILER_NBYTES, file.nbytes), file.nbytes)
    # of a stale index, which the archive has outgrown, some bytes may be left
    stop = file.nbytes if place is None else max(end, place[0])
    for begin in range(end, stop, _CHUNK_NBYTES):
        chunk = file.read(begin, min(begin + _CHUNK_NBYTES, stop))
        if chunk.strip(b"\0"):
            at = begin + len(chunk) - len(chunk.lstrip(b"\0"))
            what = f"bytes that are no index, after the end of the archive at byte {end}"
            raise _refused(file, what, at)
    later = 0 if place is None else place[1]
    with contextlib.suppress(OSError, FormatError):
        beside = ShardFile(sidecar_path(file.path))
        place = declared_place(beside.read(max(0, beside.nbytes - TRAILER_NBYTES), beside.nbytes), file.nbytes)
        later = later if place is None else max(later, place[1])
    if later > end:
        raise _refused(file, f"zeros, where an index has the end of the archive at byte {later}", end)


def _refused(file: ShardFile, what: str, offset: int) -> TarFormatError:
    return TarFormatError(f"{what}; {_REMEDY}", offset=offset, kind="trailing").at(file.path)
