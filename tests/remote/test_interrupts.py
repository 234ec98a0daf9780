"""Interrupts, errors and exits while requests are under way: the caller's buffers are its own afterwards."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

import wds_tensorcache as tc
from tests.remote.servers.http_server import HttpServer
from wds_tensorcache.storage.remote.fetch import fetch_many
from wds_tensorcache.storage.remote.remote_file import RemoteFile

ROOT = Path(__file__).parent.parent.parent
CONTENT = random.Random(9).randbytes(1_000_000)


def test_ctrl_c(http_server: HttpServer) -> None:
    """A loop over a server that stalls ends at once, with the interrupt."""
    url = http_server.put("a.tar", CONTENT)
    http_server.script("a.tar", {"drip_s": 10, "times": -1})
    script = (
        "import signal, sys\n"
        "from wds_tensorcache.storage.remote.remote_file import RemoteFile\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)  # a process in the background ignores it\n"
        f"file = RemoteFile({url!r}, {len(CONTENT)})\n"
        "print('reading', flush=True)\n"
        "file.read(0, 9000)\n"
    )
    running = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT
    )
    try:
        assert running.stdout is not None
        assert running.stdout.readline() == "reading\n"
        while not http_server.log():
            time.sleep(0.01)
        running.send_signal(signal.SIGINT)
        _, errors = running.communicate(timeout=60)
    finally:
        running.kill()
    assert "KeyboardInterrupt" in errors
    assert running.returncode == -signal.SIGINT


def test_the_first_error_ends_the_rest(http_server: HttpServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also requests that stall, and those that wait for a pause; otherwise this would take an hour."""
    monkeypatch.setenv("TENSORCACHE_REMOTE_TIMEOUT_S", "3600")
    url = http_server.put("a.tar", CONTENT)
    stalled, paused = (RemoteFile(f"{url}?{name}", len(CONTENT)) for name in ("stalled", "paused"))
    missing = RemoteFile(http_server.url + "/none.tar", 100)
    http_server.script_all(
        {
            "a.tar?stalled": [{"drip_s": 10, "times": -1}],
            "a.tar?paused": [{"status": 503, "retry_after": "3000", "times": -1}],
            "none.tar": [{"stall_s": 1}],
        }
    )
    memory = [bytearray(1000) for _ in range(201)]
    ranges = [((stalled, paused)[i % 2], 5000 * (i // 2), [memory[i]]) for i in range(20)]
    with pytest.raises(tc.MissingShardError):
        fetch_many([*ranges, (missing, 0, [memory[-1][:100]])])
    before = [bytes(one) for one in memory]
    time.sleep(0.5)
    assert before == [bytes(one) for one in memory]


def test_many_callers(http_server: HttpServer) -> None:
    """Callers with more requests than are in flight at a time: each gets its bytes or its error."""
    http_server.set(latency_s=0.05)
    url = http_server.put("a.tar", CONTENT)
    wrong: list[object] = []

    def work(number: int) -> None:
        file = RemoteFile(url if number % 4 else url + ".none", len(CONTENT))
        buffers = [memoryview(bytearray(100)) for _ in range(30)]
        try:
            fetch_many([(file, 30_000 * i + number, [buffers[i]]) for i in range(30)])
        except tc.MissingShardError:
            if number % 4:
                wrong.append(number)
            return
        for i, buffer in enumerate(buffers):
            if buffer != CONTENT[30_000 * i + number : 30_000 * i + number + 100]:
                wrong.append((number, i))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_exit_while_requests_are_under_way(http_server: HttpServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process ends at once, though a thread still waits for a server that stalls."""
    url = http_server.put("a.tar", CONTENT)
    http_server.script("a.tar", {"drip_s": 10, "times": -1})
    script = (
        "import sys, threading, time\n"
        "from wds_tensorcache.storage.remote.remote_file import RemoteFile\n"
        f"file = RemoteFile({url!r}, {len(CONTENT)})\n"
        "thread = threading.Thread(target=file.read, args=(0, 9000), daemon=True)\n"
        "thread.start()\n"
        "time.sleep(0.5)\n"
        "print('end', flush=True)\n"
    )
    monkeypatch.setenv("TENSORCACHE_REMOTE_TIMEOUT_S", "3600")
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT, timeout=200)
    assert (result.returncode, result.stdout) == (0, "end\n")
