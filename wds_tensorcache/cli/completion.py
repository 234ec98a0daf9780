"""`tensorcache completion`: the script that lets a shell complete commands, options, keys and names."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

from wds_tensorcache.cli.output import Output, json_option

__all__ = ["completion_command"]


@click.command("completion")
@click.argument("shell", metavar="SHELL", type=click.Choice(["bash", "zsh", "fish"]))
@json_option
def completion_command(shell: str, as_json: bool) -> None:
    """Print the script that completes commands, options, keys and names in SHELL.

    \b
    bash: add to ~/.bashrc:                      eval "$(tensorcache completion bash)"
    zsh:  add to ~/.zshrc, after compinit:       eval "$(tensorcache completion zsh)"
    fish: tensorcache completion fish > ~/.config/fish/completions/tensorcache.fish
    """
    from wds_tensorcache.cli.app import COMPLETE_VARIABLE, app

    output = Output(as_json)
    made = get_completion_class(shell)
    assert made is not None  # click has all three
    script = made(app, {}, "tensorcache", COMPLETE_VARIABLE).source()
    output.result({"shell": shell, "script": script})
    output.text(script.rstrip())
