"""Files in pieces, read ahead: every byte once, digests whatever the pieces, and what cannot be read is told where it is."""

from __future__ import annotations

import errno
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from random import Random
from typing import Any

import pytest
import xxhash

from wds_tensorcache.storage import readahead as module
from wds_tensorcache.storage.files import ShardFile
from wds_tensorcache.storage.readahead import ReadAhead, Readers

PIECE = 1000
CONTENT = Random(0).randbytes(10 * PIECE + 123)


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ShardFile:
    monkeypatch.setattr(module, "_PIECE_NBYTES", PIECE)
    monkeypatch.setattr(module, "_AHEAD_NBYTES", PIECE)
    monkeypatch.setattr(module, "_REREAD_NBYTES", 100)
    (tmp_path / "x").write_bytes(CONTENT)
    return ShardFile(str(tmp_path / "x"))


@pytest.mark.parametrize("threads", [0, 2])
def test_only_what_lies_in_a_bad_place_cannot_be_read(
    file: ShardFile, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, read_into = ShardFile.read, ShardFile.read_into

    def fail(begin: int, end: int) -> None:
        if begin < 2 * PIECE + 501 and end > 2 * PIECE + 500:
            raise OSError(errno.EIO, "Input/output error")

    def bad_read(self: ShardFile, begin: int, end: int) -> bytes:
        fail(begin, end)
        return read(self, begin, end)

    def bad_read_into(self: ShardFile, buffers: Any, begin: int) -> None:
        fail(begin, begin + sum(map(len, buffers)))
        read_into(self, buffers, begin)

    monkeypatch.setattr(ShardFile, "read", bad_read)
    monkeypatch.setattr(ShardFile, "read_into", bad_read_into)
    places = [(0, 2400), (2400, 2500), (2500, 2501), (2501, 4000), (2000, 2500), (4000, len(CONTENT))]
    with (
        ThreadPoolExecutor(threads) if threads else nullcontext() as pool,
        ReadAhead(file, Readers(pool, threads or 1)) as ahead,
    ):
        for begin, end in places:
            if begin == 2500:
                with pytest.raises(OSError, match="Input/output"):
                    ahead.digest(begin, end)
                continue
            assert ahead.read(begin, begin + 50) == CONTENT[begin : begin + 50]
            assert ahead.digest(begin, end) == xxhash.xxh3_64_intdigest(CONTENT[begin:end])
        with pytest.raises(OSError, match="Input/output"):
            ahead.read(2450, 2550)
