"""Fixtures: servers on 127.0.0.1, each in its own process."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.remote.nursery import Nursery
from tests.remote.objects import Objects
from tests.remote.servers.http_server import HttpServer
from tests.remote.servers.s3 import S3Server
from tests.remote.servers.write_server import WriteServer
from wds_tensorcache.storage.remote.clients import forget_clients


@pytest.fixture(autouse=True)
def _no_credentials(monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> None:
    """Keep the netrc file and the proxies of this machine away from tests."""
    monkeypatch.setenv("NETRC", f"{tmp_path}/no-netrc")
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)


@pytest.fixture(autouse=True)
def _no_kept_indexes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep no indexes in the folder of the user."""
    monkeypatch.setenv("TENSORCACHE_INDEXES", "off")


@pytest.fixture
def objects(tmp_path: Path) -> Objects:
    return Objects(tmp_path / "objects")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A place for the folder of a node's cache."""
    return tmp_path / "cache"


@pytest.fixture
def http_server() -> Iterator[HttpServer]:
    """A web server with ranges and strong ETags; `http_server.set(ranges=False)` changes it."""
    with HttpServer() as server:
        yield server


@pytest.fixture(scope="session")
def _s3_process() -> Iterator[S3Server]:
    pytest.importorskip("moto")
    pytest.importorskip("obstore")
    with S3Server() as server:
        yield server


@pytest.fixture
def s3_server(_s3_process: S3Server, monkeypatch: pytest.MonkeyPatch) -> S3Server:
    """An S3 server without objects, which the environment names; one process for all tests."""
    _s3_process.reset()
    for name, value in _s3_process.environment.items():
        monkeypatch.setenv(name, value)
    forget_clients()
    return _s3_process


@pytest.fixture(scope="session")
def _write_process() -> Iterator[WriteServer]:
    pytest.importorskip("moto")
    pytest.importorskip("obstore")
    with WriteServer() as server:
        yield server


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
    forget_clients()
    return _write_process


@pytest.fixture(scope="session")
def nursery(_write_process: WriteServer) -> Iterator[Nursery]:
    """A process that forks processes, which find the server of `write_server`."""
    with Nursery(_write_process.environment) as process:
        yield process
