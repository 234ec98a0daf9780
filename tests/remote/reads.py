"""Reads of one object by url, in each of the ways in which a cache reads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest

from wds_tensorcache.storage.remote.fetch import run_all, stat
from wds_tensorcache.storage.remote.object_info import ObjectInfo
from wds_tensorcache.storage.remote.remote_file import RemoteFile, read_whole

# the third is `me:hunter2`, as it is sent
SECRETS = ("secret", "hunter2", "bWU6aHVudGVyMg", "S1GNATURE", "test-access-key")


def read(url: str, begin: int = 10, end: int = 140, state: ObjectInfo | None = None, nbytes: int = 150) -> bytes:
    """Read a range into two buffers, of an object of 150 bytes unless its state is given."""
    memory = memoryview(bytearray(end - begin))
    file = RemoteFile(url, nbytes) if state is None else RemoteFile(url, state.nbytes, state.tag)
    file.read_into([memory[:7], memory[7:]], begin)
    return bytes(memory)


def reads_of(content: bytes) -> dict[str, tuple[Callable[[str], bytes], bytes]]:
    """Return functions of the url of an object with this content, 150 bytes, and what they return."""
    return {
        "read": (read, content[10:140]),
        "whole range": (lambda url: read(url, 0, 150), content),
        "tail": (lambda url: RemoteFile(url).read_tail(100), content[-100:]),
        "whole": (lambda url: read_whole(url, 1 << 40), content),
        "stat": (lambda url: str(stat(url).nbytes).encode(), b"150"),
    }


def outcomes(calls: Sequence[Callable[[], object]]) -> list[Any]:
    """Return the results or errors of calls that run at the same time."""

    def outcome(call: Callable[[], object]) -> object:
        try:
            return call()
        except Exception as exc:
            return exc

    return run_all([partial(outcome, call) for call in calls])


def refused(kind: Any, call: Callable[..., object], *args: Any) -> Any:
    """Return the error that a call raises; neither it nor any error in its traceback shows a secret."""
    with pytest.raises(kind) as caught:
        call(*args)
    error: BaseException | None = caught.value
    while error is not None:
        texts = (str(error), repr(error), repr(error.__dict__), "".join(getattr(error, "__notes__", [])))
        assert not any(secret in text for secret in SECRETS for text in texts)
        error = error.__cause__ or error.__context__
    return caught.value
