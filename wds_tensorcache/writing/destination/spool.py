"""Bytes that are collected on local disk before they are uploaded."""

from __future__ import annotations

import contextlib
import mmap
import os
import re
import tempfile

from wds_tensorcache.storage.atomic import create_temporary, create_unnamed, find_temporary, remove_stray
from wds_tensorcache.storage.locks import Held
from wds_tensorcache.storage.output import Output

__all__ = ["Spool"]

_NAME = "tensorcache-spool"
_CAN_OPEN_UNNAMED = os.path.isdir("/proc/self/fd")  # Linux: other processes can open a file without a name


class Spool(Output):
    """A file in the system's folder for temporary files, to which the caller appends bytes. `TMPDIR` sets another folder.

    On Linux, the file has no name, and the system frees its space however this process ends. On other systems, the file of a
    killed process is deleted by the next one.

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
        if _CAN_OPEN_UNNAMED:
            self.temporary = f"/proc/{os.getpid()}/fd/{self._file.fd}"
        self.content: mmap.mmap | bytes = b""

    def _create(self) -> contextlib.AbstractContextManager[Held]:
        if _CAN_OPEN_UNNAMED:
            return create_unnamed(self._folder, _NAME)
        for stray in find_temporary(self._folder, re.escape(_NAME)):
            remove_stray(stray)
        return create_temporary(os.path.join(self._folder, _NAME), os.O_RDWR)

    def finish(self) -> None:
        """Map the file into memory, for `content`."""
        self.flush()
        self.content = mmap.mmap(self._file.fd, self._position, access=mmap.ACCESS_READ)
        self._close()
        self._made.close()
