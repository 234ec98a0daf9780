"""docs/command_line.md lists all commands with their options, and shows what they print."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.commands import Result

PAGE = (Path(__file__).parent.parent.parent / "docs" / "command_line.md").read_text(encoding="utf-8")


def test_the_table_has_every_command_and_option(run: Callable[..., Result]) -> None:
    rows = dict(re.findall(r"^\| `(\w+) .*\|(.*)\|$", PAGE, re.MULTILINE))
    assert list(rows) == re.findall(r"^  (\w+) +[A-Z]", run("--help").out.partition("Commands:")[2], re.MULTILINE)
    for name, options in rows.items():
        shown = run(name, "--help")
        assert (shown.status, shown.err) == (0, "")
        listed = re.findall(r"^  .*", shown.out, re.MULTILINE)
        names = {option for line in listed if line[2] == "-" for option in re.findall("--[a-z-]+", line.split("  ")[1])}
        assert set(re.findall(r"`(--[a-z-]+)`", options)) | {"--json", "--help"} == names, name


def test_the_page_shows_what_commands_print(
    run: Callable[..., Result], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    block = re.search(r"^```python\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
    assert block is not None
    monkeypatch.chdir(tmp_path)
    exec(block[1], {})
    consoles = re.findall(r"^```console\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
    command = r"^\$ tensorcache (.*)\n((?:[^$].*\n|\n)*)"
    commands = [shown for text in consoles for shown in re.findall(command, text, re.MULTILINE)]
    assert len(commands) >= 4
    for arguments, expected in commands:
        result = run(*arguments.split())
        assert (result.status, result.err) == (0, "")
        assert result.out == expected, arguments
