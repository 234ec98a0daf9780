"""Remove a shared folder after the last process that holds it is gone, even if that process was killed.

This file is also a script, the reaper: `reaper.py make|wait FOLDER RENAMED`. It imports no other module of this package, so
that it starts fast and takes little memory.
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

HEAD = "head.json"  # name, fingerprint and boot id
HOLDERS = "holders"  # each process that holds the folder has a shared lock on byte `pid` of this file
IS_PERSISTENT = "persistent"  # the folder is kept if a file with this name exists
NUM_HOLDER_BYTES = 1 << 40
REAPER_BYTE = NUM_HOLDER_BYTES + 1  # locked by the reaper


def remove_folder(folder: str) -> None:
    """Remove a folder and its files; the caller has locked the bytes of all holders.

    `HEAD` is removed first, since no process uses a folder without it, and `HOLDERS` last. So if this process is killed
    meanwhile, the next process that opens a folder removes the rest.

    Raises:
        IsADirectoryError: There is a folder in it. Then nothing is removed.
    """
    order = {HEAD: -1, HOLDERS: 1}
    with os.scandir(folder) as entries:
        found = sorted(entries, key=lambda entry: order.get(entry.name, 0))
    for entry in found:
        if entry.is_dir(follow_symlinks=False):
            raise IsADirectoryError(
                f"{entry.path} is a folder that another program made; remove it, and call tc.shared_clear"
            )
    for entry in found:
        os.unlink(entry.path)
    with suppress(OSError):  # another process has renamed a new folder to the path of the empty one
        os.rmdir(folder)


def _lock(fd: int, begin: int, length: int, command: int) -> bool:
    try:
        fcntl.fcntl(fd, command, struct.pack("@hhqqi0q", fcntl.F_WRLCK, os.SEEK_SET, begin, length, 0))
    except BlockingIOError:
        return False
    return True


def _wait_and_remove(fd: int, *paths: str) -> None:
    """Wait until no process holds the folder whose file `HOLDERS` is open as `fd`, and remove it; its path is in `paths`."""
    _lock(fd, 0, NUM_HOLDER_BYTES, fcntl.F_OFD_SETLKW)
    for path in paths:
        with suppress(FileNotFoundError):
            is_same = os.stat(os.path.join(path, HOLDERS)).st_ino == os.fstat(fd).st_ino
            if is_same and not os.path.exists(os.path.join(path, IS_PERSISTENT)):
                remove_folder(path)
    if paths[0] != paths[-1]:
        with suppress(OSError):  # the process that made the folder was killed while it removed it
            os.rmdir(paths[0])


def _make(folder: str) -> None:
    """Make a folder that this user alone may use, with the file `HOLDERS`."""
    os.umask(0o077)
    os.mkdir(folder, 0o700)
    os.close(os.open(os.path.join(folder, HOLDERS), os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600))


if __name__ == "__main__":
    os.chdir("/")
    _, action, *paths = sys.argv
    if action == "make":
        _make(paths[0])
    _fd = os.open(os.path.join(paths[0], HOLDERS), os.O_RDWR | os.O_NOFOLLOW)
    _is_first = _lock(_fd, REAPER_BYTE, 1, fcntl.F_OFD_SETLK)
    if _is_first and not os.fork():  # the process that started this one waits for the parent alone
        os.read(0, 1)  # until that process holds the folder, or is gone
        _wait_and_remove(_fd, *paths)
