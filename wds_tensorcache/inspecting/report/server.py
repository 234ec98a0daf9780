"""A server of the page on this machine. The script of the page requests samples while the user scrolls."""

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

from wds_tensorcache.inspecting.report.cards import Limits, has_photos, make_card, text_of_sample
from wds_tensorcache.inspecting.report.page import build_page
from wds_tensorcache.inspecting.survey import Survey
from wds_tensorcache.inspecting.text import as_json

_HOST = "127.0.0.1"
_NAMES = re.compile(r"(?:127\.0\.0\.1|localhost)(?::\d{1,5})?", re.ASCII)
_DETAIL = Limits(text_nbytes=200_000, num_pictures=12, picture_side=512, picture_nbytes=600_000, num_tensors=300)
_MAX_COUNT, _MAX_QUERY = 200, 1000
_SEARCH_S = 0.7  # seconds after which a search answers with the matches so far
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

    Each request must contain a random token: in the address of the page, and in the header `X-Token` of requests by its script.
    Other pages cannot send this header. The header `Host` must name this machine, because the name of a hostile site may
    resolve to 127.0.0.1. No text from a request is used as a path of a file. Port 0 chooses a free port.

    Attributes:
        url: Address of the page, with the token.

    Raises:
        OSError: The port is in use, or not allowed.
    """

    daemon_threads = True
    allow_reuse_address = True

    def __init__(self, survey: Survey, report: dict[str, Any], port: int) -> None:
        super().__init__((_HOST, port), _Handler)
        self.survey = survey
        self.card = Limits(4000, 1 + has_photos(survey), picture_side=128, picture_nbytes=30_000, num_tensors=0)
        self.token = secrets.token_urlsafe(24)
        self.page = build_page(report, is_served=True)
        self.url = f"http://{_HOST}:{self.server_address[1]}/?token={self.token}"
        # hazard: each request decodes samples, so many at once would take much memory
        self.turn = threading.Semaphore(2)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print the error of a request, unless the browser has just disconnected."""
        if not isinstance(sys.exc_info()[1], (ConnectionError, TimeoutError)):
            super().handle_error(request, client_address)

    def search(self, words: list[str], is_marked: bool, begin: int, count: int) -> dict[str, Any]:
        """Return up to `count` samples that contain all words.

        The search begins at index `begin`, and continues at `next`, which is None at the end. With `is_marked`, only samples
        with marks match. After 0.7 s and one sample, return the matches so far.
        """
        samples: list[dict[str, Any]] = []
        deadline = time.monotonic() + _SEARCH_S
        index, total = begin, len(self.survey.cache)
        while index < total and len(samples) < count and (index == begin or time.monotonic() < deadline):
            text = text_of_sample(self.survey, index, _DETAIL.text_nbytes).lower() if words else ""
            if all(word in text for word in words):
                card = make_card(self.survey, index, self.card)
                if card["marks"] or not is_marked:
                    samples.append(card)
            index += 1
        return {"samples": samples, "next": index if index < total else None, "searched": index}


class _Handler(BaseHTTPRequestHandler):
    server: PageServer
    timeout = 30  # seconds after which a silent client is disconnected
    server_version, sys_version = "tensorcache", ""

    def do_GET(self) -> None:
        status, content, kind = self._respond()
        self.send_response(status)
        for name, value in {**_HEADERS, "Content-Type": f"{kind}; charset=utf-8"}.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def _respond(self) -> tuple[int, bytes, str]:
        if not _NAMES.fullmatch(self.headers.get("Host", "")):
            return 403, b"unknown host name\n", "text/plain"
        try:
            parts = urlsplit(self.path)
            fields = {name: values[-1] for name, values in parse_qs(parts.query, max_num_fields=10).items()}
        except ValueError:
            return 400, b"the address is not valid\n", "text/plain"
        token = fields.get("token", "") if parts.path == "/" else self.headers.get("X-Token", "")
        # hazard: a timing attack on the token
        if not hmac.compare_digest(token.encode("utf-8", "replace"), self.server.token.encode()):
            return 403, b"the address needs the token that `tensorcache view --serve` prints\n", "text/plain"
        if parts.path == "/":
            return 200, self.server.page, "text/html"
        if parts.path not in ("/samples", "/sample"):
            return 404, b"not found\n", "text/plain"
        survey, last = self.server.survey, len(self.server.survey.cache)
        index = _as_integer(fields.get("number"), 0, last - 1)
        begin, count = _as_integer(fields.get("begin"), 0, last), _as_integer(fields.get("count"), 1, _MAX_COUNT)
        with self.server.turn:
            if parts.path == "/sample" and index is not None:
                answer = make_card(survey, index, _DETAIL)
            elif parts.path == "/samples" and begin is not None and count is not None:
                words = fields.get("query", "")[:_MAX_QUERY].lower().split()
                answer = self.server.search(words, fields.get("marked") == "1", begin, count)
            else:
                return 400, b"a number is missing or out of range\n", "text/plain"
        return 200, as_json(answer).encode(), "application/json"

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing: the addresses of requests contain the token."""


def _as_integer(text: str | None, low: int, high: int) -> int | None:
    if text is None or not re.fullmatch(r"\d{1,15}", text, re.ASCII):
        return None
    return int(text) if low <= int(text) <= high else None
