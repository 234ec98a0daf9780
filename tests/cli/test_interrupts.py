"""Ctrl-C in a command."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

from tests.remote.servers.http_server import HttpServer

ROOT = Path(__file__).parent.parent.parent


def test_a_server_that_stalls(tmp_path: Path) -> None:
    with HttpServer(tmp_path) as server:
        server.script("cache.tar", {"stall_s": 3600, "times": -1})
        command = [sys.executable, "-m", "wds_tensorcache.cli", "ls", f"{server.url}/cache.tar"]
        running = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT, preexec_fn=_restore
        )
        try:
            while not server.log():
                time.sleep(0.01)
            running.send_signal(signal.SIGINT)
            _, errors = running.communicate(timeout=60)
        finally:
            running.kill()
    assert (running.returncode, errors) == (130, "interrupted\n")


def _restore() -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a process in the background ignores it
