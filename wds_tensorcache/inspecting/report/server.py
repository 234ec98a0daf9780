"""The page on a local server, which reads samples of the cache when they are scrolled to."""

from __future__ import annotations

import hmac
import re
import secrets
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

from wds_tensorcache.inspecting.report.cards import Limits, make_card, text_of_sample
from wds_tensorcache.inspecting.report.page import as_json, build_page
from wds_tensorcache.inspecting.report.survey import Survey

_HOST = "127.0.0.1"
_NAMES = re.compile(r"(?:127\.0\.0\.1|localhost)(?::\d{1,5})?", re.ASCII)
_CARD = Limits(text_nbytes=4000, num_pictures=1, picture_side=128, picture_nbytes=30_000, num_tensors=0)
_DETAIL = Limits(text_nbytes=200_000, num_pictures=12, picture_side=512, picture_nbytes=600_000, num_tensors=300)
_MAX_COUNT, _MAX_QUERY = 200, 1000
_SEARCH_S = 0.7  # seconds after which a search answers with what it has found
_TIMEOUT_S = 30  # seconds after which a silent client is disconnected
_HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "frame-ancestors 'none'",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}


class PageServer(ThreadingHTTPServer):
    """A server of one page and its samples, on 127.0.0.1 only.

    Each request must have a random token: the page in its address, and the requests of its script in the header `X-Token`,
    which no other page can send. The header `Host` must name this machine, because a hostile site can make its own name
    point here. No part of a request reaches the file system.

    Args:
        survey: Findings in some samples of the cache.
        report: Result of `overview`.
        port: Port to listen on; 0 chooses a free one.

    Attributes:
        url: Address of the page, with the token.

    Raises:
        OSError: The port is in use.
    """

    daemon_threads = True
    allow_reuse_address = True

    def __init__(self, survey: Survey, report: dict[str, Any], port: int = 0) -> None:
        super().__init__((_HOST, port), _Handler)
        self.survey, self.report = survey, report
        self.token = secrets.token_urlsafe(24)
        self.page = build_page(report, is_served=True)
        self.url = f"http://{_HOST}:{self.server_address[1]}/?token={self.token}"
        # hazard: each request decodes samples, so many at once would take much memory
        self.turn = threading.Semaphore(2)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print the error of a request, unless the browser has only gone away."""
        if not isinstance(sys.exc_info()[1], (ConnectionError, TimeoutError)):
            super().handle_error(request, client_address)

    def is_allowed(self, token: str) -> bool:
        """Return whether a request has the token, in a time that does not tell how much of it is right."""
        return hmac.compare_digest(token.encode("utf-8", "replace"), self.token.encode())

    def find(self, words: list[str], is_marked: bool, begin: int, count: int) -> dict[str, Any]:
        """Return at most `count` samples from index `begin` on that have all words, and where to continue.

        Answers after 0.7 s with what was found by then, but examines at least one sample.
        """
        found: list[dict[str, Any]] = []
        deadline = time.monotonic() + _SEARCH_S
        at, total = begin, len(self.survey.cache)
        while at < total and len(found) < count:
            if at > begin and time.monotonic() > deadline:
                break
            if not words or self._matches(at, words):
                card = make_card(self.survey, at, _CARD)
                if card["marks"] or not is_marked:
                    found.append(card)
            at += 1
        return {"samples": found, "next": at if at < total else None, "searched": at}

    def _matches(self, at: int, words: list[str]) -> bool:
        text = text_of_sample(self.survey, at, _DETAIL.text_nbytes).lower()
        return all(word in text for word in words)

    def detail(self, at: int) -> dict[str, Any]:
        """Return one sample with larger pictures and all its tensors."""
        return make_card(self.survey, at, _DETAIL)


class _Handler(BaseHTTPRequestHandler):
    server: PageServer
    timeout = _TIMEOUT_S
    server_version, sys_version = "tensorcache", ""

    def do_GET(self) -> None:
        if not _NAMES.fullmatch(self.headers.get("Host", "")):
            self._answer(403, b"unknown host name\n")
            return
        try:
            parts = urlsplit(self.path)
            fields = {name: values[-1] for name, values in parse_qs(parts.query, max_num_fields=10).items()}
        except ValueError:
            self._answer(400, b"the address is not valid\n")
            return
        given = fields.get("token", "") if parts.path == "/" else self.headers.get("X-Token", "")
        if not self.server.is_allowed(given):
            self._answer(403, b"the address needs the token that `tensorcache view --serve` prints\n")
        elif parts.path == "/":
            self._answer(200, self.server.page, "text/html")
        elif parts.path in ("/samples", "/sample"):
            with self.server.turn:
                self._answer_json(parts.path, fields)
        else:
            self._answer(404, b"not found\n")

    def _answer_json(self, path: str, fields: dict[str, str]) -> None:
        total = len(self.server.survey.cache)
        if path == "/sample":
            number = _integer(fields.get("number"), 0, total - 1)
            answer = None if number is None else self.server.detail(number)
        else:
            begin, count = _integer(fields.get("begin"), 0, total), _integer(fields.get("count"), 1, _MAX_COUNT)
            query = fields.get("query", "")[:_MAX_QUERY].lower().split()
            is_marked = fields.get("marked") == "1"
            answer = None if begin is None or count is None else self.server.find(query, is_marked, begin, count)
        if answer is None:
            self._answer(400, b"a number is missing or out of range\n")
        else:
            self._answer(200, as_json(answer).encode(), "application/json")

    def _answer(self, status: int, content: bytes, kind: str = "text/plain") -> None:
        self.send_response(status)
        for name, value in {**_HEADERS, "Content-Type": f"{kind}; charset=utf-8"}.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":  # HTTP forbids a body there
            self.wfile.write(content)

    def __getattr__(self, name: str) -> Any:
        # the base class looks for a method named after each request: only GET is answered
        if name.startswith("do_"):
            return lambda: self._answer(405, b"only GET is answered\n")
        raise AttributeError(name)

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing: the addresses of requests contain the token."""


def _integer(text: str | None, low: int, high: int) -> int | None:
    """Return a number from a request; None if it is not one between `low` and `high`."""
    if text is None or not re.fullmatch(r"\d{1,15}", text, re.ASCII):
        return None
    number = int(text)
    return number if low <= number <= high else None
