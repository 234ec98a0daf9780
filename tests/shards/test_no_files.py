"""Our names for things other than files: FIFOs, sockets, folders, links to nothing, to themselves and to folders."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import wds_tensorcache as tc
from tests.shards.damage import write


def _socket(path: Path) -> None:
    folder = os.open(path.parent, os.O_RDONLY)
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(f"/proc/self/fd/{folder}/{path.name}")  # paths of sockets are short
    os.close(folder)


KINDS: dict[str, Callable[[Path], Any]] = {
    "fifo": os.mkfifo,
    "socket": _socket,
    "folder": lambda path: path.mkdir(),
    "link to nothing": lambda path: path.symlink_to("nothing"),
    "link to itself": lambda path: path.symlink_to(path.name),
    "link to a folder": lambda path: path.symlink_to("."),
}
DOCUMENTED = (tc.TensorCacheError, FileNotFoundError, FileExistsError)


@pytest.fixture(autouse=True)
def nothing_waits() -> Iterator[None]:
    """A reader that waits for the other end of a FIFO waits forever."""

    def hangs(*_: object) -> None:
        raise TimeoutError("it hangs")

    before = signal.signal(signal.SIGALRM, hangs)
    signal.alarm(120)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def build(folder: Path) -> None:
    tc.build(range(4), lambda items: [{"x": i} for i in items], folder, fingerprint={}, max_samples=2, fsync=False)


@pytest.mark.filterwarnings("ignore:.* no longer exists")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["000001.tar", "000001.tar.index", "000001.idx", "manifest.json"])
def test_what_is_called_like_a_file_of_ours(tmp_path: Path, name: str, kind: str) -> None:
    """Everything says what is wrong, or does without."""
    write(tmp_path, per_shard=2, footer="index" not in name)
    (tmp_path / name).unlink(missing_ok=True)
    if kind == "link to itself":
        (tmp_path / "manifest.json").unlink(missing_ok=True)  # the folder's listing has it
    KINDS[kind](tmp_path / name)
    calls: dict[str, Callable[[], Any]] = {
        "open": lambda: list(tc.open(tmp_path)),
        "stream": lambda: list(tc.ResumablePipeline(str(tmp_path), tc.decode())),
        "open one": lambda: list(tc.open(tmp_path / "000001.tar")),
        "verify": lambda: tc.verify(tmp_path),
        "index": lambda: tc.write_index(tmp_path / "000001.tar"),
        "repair": lambda: tc.repair(tmp_path, tmp_path / "mended"),
        "build": lambda: build(tmp_path),
        "resume": lambda: write(tmp_path, per_shard=2, resume=True),
        "new": lambda: write(tmp_path, per_shard=2),
        "overwrite": lambda: write(tmp_path, per_shard=2, overwrite=True),
    }
    for what, call in calls.items():
        try:
            call()
        except DOCUMENTED:
            continue
        except IsADirectoryError:  # a file cannot take a folder's place
            if kind != "folder":
                raise
        assert not [left for left in os.listdir(tmp_path) if left.endswith((".tmp", ".lock"))], what


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_called_like_a_stray(tmp_path: Path, kind: str) -> None:
    """It is not a stray file: it stays, and has no other effect."""
    strays = [f".{name}.0123abcd.tmp" for name in ("000000.tar", "000001.tar", "000000.idx", "manifest.json")]
    names = [tmp_path / name for name in (*strays, ".tensorcache.0123abcd.lock")]
    for name in names:
        KINDS[kind](name)
    KINDS[kind](tmp_path / ".mended.0123abcd.tmp")
    before = [os.lstat(name).st_ino for name in names]
    write(tmp_path, per_shard=2)
    write(tmp_path, per_shard=2, overwrite=True)
    write(tmp_path, per_shard=2, resume=True)
    assert len(tc.open(tmp_path)) == 4
    tc.write_index(tmp_path / "000001.tar")
    assert tc.verify(tmp_path).ok
    assert tc.repair(tmp_path, tmp_path / "mended").ok
    assert [os.lstat(name).st_ino for name in names] == before
