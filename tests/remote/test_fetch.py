"""Many ranges at once: the bytes of each, near ranges in one request, large ranges in several."""

from __future__ import annotations

import pickle
import random

import pytest

import wds_tensorcache as tc
from tests.remote.servers.http_server import HttpServer
from wds_tensorcache.storage.remote.fetch import PART_NBYTES, fetch_many, pace_of
from wds_tensorcache.storage.remote.remote_file import RemoteFile


@pytest.fixture
def content() -> bytes:
    return random.Random(7).randbytes(1_000_000)


def test_random_ranges(http_server: HttpServer, content: bytes) -> None:
    chance = random.Random(3)
    files = [RemoteFile(http_server.put(f"{i}.tar", content[i:])) for i in range(3)]
    wanted = []
    for _ in range(300):
        at = chance.randrange(3)
        begin = chance.randrange(len(content) - 20_000)
        buffers = [memoryview(bytearray(chance.choice((0, 1, 100, 9000)))) for _ in range(chance.randrange(3))]
        wanted.append((at, begin, buffers))
    http_server.log()
    fetch_many([(files[at], begin, buffers) for at, begin, buffers in wanted])
    assert 1 < len(http_server.log()) < 300
    for at, begin, buffers in wanted:
        joined = b"".join(buffers)
        assert joined == content[at + begin : at + begin + len(joined)]


def test_near_ranges_share_a_request(http_server: HttpServer, content: bytes) -> None:
    file = RemoteFile(http_server.put("a.tar", content), len(content))
    http_server.log()
    buffers = [memoryview(bytearray(100)) for _ in range(20)]
    fetch_many((file, 1000 * i, [buffer]) for i, buffer in reversed(list(enumerate(buffers))))
    assert [one.range for one in http_server.log()] == ["bytes=0-19099"]
    assert [bytes(one) for one in buffers] == [content[1000 * i : 1000 * i + 100] for i in range(20)]
    fetch_many([(file, 0, [buffers[0]]), (file, 900_000, [buffers[1]])])
    assert sorted(str(one.range) for one in http_server.log()) == ["bytes=0-99", "bytes=900000-900099"]


def test_large_ranges_are_split(http_server: HttpServer) -> None:
    content = random.Random(1).randbytes(2 * PART_NBYTES + 5)
    file = RemoteFile(http_server.put("a.tar", content), len(content))
    http_server.log()
    buffers = [memoryview(bytearray(nbytes)) for nbytes in (3, PART_NBYTES, PART_NBYTES + 1)]
    file.read_into(buffers, 1)
    assert b"".join(buffers) == content[1:]
    assert len(http_server.log()) == 3
    assert pace_of(file.url).rate > 0


def test_the_surface_of_a_file(http_server: HttpServer, content: bytes) -> None:
    url = http_server.put("odd name #1?%41%.tar", content)
    file = RemoteFile(url.replace("http://", "http://me:secret@"), len(content))
    assert (file.nbytes, file.identity, str(file.url)) == (len(content), (len(content), None), url)
    assert file.read(5, 5) == b""
    assert file.read(3, 9) == content[3:9]
    assert file.identity[0] == RemoteFile(url).nbytes
    file.check_unchanged()
    copy = pickle.loads(pickle.dumps(file))
    assert copy.identity == file.identity
    assert b"secret" not in pickle.dumps(file) + repr(file).encode()
    first, *_, last = http_server.log()
    assert first.headers["authorization"].startswith("Basic ")
    assert "authorization" not in last.headers  # `RemoteFile(url)`, whose url has no user
    with pytest.raises(tc.TarFormatError, match="has only"):
        file.read(0, len(content) + 1)
    tailed = RemoteFile(url)
    assert tailed.read_tail(10) == content[-10:]
    assert tailed.identity == file.identity
