"""Results on stdout, as text or JSON; messages and progress on stderr. Control characters are escaped."""

from __future__ import annotations

import dataclasses
import json
import math
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import click
import numpy as np
from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from wds_tensorcache.errors import plain

# numbers, also those that are not finite; a string has no line break in JSON
_NUMBERS = re.compile(r'\[\n([^\[\]{}"]*(?:"(?:NaN|-?Infinity)"[^\[\]{}"]+)*)\]')
_WIDEST = 100_000  # of a table in a file, in columns


def to_json(value: Any) -> Any:
    """Return a value for `json.dumps`. Dataclasses become dicts, tuples and sets become lists, and other objects strings.

    JSON has no NaN and no infinities. They become the strings `"NaN"`, `"Infinity"` and `"-Infinity"`.
    """
    if isinstance(value, np.generic):
        value = str(value) if value.dtype.kind in "Mm" else value.item()  # numpy gives dates in nanoseconds as integers
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        if math.isfinite(value):
            return value
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: to_json(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): to_json(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [to_json(item) for item in value]
    return str(value)


class _Console(Console):
    def on_broken_pipe(self) -> None:
        # rich would exit; `app.run` knows the status
        raise BrokenPipeError


class Output:
    """The output of one command. With `as_json`, it prints only results, as one JSON value, and no text."""

    def __init__(self, as_json: bool = False) -> None:
        self.as_json = as_json
        self.console = _console()
        self._errors = _console(stderr=True)

    @property
    def is_terminal(self) -> bool:
        """True if the result is text on a terminal."""
        return self.console.is_terminal and not self.as_json

    def result(self, value: Any) -> None:
        """Print the result as JSON, if JSON was requested. Each list of numbers is on one line. See `to_json`."""
        if self.as_json:
            text = json.dumps(to_json(value), indent=2, allow_nan=False)
            sys.stdout.write(_NUMBERS.sub(lambda match: f"[{' '.join(match[1].split())}]", text) + "\n")

    def results(self, values: Iterable[Any]) -> None:
        """Print a JSON array item by item, if JSON was requested. Memory: one item."""
        if self.as_json:
            mark = "["
            for value in values:
                sys.stdout.write(f"{mark}\n{json.dumps(to_json(value), allow_nan=False)}")
                mark = ","
            sys.stdout.write("[]\n" if mark == "[" else "\n]\n")

    def line(self, text: object = "", style: str = "") -> None:
        """Print one line of text, unless JSON was requested. Line breaks in the text are escaped."""
        if not self.as_json:
            if style:
                self.console.print(Text(plain(text), style), soft_wrap=True)
            else:  # much faster
                sys.stdout.write(f"{plain(text)}\n")

    def text(self, text: object) -> None:
        """Print lines of text, unless JSON was requested.

        Hazard: a line break in a name would begin a line that looks genuine. Pass names through `plain`, or call `line`.
        """
        for line in str(text).split("\n"):
            self.line(line)

    def table(self, columns: Sequence[str], rows: Iterable[Sequence[object]], right: Sequence[str] = ()) -> None:
        """Print a table, unless JSON was requested.

        The columns `right` are aligned to the right. A cell is any object, or a `Text` whose parts went through `plain`. If the
        terminal is too narrow for a table of four or more columns, each cell has its own line. In a file, no cell is wrapped.
        """
        cells = [[cell if isinstance(cell, Text) else Text(plain(cell)) for cell in row] for row in rows]
        table = Table(box=None, pad_edge=False, show_header=any(columns))
        for column in columns:
            table.add_column(column, justify="right" if column in right else "left", overflow="fold")
        for row in cells:
            table.add_row(*row)
        unlimited = self.console.options.update(width=_WIDEST)
        if len(columns) < 4 or self.console.measure(table, options=unlimited).maximum <= self.console.width:
            self.show(table)
            return
        for row in cells:
            self.show(row[0])
            for column, cell in zip(columns[1:], row[1:], strict=True):
                self.show(Text.assemble(f"  {column} ", cell))

    def show(self, renderable: RenderableType) -> None:
        """Print an object of `rich`, unless JSON was requested. The caller passes its texts through `plain`.

        Lines are wrapped at the width of a terminal, but not in a file.
        """
        if self.as_json:
            return
        if self.console.is_terminal:
            self.console.print(renderable)
            return
        with self.console.capture() as captured:
            self.console.print(renderable)
        sys.stdout.write("".join(f"{line.rstrip()}\n" for line in captured.get().splitlines()))

    def note(self, text: object) -> None:
        """Print a message on stderr."""
        self._errors.print(Text(plain(text)), soft_wrap=True)

    @contextmanager
    def progress(self, title: str) -> Iterator[Any]:
        """Yield a function of (done, total) for a progress bar on stderr."""
        if not self._errors.is_terminal:
            yield lambda done, total: None
            return
        columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
        bar = Progress(*columns, console=self._errors, transient=True)
        task = bar.add_task(title, total=None)

        def show(done: int, total: int | None) -> None:
            bar.start()  # starts a thread; a process with threads forks no workers, which start before the first call
            bar.update(task, completed=done, total=total)

        try:
            yield show
        finally:
            bar.stop()


def _console(stderr: bool = False) -> Console:
    console = _Console(stderr=stderr, highlight=False, markup=False, emoji=False)
    if not console.is_terminal:
        console.width = _WIDEST
    return console


json_option = click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
