"""Files in Arrow's stream format, whose record batches are found first and read later, and Parquet files in pyarrow."""

from __future__ import annotations

import io
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from wds_tensorcache.errors import FormatError
from wds_tensorcache.importers.generic.arrow_values import import_pyarrow
from wds_tensorcache.importers.source_folder import SourceFolder

_SCHEMA, _RECORD_BATCH = "schema", "record batch"  # types of messages
_HEADER, _BODY_NBYTES, _COMPRESSION = 2, 3, 3  # numbers of fields: two in a message, and one in a record batch
_CONTINUATION = b"\xff\xff\xff\xff"  # before the length of a message, since Arrow 0.15


@dataclass(frozen=True, slots=True)
class StoredBatch:
    """A record batch in a file, not read yet.

    Attributes:
        name: Relative path of the file.
        begin, end: Range of bytes in the file.
        schema: Schema of the file, of pyarrow.
    """

    name: str
    begin: int
    end: int
    schema: Any

    def read(self, folder: SourceFolder) -> Any:
        """Return the record batch.

        Raises:
            FormatError: The file was cut short since, or the batch is damaged.

        Memory: one copy of the batch. The lengths of its buffers are checked, but not their elements.
        """
        arrow = import_pyarrow()
        try:
            message = _read_message(arrow, folder, self.name, self.begin, self.end)
            batch = arrow.ipc.read_record_batch(message, self.schema)
            batch.validate()
            return batch
        except (arrow.ArrowException, EOFError, ValueError) as exc:
            raise _damaged(exc) from exc


def find_batches(folder: SourceFolder, name: str) -> Iterator[StoredBatch]:
    """Yield the record batches of a file in Arrow's stream format; only their metadata is read.

    Raises:
        FormatError: The file is damaged, compressed, or has dictionaries.
    """
    arrow = import_pyarrow()
    try:
        schema = None
        for begin, body, end in _extents(folder, name):
            metadata = arrow.ipc.read_message(_buffer(arrow, folder, name, begin, body)) if schema is None else None
            if metadata is not None:
                # pyarrow verifies only messages of the kinds that it knows, and would follow any offsets in any other.
                if metadata.type != _SCHEMA:
                    raise FormatError(f"begins with a message of the kind {metadata.type!r:.40}, expected a schema")
                schema = arrow.ipc.read_schema(metadata)
                if len(set(schema.names)) < len(schema.names):
                    raise FormatError("two columns have the same name")
                continue
            yield StoredBatch(name, begin, end, schema)
        if schema is None:
            raise FormatError("has no schema")
    except FormatError:
        raise
    except (arrow.ArrowException, EOFError, ValueError, struct.error) as exc:
        raise _damaged(exc) from exc


def _extents(folder: SourceFolder, name: str) -> Iterator[tuple[int, int, int]]:
    """Yield the begin of each message, and of its body, and its end."""
    with folder.open(name) as file:
        nbytes = os.fstat(file.fileno()).st_size
    at = 0
    while at < nbytes:
        prefix = folder.read_range(name, at, min(at + 8, nbytes))
        head = 8 if prefix.startswith(_CONTINUATION) else 4
        (size,) = struct.unpack("<i", prefix[head - 4 : head])
        if not size:
            return
        metadata = folder.read_range(name, at + head, at + head + max(0, size))
        body = at + head + size
        field = _field(metadata, struct.unpack_from("<I", metadata)[0], _BODY_NBYTES)
        length = struct.unpack_from("<q", metadata, field)[0] if field else 0
        if size < 0 or length < 0 or body + length > nbytes:
            raise FormatError(f"the message at byte {at:,} ends after the file of {nbytes:,} bytes")
        yield at, body, body + length
        at = body + length


def _read_message(arrow: Any, folder: SourceFolder, name: str, begin: int, end: int) -> Any:
    message = arrow.ipc.read_message(_buffer(arrow, folder, name, begin, end))
    if message.type != _RECORD_BATCH:
        raise FormatError(f"contains a message of the kind {message.type!r:.40}, expected record batches")
    if _is_compressed(bytes(message.metadata)):
        raise FormatError("is compressed, which datasets never does")
    return message


def _buffer(arrow: Any, folder: SourceFolder, name: str, begin: int, end: int) -> Any:
    return arrow.py_buffer(folder.view(name, begin, end))


def _damaged(exc: Exception) -> FormatError:
    return exc if isinstance(exc, FormatError) else FormatError(f"is not a file of Arrow streams: {exc!r:.200}")


def _is_compressed(metadata: bytes) -> bool:
    """Return whether a record batch has an entry for its compression; the metadata is a flatbuffer."""
    begin = struct.unpack_from("<I", metadata)[0]
    header = _field(metadata, begin, _HEADER)
    return bool(_field(metadata, header + struct.unpack_from("<I", metadata, header)[0], _COMPRESSION))


def _field(metadata: bytes, table: int, number: int) -> int:
    """Return the offset of a field in a table of a flatbuffer; 0 if it is absent."""
    vtable = table - struct.unpack_from("<i", metadata, table)[0]
    at = 4 + 2 * number
    offset = (
        struct.unpack_from("<H", metadata, vtable + at)[0] if at < struct.unpack_from("<H", metadata, vtable)[0] else 0
    )
    return table + offset if offset else 0


@contextmanager
def open_for_arrow(folder: SourceFolder, name: str) -> Iterator[Any]:
    """Open a listed file as a file of pyarrow, which never reads after the end that the file had when it was opened."""
    arrow = import_pyarrow()
    with folder.open(name) as file, arrow.PythonFile(_Bounded(file), mode="r") as opened:
        yield opened


class _Bounded(io.RawIOBase):
    """A file whose reads are cut at its end. Hazard: Python allocates memory for as many bytes as a hostile file asks for."""

    def __init__(self, file: io.FileIO) -> None:
        self._file, self._nbytes = file, os.fstat(file.fileno()).st_size

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        return self._file.seek(offset, whence)

    def tell(self) -> int:
        return self._file.tell()

    def read(self, count: int = -1) -> bytes:
        left = max(0, self._nbytes - self._file.tell())
        return self._file.read(left if count is None or count < 0 else min(count, left)) or b""
