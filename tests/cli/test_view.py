"""`tensorcache view`: the page in a browser, as a file and from the local server, and the server on its own."""

from __future__ import annotations

import http.client
import json
import os
import re
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import wds_tensorcache as tc
from tests.children import wait_until
from tests.cli.browser import Browser
from tests.cli.command import json_of, run
from tests.cli.commands import Output, the_server
from tests.inspecting.caches import EVIL, write_hostile, write_photos


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("caches") / "photos"
    write_photos(folder, 150)
    return folder


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("caches") / "<i>hostile"
    write_hostile(folder)
    return folder


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with Browser(tmp_path_factory.mktemp("profile")) as found:
        yield found


@pytest.fixture
def page(browser: Browser) -> Iterator[Browser]:
    """The browser; the test fails if the page has errors, or makes a request that leaves it."""
    browser.problems.clear()
    browser.requests.clear()
    browser.look(1200, 900)
    yield browser
    assert not browser.problems
    assert not [url for url in browser.requests if not url.startswith(("file:///", "data:", "http://127.0.0.1:"))]


class PageServer(NamedTuple):
    """A running `tensorcache view --serve`."""

    url: str
    port: int
    token: str


@contextmanager
def _served(folder: Path) -> Iterator[PageServer]:
    """Run a server that has examined half of the samples, and end it with Ctrl-C."""
    with tc.open(folder) as cache:
        arguments = ["view", str(folder), "--serve", "--no-open", "--json", "--samples", str(-(-len(cache) // 2))]
    with Output() as output, Output() as errors, open(os.devnull) as null:
        process = the_server().start(arguments, (null.fileno(), output.fileno, errors.fileno), Path.cwd())
        wait_until(lambda: output.read().endswith(b"\n"))
        url = json.loads(output.read())["url"]
        address = re.fullmatch(r"http://127\.0\.0\.1:(\d+)/\?token=([\w-]{32})", url)
        assert address
        yield PageServer(url, int(address[1]), address[2])
        process.interrupt()
        assert process.wait() == 0
        messages = errors.read().decode()
    assert "Traceback" not in messages
    assert "GET" not in messages


@pytest.fixture(scope="module")
def page_server(photos: Path) -> Iterator[PageServer]:
    with _served(photos) as server:
        yield server


def _ask(page_server: PageServer, path: str, method: str = "GET", **headers: str) -> tuple[int, bytes, dict[str, str]]:
    connection = http.client.HTTPConnection("127.0.0.1", page_server.port, timeout=30)
    try:
        connection.request(method, path, headers=headers)
        answer = connection.getresponse()
        return answer.status, answer.read(), dict(answer.getheaders())
    finally:
        connection.close()


# --- the command -----------------------------------------------------------------------------------------------------------


def test_a_page_is_replaced_but_no_other_file(photos: Path, tmp_path: Path) -> None:
    out = tmp_path / "line\nbreak.html"
    found = json_of("view", photos, "-o", out, "--samples", 20)
    assert (found["num_samples"], found["num_shown"], found["nbytes"]) == (150, 20, out.stat().st_size)
    assert (found["output"], found["errors"]) == (str(out), {})
    assert out.read_bytes().startswith(b"<!doctype html>")
    assert os.listdir(tmp_path) == [out.name]
    lines = run("view", photos, "-o", out).stdout.splitlines()
    assert "150 of 150 samples" in lines[0]
    assert lines[1].startswith("marked: 2 samples with NaN, infinities, unusual numbers, or damage: photo-00007, ")
    shard = next(photos.glob("*.tar"))
    content = shard.read_bytes()
    assert "not a page" in run("view", photos, "-o", shard, status=2).stderr
    assert shard.read_bytes() == content


def test_wrong_usage(photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for arguments in (
        [photos],
        [photos, "-o", "x.html", "--serve"],
        [photos, "-o", "."],
        [photos, "-o", ""],
        [photos, "-o", "x/"],
        [photos, "-o", "nowhere/x.html"],
        [photos, "-o", "x.html", "--cache", "unknown"],
        [photos, "-o", "x.html", "--samples", "0"],
        [photos, "--serve", "--port", "70000"],
        [".", "-o", "x.html"],
        ["missing", "-o", "x.html"],
    ):
        run("view", *arguments, status=2)
    assert not list(tmp_path.iterdir())


# --- the server ------------------------------------------------------------------------------------------------------------


def test_the_server_listens_on_this_machine_alone(page_server: PageServer) -> None:
    with pytest.raises(OSError, match="refused|unreachable|timed out"):
        socket.create_connection(("127.0.0.2", page_server.port), timeout=2)


_GIVEN = {"X-Token": "TOKEN"}


@pytest.mark.parametrize(
    ("status", "requests"),
    [
        (200, [("/?token=TOKEN", {}), ("/?token=TOKEN", {"Host": "localhost:99"}), ("/sample?number=0", _GIVEN)]),
        # without the token; a page of another site can make a browser send an address, but no header
        (
            403,
            [
                (f"/{query}", {})
                for query in ("", "?token=", "?token=x", "?token=TOKENx", "?Token=TOKEN", "?token=%ff%00")
            ],
        ),
        (403, [("/sample?number=0", headers) for headers in ({}, {"X-Token": "x"}, {"Cookie": "token=TOKEN"})]),
        (403, [(f"/{path}&token=TOKEN", {}) for path in ("samples?begin=0&count=1", "sample?number=0")]),
        # for the name of another machine
        *(
            (403, [("/?token=TOKEN", {"Host": host}), ("/sample?number=0", {"Host": host, **_GIVEN})])
            for host in ("evil.example", "127.0.0.1.evil.example", "", "127.0.0.1@evil", "localhost.", "[::1]")
        ),
        (
            404,
            [(f"/{path}", _GIVEN) for path in ("../../etc/passwd", "%2e%2e/etc/passwd", "train-00000.tar", "page.js")],
        ),
        (404, [(path, _GIVEN) for path in ("//etc/passwd", "/samples/", "/sample/0", "/favicon.ico")]),
        (400, [(f"/sample?number={n}", _GIVEN) for n in ("", "-1", "150", "1e9", "9" * 5000, "%D9%A1")]),
        (400, [(f"/samples?begin={query}", _GIVEN) for query in ("0", "0&count=0", "0&count=201", "151&count=1")]),
        (400, [("/?" + "&".join(["a=b"] * 20), {})]),
    ],
    ids=lambda value: str(value)[:60],
)
def test_requests(page_server: PageServer, status: int, requests: list[tuple[str, dict[str, str]]]) -> None:
    token = page_server.token
    for path, headers in requests:
        headers = {name: value.replace("TOKEN", token) for name, value in headers.items()}
        answer, content, _ = _ask(page_server, path.replace("TOKEN", token), **headers)
        assert answer == status, path
        assert answer == 200 or not (b"photo" in content or token.encode() in content)


def test_only_get_is_answered(page_server: PageServer) -> None:
    for method in ("POST", "HEAD", "OPTIONS", "FOO", "__init__"):
        assert _ask(page_server, f"/?token={page_server.token}", method)[0] == 501


def test_broken_requests_leave_the_server_alive(page_server: PageServer) -> None:
    for raw in (
        b"\r\n\r\n",
        b"GET\r\n\r\n",
        b"\xff\xfe\0" * 50 + b"\r\n\r\n",
        b"GET " + b"a" * 70_000 + b" HTTP/1.1\r\n\r\n",
        b"GET http://[ HTTP/1.1\r\nHost: localhost\r\n\r\n",
    ):
        with socket.create_connection(("127.0.0.1", page_server.port), timeout=30) as one:
            one.sendall(raw)
            one.shutdown(socket.SHUT_WR)
            while one.recv(4096):
                pass
    with socket.create_connection(("127.0.0.1", page_server.port), timeout=30) as one:  # and does not wait for the page
        one.sendall(f"GET /?token={page_server.token} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
        one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    assert _ask(page_server, f"/?token={page_server.token}")[0] == 200


def test_answers_have_safe_headers(page_server: PageServer) -> None:
    _, content, headers = _ask(page_server, f"/?token={page_server.token}")
    assert headers["Content-Type"] == "text/html; charset=utf-8"
    assert headers["Content-Security-Policy"] == "frame-ancestors 'none'"
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert headers["Referrer-Policy"] == "no-referrer"
    assert headers["Cache-Control"] == "no-store"
    assert "Python" not in headers["Server"]
    assert "Access-Control-Allow-Origin" not in headers
    assert page_server.token.encode() not in content
    policy = re.search(rb'http-equiv="Content-Security-Policy" content="([^"]*)"', content)
    assert policy
    assert b"default-src &#x27;none&#x27;" in policy[1]
    assert b"unsafe" not in policy[1]


def test_samples_come_in_pages(page_server: PageServer) -> None:
    def pages(query: str) -> Iterator[dict[str, Any]]:
        begin: int | None = 0
        while begin is not None:
            path = f"/samples?begin={begin}&{query}"
            found = json.loads(_ask(page_server, path, **{"X-Token": page_server.token})[1])
            yield from found["samples"]
            begin = found["next"]

    cards = list(pages("count=60"))
    assert [card["number"] for card in cards] == list(range(150))
    pictures = cards[33]["pictures"]
    assert [picture.get("tensor", picture.get("member")) for picture in pictures] == [0, ".jpg"]
    assert pictures[1]["error"] == "cannot be decoded"
    assert [card["number"] for card in pages("count=60&query=HARBOR+photo-0012")] == [120, 123, 126, 129]
    assert [card["number"] for card in pages("count=200&query=photo-00149")] == [149]
    assert [card["number"] for card in pages("count=60&marked=1")] == [7, 11]
    assert not list(pages("count=60&query=%3Cscript%3E"))
    detail = json.loads(_ask(page_server, "/sample?number=33", **{"X-Token": page_server.token})[1])
    assert (detail["key"], len(detail["tensors"]), len(detail["pictures"])) == ("photo-00033", 2, 3)


# --- in a browser ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def photos_page(photos: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    out = tmp_path_factory.mktemp("pages") / "photos.html"
    run("view", photos, "-o", out)
    return out.as_uri()


def _drive(page: Browser) -> None:
    """Search, move and open with keys alone; alike for a file and a server."""
    page.until("document.querySelectorAll('.card').length >= 12")
    page.press("/", *"fox 0004", "Enter")
    page.until("document.getElementById('status').textContent.startsWith('5 of 150')")
    page.until("document.activeElement.classList.contains('card')")
    assert "fox" in page.run("document.activeElement.textContent")
    assert page.run("document.activeElement.querySelectorAll('mark').length") >= 2
    first = page.run("document.activeElement.querySelector('.key').textContent")
    page.press("ArrowRight")
    second = page.run("document.activeElement.querySelector('.key').textContent")
    assert first != second
    page.press("Enter")
    page.until("document.getElementById('detail').open")
    assert page.until("document.getElementById('detail-title').textContent") == second
    assert "number" in page.run("document.querySelector('.detail-text').textContent")
    page.until("document.querySelectorAll('#detail figure').length == 2")
    page.press("ArrowLeft")
    page.until(f"document.getElementById('detail-title').textContent == '{first}'")
    page.press("Escape")
    page.until("!document.getElementById('detail').open")
    page.until(f"document.activeElement.textContent.includes('{first}')")
    page.press("ArrowUp")
    assert page.run("document.activeElement.id") == "search"
    page.press("Escape")
    page.until("document.querySelectorAll('.card').length >= 12")
    page.press("Escape", "/")
    assert page.run("document.activeElement.id") == "search"
    page.run("document.getElementById('marked').click()")
    page.until("document.getElementById('status').textContent == '2 of 150 samples'")
    assert page.run("[...document.querySelectorAll('.badge')].map(each => each.textContent)")[0] == "3 NaN"


@pytest.mark.long
def test_keys_and_search(page: Browser, photos_page: str, page_server: PageServer) -> None:
    page.open(photos_page)
    assert page.until("document.getElementById('status').textContent") == "150 samples"
    assert page.run("document.getElementById('structure').textContent.endsWith('Counts are those of 64 samples.')")
    assert page.run("document.title") == "photos"
    page.look(320, 900, "dark")
    assert page.run("document.documentElement.scrollWidth") == 320
    assert page.run("getComputedStyle(document.body).backgroundColor").startswith("rgb(16,")
    page.look(1200, 900)
    for url in (photos_page, page_server.url):
        page.open(url)
        _drive(page)
        # the rest of the samples comes while scrolling
        page.open(url)
        page.until("document.querySelectorAll('.card').length >= 12")
        assert page.run("document.querySelectorAll('.card').length") < 150
        page.until("window.scrollTo(0, 1e6), document.querySelectorAll('.card').length == 150")
        assert page.run("new Set([...document.querySelectorAll('.key')].map(each => each.textContent)).size") == 150


@pytest.mark.parametrize("served", [False, True])
@pytest.mark.long
def test_hostile_content_does_nothing(page: Browser, hostile: Path, tmp_path: Path, served: bool) -> None:
    def look(url: str) -> None:
        page.open(url)
        # a search ends after 0.7 s, and goes on when the page is scrolled
        page.until("window.scrollTo(0, 1e6), document.querySelectorAll('.card').length == 11")
        assert page.run("document.title") == "<i>hostile"
        for number in range(11):
            page.run(f"document.querySelectorAll('.card')[{number}].click()")
            page.until("document.getElementById('detail').open")
            page.press("Escape")
            page.until("!document.getElementById('detail').open")
        assert page.run("document.title") == "<i>hostile"
        assert page.run("document.querySelectorAll('script').length") == 2
        assert (
            page.run("document.querySelectorAll('i, img:not([src^=\"data:image/png;base64,\"]), svg[onload]').length")
            == 0
        )
        assert page.run("document.documentElement.textContent.includes('\\u202e')") is False
        page.run("document.querySelectorAll('.card')[0].click()")
        assert EVIL[:40] in page.run("document.querySelector('.detail-text').textContent")

    if served:
        with _served(hostile) as page_server:
            look(page_server.url)
            page.open("about:blank")
    else:
        out = tmp_path / "report.html"
        run("view", hostile, "-o", out)
        look(out.as_uri())


@pytest.mark.long
def test_the_policy_stops_scripts_and_requests(page: Browser, photos_page: str) -> None:
    """The page would be safe even if a text became HTML: each attempt is blocked, and reported."""
    page.open(photos_page)
    page.until("document.querySelectorAll('.card').length >= 12")
    attempt = "(() => {{ try {{ {}; return 'done' }} catch (error) {{ return error.name }} }})()"
    assert page.run(attempt.format("document.body.innerHTML = '<b>x</b>'")) == "TypeError"
    assert page.run(attempt.format("document.body.setAttribute('onclick', 'alert(1)')")) == "TypeError"
    assert page.run("fetch('http://127.0.0.1:1/').then(() => 'sent', () => 'blocked')") == "blocked"
    image = "const one = new Image(); one.onload = () => done('sent'); one.onerror = () => done('blocked'); "
    assert page.run(f"new Promise((done) => {{ {image} one.src = 'http://127.0.0.1:1/x.png' }})") == "blocked"
    assert page.problems
    page.problems.clear()
