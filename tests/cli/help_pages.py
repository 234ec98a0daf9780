"""Write the help of every command into docs/command_line.md.

python -m tests.cli.help_pages
"""

from __future__ import annotations

from pathlib import Path

import click

from wds_tensorcache.cli.app import app

PAGE = Path(__file__).parent.parent.parent / "docs" / "command_line.md"
MARK = "<!-- `python -m tests.cli.help_pages` writes everything after this line. -->\n"
_WIDTH = 110


def help_pages() -> str:
    """Return the help of `tensorcache` and of its commands as markdown."""
    parent = app.make_context("tensorcache", [], resilient_parsing=True, terminal_width=_WIDTH)
    parts = [f"\n```\n{app.get_help(parent)}\n```\n"]
    for name in app.list_commands(parent):
        command = app.get_command(parent, name)
        assert command is not None
        context = click.Context(command, parent=parent, info_name=name, terminal_width=_WIDTH)
        parts.append(f"\n### tensorcache {name}\n\n```\n{command.get_help(context)}\n```\n")
    return "".join(parts)


if __name__ == "__main__":
    head, mark, _ = PAGE.read_text(encoding="utf-8").partition(MARK)
    assert mark, f"{PAGE} lacks the line {MARK}"
    PAGE.write_text(head + mark + help_pages(), encoding="utf-8")
