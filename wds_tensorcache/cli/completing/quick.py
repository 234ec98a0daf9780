"""Completions of a shell that need neither torch nor the modules of commands, which take seconds to import."""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import islice
from time import perf_counter

from click.shell_completion import CompletionItem, get_completion_class

from wds_tensorcache.errors import FormatError
from wds_tensorcache.shards.names import SKELETON, split_member
from wds_tensorcache.shards.tar import Scanner

MAX_COMPLETIONS = 200
_MAX_SECONDS = 1.0  # of scanning shards; then their indexes, which need torch, take less time
_ABOUT_A_SAMPLE = ("show", "cat")  # commands with the arguments CACHE and KEY
# of the first argument; for all other commands, "file"
_KIND_OF_FIRST = {"drop": "dir", "completion": None}


def complete_quickly(app: object, variable: str, instruction: str, commands: frozenset[str]) -> str | None:
    """Return what click would print for the shell; None if it needs to know the options of the command, or takes too long.

    Args:
        app: The group of commands.
        variable: Name of the environment variable with `instruction`, for example `bash_complete`.
        commands: Names of all commands.
    """
    shell, _, task = instruction.partition("_")
    found = get_completion_class(shell)
    if task != "complete" or found is None:
        return None
    complete = found(app, {}, "tensorcache", variable)  # type: ignore[arg-type]
    words, incomplete = complete.get_completion_args()
    items = _complete(words, incomplete, commands)
    return None if items is None else "\n".join(map(complete.format_completion, items))


def _complete(words: list[str], incomplete: str, commands: frozenset[str]) -> list[CompletionItem] | None:
    if not words or words[0] not in commands or any(word.startswith("-") for word in (*words, incomplete)):
        return None
    if len(words) == 1:
        kind = _KIND_OF_FIRST.get(words[0], "file")
        return None if kind is None else [CompletionItem(incomplete, type=kind)]
    if len(words) > 2 or words[0] not in _ABOUT_A_SAMPLE:
        return None
    try:
        keys = _keys(words[1])
        return [CompletionItem(key) for key in islice((key for key in keys if _fits(key, incomplete)), MAX_COMPLETIONS)]
    except (FormatError, OSError, TimeoutError):
        return None


def _fits(key: str, incomplete: str) -> bool:
    return key.startswith(incomplete) and key.isprintable()  # a shell reads one name a line


def _keys(path: str) -> Iterator[str]:
    """Yield the keys of the samples that have a cache, from the headers of the shards' members.

    Raises:
        FormatError, OSError: A shard is damaged or cannot be read, or the path is not a folder of shards without a manifest, or
            a shard.
        TimeoutError: It takes too long.
    """
    until = perf_counter() + _MAX_SECONDS
    shards = sorted(name for name in os.listdir(path) if name.endswith(".tar")) if os.path.isdir(path) else [""]
    last = None
    for name in shards:
        if name.startswith("."):
            continue
        with open(os.path.join(path, name) if name else path, "rb", 0) as file:

            def read(begin: int, end: int, fd: int = file.fileno()) -> bytes:
                if perf_counter() > until:
                    raise TimeoutError
                return os.pread(fd, end - begin, begin)

            for member, *_ in Scanner(read, os.fstat(file.fileno()).st_size):
                key, suffix = split_member(member) or ("", "")
                if suffix == SKELETON and key != last:
                    yield key
                    last = key
