"""The commands by name, and the exit status of every error. The module of a command is imported when the command runs."""

from __future__ import annotations

import importlib
import os
import sys
import traceback
import warnings
from collections.abc import Sequence
from typing import Any

import click
from click.shell_completion import CompletionItem, shell_complete

from wds_tensorcache import __version__
from wds_tensorcache.errors import TensorCacheError, plain, unknown_name

# The module of `wds_tensorcache.cli`, its click command, and the summary for the list of commands. That list and completion
# need no module of a command, and no torch.
_COMMANDS = {
    "import": ("import_command:import_command", "Write shards from the files of a trainer."),
    "ls": ("looking.ls:ls_command", "List samples: keys, and bytes of tensors."),
    "show": ("looking.show:show_command", "Show a sample: structure, values, tensors."),
    "schema": ("looking.schema:schema_command", "Show the names, dtypes and shapes of tensors."),
    "stats": ("looking.stats:stats_command", "Show statistics: sizes, numbers, histograms."),
    "view": ("view_command:view_command", "Show a cache as a page for a browser."),
    "cat": ("looking.cat:cat_command", "Write a tensor, value or member to stdout."),
    "verify": ("check_commands:verify", "Check every byte, index and manifest."),
    "repair": ("check_commands:repair", "Write the intact samples into a new folder."),
    "index": ("check_commands:index", "Index shards that another program made."),
    "diff": ("diff_command:diff_command", "Compare the samples of two caches."),
    "drop": ("change_commands:drop", "Write a new folder without some samples."),
    "merge": ("change_commands:merge", "Write several caches into one new folder."),
    "reshard": ("change_commands:reshard", "Write shards of another length."),
    "export": ("export_command:export", "Write .pt, .npz or .safetensors files."),
    "bench": ("bench_command:bench", "Measure how fast this machine reads a cache."),
}
_COMPLETE_VARIABLE = "_TENSORCACHE_COMPLETE"  # set by the scripts that click makes for shells
_INTERRUPTED, _CLOSED_PIPE = 130, 141  # as a shell shows SIGINT and SIGPIPE


class _Commands(click.Group):
    def get_command(self, context: click.Context, name: str) -> click.Command | None:
        if name not in _COMMANDS:
            return None
        module, _, attribute = _COMMANDS[name][0].partition(":")
        command: click.Command = getattr(importlib.import_module(f"wds_tensorcache.cli.{module}"), attribute)
        return command

    def format_commands(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, summary) for name, (_, summary) in _COMMANDS.items()])

    def shell_complete(self, context: click.Context, incomplete: str) -> list[CompletionItem]:
        commands = [CompletionItem(name, help=summary) for name, (_, summary) in _COMMANDS.items()]
        matches = [item for item in commands if item.value.startswith(incomplete)]
        return matches + click.Command.shell_complete(self, context, incomplete)

    def resolve_command(self, context: click.Context, args: list[str]) -> Any:
        if args[0] not in _COMMANDS and not args[0].startswith("-") and not context.resilient_parsing:
            raise click.UsageError(unknown_name("command", args[0], _COMMANDS), context)
        return super().resolve_command(context, args)


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="tensorcache")
def app() -> None:
    """Make, check and look at caches of tensors in WebDataset shards.

    Results are printed on stdout, messages and progress on stderr. The exit status is 0 for success, 1 for bad data, and 2 for
    wrong usage.
    """


def run(arguments: Sequence[str]) -> int:
    """Run a command, and return its exit status.

    The status is 0 for success, 1 for bad data and faults of this package, and 2 for wrong usage. It is 130 for an
    interruption, and 141 if the reader of stdout has ended.
    """
    if None in (sys.stdin, sys.stdout, sys.stderr):  # closed by the shell, as in `2>&-`
        null = open(os.devnull, "r+")  # noqa: SIM115
        sys.stdin, sys.stdout, sys.stderr = sys.stdin or null, sys.stdout or null, sys.stderr or null
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]  # a terminal may lack characters
    warnings.showwarning = lambda message, *_: _say(f"tensorcache: {plain(message)}")
    try:
        status = _run(arguments)
        sys.stdout.flush()
        return status
    except BrokenPipeError:  # the program that reads our output, such as `head`, has ended
        status = _CLOSED_PIPE
    except KeyboardInterrupt:
        _say("interrupted")
        status = _INTERRUPTED
    except OSError as exc:  # a full disk
        status = _fail(exc, 1)
    # otherwise the interpreter would fail again when it ends
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return status


def _run(arguments: Sequence[str]) -> int:
    """Run a command, print its error, and return the exit status."""
    try:
        instruction = os.environ.get(_COMPLETE_VARIABLE)
        if instruction:
            return shell_complete(app, {}, "tensorcache", _COMPLETE_VARIABLE, instruction)
        if not arguments:
            _say(app.get_help(app.make_context("tensorcache", [], resilient_parsing=True)))
            return 2
        # `app.main` would turn a closed pipe, an EOFError and an interruption into its own exit
        with app.make_context("tensorcache", list(arguments)) as context:
            result = app.invoke(context)
        return result if isinstance(result, int) else 0
    except click.exceptions.Exit as exc:
        return exc.exit_code
    except click.ClickException as exc:
        if isinstance(exc, click.UsageError) and exc.ctx is not None:
            _say(plain(exc.ctx.get_usage()))
            _say(f"Try '{plain(exc.ctx.command_path)} --help'.")
        return _fail(" ".join(exc.format_message().split()), 2 if isinstance(exc, click.UsageError) else 1)
    except BrokenPipeError:
        # `run` knows the status
        raise
    except Exception as exc:
        status = _status_of(exc)
        if status is not None:
            return _fail(exc.args[0] if isinstance(exc, KeyError) else exc, status)
        # The text of an error may contain any text of a shard, so it must not reach the terminal as it is.
        for line in traceback.format_exc().splitlines():
            _say(plain(line))
        return _fail("this is a fault of tensorcache; please report it", 1)


def _status_of(exc: Exception) -> int | None:
    """Return the exit status for an error; None for faults of tensorcache."""
    if isinstance(exc, TensorCacheError):
        return 1
    # a missing extra, an OUT that exists, a wrong argument
    if isinstance(exc, (ImportError, FileExistsError, ValueError)):
        return 2
    if isinstance(exc, (OSError, EOFError)):
        # without an errno: `find_shards` raises it for a path or pattern without shards
        return 2 if type(exc) is FileNotFoundError and exc.errno is None else 1
    is_message = isinstance(exc, KeyError) and exc.args and " " in str(exc.args[0])  # about an unknown name
    return 2 if is_message else None


def _fail(problem: object, status: int) -> int:
    _say(f"tensorcache: {plain(problem)}")
    return status


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
