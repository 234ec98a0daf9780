"""Run `tensorcache` in a test as a separate process: real files, pipes, terminals, signals and exit statuses.

A process imports the package once, and forks for each command, which then runs as the console script does. Importing torch for
each command would take seconds. `tests/cli/test_frame.py` also runs the script itself.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import json
import multiprocessing
import os
import pty
import runpy
import select
import signal
import struct
import sys
import termios
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from multiprocessing.reduction import DupFd
from pathlib import Path
from typing import Any

_TIMEOUT_S = 60
_UNSET = ("NO_COLOR", "FORCE_COLOR", "COLORTERM", "COLUMNS", "LINES", "TTY_COMPATIBLE", "PYTHONIOENCODING")


@dataclass(frozen=True)
class Result:
    """Exit status, as a shell sees it, and bytes on stdout and stderr. On a terminal, stdout has both."""

    status: int
    stdout: bytes
    stderr: bytes

    @property
    def out(self) -> str:
        return self.stdout.decode()

    @property
    def err(self) -> str:
        return self.stderr.decode()

    @property
    def json(self) -> Any:
        return json.loads(self.stdout, parse_constant=lambda name: (_ for _ in ()).throw(ValueError(name)))


class Process:
    """A command that runs."""

    def __init__(self, process: Any) -> None:
        self.pid: int = process.pid
        self._process = process

    def interrupt(self) -> None:
        os.kill(self.pid, signal.SIGINT)

    def wait(self) -> int:
        """Return the exit status; minus the signal's number if a signal has ended the command."""
        self._process.join(_TIMEOUT_S)
        assert self._process.exitcode is not None, "the command has not ended"
        return int(self._process.exitcode)


class Server:
    """The process that forks for each command; see `the_server`."""

    def __init__(self) -> None:
        self._context = multiprocessing.get_context("forkserver")

    def start(
        self,
        arguments: list[str],
        files: tuple[int, int, int],
        cwd: Path,
        environment: Mapping[str, str] | None = None,
        prepare: Callable[[], object] | None = None,
    ) -> Process:
        """Start a command with stdin, stdout and stderr; -1 closes stdout. `prepare` is called in its process before it."""
        args = arguments, _Files(files), str(cwd), environment or {}, prepare
        process = self._context.Process(target=_become, args=args)
        process.start()
        return Process(process)

    @contextlib.contextmanager
    def running(self, *arguments: object, cwd: Path) -> Iterator[tuple[Process, Output]]:
        """Start a command without input, whose stdout and stderr are one file."""
        with open(os.devnull) as null, Output() as said:
            yield self.start(list(map(str, arguments)), (null.fileno(), said.fileno, said.fileno), cwd), said

    def run(
        self,
        *arguments: str | Path,
        cwd: Path,
        stdin: str = "",
        prepare: Callable[[], object] | None = None,
        **environment: str,
    ) -> Result:
        """Run a command whose input and output are files."""
        with Output() as source, Output() as out, Output() as err:
            os.write(source.fileno, stdin.encode())
            os.lseek(source.fileno, 0, os.SEEK_SET)
            files = source.fileno, out.fileno, err.fileno
            status = self.start(list(map(str, arguments)), files, cwd, environment, prepare).wait()
            return Result(status, out.read(), err.read())

    def run_on_terminal(
        self, *arguments: str | Path, cwd: Path, columns: int = 100, stderr: bool = True, **environment: str
    ) -> Result:
        """Run a command on a pseudo-terminal."""
        ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
        environment = {"TERM": "xterm-256color", **environment}
        with Output() as err:
            files = theirs, theirs, theirs if stderr else err.fileno
            process = self.start(list(map(str, arguments)), files, cwd, environment)
            os.close(theirs)
            parts = []
            deadline = time.monotonic() + _TIMEOUT_S
            with contextlib.suppress(OSError):  # the command has ended
                while select.select([ours], [], [], max(0, deadline - time.monotonic()))[0] and (
                    part := os.read(ours, 1 << 16)
                ):
                    parts.append(part)
            os.close(ours)
            return Result(process.wait(), b"".join(parts), err.read())


class Output:
    """A temporary file without a name."""

    def __enter__(self) -> Output:
        self.fileno = os.memfd_create("output")
        return self

    def __exit__(self, *exc: object) -> None:
        os.close(self.fileno)

    def read(self) -> bytes:
        os.lseek(self.fileno, 0, os.SEEK_SET)
        with open(self.fileno, "rb", closefd=False) as file:
            return file.read()


@functools.cache
def the_server() -> Server:
    """Return the server of this test session."""
    return Server()


class _Files:
    """Descriptors that a child inherits; pickled when it starts."""

    def __init__(self, files: tuple[int, int, int]) -> None:
        self._files = files

    def __reduce__(self) -> Any:
        return tuple, ([DupFd(file) if file >= 0 else None for file in self._files],)


def _become(
    arguments: list[str], files: Any, cwd: str, environment: dict[str, str], prepare: Callable[[], object] | None
) -> None:
    """Run a command in this process as the console script does, with these files, folder and environment."""
    os.setsid()
    for number, file in enumerate(files):
        if file is None:
            os.close(number)
        else:
            os.dup2(descriptor := file.detach(), number)
            os.close(descriptor)
    os.chdir(cwd)
    for name in _UNSET:
        os.environ.pop(name, None)
    os.environ.update({"TERM": "dumb", "PYTHONUTF8": "1", **environment})
    encoding = environment.get("PYTHONIOENCODING", "utf-8")
    sys.stdin = open(0, encoding=encoding)
    sys.stdout = None if files[1] is None else open(1, "w", encoding=encoding)  # type: ignore[assignment]
    sys.stderr = open(2, "w", encoding=encoding, errors="backslashreplace", buffering=1)
    sys.argv = ["tensorcache", *arguments]
    status: Any = 1
    if prepare is not None:
        prepare()
    try:
        runpy.run_module("wds_tensorcache.cli", run_name="__main__")
    except SystemExit as exc:
        status = exc.code
    except BaseException:
        traceback.print_exc()
    # The interpreter would take a second to end, most of it in torch. It also flushes, and exits with 120 if it cannot.
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError:
        traceback.print_exc()
        status = 120
    os._exit(status)
