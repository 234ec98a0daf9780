"""Bytes after the end of an archive: nothing but zeros and an index, or the shard is not written again."""

from __future__ import annotations

import contextlib
import os
import re

from wds_tensorcache.errors import FormatError, Kind, TarFormatError
from wds_tensorcache.shards.footer import declared_place, read_footer
from wds_tensorcache.shards.index import ShardIndex
from wds_tensorcache.shards.manifest import MANIFEST, dali_index_path, read_manifest
from wds_tensorcache.shards.shard import load_index
from wds_tensorcache.shards.sidecar import stored
from wds_tensorcache.shards.tar.archive import BLOCK
from wds_tensorcache.shards.tar.fields import adds_up
from wds_tensorcache.storage.files import ShardFile

__all__ = ["check_end", "load_whole"]

_CHUNK_NBYTES = 1 << 20
_MIN_LOST_NBYTES = 3 * BLOCK  # a header and the end-of-archive marker; an index begins within as much
_NUMBER = re.compile(rb"[0-9]{1,19}").fullmatch
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
    check_end(file, index.end, len(index.keys))
    return index


def check_end(file: ShardFile, end: int, num_samples: int) -> None:
    """Raise TarFormatError unless a scan that found the end of the archive at byte `end` accounts for all of the file.

    Args:
        file: The shard.
        end: Where the scan found the end-of-archive marker.
        num_samples: That it found before.

    Hazard: readers end at the first block of zeros. Where zeros have overwritten a header, or another tar follows, members
    follow it, and a shard that is cut there, or written again up to there, would lose them for good.
    """
    place = declared_place(file.read, file.nbytes, file.nbytes)
    # of a stale index, which the archive has outgrown, some bytes may be left
    stop = file.nbytes if place is None else max(end, place[0])
    for begin in range(end, stop, _CHUNK_NBYTES):
        chunk = file.read(begin, min(begin + _CHUNK_NBYTES, stop))
        if chunk.strip(b"\0"):
            at = begin + len(chunk) - len(chunk.lstrip(b"\0"))
            what = f"bytes that are no index, after the end of the archive at byte {end}"
            raise _refused(file, what, at)
    if stop < file.nbytes and read_footer(file.read, file.nbytes) is None:
        # Hazard: `tar -r` writes over an index from its beginning, and leaves its trailer: what is before that may be members.
        _refuse_headers(file, stop)
    declared = stored(file, lambda each: declared_place(each.read, each.nbytes, file.nbytes))
    later = max((declared_end for _, declared_end in declared), default=0)
    if later > end:
        raise _refused(file, f"zeros, where an index has the end of the archive at byte {later}", end)
    # Hazard: the index and the manifest that are to be written are all that tells of members that zeros have overwritten.
    if stop - end >= _MIN_LOST_NBYTES:
        idx = dali_index_path(file.path)
        if (listed := _listed_behind(idx, end, file.nbytes)) is not None:
            what = f"zeros, where {os.path.basename(idx)} has a member at byte {listed}"
            raise _refused(file, f"{what} (delete the .idx if it is of another state of the shard)", end, "lost")
        if (count := _listed_samples(file)) > num_samples:
            what = f"zeros after {num_samples} samples, where {MANIFEST} lists {count} in a file of this length"
            raise _refused(file, what, end, "lost")


def _refuse_headers(file: ShardFile, begin: int) -> None:
    """Raise TarFormatError if a tar header is in what is left of a stale index, from byte `begin` on."""
    begin -= begin % BLOCK
    for at in range(begin, file.nbytes - BLOCK + 1, BLOCK):
        header = file.read(at, at + BLOCK)
        if header[257:262] == b"ustar" and adds_up(header):
            raise _refused(file, "a tar header in what is left of an index", at)


def _listed_samples(file: ShardFile) -> int:
    """Return how many samples the manifest lists of a shard of this length, 0 if it lists none."""
    folder, name = os.path.split(os.path.abspath(file.path))
    with contextlib.suppress(FileNotFoundError, FormatError):
        entries, _ = read_manifest(os.path.join(folder, MANIFEST))
        same = [each for each in entries if os.path.normpath(each.url) == name and each.nbytes == file.nbytes]
        return max((each.num_samples for each in same), default=0)
    return 0


def _listed_behind(path: str, end: int, nbytes: int) -> int | None:
    """Return where DALI's index has the first member behind byte `end`; None without any, or if one is beyond the file."""
    with contextlib.suppress(FileNotFoundError, FormatError):
        file = ShardFile(path)
        first, *lines = file.read(0, file.nbytes).splitlines() or [b""]
        width = {b"v1.1": 3, b"v1.2": 4}.get(first[:4], 0)
        found: list[int] = []
        for line in lines if width else ():
            fields = line.split()
            for begin, size in zip(fields[1::width], fields[2::width], strict=False):
                if not (_NUMBER(begin) and _NUMBER(size)):
                    continue  # a damaged line says nothing
                if int(begin) + int(size) > nbytes:
                    return None
                found.append(int(begin))
        return min((begin for begin in found if begin > end), default=None)
    return None


def _refused(file: ShardFile, what: str, offset: int, kind: Kind = "trailing") -> TarFormatError:
    return TarFormatError(f"{what}; {_REMEDY}", offset=offset, kind=kind).at(file.path)
