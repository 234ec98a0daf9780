"""A disk that cannot read some bytes, as the system reports it."""

from __future__ import annotations

import errno
import os
from typing import Any

import pytest


def break_disk(monkeypatch: pytest.MonkeyPatch, suffix: str, first: int, last: int, after: int = 0) -> None:
    """Let reads of bytes `[first, last)` fail, in files whose paths end in `suffix`, after `after` reads that do not."""
    pread, preadv, num_left = os.pread, os.preadv, after

    def check(fd: int, begin: int, nbytes: int) -> None:
        nonlocal num_left
        path = os.readlink(f"/proc/self/fd/{fd}")
        if path.endswith(suffix) and begin < last and begin + nbytes > first:
            num_left -= 1
            if num_left < 0:
                raise OSError(errno.EIO, "Input/output error")  # the system does not tell the path

    def bad_pread(fd: int, nbytes: int, begin: int) -> bytes:
        check(fd, begin, nbytes)
        return pread(fd, nbytes, begin)

    def bad_preadv(fd: int, buffers: Any, begin: int, *flags: int) -> int:
        check(fd, begin, sum(map(len, buffers)))
        return preadv(fd, buffers, begin, *flags)

    monkeypatch.setattr(os, "pread", bad_pread)
    monkeypatch.setattr(os, "preadv", bad_preadv)
