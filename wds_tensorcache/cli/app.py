"""The commands by name, each in a module that is imported when it runs, and the exit status of every error."""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
import traceback
import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

import click
from click.shell_completion import CompletionItem, shell_complete

from wds_tensorcache import __version__
from wds_tensorcache.cli.completing.quick import complete_quickly
from wds_tensorcache.cli.output import plain
from wds_tensorcache.errors import TensorCacheError, unknown_name


class _Command(NamedTuple):
    place: str  # module of `wds_tensorcache.cli`, and the click command in it
    summary: str  # for the list of commands, which is shown without importing their modules, and torch with them


_COMMANDS = {
    "import": _Command("import_command:import_command", "Write shards from the files of a trainer."),
    "ls": _Command("looking.ls:ls_command", "List samples: keys, and bytes of tensors."),
    "show": _Command("looking.show:show_command", "Show a sample: structure, values, tensors."),
    "schema": _Command("looking.schema:schema_command", "Show the names, dtypes and shapes of tensors."),
    "stats": _Command("looking.stats:stats_command", "Show statistics: sizes, numbers, histograms."),
    "view": _Command("view_command:view_command", "Show a cache as a page for a browser."),
    "cat": _Command("looking.cat:cat_command", "Write a tensor or a member to stdout."),
    "verify": _Command("check_commands:verify", "Check every byte, index and manifest."),
    "repair": _Command("check_commands:repair", "Write the intact samples into a new folder."),
    "index": _Command("check_commands:index", "Index shards that another program made."),
    "diff": _Command("diff_command:diff_command", "Compare the samples of two caches."),
    "drop": _Command("change_commands:drop", "Write a new folder without some samples."),
    "merge": _Command("change_commands:merge", "Write several caches into one new folder."),
    "reshard": _Command("change_commands:reshard", "Write shards of another length."),
    "export": _Command("export_command:export", "Write .pt, .npz or .safetensors files."),
    "bench": _Command("bench_command:bench", "Measure how fast this machine reads a cache."),
    "completion": _Command("completing.script:completion_command", "Print the script for completion in a shell."),
}
_INTERRUPTED, _CLOSED_PIPE = 130, 141  # as a shell shows SIGINT and SIGPIPE
COMPLETE_VARIABLE = "_TENSORCACHE_COMPLETE"  # set by the scripts that `tensorcache completion` prints


class _Commands(click.Group):
    def list_commands(self, context: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, context: click.Context, name: str) -> click.Command | None:
        if name not in _COMMANDS:
            return None
        module, _, attribute = _COMMANDS[name].place.partition(":")
        command: click.Command = getattr(importlib.import_module(f"wds_tensorcache.cli.{module}"), attribute)
        return command

    def format_commands(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, command.summary) for name, command in _COMMANDS.items()])

    def shell_complete(self, context: click.Context, incomplete: str) -> list[CompletionItem]:
        found = [
            CompletionItem(name, help=command.summary)
            for name, command in _COMMANDS.items()
            if name.startswith(incomplete)
        ]
        return found + click.Command.shell_complete(self, context, incomplete)

    def resolve_command(self, context: click.Context, args: list[str]) -> Any:
        if args and args[0] not in _COMMANDS and not args[0].startswith("-"):
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

    0 means success, 1 bad data, 2 wrong usage, 130 an interruption, and 141 that the program that reads stdout has ended.
    """
    for stream in (sys.stdout, sys.stderr):
        # a terminal may lack characters; a program without a stdout has none to set up
        with contextlib.suppress(AttributeError):
            stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    warnings.showwarning = lambda message, *_: _say(f"tensorcache: {plain(message)}")
    try:
        status = _status(arguments)
        if sys.stdout is not None:
            sys.stdout.flush()
        return status
    except BrokenPipeError:  # the program that reads our output, such as `head`, has ended
        _discard_output()
        return _CLOSED_PIPE
    except OSError as exc:  # a full disk
        _discard_output()
        return _fail(exc, 1)
    except KeyboardInterrupt:
        _discard_output()
        _say("interrupted")
        return _INTERRUPTED


def _status(arguments: Sequence[str]) -> int:
    """Run a command, print what is wrong, and return the exit status. BrokenPipeError and KeyboardInterrupt are raised."""
    try:
        instruction = os.environ.get(COMPLETE_VARIABLE)
        if instruction:
            quick = complete_quickly(app, COMPLETE_VARIABLE, instruction, frozenset(_COMMANDS))
            if quick is not None:
                click.echo(quick)
                return 0
            return shell_complete(app, {}, "tensorcache", COMPLETE_VARIABLE, instruction)
        if not arguments:
            _say(app.get_help(app.make_context("tensorcache", [], resilient_parsing=True)))
            return 2
        # `app.main` would turn a closed pipe, an EOFError and an interruption into its own exit
        with app.make_context("tensorcache", list(arguments)) as context:
            result = app.invoke(context)
        return result if isinstance(result, int) else 0
    except click.exceptions.Exit as exc:
        return exc.exit_code
    except click.Abort as exc:
        raise KeyboardInterrupt from exc
    except click.ClickException as exc:
        return _refuse(exc)
    except BrokenPipeError:
        raise
    except ImportError as exc:  # an extra that is not installed; the message has the command that installs it
        return _fail(exc, 2)
    except TensorCacheError as exc:
        return _fail(exc, 1)
    except (FileExistsError, ValueError) as exc:  # an OUT that exists, or a wrong argument
        return _fail(exc, 2)
    except (OSError, EOFError) as exc:
        # without an errno: `find_shards` raises it for a path or pattern without shards
        is_usage = type(exc) is FileNotFoundError and exc.errno is None
        return _fail(exc, 2 if is_usage else 1)
    except Exception as exc:
        if isinstance(exc, KeyError) and exc.args and " " in str(exc.args[0]):  # the message about an unknown name
            return _fail(exc, 2)
        # The text of an error may contain anything that a shard does, so it must not reach the terminal as it is.
        for line in traceback.format_exc().splitlines():
            _say(plain(line))
        return _fail("this is a fault of tensorcache; please report it", 1)


def _refuse(exc: click.ClickException) -> int:
    is_usage = isinstance(exc, click.UsageError)
    if isinstance(exc, click.UsageError) and exc.ctx is not None:
        _say(plain(exc.ctx.get_usage()))
        _say(f"Try '{plain(exc.ctx.command_path)} --help'.")
    return _fail(" ".join(exc.format_message().split()), 2 if is_usage else 1)


def _fail(exc: object, status: int) -> int:
    text = exc.args[0] if isinstance(exc, KeyError) and exc.args else exc
    _say(f"tensorcache: {plain(text)}")
    return status


def _say(text: str) -> None:
    """Print a message on stderr. If it is closed or full, the exit status alone tells what happened."""
    if sys.stderr is not None:  # `print` would use stdout
        try:
            print(text, file=sys.stderr, flush=True)
        except BrokenPipeError:
            raise
        except (OSError, ValueError):
            return


def _discard_output() -> None:
    """Let nothing be written to stdout any more, so that the interpreter does not fail again when it ends."""
    if sys.stdout is not None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
