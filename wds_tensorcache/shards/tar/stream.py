"""A tar as it comes out of a stream, member by member; what is read is what `Scanner` reads."""

from __future__ import annotations

import bz2
import gzip
import lzma
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from wds_tensorcache.errors import Kind, TarFormatError
from wds_tensorcache.shards.tar.archive import BLOCK, Scanner, is_extended, is_meta_name, padding
from wds_tensorcache.shards.tar.fields import Pairs, adds_up
from wds_tensorcache.shards.tar.sparse import SparseMap, read_map

__all__ = ["TarStream"]

_UNKNOWN = 1 << 62  # bytes, in place of the length that a stream does not have
_MAX_SKIP_NBYTES = 1 << 20
_MAX_READ_NBYTES = 1 << 26
_MAX_MAGIC_NBYTES = 6
_DECOMPRESSORS: dict[bytes, Callable[[Any], Any]] = {
    b"\x1f\x8b": lambda stream: gzip.GzipFile(fileobj=stream),
    b"BZh": bz2.BZ2File,
    b"\xfd7zXZ\0": lzma.LZMAFile,
}


class TarStream:
    """The ordinary files of a tar, also of one compressed by gzip, bzip2 or xz: iterating yields `(name, read)` for each.

    `read()` returns the content, in memory of its own; what is not read until the next member is asked for is skipped.
    Directories, links, devices and webdataset's own metadata (`__…__`) are skipped; GNU sparse members come with their holes.

    Args:
        stream: Has `read(n)`, which may return fewer bytes.

    Raises:
        TarFormatError: While iterating or reading, with the offset in the (decompressed) tar. The stream ends without an
            end-of-archive block, or breaks a rule of the format.

    Threads: not safe; one iteration.
    """

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._at = 0
        self._is_compressed = False
        self._begun: bytes = b""  # what was read to see whether the stream is compressed

    def __iter__(self) -> Iterator[tuple[str, Callable[[], bytes]]]:
        scanner = Scanner(self._read_range, _UNKNOWN)
        own: dict[bytes, bytes] = {}
        common: dict[bytes, bytes] = {}
        records: Pairs = []  # of a sparse member
        is_expected = False  # another header
        self._decompress()
        while True:
            header_begin = self._at
            header = self._take(BLOCK)
            if not header and not header_begin:
                raise TarFormatError("the stream is empty, expected a tar", offset=0, kind="truncated")
            if len(header) < BLOCK:
                raise TarFormatError(
                    "truncated: the stream ends without an end-of-archive block", offset=header_begin, kind="truncated"
                )
            if header.count(0) == BLOCK:
                if is_expected:
                    raise TarFormatError(
                        "the archive ends behind an extended header", offset=header_begin, kind="extended-header"
                    )
                return
            is_file, name, nbytes = scanner.read_header(header, header_begin, own, common, records)
            is_expected = is_extended(header)
            begin, end, holes = header_begin + BLOCK, header_begin + BLOCK + nbytes, None
            if is_file and not is_expected and (records or header[156] == ord("S")):
                holes, left = _at_byte(header_begin, partial(read_map, header, records, nbytes, self._take_exactly))
                begin, end = self._at, self._at + left
            records = records if is_expected else []
            if is_file and not is_meta_name(name):
                yield name, partial(self._read_member, begin, end, holes)
            self._skip_to(end + padding(nbytes))

    def finish(self) -> None:
        """Read what is behind the archive, if it was compressed: a checksum is at the end.

        Raises:
            FormatError: The compressed stream is cut short or damaged.
        """
        while self._is_compressed and self._take(_MAX_SKIP_NBYTES):
            pass

    def _decompress(self) -> None:
        head = self._take(_MAX_MAGIC_NBYTES)
        decompressor = next((made for magic, made in _DECOMPRESSORS.items() if head.startswith(magic)), None)
        if decompressor is not None:
            head += self._take(BLOCK - len(head))
            # a member may be called like that; tars from before POSIX have no magic
            if not (len(head) == BLOCK and head[257:262] == b"ustar") and not adds_up(head):
                self._stream, head, self._is_compressed = decompressor(_Rejoined(head, self._stream)), b"", True
        self._begun, self._at = head, 0

    def _read_range(self, begin: int, end: int) -> bytes:
        if begin != self._at:
            raise ValueError("the members of a stream are read once, each before the next one")
        content = self._take(end - begin)
        if len(content) < end - begin:
            raise TarFormatError(
                f"truncated: expected {end - begin} bytes, got {len(content)}", offset=begin, kind="truncated"
            )
        return content

    def _take_exactly(self, nbytes: int) -> bytes:
        return self._read_range(self._at, self._at + nbytes)

    def _read_member(self, begin: int, end: int, holes: SparseMap | None) -> bytes:
        return self._read_range(begin, end) if holes is None else holes.fill(self._read_range(begin, end))

    def _skip_to(self, end: int) -> None:
        while self._at < end:
            begin, nbytes = self._at, min(end - self._at, _MAX_SKIP_NBYTES)
            if len(self._take(nbytes)) < nbytes:
                raise TarFormatError(
                    f"truncated: {end - begin} bytes more were expected, got {self._at - begin}",
                    offset=begin,
                    kind="truncated",
                )

    def _take(self, nbytes: int) -> bytes:
        """Return so many bytes, or fewer at the stream's end."""
        if self._begun:
            head, self._begun = self._begun[:nbytes], self._begun[nbytes:]
            self._at += len(head)
            return head + self._take(nbytes - len(head)) if len(head) < nbytes else head
        # one piece, unless a pipe gives less; no more memory is asked for than a header may claim and a stream not have
        content: bytes = self._read(min(nbytes, _MAX_READ_NBYTES))
        if len(content) < nbytes:
            parts, missing = [content], nbytes - len(content)
            while missing and parts[-1]:
                parts.append(self._read(min(missing, _MAX_READ_NBYTES)))
                missing -= len(parts[-1])
            content = b"".join(parts)
        self._at += len(content)
        return content

    def _read(self, nbytes: int) -> Any:
        if not self._is_compressed:
            return self._stream.read(nbytes)
        try:
            return self._stream.read(nbytes)
        except (EOFError, OSError, zlib.error, lzma.LZMAError) as exc:
            if getattr(exc, "errno", None) is not None:
                raise  # of the stream itself; those of gzip and bz2 have no number
            kind: Kind = "truncated" if isinstance(exc, EOFError) else "compressed"
            raise TarFormatError(
                f"the compressed stream is cut short or damaged: {exc}", offset=self._at, kind=kind
            ) from exc


def _at_byte(begin: int, call: Callable[[], Any]) -> Any:
    try:
        return call()
    except TarFormatError as exc:
        if exc.offset is not None:
            raise
        raise TarFormatError(exc.reason, offset=begin, kind="sparse") from exc


class _Rejoined:
    """A stream, and in front of it what was read of it already."""

    def __init__(self, head: bytes, stream: Any) -> None:
        self._head = head
        self._stream = stream

    def read(self, nbytes: int = -1) -> Any:
        if self._head:
            head = self._head if nbytes < 0 else self._head[:nbytes]
            self._head = self._head[len(head) :]
            return head
        return self._stream.read(nbytes)

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return False

    closed = False
