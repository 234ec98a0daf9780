"""Remove a shared folder after the last process that holds it is gone, even if that process was killed.

This file is also run as a script, by a process without any other module of this package.
"""

from __future__ import annotations

import os
import struct
import sys
from contextlib import suppress

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

__all__ = ["HEAD", "HOLDERS", "IS_PERSISTENT", "NUM_HOLDER_BYTES", "REAPER_BYTE", "remove_folder"]

HEAD = "head.json"  # describes the samples
HOLDERS = "holders"  # each process that holds the folder has locked one byte of this file
IS_PERSISTENT = "persistent"  # the folder is kept if a file with this name exists
NUM_HOLDER_BYTES = 1 << 40
REAPER_BYTE = NUM_HOLDER_BYTES + 1  # locked by the process that waits for the holders


def remove_folder(folder: str) -> None:
    """Remove a folder and its files; the caller holds the lock of all holders.

    The first file to go is `HEAD`, without which a folder is never used, the last is `HOLDERS`. So if this process is killed
    meanwhile, the next process that opens a folder removes the rest.
    """
    order = {HEAD: -1, HOLDERS: 1}
    for name in sorted(os.listdir(folder), key=lambda name: order.get(name, 0)):
        os.unlink(os.path.join(folder, name))
    with suppress(OSError):  # a new folder has taken the place of the empty one
        os.rmdir(folder)


def _lock(fd: int, begin: int, length: int, command: int) -> bool:
    try:
        fcntl.fcntl(fd, command, struct.pack("@hhqqi0q", fcntl.F_WRLCK, os.SEEK_SET, begin, length, 0))
    except BlockingIOError:
        return False
    return True


def _wait_and_remove(folder: str) -> None:
    holders = os.path.join(folder, HOLDERS)
    fd = os.open(holders, os.O_RDWR | os.O_NOFOLLOW)
    if not _lock(fd, REAPER_BYTE, 1, fcntl.F_OFD_SETLK):
        return  # another process waits already
    _lock(fd, 0, NUM_HOLDER_BYTES, fcntl.F_OFD_SETLKW)
    try:
        is_same = os.stat(holders).st_ino == os.fstat(fd).st_ino
    except FileNotFoundError:
        return
    if is_same and not os.path.exists(os.path.join(folder, IS_PERSISTENT)):
        remove_folder(folder)


if __name__ == "__main__":
    os.chdir("/")
    if not os.fork():  # the parent's parent does not have to wait for this process
        _wait_and_remove(sys.argv[1])
