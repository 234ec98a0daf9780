"""A tar read from a stream by the rules of `Scanner`."""

from __future__ import annotations

import bz2
import gzip
import lzma
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from wds_tensorcache.errors import FormatError, Kind, TarFormatError
from wds_tensorcache.shards.expansion import MAX_EXPANDED_NBYTES, check_objects, max_expanded
from wds_tensorcache.shards.tar import (
    BLOCK,
    Headers,
    check_length,
    find_header_in,
    hidden_members,
    is_extended,
    is_header,
    is_meta_name,
    padding,
)

_UNKNOWN = 1 << 62  # stands for the length of the tar, which is unknown in a stream
_MAX_SKIP_NBYTES = 1 << 20
_MAX_READ_NBYTES = 1 << 26
_FUNCTIONS = "tc.tarfile_to_samples or tc.ResumablePipeline"
_DECOMPRESSORS: dict[bytes, Callable[[Any], Any]] = {
    b"\x1f\x8b": lambda stream: gzip.GzipFile(fileobj=stream),
    b"BZh": bz2.BZ2File,
    b"\xfd7zXZ\0": lzma.LZMAFile,
}


class TarStream:
    """The ordinary files of a tar in a stream, by `Scanner`'s rules. Iterate once. gzip, bzip2 and xz are decompressed.

    Iterating yields the name of each file, and a function that returns its content until the next file is requested.

    Args:
        stream: Object with `read(n)`, which may return fewer than n bytes.
        begin: Offset of the stream's first byte in the tar: 0, or a `start` of an earlier stream of this tar.
        skip: Function that skips up to n bytes of `stream` and returns the number of skipped bytes; None to read and drop them.
        max_expanded_nbytes: Limit for the decompressed bytes of the whole tar; 64 times the bytes read from `stream` are always
            allowed. Members that become objects have lower limits, see `check_objects`.

    Raises:
        TarFormatError: The stream ends without an end-of-archive block, breaks a rule of the format, or expands too much.
            Raised while iterating or reading, with the offset in the decompressed tar.
        ValueError: The content of a file was requested twice, or after the next file.
    """

    def __init__(
        self,
        stream: Any,
        begin: int = 0,
        skip: Callable[[int], int] | None = None,
        max_expanded_nbytes: int = MAX_EXPANDED_NBYTES,
    ) -> None:
        # Offset of the current member's first header, at which another stream of this tar can begin. None if the tar is
        # compressed, or if a global header precedes the member.
        self.start: int | None = None
        self._stream = stream
        self._skip = skip
        self._max_expanded_nbytes = max_expanded_nbytes
        self._at = begin
        self._compressed: _Compressed | None = None

    def __iter__(self) -> Iterator[tuple[str, Callable[[], bytes]]]:
        headers = Headers(self._read_range, _UNKNOWN)
        header_begin = start = self._at
        block = self._take_first() if not self._at else self._take(BLOCK)
        while True:
            if len(block) < BLOCK:
                problem = "truncated: the stream ends without an end-of-archive block"
                problem = problem if header_begin or block else "the stream is empty, expected a tar"
                raise TarFormatError(problem, offset=header_begin, kind="truncated")
            if headers.is_end(block, header_begin):
                return
            header = headers.parse(block, header_begin)
            begin, end = header_begin + BLOCK, header_begin + BLOCK + header.nbytes
            is_member = not is_extended(block)  # the content of an extended header is read by `parse`
            if is_member:
                self.start = None if self._compressed is not None or headers.common else start
                if header.is_file and not is_meta_name(header.name):
                    yield header.name, partial(self._read_member, header.name, begin, end)
            self._skip_to(end + padding(header.nbytes))
            header_begin = self._at
            start = header_begin if is_member else start
            block = self._take(BLOCK)

    def finish(self) -> TarFormatError | None:
        """Return an error if a tar header follows the archive.

        A compressed stream is read to its end. Raises TarFormatError if it is cut short, differs from its checksum, or expands
        too much.
        """
        end, hidden = self._at - BLOCK, None
        while (hidden is None or self._compressed is not None) and (blocks := self._take(_MAX_SKIP_NBYTES)):
            offset = find_header_in(blocks) if hidden is None else None
            if offset is not None:
                hidden = hidden_members(end, self._at - len(blocks) + offset)
        return hidden

    def _take_first(self) -> bytes:
        block = self._take(BLOCK)
        decompressor = next((_DECOMPRESSORS[magic] for magic in _DECOMPRESSORS if block.startswith(magic)), None)
        # a plain tar may begin with a name that looks compressed; tars from before POSIX have no `ustar`
        if decompressor is None or block[257:262] == b"ustar" or is_header(block):
            return block
        self._compressed = _Compressed(block, self._stream)
        self._stream, self._at = decompressor(self._compressed), 0
        return self._take(BLOCK)

    def _read_range(self, begin: int, end: int) -> bytes:
        if begin != self._at:
            raise ValueError("a member of a stream can be read only once, and only before the next member is requested")
        content = self._take(end - begin)
        check_length(content, begin, end)
        return content

    def _read_member(self, name: str, begin: int, end: int) -> bytes:
        content = self._read_range(begin, end)
        if self._compressed is not None:
            try:
                check_objects(name, len(content), self._compressed.nbytes, self._max_expanded_nbytes, _FUNCTIONS)
            except FormatError as exc:
                raise TarFormatError(f"{name!r:.100}: {exc}", offset=begin, kind="compressed") from None
        return content

    def _skip_to(self, end: int) -> None:
        if self._skip is not None and end - self._at > _MAX_SKIP_NBYTES and self._compressed is None:
            self._at += self._skip(end - self._at)
        while self._at < end:
            begin, nbytes = self._at, min(end - self._at, _MAX_SKIP_NBYTES)
            if len(self._take(nbytes)) < nbytes:
                problem = f"truncated: expected {end - begin} more bytes, got {self._at - begin}"
                raise TarFormatError(problem, offset=begin, kind="truncated")

    def _take(self, nbytes: int) -> bytes:
        # Usually one read. A header may declare more bytes than the stream has, so each read is limited.
        content = self._read(min(nbytes, _MAX_READ_NBYTES))
        if len(content) < nbytes:
            parts, missing = [content], nbytes - len(content)
            while missing and parts[-1]:
                parts.append(self._read(min(missing, _MAX_READ_NBYTES)))
                missing -= len(parts[-1])
            content = b"".join(parts)
        return content

    def _read(self, nbytes: int) -> bytes:
        compressed = self._compressed
        if compressed is None:
            content: bytes = self._stream.read(nbytes)
            self._at += len(content)
            return content
        try:
            content = self._stream.read(nbytes)
        except (EOFError, OSError, zlib.error, lzma.LZMAError) as exc:
            if getattr(exc, "errno", None) is not None:
                raise  # an error of the stream itself; errors of gzip and bz2 have no errno
            kind: Kind = "truncated" if isinstance(exc, EOFError) else "compressed"
            problem = f"the compressed stream is cut short or damaged: {exc}"
            raise TarFormatError(problem, offset=self._at, kind=kind) from exc
        self._at += len(content)
        limit = max_expanded(compressed.nbytes, self._max_expanded_nbytes)
        if self._at > limit:
            problem = f"{compressed.nbytes} compressed bytes expand to {self._at} or more, expected at most {limit} "
            problem += (
                f"for what was read so far; if you trust the shard, pass a larger max_expanded_nbytes= to {_FUNCTIONS}"
            )
            raise TarFormatError(problem, offset=self._at, kind="compressed")
        return content


class _Compressed:
    """A compressed stream of which `head` was already read."""

    def __init__(self, head: bytes, stream: Any) -> None:
        self._head = head
        self._stream = stream
        self.nbytes = 0  # returned so far

    def read(self, nbytes: int = -1) -> Any:
        if self._head:
            content = self._head if nbytes < 0 else self._head[:nbytes]
            self._head = self._head[len(content) :]
        else:
            content = self._stream.read(nbytes)
        self.nbytes += len(content)
        return content
