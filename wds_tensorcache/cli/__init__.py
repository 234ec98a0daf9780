"""The command `tensorcache`; it needs `pip install 'wds-tensorcache[cli]'`."""

from __future__ import annotations

import signal
import sys

__all__ = ["main"]


def main() -> None:
    """Run the command, and exit with its status: 0 for success, 1 for bad data, 2 for wrong usage."""
    try:
        import click  # noqa: F401
        import rich  # noqa: F401

        from wds_tensorcache.cli.app import run
    except ModuleNotFoundError as exc:
        print(f"tensorcache needs {exc.name}: pip install 'wds-tensorcache[cli]'", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)
    status = run(sys.argv[1:])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the command has ended; an interrupt now would change its status
    sys.exit(status)
