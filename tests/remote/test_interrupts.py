"""Interrupts, errors and time limits while requests are under way."""

from __future__ import annotations

import contextlib
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

import wds_tensorcache as tc
from tests.reading.batches import write
from tests.remote.reads import PASS, outcomes, refused
from tests.remote.servers.http_server import HttpServer


@pytest.fixture
def url(http_server: HttpServer, tmp_path: Path) -> str:
    """A cache of 40 shards with one sample each."""
    samples = [{"x": torch.full((9000,), i, dtype=torch.uint8)} for i in range(40)]
    write(tmp_path / "c" / "%06d.tar", samples, max_samples=1)
    http_server.set(folder=tmp_path)
    return f"{http_server.url}/c"


SCRIPT = """
import signal, sys, threading
import wds_tensorcache as tc

signal.signal(signal.SIGINT, signal.default_int_handler)  # a process in the background ignores it
url = sys.argv[1]
lazy = tc.open(url)[0]["x"]
stream = iter(tc.tarfile_to_samples()([{"url": url + "/000001.tar"}]))
for read in (lazy.load, lambda: next(stream)):
    threading.Thread(target=read, daemon=True).start()
lazy.load()
"""


@pytest.mark.long
def test_ctrl_c(http_server: HttpServer, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It ends a read from a server that sends a byte now and then, and the process, though threads wait for the server."""
    monkeypatch.setenv("TENSORCACHE_REMOTE_TIMEOUT_S", "3600")
    http_server.script("c/000000.tar", PASS, PASS, {"drip_s": 10, "times": -1})
    http_server.script("c/000001.tar", PASS, {"drip_s": 10, "times": -1})
    with subprocess.Popen([sys.executable, "-c", SCRIPT, url], stderr=subprocess.PIPE, text=True) as running:
        try:
            seen = http_server.log()
            # the manifest; index, structure and two tensors of the first shard; length and bytes of the second one
            while len(seen) < 7:
                seen += http_server.log()
            running.send_signal(signal.SIGINT)
            _, errors = running.communicate(timeout=60)
        finally:
            running.kill()
    assert "KeyboardInterrupt" in errors
    assert running.returncode == -signal.SIGINT


AT_EXIT = """
import atexit, sys, threading
import wds_tensorcache as tc

cache = tc.open(sys.argv[1])

def read(name):
    for i in range(40):
        assert cache[i]["x"][0] == i
    for batch in tc.Loader(cache, batch_size=10):
        pass
    print(name, batch["x"][:, 0].tolist())

begun = threading.Event()
threading.Thread(target=lambda: (begun.set(), read("thread"))).start()
begun.wait()
atexit.register(read, "atexit")
"""


@pytest.mark.long
def test_reads_after_the_end_of_the_main_thread(http_server: HttpServer, url: str) -> None:
    """A thread for which the interpreter waits goes on reading, and functions of `atexit` read, as from local shards."""
    http_server.set(latency_s=0.01)
    ended = subprocess.run([sys.executable, "-c", AT_EXIT, url], check=False, capture_output=True, text=True)
    last = list(range(30, 40))
    assert (ended.stdout, ended.stderr, ended.returncode) == (f"thread {last}\natexit {last}\n", "", 0)


def test_the_first_error_ends_the_rest(http_server: HttpServer, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also requests that stall, and those that wait for a pause; otherwise this would take an hour."""
    monkeypatch.setenv("TENSORCACHE_REMOTE_TIMEOUT_S", "3600")
    with tc.open(url) as cache:
        assert torch.equal(cache.read_tensors(range(40))["x"][:, 0], torch.arange(40, dtype=torch.uint8))
        drips, pauses = {"drip_s": 10, "times": -1}, {"status": 503, "retry_after": "3000", "times": -1}
        faults = [*(drips if i % 2 else pauses for i in range(38)), {"stall_s": 1, "status": 404}]
        # the first shard shows the structure of the batch
        http_server.script_all({f"c/{i:06d}.tar": [fault] for i, fault in enumerate(faults, 1)})
        with pytest.raises(tc.MissingShardError):
            cache.read_tensors(range(40))


def test_many_callers(http_server: HttpServer, url: str, tmp_path: Path) -> None:
    """Callers with more requests than are in flight at a time: each gets its bytes or its error."""
    http_server.set(latency_s=0.05)
    with tc.open(url) as cache:
        cache.read_tensors(range(40))
        (tmp_path / "c" / "000039.tar").unlink()
        ranges = [range(number % 2, 39 + (number % 4 == 3)) for number in range(12)]
        results = outcomes([lambda indices=indices: cache.read_tensors(indices)["x"] for indices in ranges])
        for indices, tensors in zip(ranges, results, strict=True):
            if 39 in indices:
                assert isinstance(tensors, tc.MissingShardError)
            else:
                assert tensors[:, -1].tolist() == list(indices)


def test_heads_that_drip(monkeypatch: pytest.MonkeyPatch) -> None:
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
        error = refused(tc.RemoteError, tc.open, f"http://127.0.0.1:{listener.getsockname()[1]}/a.tar")
        assert "given up" in str(error)
        thread.join()
