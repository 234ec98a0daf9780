"""Arguments of commands that name a cache or a sample."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import click

import wds_tensorcache as tc
from wds_tensorcache.storage.urls import shown


@contextmanager
def open_cache(path: str, name: str | None = None, num_threads: int | None = None) -> Iterator[tc.TensorCache]:
    """Open the cache of a command, and close it at the end.

    Raises:
        click.BadParameter: `name` is not valid.
        FileNotFoundError, FormatError, KeyError, ValueError: As for `tc.open`; KeyError also if the shards contain no cache.
    """
    try:
        cache = tc.open(path, cache=name, num_threads=num_threads)
    except tc.InvalidKeyError as exc:
        raise click.BadParameter(str(exc), param_hint="--cache") from exc
    with cache:
        if not all(shard.has_cache for shard in cache._store.shards):
            from wds_tensorcache.shards.member_shard import NO_CACHE

            raise KeyError(f"{shown(path)}: {NO_CACHE}")
        yield cache


def sample_key(cache: tc.TensorCache, name: str) -> str:
    """Return the key of a sample from its key or original name. Raise KeyError with similar keys if none fits."""
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
