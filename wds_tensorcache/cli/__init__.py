"""The command `tensorcache`; it needs `pip install 'wds-tensorcache[cli]'`."""

from __future__ import annotations

import signal
import sys
import threading

from wds_tensorcache.cli.interrupts import delayed_interrupts, handle_interrupts

__all__ = ["main"]

_INTERRUPTED = 130


def main() -> None:
    """Run the command, and exit with its status: 0 for success, 1 for bad data, 2 for wrong usage."""
    status = _INTERRUPTED
    handle_interrupts()
    # an interrupt may arrive at any line
    try:
        try:
            status = _run()
        finally:
            _ignore_interrupts()  # one now would change the status
    except KeyboardInterrupt:
        _ignore_interrupts()
    sys.exit(status)


def _ignore_interrupts() -> None:
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.SIG_IGN)


def _run() -> int:
    try:
        with delayed_interrupts():
            import click  # noqa: F401
            import rich  # noqa: F401

            from wds_tensorcache.cli.app import run
    except ModuleNotFoundError as exc:
        print(f"tensorcache needs {exc.name}: pip install 'wds-tensorcache[cli]'", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return _INTERRUPTED
    return run(sys.argv[1:])
