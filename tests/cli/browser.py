"""A headless Chromium that a test drives: pages, keys, pictures of the page, its errors and its requests."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

_FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --disable-dev-shm-usage --hide-scrollbars --remote-debugging-pipe"
).split()
_TIMEOUT_S = 30
_CODES = {"/": ("Slash", 191), "Enter": ("Enter", 13), "Escape": ("Escape", 27)}
_CODES |= {f"Arrow{way}": (f"Arrow{way}", code) for code, way in enumerate(("Left", "Up", "Right", "Down"), 37)}


def chromium() -> str:
    """Return the path of the browser, or skip the test."""
    for name in ("chromium", "chromium-browser", "google-chrome"):
        if path := shutil.which(name):
            return path
    pytest.skip("needs a browser: apt-get install chromium")


# the browser reads commands from file 3 and writes answers to file 4; high copies first, so that neither is overwritten
_WIRE = """import fcntl, os, sys
high = [fcntl.fcntl(int(fd), fcntl.F_DUPFD, 20) for fd in sys.argv[1:3]]
os.dup2(high[0], 3)
os.dup2(high[1], 4)
os.execv(sys.argv[3], sys.argv[3:])
"""


class Browser:
    """One page of a browser. The commands are those of the DevTools protocol, over two pipes.

    Attributes:
        problems: Errors and warnings of the page: its console, uncaught exceptions, and loads that failed or were blocked.
        requests: Addresses that the page has requested, cut to 200 characters.
    """

    def __init__(self, profile: Path) -> None:
        path = chromium()
        self.problems: list[str] = []
        self.requests: list[str] = []
        self._numbers, self._buffer, self._answers = itertools.count(1), b"", dict[int, Any]()
        self._is_loaded = False
        commands, self._write = os.pipe()
        self._read, answers = os.pipe()
        command = [path, *_FLAGS, f"--user-data-dir={profile}", "about:blank"]
        self._process = subprocess.Popen(
            [sys.executable, "-c", _WIRE, str(commands), str(answers), *command],
            pass_fds=(commands, answers),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(commands)
        os.close(answers)
        self._session = None
        targets = self.send("Target.getTargets")["targetInfos"]
        page = next(each["targetId"] for each in targets if each["type"] == "page")
        self._session = self.send("Target.attachToTarget", targetId=page, flatten=True)["sessionId"]
        for name in ("Page", "Runtime", "Log", "Network"):
            self.send(f"{name}.enable")

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *exc: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        os.close(self._read)
        os.close(self._write)

    def send(self, method: str, **parameters: Any) -> Any:
        """Send a command, and return its result."""
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        self._wait(lambda: number in self._answers, method)
        answer = self._answers.pop(number)
        assert "error" not in answer, (method, answer)
        return answer["result"]

    def open(self, url: str) -> None:
        """Go to an address, and wait until the page is loaded."""
        self._is_loaded = False
        self.send("Page.navigate", url=url)
        self._wait(lambda: self._is_loaded, url)

    def look(self, width: int, height: int, scheme: str = "light") -> None:
        """Set the size of the window in pixels, and the color scheme."""
        self.send("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        self.send("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def run(self, script: str) -> Any:
        """Return the value of an expression in the page; the result of a promise is waited for."""
        found = self.send("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in found, (script, found)
        return found["result"].get("value")

    def until(self, script: str) -> Any:
        """Wait until an expression is true in the page, and return its value."""
        deadline = time.monotonic() + _TIMEOUT_S
        while not (value := self.run(script)):
            assert time.monotonic() < deadline, script
            time.sleep(0.02)
        return value

    def press(self, *keys: str) -> None:
        """Press keys, each down and up: a character, or a name such as `Enter`."""
        for key in keys:
            code, number = _CODES[key] if key in _CODES else (f"Key{key.upper()}", ord(key.upper()))
            text = {"text": "\r" if key == "Enter" else key} if len(key) == 1 or key == "Enter" else {}
            which = {"key": key, "code": code, "windowsVirtualKeyCode": number}
            self.send("Input.dispatchKeyEvent", type="keyDown", **which, **text)
            self.send("Input.dispatchKeyEvent", type="keyUp", **which)

    def _wait(self, is_done: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + _TIMEOUT_S
        while not is_done():
            ready, _, _ = select.select([self._read], [], [], max(0, deadline - time.monotonic()))
            assert ready, f"no answer to {what:.200}"
            some = os.read(self._read, 1 << 20)
            assert some, "the browser has ended"
            *messages, self._buffer = (self._buffer + some).split(b"\0")
            for message in messages:
                self._take(json.loads(message))

    def _take(self, message: dict[str, Any]) -> None:
        if "id" in message:
            self._answers[message["id"]] = message
            return
        method, found = message["method"], message.get("params", {})
        if method == "Page.loadEventFired":
            self._is_loaded = True
        elif method == "Network.requestWillBeSent":
            self.requests.append(found["request"]["url"][:200])
        elif method == "Network.loadingFailed" and not found.get("canceled"):
            self.problems.append(f"failed: {found}")
        elif method == "Runtime.exceptionThrown":
            self.problems.append(f"exception: {found['exceptionDetails']}")
        elif method == "Runtime.consoleAPICalled" and found["type"] in ("error", "warning", "assert"):
            self.problems.append(f"console: {found['args']}")
        elif method == "Log.entryAdded" and found["entry"]["level"] in ("error", "warning"):
            self.problems.append(f"log: {found['entry']}")
