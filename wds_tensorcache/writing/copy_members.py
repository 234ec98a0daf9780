"""Write shards from members of other shards."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from wds_tensorcache.shards.footer import build_footer
from wds_tensorcache.shards.index import Origins, ShardIndex
from wds_tensorcache.shards.index_builder import scan_shard
from wds_tensorcache.shards.tar.headers import END_OF_ARCHIVE
from wds_tensorcache.storage.files import Files, ShardFile
from wds_tensorcache.storage.output import Output

__all__ = ["MemberRange", "append_range", "read_members", "write_shard"]

_CHUNK_NBYTES = 1 << 22


@dataclasses.dataclass(slots=True, order=True)
class MemberRange:
    """A range of whole members of a shard, bytes `[begin, end)`; and the tar header of a member whose own header is lost."""

    path: str
    begin: int
    end: int
    header: bytes = b""


def append_range(ranges: list[MemberRange], path: str, begin: int, end: int, header: bytes = b"") -> None:
    """Append a range, or extend the last range if it ends at byte `begin` of the same shard."""
    last = ranges[-1] if ranges else None
    if last is not None and last.end == begin and not header and last.path == path:
        last.end = end
    else:
        ranges.append(MemberRange(path, begin, end, header))


def read_members(ranges: Iterable[MemberRange], files: Files) -> Iterator[bytes]:
    """Yield the bytes of ranges in chunks."""
    for each in ranges:
        yield each.header
        for begin in range(each.begin, each.end, _CHUNK_NBYTES):
            file, end = files.get(each.path), min(begin + _CHUNK_NBYTES, each.end)
            # a damaged shard may end inside the padding of its last member, which is then completed
            yield file.read(begin, max(begin, min(end, file.nbytes))).ljust(end - begin, b"\0")


def write_shard(
    path: str,
    ranges: Iterable[MemberRange],
    files: Files,
    fingerprint: Mapping[str, Any] | None,
    origins: Iterable[tuple[int, str | None]],
    *,
    footer: bool = True,
    fsync: bool = True,
) -> ShardIndex:
    """Write a shard from members of other shards; scan it, and return its index.

    `origins` are those of the samples, in order, as in `ShardIndex.origin`.

    Raises:
        FormatError: The ranges do not form an intact tar. Nothing is written.
    """
    output, nbytes = Output(path, fsync), 0
    try:
        for chunk in itertools.chain(read_members(ranges, files), [END_OF_ARCHIVE]):
            output.append([chunk], len(chunk))
            nbytes += len(chunk)
        output.flush()
        written = ShardFile(output.temporary)
        index = scan_shard(written.read, nbytes)
        index = dataclasses.replace(index, fingerprint=fingerprint, origins=Origins.of(origins))
        del written  # only POSIX systems can rename an open file
        if footer:
            tail = build_footer(index)
            output.append([tail], len(tail))
        output.finish()
    except BaseException:
        output.drop()
        raise
    return index
