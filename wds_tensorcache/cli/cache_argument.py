"""Arguments of commands that name a cache or a sample."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import click

import wds_tensorcache as tc
from wds_tensorcache.storage.urls import is_url, shown


class LocalPath(click.Path):
    """The path of an existing file or folder; a url is refused unless `urls` is True."""

    def __init__(self, *, file_okay: bool = True, urls: bool = False) -> None:
        super().__init__(exists=True, file_okay=file_okay)
        self._urls = urls

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not is_url(text := os.fsdecode(value)):
            return super().convert(value, param, ctx)
        if not self._urls:
            self.fail(f"{shown(text)} is a url, expected a local path; copy the files to a disk first", param, ctx)
        return value


@contextmanager
def open_cache(path: str, name: str | None = None) -> Iterator[tc.TensorCache]:
    """Open a cache from the command line, and close it at the end.

    Raises:
        click.UsageError: `path` is not valid.
        click.BadParameter: `name` is not valid.
        FileNotFoundError, FormatError, KeyError: As for `tc.open`; KeyError also if the shards contain no cache.
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
        if not all(shard.has_cache for shard in cache._store.shards):
            from wds_tensorcache.shards.member_shard import NO_CACHE

            raise KeyError(f"{shown(path)}: {NO_CACHE}")
        yield cache


def sample_key(cache: tc.TensorCache, name: str) -> str:
    """Return the key of a sample from its key or original name; raise KeyError with similar keys if there is no sample."""
    if name not in cache and (safe := tc.safe_key(name)) in cache:
        return safe
    cache[name]
    return name


cache_argument = click.argument("path", metavar="CACHE", type=click.Path())
key_argument = click.argument("key", metavar="KEY")
cache_option = click.option(
    "--cache",
    "cache_name",
    metavar="NAME",
    help="Name of the cache, if the samples have several; '' for the unnamed one.",
)
threads_option = click.option(
    "--threads", type=click.IntRange(1, 1024), help="Number of threads; by default the number of cores."
)
