"""Interrupts, errors and exits while requests are under way: the caller's buffers are its own afterwards."""

from __future__ import annotations

import contextlib
import random
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest

import wds_tensorcache as tc
from tests.remote.reads import refused
from tests.remote.servers.http_server import HttpServer
from wds_tensorcache.storage.remote.fetch import fetch_many
from wds_tensorcache.storage.remote.remote_file import RemoteFile

CONTENT = random.Random(9).randbytes(1_000_000)
SCRIPT = """
import signal
from wds_tensorcache.storage.remote.remote_file import RemoteFile
signal.signal(signal.SIGINT, signal.default_int_handler)  # a process in the background ignores it
file = RemoteFile({!r}, 1_000_000)
"""


def test_ctrl_c(http_server: HttpServer) -> None:
    """A read from a server that sends a byte now and then ends at once, with the interrupt."""
    url = http_server.put("a.tar", CONTENT)
    http_server.script("a.tar", {"drip_s": 10, "times": -1})
    begin = "print('reading', flush=True); file.read(0, 9000)"
    with subprocess.Popen(
        [sys.executable, "-c", SCRIPT.format(url) + begin], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as running:
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
    """A process ends at once, though a thread, or a stream that was not closed, waits for a server that stalls."""
    monkeypatch.setenv("TENSORCACHE_REMOTE_TIMEOUT_S", "3600")
    url = http_server.put("a.tar", CONTENT)
    http_server.script("a.tar", {"headers": {}}, {"drip_s": 10, "times": -1})
    begin = (
        "import threading, time\n"
        "from wds_tensorcache.storage.remote.stream import RemoteStream\n"
        f"stream = RemoteStream({url!r})\n"
        "for read in (lambda: file.read(0, 9000), stream.read): threading.Thread(target=read, daemon=True).start()\n"
        "time.sleep(0.5)\n"
    )
    subprocess.run([sys.executable, "-c", SCRIPT.format(url) + begin], check=True, timeout=200)


def test_heads_that_drip(http_server: HttpServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The time limit is that of the whole request, however slowly its head arrives."""
    monkeypatch.setenv("TENSORCACHE_REMOTE_TIMEOUT_S", "1")
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            connection, _ = listener.accept()
            with connection, contextlib.suppress(OSError):
                for byte in b"HTTP/1.1 200 OK\r\nA: " + bytes(1000):
                    connection.send(bytes([byte]))
                    time.sleep(0.2)

        thread = threading.Thread(target=serve)
        thread.start()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/a.tar"
        error = refused(tc.RemoteError, RemoteFile(url).read_tail, 10)
        assert "given up" in str(error)
        thread.join()
