"""Run `tensorcache` in a test as a separate process: real files, pipes, terminals, signals and exit statuses.

A server imports the package once, and forks for each command, which then runs as the console script does. Importing torch for
each command would take seconds. `tests/cli/test_frame.py` also runs the script itself.
"""

from __future__ import annotations

import array
import atexit
import contextlib
import fcntl
import functools
import gc
import json
import os
import pty
import select
import signal
import socket
import struct
import subprocess
import sys
import termios
import time
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
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

    def __init__(self, pid: int, connection: socket.socket) -> None:
        self.pid = pid
        self._connection = connection

    def interrupt(self) -> None:
        os.kill(self.pid, signal.SIGINT)

    def wait(self) -> int:
        """Return the exit status; minus the signal's number if a signal has ended the command."""
        with self._connection:
            return int(struct.unpack("i", _receive(self._connection, 4))[0])


class Server:
    """The server, as a context; see `the_server`."""

    def __enter__(self) -> Server:
        self._ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", "from tests.cli.commands import serve; serve()", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                cwd=Path(__file__).parent.parent.parent,
            )
        return self

    def __exit__(self, *exc: object) -> None:
        self._ours.close()
        self._process.wait(_TIMEOUT_S)

    def start(
        self, arguments: list[str], files: tuple[int, int, int], cwd: Path, environment: Mapping[str, str] | None = None
    ) -> Process:
        """Start a command with stdin, stdout and stderr; -1 closes stdout."""
        ours, theirs = socket.socketpair()
        given = [file for file in files if file >= 0]
        request = [arguments, [file >= 0 for file in files], str(cwd), dict(environment or {})]
        content = json.dumps(request).encode("utf-8")
        with theirs:
            rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [theirs.fileno(), *given]))]
            self._ours.sendmsg([struct.pack("i", len(content))], rights)
            self._ours.sendall(content)
        ours.settimeout(_TIMEOUT_S)
        return Process(struct.unpack("i", _receive(ours, 4))[0], ours)

    def run(self, *arguments: str | Path, cwd: Path, **environment: str) -> Result:
        """Run a command whose output is read through pipes."""
        with contextlib.ExitStack() as stack:
            null = stack.enter_context(open(os.devnull))
            out, err = (stack.enter_context(Output()) for _ in range(2))
            files = null.fileno(), out.fileno, err.fileno
            status = self.start(list(map(str, arguments)), files, cwd, environment).wait()
            return Result(status, out.read(), err.read())

    def run_on_terminal(
        self, *arguments: str | Path, cwd: Path, columns: int = 100, stderr: bool = True, **environment: str
    ) -> Result:
        """Run a command on a pseudo-terminal."""
        ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
        environment = {"TERM": "xterm-256color", **environment}
        with Output() as err:
            process = self.start(
                list(map(str, arguments)), (theirs, theirs, theirs if stderr else err.fileno), cwd, environment
            )
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
    server = Server().__enter__()
    atexit.register(server.__exit__)
    return server


def _receive(connection: socket.socket, count: int) -> bytes:
    content = b""
    while len(content) < count:
        part = connection.recv(count - len(content))
        if not part:
            raise EOFError("the server of commands has ended")
        content += part
    return content


def serve() -> None:
    """Fork for each request, until there are no more. The forked process runs the command."""
    from wds_tensorcache.cli import main

    gc.freeze()
    for _ in _requests(socket.socket(fileno=int(sys.argv[1]))):
        status: Any = 1
        try:
            main()
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


def _requests(connection: socket.socket) -> Iterator[None]:
    """Yield in the forked process of each request."""
    import click  # noqa: F401

    import wds_tensorcache.cli.app

    # the modules of the commands, which a console script imports while it runs
    for module in sorted(Path(wds_tensorcache.cli.app.__file__).parent.rglob("*.py")):
        if module.name != "__main__.py":
            name = module.relative_to(Path(wds_tensorcache.cli.app.__file__).parent).with_suffix("")
            __import__(".".join(("wds_tensorcache.cli", *name.parts)).removesuffix(".__init__"))
    while True:
        header, rights, *_ = connection.recvmsg(4, socket.CMSG_LEN(4 * 4))
        if not header:
            return
        descriptors = array.array("i")
        for _, _, content in rights:
            descriptors.frombytes(content)
        request = json.loads(_receive(connection, struct.unpack("i", header)[0]))
        # The watcher waits for the command, so that the server can take the next one.
        if os.fork() == 0:
            if _watch(descriptors, connection):
                yield _become(request, descriptors)
                return
            os._exit(0)
        for descriptor in descriptors:
            os.close(descriptor)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass


def _watch(descriptors: array.array[int], connection: socket.socket) -> bool:
    """Fork again; return True in the process of the command. The other process reports its id and status, and returns False."""
    connection.close()
    child = os.fork()
    if child == 0:
        return True
    for descriptor in descriptors[1:]:
        os.close(descriptor)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.write(descriptors[0], struct.pack("i", child))
    os.write(descriptors[0], struct.pack("i", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])))
    return False


def _become(request: Any, descriptors: array.array[int]) -> None:
    """Give this process the arguments, files, folder and environment of a command."""
    arguments, is_open, cwd, environment = request
    os.setsid()
    remaining = iter(descriptors[1:])
    for number, given in enumerate(is_open):
        if given:
            os.dup2(next(remaining), number)
        else:
            os.close(number)
    for descriptor in descriptors:
        os.close(descriptor)
    os.chdir(cwd)
    for name in _UNSET:
        os.environ.pop(name, None)
    os.environ.update({"TERM": "dumb", "PYTHONUTF8": "1", **environment})
    encoding = environment.get("PYTHONIOENCODING", "utf-8")
    sys.stdin = open(0, encoding=encoding)
    sys.stdout = open(1, "w", encoding=encoding) if is_open[1] else None  # type: ignore[assignment]
    sys.stderr = open(2, "w", encoding=encoding, errors="backslashreplace", buffering=1)
    sys.argv = ["tensorcache", *arguments]
