"""docs/command_line.md lists all commands with their options, and shows what they print."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import click
import pytest

from tests.cli.commands import Result
from wds_tensorcache.cli.app import app

PAGE = (Path(__file__).parent.parent.parent / "docs" / "command_line.md").read_text(encoding="utf-8")


def test_the_table_has_every_command_and_option() -> None:
    context = click.Context(app)
    rows = dict(re.findall(r"^\| `(\w+) .*\|(.*)\|$", PAGE, re.MULTILINE))
    assert list(rows) == app.list_commands(context)
    for name, options in rows.items():
        command = app.get_command(context, name)
        assert command is not None
        names = {name for option in command.params for name in (*option.opts, *option.secondary_opts)}
        assert set(re.findall(r"`(--[a-z-]+)`", options)) == {name for name in names if name[:2] == "--"} - {"--json"}


def test_the_page_shows_what_commands_print(
    run: Callable[..., Result], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    block = re.search(r"^```python\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
    assert block is not None
    monkeypatch.chdir(tmp_path)
    exec(block[1], {})
    consoles = re.findall(r"^```console\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
    commands = [
        found
        for text in consoles
        for found in re.findall(r"^\$ tensorcache (.*)\n((?:[^$].*\n|\n)*)", text, re.MULTILINE)
    ]
    assert len(commands) >= 4
    for command, expected in commands:
        found = run(*command.split())
        assert (found.status, found.err) == (0, "")
        assert found.out == expected, command
