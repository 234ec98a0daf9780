"""Arguments of commands that name a cache, a sample or a tensor: opening, looking up, and completion in a shell."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any

import click

import wds_tensorcache as tc
from wds_tensorcache.cli.completing.quick import MAX_COMPLETIONS
from wds_tensorcache.codec.lazy import Lazy
from wds_tensorcache.codec.tree import flatten
from wds_tensorcache.errors import unknown_name
from wds_tensorcache.storage.urls import is_url, shown


class LocalPath(click.Path):
    """The path of an existing file or folder; a url is refused by name, or accepted as it is if `urls` is True."""

    def __init__(self, *, file_okay: bool = True, dir_okay: bool = True, urls: bool = False) -> None:
        super().__init__(exists=True, file_okay=file_okay, dir_okay=dir_okay)
        self._file_okay = file_okay
        self._urls = urls

    def convert(
        self, value: str | os.PathLike[str], param: click.Parameter | None, ctx: click.Context | None
    ) -> str | bytes | os.PathLike[str]:
        text = os.fsdecode(value)
        if not is_url(text):
            if not self._file_okay and os.path.isfile(text):
                self.fail(f"{text} is a file, expected a folder; pass the folder that contains it", param, ctx)
            return super().convert(value, param, ctx)
        if not self._urls:
            self.fail(f"{shown(text)} is a url, expected a local path; copy the files to a disk first", param, ctx)
        return value


@contextmanager
def open_cache(path: str, name: str | None = None) -> Iterator[tc.TensorCache]:
    """Open a cache from the command line, and close it at the end.

    Raises:
        click.BadParameter: `path` or `name` cannot be those of a cache.
        FileNotFoundError, FormatError, KeyError: As `tc.open`.
    """
    try:
        cache = tc.open(path, cache=name)
    except tc.InvalidKeyError as exc:
        raise click.BadParameter(str(exc), param_hint="--cache") from exc
    except tc.TensorCacheError:
        raise
    except ValueError as exc:  # not a local path
        raise click.UsageError(str(exc)) from exc
    with cache:
        yield cache


def sample_key(cache: tc.TensorCache, name: str) -> str:
    """Return the key of a sample from its key, or from the name from which `tc.safe_key` made the key.

    Raises:
        KeyError: There is no such sample; the message lists similar keys.
    """
    if name not in cache and (safe := tc.safe_key(name)) in cache:
        return safe
    cache[name]
    return name


def find_tensor(sample: Any, key: str, name: str) -> Lazy:
    """Return a tensor of a sample; raise KeyError, which lists similar names, if there is no such tensor."""
    tensors = flatten(sample)
    if name not in tensors:
        raise KeyError(f"sample {key!r}: {unknown_name('tensor', name, tensors)}")
    found: Lazy = tensors[name]
    return found


def _complete_key(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[str]:
    return _matching(context, incomplete, lambda cache: cache.keys())


def tensor_names(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[str]:
    """Return the names of the tensors of the sample on an incomplete command line, for a shell."""

    def names(cache: tc.TensorCache) -> Iterable[str]:
        return flatten(cache[sample_key(cache, context.params["key"])])

    return _matching(context, incomplete, names)


def _matching(context: click.Context, incomplete: str, names: Any) -> list[str]:
    warnings.simplefilter("ignore")  # a message would appear in the line that is being completed
    try:
        with open_cache(context.params["path"], context.params.get("cache_name")) as cache:
            # a shell reads one name a line
            found = (name for name in names(cache) if name.startswith(incomplete) and name.isprintable())
            return list(islice(found, MAX_COMPLETIONS))
    except (click.ClickException, tc.TensorCacheError, OSError, KeyError, TypeError):
        return []  # an incomplete or wrong command line has no completions


cache_argument = click.argument("path", metavar="CACHE", type=click.Path())
key_argument = click.argument("key", metavar="KEY", shell_complete=_complete_key)
cache_option = click.option(
    "--cache",
    "cache_name",
    metavar="NAME",
    help="Name of the cache, if the samples have several; '' for the unnamed one.",
)
