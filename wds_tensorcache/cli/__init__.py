"""The command `tensorcache`; it needs `pip install 'wds-tensorcache[cli]'`."""

from __future__ import annotations

import sys


def main() -> None:
    try:
        import click  # noqa: F401
        import rich  # noqa: F401

        from wds_tensorcache.cli.app import run
    except ModuleNotFoundError as exc:
        print(f"tensorcache needs {exc.name}: pip install 'wds-tensorcache[cli]'", file=sys.stderr)
        sys.exit(2)
    sys.exit(run(sys.argv[1:]))
