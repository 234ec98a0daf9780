"""The page: one HTML file with its style, script and data. Its policy forbids requests to other servers."""

from __future__ import annotations

import base64
import hashlib
import html
import re
from importlib import resources
from typing import Any

from wds_tensorcache.inspecting.text import as_json

_PLACE = re.compile(r"\{\{(\w+)\}\}")


def build_page(report: dict[str, Any], *, is_served: bool = False) -> bytes:
    """Return the page as UTF-8. `report` comes from `overview`, and has the `samples` unless the page's server sends them."""
    style, script = _file("page.css"), _file("page.js")
    parts = {
        "policy": html.escape(policy_of(style, script, is_served)),
        "title": html.escape(str(report["title"])),
        "style": style,
        "script": script,
        "report": as_json({"samples": [], **report, "mode": "server" if is_served else "file"}),
    }
    # one pass, so that no part is searched for the places of another
    page = _PLACE.sub(lambda match: parts[match[1]], _file("page.html"))
    return page.encode("utf-8")


def policy_of(style: str, script: str, is_served: bool) -> str:
    """Return the Content-Security-Policy. It allows this style and script, embedded pictures, and requests if served."""
    rules = {
        "default-src": "'none'",
        "script-src": _digest(script),
        "style-src": _digest(style),
        "img-src": "data:",
        "connect-src": "'self'" if is_served else "'none'",
        "base-uri": "'none'",
        "form-action": "'none'",
        # without a policy, the script cannot make HTML from text
        "require-trusted-types-for": "'script'",
        "trusted-types": "'none'",
    }
    return "; ".join(f"{name} {value}" for name, value in rules.items())


def _digest(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _file(name: str) -> str:
    return resources.files("wds_tensorcache.inspecting.report").joinpath(name).read_text(encoding="utf-8")
