"""The removal of shared folders, even after their last holder was killed.

This file is also a script, the reaper: `reaper.py FOLDER`. At the top it imports no other module of this package, so that
it starts fast and takes little memory. A process creates or removes folders only under a lock of their parent folder (`flock`).
"""

from __future__ import annotations

import fcntl
import os
import struct
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

HEAD = "head.json"  # name, fingerprint and boot id
HOLDERS = "holders"  # each process that holds the folder has shared locks on byte `pid` and byte `IN_USE` of this file
PERSISTENT = "persistent"  # the folder is kept if a file with this name exists
NUM_HOLDER_BYTES = 1 << 40
IN_USE = NUM_HOLDER_BYTES  # the reaper waits for this byte, so that it never delays a process that removes the folder
_REAPER = NUM_HOLDER_BYTES + 1  # locked by the reaper


def remove_if_abandoned(folder: str, *, even_persistent: bool = False) -> bool:
    """Remove a folder that no process holds, unless it is persistent. The caller has locked the parent folder.

    Returns:
        False if a process holds the folder, else True, even if the folder is persistent and stays.

    Raises:
        IsADirectoryError: The folder contains another folder; nothing is removed.
    """
    if os.path.islink(folder) or not os.path.isdir(folder):
        return True
    try:
        fd = os.open(os.path.join(folder, HOLDERS), os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        fd = -1  # the process that was making the folder was killed
    try:
        if fd >= 0 and not _lock(fd, 0, NUM_HOLDER_BYTES, fcntl.F_OFD_SETLK):
            return False
        is_kept = all(os.path.exists(os.path.join(folder, name)) for name in (PERSISTENT, HEAD))
        if even_persistent or not is_kept:
            remove_folder(folder)
    finally:
        if fd >= 0:
            # closing is not enough while a child that another thread has just forked has the file open
            _lock(fd, 0, NUM_HOLDER_BYTES, fcntl.F_OFD_SETLK, fcntl.F_UNLCK)
            os.close(fd)
    return True


def remove_folder(folder: str) -> None:
    """Remove a folder and its files; see `remove_if_abandoned`."""
    with os.scandir(folder) as entries:
        # First `HEAD`: without it, a folder is removed by the next process if this process is killed.
        files = sorted(entries, key=lambda entry: entry.name != HEAD)
    for file in files:
        if file.is_dir(follow_symlinks=False):
            raise IsADirectoryError(
                f"{file.path} is a folder that another program made; remove it, and call tc.shared_clear"
            )
    for file in files:
        os.unlink(file.path)
    with suppress(OSError):  # another program has just added a file
        os.rmdir(folder)


@contextmanager
def start_reaper(folder: str) -> Iterator[None]:
    """Start the reaper of a folder, unless it has one. At the end of the `with` block, it begins to wait for the holders.

    The caller has locked the parent folder, so no other reaper removes the folder during the start.

    Without a reaper, for example because the system allows no more processes, the next process that opens a folder removes
    abandoned folders.
    """
    import subprocess

    is_embedded = not os.path.basename(sys.executable or "").startswith(("python", "pypy"))
    if is_embedded or _has_reaper(folder):
        yield
        return
    gate, opened = os.pipe()
    process = None
    try:
        with suppress(OSError):  # no such executable, no more processes
            process = subprocess.Popen(
                [sys.executable, "-I", "-S", __file__, folder],
                stdin=gate,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        yield
    finally:
        # Closing the pipe is not enough while a child that another thread has just forked has it open.
        os.write(opened, b"\n")
        os.close(opened)
        os.close(gate)
        if process is not None:
            process.wait()  # the reaper itself runs in the background


def _has_reaper(folder: str) -> bool:
    from wds_tensorcache.storage.locks import RangeLocks

    with suppress(OSError):
        return bool(RangeLocks(os.path.join(folder, HOLDERS)).locked_by_others(_REAPER, 1))
    return False


def _lock(fd: int, begin: int, length: int, command: int, kind: int = fcntl.F_WRLCK) -> bool:
    try:
        fcntl.fcntl(fd, command, struct.pack("@hhqqi0q", kind, os.SEEK_SET, begin, length, 0))
    except BlockingIOError:
        return False
    return True


def _was_made_anew(fd: int, path: str) -> bool:
    """Return whether `path` is now another file than the open file."""
    try:
        return not os.path.samestat(os.fstat(fd), os.stat(path))
    except FileNotFoundError:  # a process that removed the folder was killed
        return False


def _reap(folder: str) -> None:
    """Wait until no process holds a folder, then remove it."""
    os.chdir("/")
    os.read(0, 1)  # until the process that started the reaper holds the folder, or is gone
    holders, fd = os.path.join(folder, HOLDERS), -1
    with suppress(FileNotFoundError):
        fd = os.open(holders, os.O_RDWR | os.O_NOFOLLOW)
    if fd >= 0 and not _lock(fd, _REAPER, 1, fcntl.F_OFD_SETLK):
        return
    if os.fork():
        return  # for this, the process that started the reaper waits
    base = os.open(os.path.dirname(folder), os.O_RDONLY | os.O_DIRECTORY)
    while True:
        if fd >= 0:
            _lock(fd, IN_USE, 1, fcntl.F_OFD_SETLKW)
            _lock(fd, IN_USE, 1, fcntl.F_OFD_SETLK, fcntl.F_UNLCK)
        fcntl.flock(base, fcntl.LOCK_EX)  # at the latest until this process ends
        # A folder that was made again has another reaper. If a process has opened the folder since then, wait again.
        if (fd >= 0 and _was_made_anew(fd, holders)) or remove_if_abandoned(folder) or fd < 0:
            return
        fcntl.flock(base, fcntl.LOCK_UN)


if __name__ == "__main__":
    _reap(sys.argv[1])
