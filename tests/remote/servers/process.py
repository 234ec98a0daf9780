"""A server of the tests in its own process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any, ClassVar, TypeVar

_ROOT = Path(__file__).parent.parent.parent.parent
_Server = TypeVar("_Server", bound="ServerProcess")


class ServerProcess:
    """A child process that prints its port, and ends when its standard input does, so also if this process is killed.

    Args:
        arguments: Those of Python.
        environment: Further variables of the child.
        options: Those of `subprocess.Popen`.

    Attributes:
        port: The port on 127.0.0.1, which no earlier server of this process had: clients of an address are kept.
    """

    _ports: ClassVar[set[int]] = set()

    def __init__(self, arguments: list[str], environment: dict[str, str] | None = None, **options: Any) -> None:
        while True:
            self._start(arguments, environment, options)
            if self.port not in self._ports:
                break
            self.close()
        self._ports.add(self.port)

    def _start(self, arguments: list[str], environment: dict[str, str] | None, options: dict[str, Any]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=_ROOT,
            env={**os.environ, "PYTHONPATH": str(_ROOT), **(environment or {})},
            **options,
        )
        assert self._process.stdout
        self.port = int(self._process.stdout.readline())

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.close()
        self._process.kill()
        self._process.wait()
        self._process.stdout.close()

    def __enter__(self: _Server) -> _Server:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
