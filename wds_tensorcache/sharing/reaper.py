"""Remove a shared folder after the last process that holds it is gone, even if that process was killed.

This file is also run as a script, by a process without any other module of this package.
"""

from __future__ import annotations

import os
import struct
import sys

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

__all__ = ["HOLDERS", "IS_PERSISTENT", "NUM_HOLDER_BYTES", "REAPER_BYTE", "remove_folder"]

HOLDERS = "holders"  # each process that holds the folder has locked one byte of this file
IS_PERSISTENT = "persistent"  # the folder is kept if a file with this name exists
NUM_HOLDER_BYTES = 1 << 40
REAPER_BYTE = NUM_HOLDER_BYTES + 1  # locked by the process that waits for the holders


def remove_folder(folder: str, dying: str) -> None:
    """Remove a folder of files; the caller holds the lock of all holders. `dying` is an unused name, for the time until then."""
    try:
        os.rename(folder, dying)
    except FileNotFoundError:
        return
    # the file of the holders last: a folder without it is taken for an empty one
    for name in sorted(os.listdir(dying), key=HOLDERS.__eq__):
        os.unlink(os.path.join(dying, name))
    os.rmdir(dying)


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
        base, name = os.path.split(folder)
        remove_folder(folder, os.path.join(base, f".{name}.{os.getpid()}.dying"))


if __name__ == "__main__":
    os.chdir("/")
    if not os.fork():  # the parent's parent does not have to wait for this process
        _wait_and_remove(sys.argv[1])
