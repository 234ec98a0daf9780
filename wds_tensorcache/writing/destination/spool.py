"""Bytes that are collected on local disk before they are uploaded."""

from __future__ import annotations

import io
import mmap
import os
import tempfile
from typing import Any

from wds_tensorcache.storage.output import Output

__all__ = ["Spool"]


class Spool(Output):
    """A file in the system's folder for temporary files, to which the caller appends bytes. `TMPDIR` sets another folder.

    The file has no name, and the system frees its space however this process ends.

    Args:
        target: Where the bytes will be uploaded, for messages.

    Attributes:
        content: The bytes, after `finish`; an empty object before.
        temporary: Path at which other processes can open the file until `finish`.

    Threads/fork: as for `Output`; a forked child keeps the space of the maps that it inherits until it ends.
    """

    def __init__(self, target: str) -> None:
        self._folder = tempfile.gettempdir()
        super().__init__(f"{target}, in the temporary folder {self._folder} (TMPDIR sets another one)", fsync=False)
        self.content: mmap.mmap | bytes = b""

    def _create(self) -> io.RawIOBase:
        file: Any = tempfile.TemporaryFile(buffering=0, dir=self._folder)  # noqa: SIM115
        self.temporary = f"/proc/{os.getpid()}/fd/{file.fileno()}"
        return file  # type: ignore[no-any-return]

    def finish(self) -> None:
        """Map the file into memory, for `content`."""
        self.flush()
        self.content = mmap.mmap(self._file.fileno(), self._position, access=mmap.ACCESS_READ)
        self._close()
