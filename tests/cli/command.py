"""Run the command as users do: a process with its own stdin, stdout and stderr."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

__all__ = ["json_of", "run"]


def run(*arguments: object, status: int = 0, stdin: str | None = None) -> subprocess.CompletedProcess[str]:
    """Run `tensorcache`, and assert its exit status."""
    command = [sys.executable, "-m", "wds_tensorcache.cli", *map(str, arguments)]
    found = subprocess.run(command, capture_output=True, text=True, input=stdin, timeout=60)
    assert found.returncode == status, found.stdout + found.stderr
    assert "Traceback" not in found.stderr
    return found


def json_of(*arguments: object, status: int = 0) -> Any:
    """Return the result of a command with `--json`; nothing else is on stdout."""
    return json.loads(run(*arguments, "--json", status=status).stdout)
