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
from wds_tensorcache.storage.readahead import Digest, ReadAhead, Readers

PIECE = 1000
CONTENT = Random(0).randbytes(10 * PIECE + 123)


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ShardFile:
    monkeypatch.setattr(module, "_PIECE_NBYTES", PIECE)
    monkeypatch.setattr(module, "_AHEAD_NBYTES", PIECE)
    monkeypatch.setattr(module, "_HELD_NBYTES", 300)
    (tmp_path / "x").write_bytes(CONTENT)
    return ShardFile(str(tmp_path / "x"))


@pytest.mark.parametrize("threads", [0, 3])
@pytest.mark.parametrize("seed", range(5))
def test_reads_and_digests_in_order_are_the_files(file: ShardFile, threads: int, seed: int) -> None:
    random, at = Random(seed), 0
    asked: list[tuple[Digest, int, int]] = []
    with (
        ThreadPoolExecutor(threads) if threads else nullcontext() as pool,
        ReadAhead(file, Readers(pool, threads or 1)) as ahead,
    ):
        while at < len(CONTENT):
            end = min(len(CONTENT), at + random.choice([0, 1, 10, 100, PIECE, PIECE + 1, 3 * PIECE]))
            assert ahead.read(at, min(end, at + 50)) == CONTENT[at : min(end, at + 50)]
            asked.append((ahead.digest(at, end), at, end))
            done = [(digest, *place) for digest, *place in asked if place[1] <= ahead.done]
            assert all(digest.value == xxhash.xxh3_64_intdigest(CONTENT[a:b]) for digest, a, b in done if a < b)
            if random.random() < 0.1:
                ahead.hash()
            at = max(end, at + 1)
        assert ahead.read(0, len(CONTENT)) == CONTENT  # the bytes before the current piece are read again
        ahead.finish()
    assert [digest.value for digest, a, b in asked if a < b] == [
        xxhash.xxh3_64_intdigest(CONTENT[a:b]) for _, a, b in asked if a < b
    ]


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
        digests = []
        for begin, end in places:
            if begin != 2500:
                assert ahead.read(begin, begin + 50) == CONTENT[begin : begin + 50]
            digests.append(ahead.digest(begin, end))
        with pytest.raises(OSError, match="Input/output"):
            ahead.read(2450, 2550)
        ahead.finish()
    assert [isinstance(digest.error, OSError) for digest in digests] == [False, False, True, False, False, False]
    for digest, (begin, end) in zip(digests, places, strict=True):
        assert digest.error or digest.value == xxhash.xxh3_64_intdigest(CONTENT[begin:end])
