"""A process that has imported torch, but has not used obstore, and forks processes that call functions.

A process of a test cannot fork them itself: obstore does not work in a child of a process that has used it. A new process for
each call would import torch each time.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).parent.parent.parent


class Nursery:
    """Forks processes.

    Args:
        environment: Variables that these processes have in addition.
    """

    def __init__(self, environment: dict[str, str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.remote.nursery"],
            cwd=_ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, **environment, "PYTHONPATH": str(_ROOT)},
        )

    def _ask(self, *question: Any) -> Any:
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.write(json.dumps(question).encode() + b"\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def start(self, function: str, *args: Any, **options: Any) -> int:
        """Start a call of `MODULE:NAME`; return the id of its process, which the caller may kill."""
        return int(self._ask("start", function, args, options))

    def wait(self, pid: int) -> int:
        """Wait for the end of a process; return its exit code, 1 after an exception, or minus the number of a signal."""
        return int(self._ask("wait", pid))

    def close(self) -> None:
        """End the nursery."""
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()

    def __enter__(self) -> Nursery:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _main() -> None:
    importlib.import_module("tests.remote.written")
    for line in sys.stdin:
        act, *question = json.loads(line)
        if act == "wait":
            print(os.waitstatus_to_exitcode(os.waitpid(question[0], 0)[1]), flush=True)
            continue
        function, args, options = question
        pid = os.fork()
        if not pid:
            status = 1
            try:
                module, _, name = function.partition(":")
                getattr(importlib.import_module(module), name)(*args, **options)
                status = 0
            finally:
                os._exit(status)
        print(pid, flush=True)


if __name__ == "__main__":
    _main()
