"""One writer of a pattern at a time: a hidden file in the folder, whose lock ends with the writer's process."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import platform
import re
import secrets
import weakref
from dataclasses import dataclass
from typing import Any

from wds_tensorcache.storage.locks import Held, locked_folder, open_regular
from wds_tensorcache.writing.pattern import ShardPattern

__all__ = ["WriterLock"]

_NAME = re.compile(r"\.tensorcache\.[0-9a-f]{8}\.lock").fullmatch
_MAX_NBYTES = 1 << 13
_MINE: set[str] = set()  # tokens of the locks that this process has


@dataclass(frozen=True, slots=True)
class _Writer:
    """Content of a lock's file: the writer, and the pattern that it writes."""

    pattern: str
    pid: int
    host: str


class WriterLock:
    """Claim of this process to write the shards of a pattern, from now on until `close`.

    The file is called `.tensorcache.TOKEN.lock`, and holds pattern, pid and host. A killed process's does not count;
    the next writer in the folder deletes it. Readers ignore it.

    Where the file system has no locks, a process of this host counts as a writer as long as it runs, one of another host until
    the file is deleted. In a folder that cannot be written to there is nothing to lock.

    Raises:
        FileExistsError: Another writer, of this process or another one, has the pattern, or one with names in common;
            or another process keeps the folder locked.

    Threads/fork/pickle: as of `Held`.
    """

    def __init__(self, pattern: ShardPattern) -> None:
        folder, token = pattern.folder or ".", secrets.token_hex(4)
        self._path = os.path.join(folder, f".tensorcache.{token}.lock")
        self._file: Held | None = None
        self._net: Any = None
        # one at a time; where folders have no locks, two that begin at the same moment may both be refused
        with locked_folder(folder):
            try:
                self._file = Held(self._path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
            except OSError as exc:
                if exc.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
                    return
                raise
            _MINE.add(token)
            self._net = weakref.finalize(self, _give_back, self._file, self._path, os.getpid())
            try:
                self._file.lock()
                os.write(self._file.fd, _content(pattern))
                # Hazard: two writers begin at once. Each creates its file before it looks, so at least one sees the other.
                _refuse_others(pattern, folder, os.path.basename(self._path))
            except BaseException:
                self.close()
                raise

    def close(self) -> None:
        """Let other writers begin."""
        if self._net is not None:
            self._net()


def _give_back(file: Held, path: str, pid: int) -> None:
    if pid == os.getpid():  # a forked child has closed it
        _MINE.discard(path.split(".")[-2])
        if os.name != "posix":
            file.close()  # Windows deletes no open file
        with contextlib.suppress(OSError):
            os.unlink(path)
        file.close()


def _content(pattern: ShardPattern) -> bytes:
    name = os.path.basename(str(pattern))
    return json.dumps({"pattern": name, "pid": os.getpid(), "host": platform.node()}).encode()


def _refuse_others(pattern: ShardPattern, folder: str, mine: str) -> None:
    """Raise if a living writer has names in common with a pattern; delete what killed ones have left."""
    for name in os.listdir(folder):
        path = os.path.join(folder, name)
        file = open_regular(path) if _NAME(name) and name != mine else None
        if file is None:
            continue
        with file:
            is_free, writer = file.lock(), _parse(os.read(file.fd, _MAX_NBYTES))
            if is_free or (is_free is None and (writer is None or not _may_be_alive(writer, name))):
                with contextlib.suppress(OSError):
                    os.unlink(path)
            elif writer is not None and pattern.overlaps(writer.pattern):
                what = f"process {writer.pid} on {writer.host} is writing {os.path.join(folder, writer.pattern)}"
                gone = f"; if it is gone, delete {path}" if is_free is None else ""
                raise FileExistsError(f"{pattern}: {what}; wait for its end, or write to another folder{gone}")


def _parse(content: bytes) -> _Writer | None:
    """Return the writer that has a lock; None if the file does not name it, or not yet."""
    try:
        found: Any = json.loads(content)
        pattern, pid, host = found["pattern"], found["pid"], found["host"]
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    are_right = isinstance(pattern, str) and type(pid) is int and 0 < pid < 1 << 31 and isinstance(host, str)
    return _Writer(pattern, pid, host[:255]) if are_right else None


def _may_be_alive(writer: _Writer, name: str) -> bool:
    if writer.host != platform.node() or os.name != "posix":
        return True
    if writer.pid == os.getpid():
        return name.split(".")[-2] in _MINE
    try:
        os.kill(writer.pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
