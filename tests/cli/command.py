"""Run the command as users do: a process with its own stdin, stdout and stderr."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.cli.commands import the_server


@dataclass(frozen=True)
class Completed:
    """Exit status, and texts on stdout and stderr."""

    returncode: int
    stdout: str
    stderr: str


def run(*arguments: object, status: int = 0, stdin: str | None = None) -> Completed:
    """Run `tensorcache`, and assert its exit status."""
    completed = run_any(*arguments, stdin=stdin)
    assert completed.returncode == status, completed.stdout + completed.stderr
    return completed


def run_any(*arguments: object, stdin: str | None = None) -> Completed:
    """Run `tensorcache`, which may end with any status, but not with a traceback."""
    result = the_server().run(*map(str, arguments), cwd=Path.cwd(), stdin=stdin or "")
    completed = Completed(result.status, result.out, result.err)
    assert "Traceback" not in completed.stderr
    return completed


def json_of(*arguments: object, status: int = 0) -> Any:
    """Return the result of a command with `--json`; nothing else is on stdout."""
    return json.loads(run(*arguments, "--json", status=status).stdout)
