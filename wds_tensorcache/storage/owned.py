"""Files and folders of one user, and errors of full file systems."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Callable, Iterator

ALONE = 0o077  # permissions that other users must not have, for files that only their owner may use
OTHERS_MAY_WRITE = 0o022


def is_owned(status: os.stat_result, is_kind: Callable[[int], bool], refused: int = ALONE) -> bool:
    """Return whether a file or folder is this user's, without `refused` permissions.

    `is_kind` is `stat.S_ISREG` or `stat.S_ISDIR`. `refused` contains the permissions that other users must not have: `ALONE` or
    `OTHERS_MAY_WRITE`.
    """
    return is_kind(status.st_mode) and status.st_uid == os.geteuid() and not status.st_mode & refused


def check_owner(path: str, status: os.stat_result, is_kind: Callable[[int], bool], refused: int = ALONE) -> None:
    """Raise PermissionError unless `is_owned` returns True; `path` is for the message."""
    if not is_owned(status, is_kind, refused):
        kind = "folder" if is_kind is stat.S_ISDIR else "regular file"
        rule = "with permissions for this user alone" if refused == ALONE else "into which no other user may write"
        raise PermissionError(
            f"{path} has owner {status.st_uid} and mode {stat.filemode(status.st_mode)}, expected a {kind} of user "
            f"{os.geteuid()} {rule}; remove it, or pass another folder"
        )


def open_owned(path: str, flags: int, dir_fd: int | None = None) -> tuple[int, os.stat_result]:
    """Open a file that only this user can access. Return descriptor and status.

    With `dir_fd`, the file is opened in that folder by the last part of `path`. Raises OSError for a symbolic link, and
    PermissionError if it is not a regular file, or other users can access it.
    """
    name = path if dir_fd is None else os.path.basename(path)
    try:
        fd = os.open(name, flags | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600, dir_fd=dir_fd)
    except OSError as exc:
        exc.filename = path
        raise
    try:
        status = os.fstat(fd)
        check_owner(path, status, stat.S_ISREG)
    except BaseException:
        os.close(fd)
        raise
    return fd, status


def write_file(path: str, content: bytes = b"", nbytes: int = 0) -> None:
    """Create a file that only this user can access. Raise FileExistsError if the path exists.

    Reserve `nbytes` bytes of disk space, and extend the file with zeros to this length.
    """
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        os.fchmod(fd, 0o600)  # a umask may have removed permissions
        with explain_no_space(path, f"a file of {max(nbytes, len(content)):,} bytes"):
            if nbytes:
                os.posix_fallocate(fd, 0, nbytes)
            os.write(fd, content)
    finally:
        os.close(fd)


@contextlib.contextmanager
def explain_no_space(path: str, content: str) -> Iterator[None]:
    """Add sizes and the remedy to a full file system's OSError. `content` names what needs space."""
    try:
        yield
    except OSError as exc:
        if exc.errno != errno.ENOSPC:
            raise
        status = os.statvfs(os.path.dirname(path))
        free, total = status.f_bavail * status.f_frsize, status.f_blocks * status.f_frsize
        raise OSError(
            errno.ENOSPC,
            f"no memory for {content}: the file system has {free:,} of {total:,} bytes left; pass max_nbytes= or directory=, "
            "or enlarge /dev/shm (docker run --shm-size)",
            path,
        ) from exc
