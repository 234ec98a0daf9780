"""Check the bytes after the end of an archive: tools index or copy a shard only if they are zeros, an index, or both."""

from __future__ import annotations

import contextlib
import os

from wds_tensorcache.errors import FormatError, Kind, TarFormatError
from wds_tensorcache.shards.dali_index import MIN_LOST_NBYTES, listed_after
from wds_tensorcache.shards.footer import read_footer, read_trailer
from wds_tensorcache.shards.index import ShardIndex
from wds_tensorcache.shards.index_paths import dali_index_path
from wds_tensorcache.shards.load_index import load_index, parse_both
from wds_tensorcache.shards.manifest import MANIFEST, read_manifest
from wds_tensorcache.shards.tar.headers import BLOCK
from wds_tensorcache.shards.tar.hidden import HIDDEN_REMEDY, find_header, lost_members
from wds_tensorcache.storage.files import ShardFile

__all__ = ["check_end", "load_whole"]

_CHUNK_NBYTES = 1 << 20
_REMEDY = (
    "`tensorcache verify` (tc.verify) describes the damage, `tensorcache repair` (tc.repair) saves all other samples"
)


def load_whole(path: str) -> ShardIndex:
    """Return the index of a shard that a writer will extend, after checking that the shard is whole.

    Raises:
        FormatError: The file is not a shard, or is damaged, or something other than an index follows its archive.
    """
    file = ShardFile(path)
    try:
        index = load_index(file)
    except FormatError as exc:
        found = type(exc)(f"{exc.reason}; {_REMEDY}", offset=exc.offset, kind=exc.kind)
        raise (found if exc.where is None else found.at(exc.where)) from exc
    check_end(file, index.end, len(index.keys))
    return index


def check_end(file: ShardFile, end: int, num_samples: int) -> None:
    """Raise TarFormatError unless a scan found every member of the file.

    Args:
        file: The shard.
        end: Offset of the end-of-archive marker that the scan found.
        num_samples: Number of samples that the scan found.

    Hazard: readers stop at the first block of zeros. If zeros overwrote a header, or another tar follows, more members come
    after the zeros. A copy of the part before them, or an index of it, would lose these members.
    """
    place = read_trailer(file.read, file.nbytes, file.nbytes)
    # another tool may have appended to the archive, over a part of a stale index
    stop = file.nbytes if place is None else max(end, place.begin)
    for begin in range(end, stop, _CHUNK_NBYTES):
        chunk = file.read(begin, min(begin + _CHUNK_NBYTES, stop))
        if chunk.strip(b"\0"):
            at = begin + len(chunk) - len(chunk.lstrip(b"\0"))
            what = f"unknown bytes after the end of the archive at byte {end}, expected an index"
            hidden = find_header(file.read, at - at % BLOCK, file.nbytes)
            if hidden is None:
                raise _refused(file, what, at)
            raise _refused(file, f"{what}; a tar header follows at byte {hidden}", at, remedy=HIDDEN_REMEDY)
    if stop < file.nbytes and read_footer(file.read, file.nbytes) is None:
        # Hazard: `tar -r` overwrites the beginning of an index, but not its trailer. New members may precede the trailer.
        hidden = find_header(file.read, stop - stop % BLOCK, file.nbytes)
        if hidden is not None:
            raise _refused(file, "a tar header, in the remains of an index that other members overwrote", hidden)
    declared = parse_both(file, lambda each: read_trailer(each.read, each.nbytes, file.nbytes))
    later = max((trailer.end for trailer in declared), default=0)
    if later > end:
        raise _refused(file, f"zeros, although an index says that the archive ends at byte {later}", end)
    # Hazard: if zeros have overwritten members, only DALI's index and the manifest list them, and a tool replaces both.
    if stop - end >= MIN_LOST_NBYTES:
        idx = dali_index_path(file.path)
        if (listed := listed_after(idx, end, file.nbytes)) is not None:
            raise lost_members(idx, end, listed).at(file.path)
        if (count := _listed_samples(file)) > num_samples:
            what = f"zeros after {num_samples} samples, although {MANIFEST} lists {count} for a file of this length"
            raise _refused(file, what, end, "lost")


def _listed_samples(file: ShardFile) -> int:
    """Return the number of samples that the manifest lists for a shard of this length; 0 if it does not list the shard."""
    folder, name = os.path.split(os.path.abspath(file.path))
    with contextlib.suppress(FileNotFoundError, FormatError):
        entries, _ = read_manifest(os.path.join(folder, MANIFEST))
        same = [each for each in entries if os.path.normpath(each.url) == name and each.nbytes == file.nbytes]
        return max((each.num_samples for each in same), default=0)
    return 0


def _refused(file: ShardFile, what: str, offset: int, kind: Kind = "trailing", remedy: str = _REMEDY) -> TarFormatError:
    return TarFormatError(f"{what}; {remedy}", offset=offset, kind=kind).at(file.path)
