"""Files and folders of one user: create them, check their owner, and explain a full file system."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Callable, Iterator

_OTHER_USERS = 0o077  # permissions of all users but the owner


def check_owner(path: str, status: os.stat_result, is_kind: Callable[[int], bool]) -> None:
    """Raise PermissionError unless a file or folder is of the right kind, and belongs to this user alone.

    Args:
        path: Path for the message.
        status: Status of the open file or folder.
        is_kind: `stat.S_ISREG` for a file, `stat.S_ISDIR` for a folder.
    """
    if not is_kind(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & _OTHER_USERS:
        found = f"owner {status.st_uid} and mode {stat.filemode(status.st_mode)}"
        kind = "folder" if is_kind is stat.S_ISDIR else "regular file"
        raise PermissionError(
            f"{path} has {found}, expected a {kind} of user {os.geteuid()} with permissions for this user alone; remove it, "
            "or pass another directory="
        )


def write_file(path: str, content: bytes = b"", nbytes: int = 0, dir_fd: int | None = None) -> None:
    """Create a file that only this user may use.

    Args:
        path: Path of the file, relative to `dir_fd` if that is given.
        content: First bytes of the file.
        nbytes: Number of bytes to reserve, as zeros; 0 for only the content.
        dir_fd: Descriptor of a folder.

    Raises:
        FileExistsError: The path exists.
        OSError: The file system is full.
    """
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600, dir_fd=dir_fd)
    try:
        os.fchmod(fd, 0o600)  # a umask may have removed permissions
        with explained_no_space(path, f"a file of {max(nbytes, len(content)):,} bytes"):
            if nbytes:
                os.posix_fallocate(fd, 0, nbytes)
            os.write(fd, content)
    finally:
        os.close(fd)


@contextlib.contextmanager
def explained_no_space(path: str, what: str) -> Iterator[None]:
    """Add sizes and the remedy to the OSError of a full file system that is raised inside the `with` block.

    Args:
        path: Path of the file that is written.
        what: Noun phrase for the message: what needs the memory.
    """
    try:
        yield
    except OSError as exc:
        if exc.errno != errno.ENOSPC:
            raise
        status = os.statvfs(os.path.dirname(path))
        free, total = status.f_bavail * status.f_frsize, status.f_blocks * status.f_frsize
        raise OSError(
            errno.ENOSPC,
            f"no memory for {what}: the file system has {free:,} of {total:,} bytes left; pass max_nbytes= or directory=, or "
            "enlarge /dev/shm (docker run --shm-size)",
            path,
        ) from exc
