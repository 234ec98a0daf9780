"""Results on stdout, for people or as JSON; messages and progress on stderr. Terminals obey nothing that a cache contains."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

__all__ = ["Output", "json_option", "plain"]

_UNPRINTABLE = re.compile("[\x00-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ud800-\udfff]")


def plain(text: object) -> str:
    """Return a text in which control characters and marks that reorder text are escapes, such as `\\x1b`."""
    return _UNPRINTABLE.sub(lambda match: match[0].encode("unicode_escape", "surrogatepass").decode("ascii"), str(text))


class Output:
    """The output of one command.

    Args:
        as_json: Print results as one JSON value, and no texts.
    """

    def __init__(self, as_json: bool = False) -> None:
        self.as_json = as_json
        self.console = Console(highlight=False, markup=False, emoji=False)
        self._errors = Console(stderr=True, highlight=False, markup=False, emoji=False)

    def result(self, value: Any) -> None:
        """Print the result as JSON, if that was requested."""
        if self.as_json:
            json.dump(value, sys.stdout, indent=2, ensure_ascii=True, allow_nan=False, default=str)
            sys.stdout.write("\n")

    def text(self, text: object, style: str = "") -> None:
        """Print lines for people, unless JSON was requested."""
        if not self.as_json:
            for line in str(text).split("\n"):
                self.console.print(Text(plain(line), style), soft_wrap=True)

    def table(self, columns: Sequence[str], rows: Iterable[Sequence[object]], right: Sequence[str] = ()) -> None:
        """Print a table for people, unless JSON was requested; the columns `right` are aligned to the right."""
        if self.as_json:
            return
        table = Table(box=None, pad_edge=False)
        for column in columns:
            table.add_column(column, justify="right" if column in right else "left", overflow="fold")
        for row in rows:
            table.add_row(*(Text(plain(cell)) for cell in row))
        self.console.print(table)

    def note(self, text: object) -> None:
        """Print a message on stderr."""
        self._errors.print(Text(plain(text)), soft_wrap=True)

    @contextmanager
    def progress(self, what: str) -> Iterator[Any]:
        """Yield a function of (done, total) that shows a bar on stderr, if that is a terminal."""
        if not self._errors.is_terminal:
            yield lambda done, total: None
            return
        columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
        with Progress(*columns, console=self._errors, transient=True) as bar:
            task = bar.add_task(what, total=None)
            yield lambda done, total: bar.update(task, completed=done, total=total)


json_option = click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
