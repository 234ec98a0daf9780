"""Lock that allows one writer at a time for a pattern of shard names, such as `train-%06d.tar`.

The lock is on a hidden file, and ends with the writer's process.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import platform
import re
import secrets
import time
import weakref
from typing import Any

from wds_tensorcache.storage.locks import Held, locked_folder, open_regular
from wds_tensorcache.writing.pattern import ShardPattern

__all__ = ["WriterLock"]

_NAME = re.compile(r"\.tensorcache\.[0-9a-f]{8}\.lock").fullmatch
_MAX_NBYTES = 1 << 13
_STARTS_S = 2.0  # the longest time that a living process needs to fill its new lock file
_MINE: set[str] = set()  # tokens of the locks that this process holds


class WriterLock:
    """The exclusive right of this process to write the shards of a pattern, until `close`.

    The file `.tensorcache.TOKEN.lock` in the folder contains pattern, pid and host. The next writer deletes the file of a
    killed process. If the file system has no locks, a writer on this host counts as active while its process runs. A writer on
    another host then counts as active until its lock file is deleted. A read-only folder is not locked.

    Raises:
        FileExistsError: An active writer has a pattern that can produce the same names; or another process keeps the folder
            locked.

    Threads/fork/pickle: as for `Held`.
    """

    def __init__(self, pattern: ShardPattern) -> None:
        folder, token = pattern.folder or ".", secrets.token_hex(4)
        self._path = os.path.join(folder, f".tensorcache.{token}.lock")
        self._file: Held | None = None
        self._net: Any = None
        # one process at a time runs this block; without folder locks, two that start together may both be refused
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
                # Hazard: two writers may start at once. Each creates its file before it searches, so one finds the other's.
                _refuse_others(pattern, folder, os.path.basename(self._path))
                if not os.path.exists(self._path):
                    raise FileExistsError(f"{pattern}: another writer has started at the same moment; try again")
            except BaseException:
                self.close()
                raise

    def close(self) -> None:
        """Release the lock, so that other writers can start."""
        if self._net is not None:
            self._net()


def _give_back(file: Held, path: str, pid: int) -> None:
    if pid == os.getpid():  # a forked child must not delete its parent's lock file; `Held` is already closed there
        _MINE.discard(path.split(".")[-2])
        if os.name != "posix":
            file.close()  # Windows cannot delete an open file
        with contextlib.suppress(OSError):
            os.unlink(path)
        file.close()


def _content(pattern: ShardPattern) -> bytes:
    name = os.path.basename(str(pattern))
    return json.dumps({"pattern": name, "pid": os.getpid(), "host": platform.node(), "space": _pid_space()}).encode()


def _pid_space() -> str:
    """Return a text that differs for processes whose numbers cannot be compared: of other machines, boots and containers."""
    parts = []
    with contextlib.suppress(OSError):
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            parts.append(file.read().strip())
        parts.append(os.readlink("/proc/self/ns/pid"))
    return " ".join(parts)


def _refuse_others(pattern: ShardPattern, folder: str, mine: str) -> None:
    """Raise FileExistsError if an active writer can produce the same names; delete the lock files of killed writers."""
    for name in os.listdir(folder):
        path = os.path.join(folder, name)
        file = open_regular(path) if _NAME(name) and name != mine else None
        if file is None:
            continue
        with file:
            is_free = file.lock()
            writer = _read_writer(file, wait=is_free is None)
            if is_free or (is_free is None and (writer is None or not _may_be_alive(name, *writer[1:]))):
                with contextlib.suppress(OSError):
                    os.unlink(path)
            elif writer is not None and pattern.overlaps(writer[0]):
                other, pid, host, _ = writer
                what = f"process {pid} on {host} is writing {os.path.join(folder, other)}"
                gone = f"; if that process has ended, delete {path}" if is_free is None else ""
                raise FileExistsError(f"{pattern}: {what}; wait until it ends, or write to another folder{gone}")


def _read_writer(file: Held, wait: bool) -> tuple[str, int, str, str] | None:
    """Return pattern, pid, host and space of pids of the writer that holds a lock; None if the file does not contain them.

    If `wait`, give the writer time to write them.
    """
    until = time.monotonic() + _STARTS_S
    while True:
        os.lseek(file.fd, 0, os.SEEK_SET)
        writer = _parse(os.read(file.fd, _MAX_NBYTES))
        if writer is not None or not wait or not os.path.exists(file.path) or time.monotonic() >= until:
            return writer
        time.sleep(0.001)


def _parse(content: bytes) -> tuple[str, int, str, str] | None:
    """Return pattern, pid, host and space of pids of a writer; None if these bytes are not the content of a lock file."""
    try:
        found: Any = json.loads(content)
        pattern, pid, host = found["pattern"], found["pid"], found["host"]
        space = found.get("space", _pid_space())
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    are_right = isinstance(pattern, str) and type(pid) is int and 0 < pid < 1 << 31 and isinstance(host, str)
    return (pattern, pid, host[:255], str(space)) if are_right else None


def _may_be_alive(name: str, pid: int, host: str, space: str) -> bool:
    if host != platform.node() or space != _pid_space() or os.name != "posix":
        return True
    if pid == os.getpid():
        return name.split(".")[-2] in _MINE
    try:
        os.kill(pid, 0)
    except OSError as exc:
        return not isinstance(exc, ProcessLookupError)
    return True
