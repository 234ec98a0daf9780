"""Checks of the bytes after the end of an archive. Only zeros, an index, or both may follow.

Hazard: readers stop at the first block of zeros. If zeros overwrote a header, or another tar follows, more members come after
the zeros. A copy or an index of the members before the zeros would lose them.
"""

from __future__ import annotations

import contextlib
import os

from wds_tensorcache.errors import FormatError, TarFormatError
from wds_tensorcache.shards.footer import read_footer, read_trailer
from wds_tensorcache.shards.index import ShardIndex
from wds_tensorcache.shards.load_index import load_index, parse_both
from wds_tensorcache.shards.manifest import MANIFEST, read_manifest
from wds_tensorcache.shards.tar import BLOCK, HIDDEN_REMEDY, find_header
from wds_tensorcache.storage.files import File, ShardFile
from wds_tensorcache.storage.urls import is_url

_CHUNK_NBYTES = 1 << 20
# a lost header and the end-of-archive marker; an undamaged index begins within this distance
_MIN_LOST_NBYTES = 3 * BLOCK
_REMEDY = (
    "`tensorcache verify` (tc.verify) describes the damage, `tensorcache repair` (tc.repair) saves all other samples"
)
REMOTE_REMEDY = f"for a copy on a local disk, {_REMEDY}"


def find_lost(path: str, end: int, nbytes: int, num_samples: int) -> TarFormatError | None:
    """Return an error if the manifest lists samples that zeros have overwritten. The zeros begin at byte `end`."""
    if nbytes - end < _MIN_LOST_NBYTES:
        return None
    folder, name = os.path.split(os.path.abspath(path))
    with contextlib.suppress(FileNotFoundError, FormatError):
        for entry in read_manifest(os.path.join(folder, MANIFEST))[0]:
            is_it = os.path.normpath(entry.url) == name and entry.nbytes == nbytes
            if is_it and entry.num_samples > num_samples:
                problem = f"zeros after {num_samples} samples, although {MANIFEST} lists {entry.num_samples}"
                return TarFormatError(f"{problem}; {_REMEDY}", offset=end, kind="lost").at(path)
    return None


def load_whole(path: str) -> ShardIndex:
    """Load the index of a shard, and check its end. Raise FormatError as `load_index` and `check_end` do."""
    file = ShardFile(path)
    try:
        index = load_index(file)
    except FormatError as exc:
        error = type(exc)(f"{exc.reason}; {_REMEDY}", offset=exc.offset, kind=exc.kind)
        raise (error if exc.where is None else error.at(exc.where)) from exc
    check_end(file, index.end, len(index.keys))
    return index


def check_end(file: File, end: int, num_samples: int) -> None:
    """Raise TarFormatError for unknown bytes or lost members after the archive.

    `end` and `num_samples` come from the index of the shard.
    """

    def refuse(problem: str, offset: int, remedy: str = REMOTE_REMEDY if is_url(file.path) else _REMEDY) -> None:
        raise TarFormatError(f"{problem}; {remedy}", offset=offset, kind="trailing").at(file.path)

    trailer = read_trailer(file.read, file.nbytes, file.nbytes)
    # another tool may have appended to the archive, over a part of a stale index
    stop = file.nbytes if trailer is None else max(end, trailer.begin)
    unknown = first_nonzero(file, end, stop)
    if unknown is not None:
        problem = f"unknown bytes after the end of the archive at byte {end}, expected an index"
        header = find_header(file.read, unknown - unknown % BLOCK, file.nbytes)
        if header is None:
            refuse(problem, unknown)
        refuse(f"{problem}; a tar header follows at byte {header}", unknown, remedy=HIDDEN_REMEDY)
    if stop < file.nbytes and read_footer(file.read, file.nbytes) is None:
        # `tar -r` overwrites the beginning of an index, but not its trailer. New members may precede the trailer.
        header = find_header(file.read, stop - stop % BLOCK, file.nbytes)
        if header is not None:
            refuse("a tar header, in the remains of an index that other members overwrote", header)
    trailers = parse_both(file, lambda part: read_trailer(part.read, part.nbytes, file.nbytes))
    later = max((trailer.end for trailer in trailers), default=0)
    if later > end:
        refuse(f"zeros, although an index says that the archive ends at byte {later}", end)
    # if zeros have overwritten members, only the manifest lists them, until a command replaces the manifest
    if stop - end >= _MIN_LOST_NBYTES and isinstance(file, ShardFile):
        lost = find_lost(file.path, end, file.nbytes, num_samples)
        if lost is not None:
            raise lost


def first_nonzero(file: File, begin: int, end: int) -> int | None:
    """Return the offset of the first byte other than zero in `[begin, end)`."""
    for at in range(begin, end, _CHUNK_NBYTES):
        chunk = file.read(at, min(at + _CHUNK_NBYTES, end))
        rest = chunk.lstrip(b"\0")
        if rest:
            return at + len(chunk) - len(rest)
    return None
