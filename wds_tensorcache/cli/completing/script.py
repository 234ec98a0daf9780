"""`tensorcache completion`: the script that lets a shell complete commands, options, keys and names."""

from __future__ import annotations

import click
from click.shell_completion import BashComplete, get_completion_class

from wds_tensorcache.cli.output import Output, json_option

# Keys and names of tensors may be any text. The script of click inserts them as they are, and bash would run `$(…)` in
# them after Enter; here each is quoted.
_BASH = """\
%(complete_func)s() {
    local type value
    COMPREPLY=()
    while IFS=, read -r type value; do
        case $type in
            dir) compopt -o dirnames ;;
            file) compopt -o default ;;
            plain) COMPREPLY+=("$(printf %%q "$value")") ;;
        esac
    done < <(
        IFS=$'\\n'
        COMP_WORDS="${COMP_WORDS[*]}" COMP_CWORD=$COMP_CWORD %(complete_var)s=bash_complete "$1"
    )
}

complete -o nosort -F %(complete_func)s %(prog_name)s
"""


class _Bash(BashComplete):
    source_template = _BASH


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
    made = _Bash if shell == "bash" else get_completion_class(shell)
    assert made is not None  # click has all three
    script = made(app, {}, "tensorcache", COMPLETE_VARIABLE).source()
    output.result({"shell": shell, "script": script})
    output.text(script.rstrip())
