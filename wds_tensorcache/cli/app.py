"""The commands by name, each in a module that is imported when it runs, and the exit status of every error."""

from __future__ import annotations

import importlib
import os
import signal
import sys
from collections.abc import Sequence
from typing import Any

import click

import wds_tensorcache as tc
from wds_tensorcache.cli.output import plain

__all__ = ["app", "run"]

# command -> module of `wds_tensorcache.cli` and the name of the click command in it
_COMMANDS: dict[str, str] = {
    "drop": "check_commands:drop",
    "export": "export_command:export",
    "import": "import_command:import_command",
    "index": "check_commands:index",
    "repair": "check_commands:repair",
    "verify": "check_commands:verify",
}


class _Commands(click.Group):
    def list_commands(self, context: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, context: click.Context, name: str) -> click.Command | None:
        if name not in _COMMANDS:
            return None
        module, _, attribute = _COMMANDS[name].partition(":")
        found: click.Command = getattr(importlib.import_module(f"wds_tensorcache.cli.{module}"), attribute)
        return found


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(tc.__version__, prog_name="tensorcache")
def app() -> None:
    """Make, check and look at caches of tensors in WebDataset shards.

    Results are printed on stdout, messages and progress on stderr. The exit status is 0 for success, 1 for bad data, and 2 for
    wrong usage.
    """


def run(arguments: Sequence[str]) -> int:
    """Run a command, and return its exit status."""
    try:
        result: Any = app.main(list(arguments), prog_name="tensorcache", standalone_mode=False)
        sys.stdout.flush()
    except click.exceptions.Exit as exc:
        return exc.exit_code
    except click.ClickException as exc:
        exc.show()
        return exc.exit_code if isinstance(exc, click.UsageError) else 1
    except (click.Abort, KeyboardInterrupt):
        print("interrupted", file=sys.stderr)
        return 128 + signal.SIGINT
    except BrokenPipeError:
        # the program that reads our output, such as `head`, has ended; nothing may be flushed to it when the interpreter ends
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except ImportError as exc:  # an extra that is not installed; the message has the command that installs it
        return _fail(exc, 2)
    except (tc.TensorCacheError, OSError, ValueError, KeyError) as exc:
        return _fail(exc, 1)
    return result if isinstance(result, int) else 0


def _fail(exc: Exception, status: int) -> int:
    text = exc.args[0] if isinstance(exc, KeyError) and exc.args else exc
    print(f"tensorcache: {plain(text)}", file=sys.stderr)
    return status
