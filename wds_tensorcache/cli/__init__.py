"""The command `tensorcache`; it needs `pip install 'wds-tensorcache[cli]'`."""

from __future__ import annotations

import sys


def main() -> None:
    sys.exit(_run())


def _run() -> int:
    try:
        import click  # noqa: F401
        import rich  # noqa: F401

        from wds_tensorcache.cli.app import run
    except ModuleNotFoundError as exc:
        print(f"tensorcache needs {exc.name}: pip install 'wds-tensorcache[cli]'", file=sys.stderr)
        return 2
    return run(sys.argv[1:])
