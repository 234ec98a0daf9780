"""Fixtures: servers on 127.0.0.1, each in its own process."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator
from multiprocessing import forkserver
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest

from tests.remote.objects import Objects
from tests.remote.servers.http_server import HttpServer
from tests.remote.servers.write_server import WriteServer, shared_server


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> None:
    """Keep the netrc file and the proxies of this machine away from tests."""
    monkeypatch.setenv("NETRC", f"{tmp_path}/no-netrc")
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)


@pytest.fixture
def objects(http_server: HttpServer) -> Objects:
    return Objects(http_server)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A place for the folder of a node's cache."""
    return tmp_path / "cache"


@pytest.fixture(scope="session")
def _http_process() -> Iterator[HttpServer]:
    with HttpServer() as server:
        yield server


@pytest.fixture(scope="session")
def _module_process() -> Iterator[HttpServer]:
    with HttpServer() as server:
        yield server


@pytest.fixture
def http_server(_http_process: HttpServer) -> HttpServer:
    """An empty web server with ranges and strong ETags; `http_server.set(ranges=False)` changes it."""
    _http_process.reset()
    return _http_process


@pytest.fixture(scope="module")
def module_server(_module_process: HttpServer) -> HttpServer:
    """Such a server for all tests of a module; `module_server.set(folder=…)` lets it serve files."""
    _module_process.reset()
    return _module_process


@pytest.fixture(scope="module")
def server(module_server: HttpServer, folder: Path) -> HttpServer:
    """A server of the fixture `folder` of a module."""
    module_server.set(folder=folder)
    return module_server


@pytest.fixture(scope="session")
def _write_process() -> WriteServer:
    pytest.importorskip("moto")
    pytest.importorskip("obstore")
    return shared_server()


@pytest.fixture
def write_server(_write_process: WriteServer, monkeypatch: pytest.MonkeyPatch) -> WriteServer:
    """An S3 server with an empty bucket and faults of writes, which the environment names."""
    _write_process.clear()
    _write_process.log()
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    for name, value in _write_process.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("TENSORCACHE_REMOTE_TIMEOUT_S", "30")
    return _write_process


def _call(environment: dict[str, str], function: Callable[..., object], *args: Any, **options: Any) -> None:
    os.environ.update(environment)
    function(*args, **options)


@pytest.fixture
def start() -> Callable[..., BaseProcess]:
    """Start a process that calls a function in the environment of the test.

    It is forked by a process that has imported torch and has not used obstore, which does not work in forked children.
    """
    context = multiprocessing.get_context("forkserver")

    def start(function: Callable[..., object], *args: Any, **options: Any) -> BaseProcess:
        process = context.Process(target=_call, args=(dict(os.environ), function, *args), kwargs=options)
        process.start()
        return process

    return start


@pytest.fixture
def new_forkserver() -> None:
    """Let the process that forks workers have the environment of this test."""
    forkserver._forkserver._stop()  # type: ignore[attr-defined]


def wait(processes: list[BaseProcess]) -> list[int | None]:
    """Wait for the end of processes; return their exit codes, minus the number of a signal."""
    for process in processes:
        process.join()
    return [process.exitcode for process in processes]
