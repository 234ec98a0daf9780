"""Web servers that fail: the right bytes after another attempt, or a clear error, never old bytes mixed with new ones."""

from __future__ import annotations

import math
import random
import resource
import socket
import time
from collections.abc import Iterator
from email.utils import formatdate
from typing import Any

import pytest

import wds_tensorcache as tc
from tests.children import run_in_child
from tests.remote.reads import outcomes, read, reads_of, refused
from tests.remote.servers.http_server import HttpServer
from wds_tensorcache.storage.remote import retry
from wds_tensorcache.storage.remote.clients import forget_clients
from wds_tensorcache.storage.remote.fetch import stat
from wds_tensorcache.storage.remote.remote_file import RemoteFile, read_whole

CONTENT = random.Random(11).randbytes(150)
READS = reads_of(CONTENT)
READS_CHANGED = {
    expected: other for (_, expected), (_, other) in zip(READS.values(), reads_of(CONTENT[::-1]).values(), strict=True)
}


@pytest.fixture(scope="module")
def server() -> Iterator[HttpServer]:
    with HttpServer() as started:
        yield started


@pytest.fixture
def url(server: HttpServer) -> str:
    server.set(ranges=True, suffix_ranges=True, etag="strong", last_modified=True, latency_s=0)
    server.script("a.tar")
    forget_clients()  # what an earlier test learned about the server
    server.log()
    return server.put("a.tar", CONTENT)


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """A time limit of 1.5 s."""
    monkeypatch.setenv("TENSORCACHE_REMOTE_TIMEOUT_S", "1.5")


@pytest.mark.parametrize("reset", [False, True])
@pytest.mark.parametrize("how", READS)
def test_a_connection_that_drops_at_every_byte(server: HttpServer, url: str, how: str, reset: bool) -> None:
    call, expected = READS[how]
    assert call(url) == expected
    (plain,) = server.log()
    num_bytes = 300 + plain.nbytes  # the head has fewer
    server.script_all({f"a.tar?{at}": [{"drop_after": at, "reset": reset}] for at in range(num_bytes)})
    found = outcomes([lambda at=at: call(f"{url}?{at}") for at in range(num_bytes)])
    assert found == [expected] * num_bytes
    log = server.log()
    assert num_bytes + 100 < len(log) <= 2 * num_bytes
    if how == "read":  # continued from the byte reached, and only with the same tag
        resumed = [one for one in log if one.range not in (None, plain.range)]
        assert len(resumed) > 100 or reset  # a reset may drop what was sent before
        assert all("if-match" in one.headers for one in resumed)


def test_statuses_that_pass(server: HttpServer, url: str) -> None:
    statuses = [408, 429, 500, 502, 503, 504]
    server.script_all(
        {
            f"a.tar?{how}{status}": [{"status": status}, {"status": status, "retry_after": "0"}, {"drop_after": 3}]
            for how in READS
            for status in statuses
        }
    )
    calls = [
        lambda how=how, status=status: READS[how][0](f"{url}?{how}{status}") for how in READS for status in statuses
    ]
    assert outcomes(calls) == [READS[how][1] for how in READS for _ in statuses]
    assert sum(one.status in statuses for one in server.log()) == 2 * len(calls)


def test_retry_after_is_obeyed(server: HttpServer, url: str) -> None:
    date = formatdate(time.time() + 2, usegmt=True)  # whole seconds, so at least one
    waits = {"seconds": {"status": 503, "retry_after": "1"}, "date": {"status": 429, "retry_after": date}}
    server.script_all({f"a.tar?{how}{name}": [fault] for how in READS for name, fault in waits.items()})
    begun = time.monotonic()
    found = outcomes(
        [lambda how=how, name=name: READS[how][0](f"{url}?{how}{name}") for how in READS for name in waits]
    )
    assert found == [READS[how][1] for how in READS for _ in waits]
    assert time.monotonic() - begun >= 1


@pytest.mark.usefixtures("short")
def test_what_does_not_pass_in_time(server: HttpServer, url: str) -> None:
    faults: dict[str, tuple[dict[str, Any], int | None]] = {
        "pause": ({"status": 503, "retry_after": "1000"}, 503),
        "status": ({"status": 500, "times": -1}, 500),
        "drop": ({"drop_after": 30, "times": -1}, None),
        "stall": ({"stall_s": 100, "times": -1}, None),
        "drip": ({"drip_s": 0.1, "times": -1}, None),
    }
    cases = [(how, name) for how in READS for name in faults if (how, name) != ("stat", "drip")]
    server.script_all({f"a.tar?{how}{name}": [faults[name][0]] for how, name in cases})
    found = outcomes([lambda how=how, name=name: READS[how][0](f"{url}?{how}{name}") for how, name in cases])
    for (how, name), error in zip(cases, found, strict=True):
        assert isinstance(error, tc.RemoteError), (how, name)
        assert error.status == faults[name][1]
        assert str(error).startswith(f"{error.url}: ")
        assert error.url.removesuffix("?…") == url
        if how == "read":
            assert (error.begin, error.end) == (10, 140)


@pytest.mark.parametrize("status", [400, 401, 403, 405, 409, 451, 505, 404, 410])
def test_other_statuses_are_refused_at_once(server: HttpServer, url: str, status: int) -> None:
    server.script("a.tar", {"status": status, "times": -1})
    for call, _ in READS.values():
        error = refused(FileNotFoundError if status in (404, 410) else tc.RemoteError, call, url)
        assert url in str(error)
        assert getattr(error, "status", status) == status
    assert len(server.log()) <= 10


@pytest.mark.parametrize(
    "shown",
    [
        "bytes 11-140/150",
        "bytes 10-138/150",
        "bytes 10-140/150",
        "bytes 0-149/150",
        "bytes 139-10/150",
        "bytes 10-200/150",
        "bytes */150",
        "bytes 10-139/" + "9" * 30,
        "items 10-139/150",
        "bytes -1-139/150",
        "",
        None,
    ],
)
def test_a_wrong_content_range(server: HttpServer, url: str, shown: str | None) -> None:
    server.script("a.tar", {"content_range": shown, "times": -1})
    error = refused(tc.RemoteError, read, url)
    assert (error.url, error.begin, error.end, error.status) == (url, 10, 140, 206)
    tail = refused((tc.RemoteError, tc.FormatError), RemoteFile(url).read_tail, 100)
    assert "a.tar" in str(tail)


def test_content_range_may_omit_the_total(server: HttpServer, url: str) -> None:
    server.script("a.tar", {"content_range": "bytes 10-139/*"})
    assert read(url) == CONTENT[10:140]


def test_a_body_of_another_length(server: HttpServer, url: str) -> None:
    for nbytes in (0, 129, 131, 10**17, "10 000", "-5"):
        server.script("a.tar", {"headers": {"Content-Length": str(nbytes)}, "times": 2})
        if nbytes in ("10 000", "-5"):  # not a length: the body ends where the connection does
            continue
        assert refused(tc.RemoteError, read, url).status == 206


@pytest.mark.parametrize("how", ["read", "whole range", "tail", "whole"])
def test_encoded_bodies_are_refused(server: HttpServer, url: str, how: str) -> None:
    server.script("a.tar", {"headers": {"Content-Encoding": "gzip"}, "times": -1})
    assert "gzip" in str(refused(tc.RemoteError, READS[how][0], url))
    assert {one.headers["accept-encoding"] for one in server.log()} == {"identity"}


@pytest.mark.parametrize("etag", ["strong", "weak", None])
def test_a_changed_object(server: HttpServer, url: str, etag: str | None) -> None:
    """Between two reads, and in the middle of one, after which the rest would come from the new object."""
    changed = CONTENT[::-1]
    server.set(etag=etag)
    state = stat(url)
    for how, (call, expected) in READS.items():
        server.put("a.tar", CONTENT)
        server.script("a.tar", {"drop_body_after": 1}, {"replace": changed.decode("latin-1")})
        if etag == "strong" and how in ("read", "whole range"):
            refused(tc.FormatError, call, url)
        else:  # all of it is read again
            assert call(url) == READS_CHANGED[expected]
    # a date does not show that an object was changed within a second
    for content in (changed, CONTENT + b"longer", CONTENT[:20])[etag is None :]:
        server.put("a.tar", content)
        assert "changed" in str(refused(tc.FormatError, read, url, 10, 140, state))


def test_a_server_without_ranges(server: HttpServer, url: str) -> None:
    server.set(ranges=False)
    server.script("a.tar", {"drop_body_after": 70, "method": "GET", "times": 3})
    state = stat(url)
    calls = [lambda at=at: read(url, at, at + 30, state) for at in range(100)]
    assert outcomes(calls) == [CONTENT[at : at + 30] for at in range(100)]
    assert sum(one.status == 200 and one.nbytes == 150 for one in server.log()) == 1
    server.put("a.tar", CONTENT[::-1])
    changed = stat(url)
    assert read(url, 0, 30, changed) == CONTENT[::-1][:30]
    refused(tc.FormatError, read, url, 0, 30, state)


def test_at_most_32_copies_are_kept(server: HttpServer, url: str) -> None:
    server.set(ranges=False)
    for i in [*range(34), 0]:
        assert read(f"{url}?{i}") == CONTENT[10:140]
    assert [one.path for one in server.log()] == [f"/a.tar?{i}" for i in [*range(34), 0]]


def test_whole_objects_that_were_asked_for_as_ranges(server: HttpServer, url: str) -> None:
    """By a server that has ranges: the whole object is what was asked for."""
    for call in (lambda: read(url, 0, 150), lambda: RemoteFile(url).read_tail(200)):
        server.script("a.tar", {"ignores_range": True})
        assert call() == CONTENT
    assert [one.status for one in server.log()] == [200, 200]


def test_tags_without_quotes(server: HttpServer, url: str) -> None:
    server.script("a.tar", {"etag": "abc"})
    assert stat(url).tag == '"abc"'


def test_a_disk_without_space(server: HttpServer, url: str) -> None:
    server.set(ranges=False)
    content = CONTENT * 1000
    url = server.put("a.tar", content)

    def work() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
        error = refused(tc.RemoteError, lambda: RemoteFile(url).read(10, 20))
        assert "TMPDIR" in str(error)
        # what fits still does
        server.put("b.tar", CONTENT)
        assert RemoteFile(f"{server.url}/b.tar").read(10, 20) == CONTENT[10:20]

    assert run_in_child(work) == 0
    assert RemoteFile(url).read(10, 20) == content[10:20]


@pytest.mark.parametrize("etag", ["strong", "weak", None])
def test_conditions(server: HttpServer, url: str, etag: str | None) -> None:
    """A weak ETag never matches `If-Match`, so it is compared here alone."""
    server.set(etag=etag)
    state = stat(url)
    server.log()
    read(url, 10, 140, state)
    headers = server.log()[0].headers
    assert ("if-match" in headers) == (etag == "strong")
    assert ("if-unmodified-since" in headers) == (etag is None)
    server.set(etag=None, last_modified=False)
    assert read(url) == CONTENT[10:140]


@pytest.mark.parametrize(
    "answer",
    [
        "nonsense",
        "HTTP/1.1 206\r\n\r\n",
        "HTTP/1.1 99 X\r\n\r\n",
        "HTTP/1.1 101 X\r\nUpgrade: websocket\r\n\r\n",
        "HTTP/1.1 206 X\r\n" + "a: b\r\n" * 1000 + "\r\n",
        "HTTP/1.1 206 X\r\na: " + "b" * 100_000 + "\r\n\r\n",
        "HTTP/1.1 206 X\r\nno colon\r\nContent-Range: bytes 10-139/150\r\n\r\n" + "x" * 130,
        "HTTP/1.1 206 X\r\nContent-Range: bytes 10-139/150\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        "HTTP/1.1 206 X\r\nContent-Range: bytes 10-139/150\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nabcde\r\n0\r\n\r\n",
        "HTTP/1.1 206 X\r\nContent-Range: bytes 10-139/150\r\nTransfer-Encoding: chunked\r\n\r\n40\r\n"
        + "x" * 65
        + "\r\n42\r\n"
        + "x" * 66
        + "\r\n0\r\n\r\n",
        "HTTP/1.1 206 X\r\nContent-Range: bytes 10-139/150\r\nTransfer-Encoding: gzip, chunked\r\n\r\n82\r\n"
        + "x" * 130,
        "HTTP/1.1 206 X\r\nContent-Range: bytes 10-139/150\r\n\r\nabcde",
    ],
)
@pytest.mark.usefixtures("short")
def test_answers_that_are_damaged(server: HttpServer, url: str, answer: str) -> None:
    server.script("a.tar", {"raw": answer, "times": -1})
    refused(tc.RemoteError, read, url)
    server.script("a.tar", {"raw": answer})
    if "206 X\r\nC" in answer:
        assert read(url) == CONTENT[10:140]  # of the second attempt alone


def test_interim_heads_are_skipped(server: HttpServer, url: str) -> None:
    interim = "HTTP/1.1 100 Continue\r\n\r\n" + "HTTP/1.1 103 Early Hints\r\nLink: </style.css>\r\n\r\n" * 2
    head = "HTTP/1.1 206 X\r\nContent-Range: bytes 10-139/150\r\nContent-Length: 130\r\n\r\n"
    server.script("a.tar", {"raw": interim + head + "x" * 130})
    assert read(url) == b"x" * 130


@pytest.mark.usefixtures("short")
def test_an_announced_length_does_not_extend_the_time_limit(server: HttpServer, url: str) -> None:
    head = "HTTP/1.1 200 X\r\nETag: {}\r\nContent-Length: 4000000\r\n\r\n"
    for tag in ('"strong"', 'W/"weak"'):
        server.script("a.tar", {"raw": head.format(tag) + "x" * 10, "times": -1})
        error = refused(tc.RemoteError, read_whole, url, 1 << 40)
        assert "given up" in str(error)


def test_bodies_without_a_length(server: HttpServer, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    server.script("a.tar", {"raw": "HTTP/1.1 200 X\r\n\r\nabc", "times": -1})
    assert "no Content-Length" in str(refused(tc.RemoteError, read_whole, url, 1000))
    head = "HTTP/1.1 {} X\r\nContent-Range: bytes 10-139/150\r\nTransfer-Encoding: chunked\r\n\r\n"
    chunks = "".join(f"1\r\n{chr(byte)}\r\n" for byte in CONTENT[10:140]) + "0\r\n\r\n"
    server.script("a.tar", {"raw": head.format(206) + chunks})
    assert read(url) == CONTENT[10:140]
    server.script("a.tar", {"raw": head.format(200) + chunks})
    assert read_whole(url, 1000) == CONTENT[10:140]
    server.script("a.tar", {"raw": head.format(200) + chunks, "times": -1})
    with monkeypatch.context() as patch:
        patch.setattr("wds_tensorcache.storage.remote.http._MAX_UNKNOWN", 100)
        assert "more than 100" in str(refused(tc.RemoteError, read_whole, url, 1000))
    refused(tc.RemoteError, read_whole, url, 100)


@pytest.mark.usefixtures("short")
def test_a_warning_while_requests_fail(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """One for all requests of the process, so that training does not wait in silence."""
    monkeypatch.setattr(retry, "_LATE_S", 0.1)
    monkeypatch.setattr(retry, "_warned_s", -math.inf)
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        url = f"http://user:secret@127.0.0.1:{closed.getsockname()[1]}/a.tar"
        errors = outcomes([lambda: read(url)] * 4)
    assert all(isinstance(error, tc.RemoteError) for error in errors)
    (record,) = caplog.records
    assert (record.name, record.levelname) == ("wds_tensorcache", "WARNING")
    assert "/a.tar: bytes [10, 140): no connection to the server; trying again for up to" in record.message
    assert "secret" not in record.message
