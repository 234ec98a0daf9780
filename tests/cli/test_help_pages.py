"""docs/command_line.md has the help of every command, and shows what the commands print."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.commands import Result
from tests.cli.help_pages import MARK, PAGE, help_pages


def test_the_page_is_current() -> None:
    _, mark, rest = PAGE.read_text(encoding="utf-8").partition(MARK)
    assert mark
    assert rest == help_pages(), "run `python -m tests.cli.help_pages`"


def test_no_line_of_the_help_is_too_long() -> None:
    assert max(map(len, help_pages().splitlines())) <= 110


def test_the_page_shows_what_commands_print(
    run: Callable[..., Result], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = PAGE.read_text(encoding="utf-8")
    block = re.search(r"^```python\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    assert block is not None
    monkeypatch.chdir(tmp_path)
    exec(block[1], {})
    consoles = re.findall(r"^```console\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
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
