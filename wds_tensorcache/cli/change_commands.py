"""`tensorcache merge`, `reshard` and `drop`: new shards from the members of existing shards."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import click

import wds_tensorcache as tc
from wds_tensorcache.cli.output import Output, json_option
from wds_tensorcache.errors import format_count
from wds_tensorcache.shards.names import safe_key
from wds_tensorcache.writing.copy_shards import CopyReport
from wds_tensorcache.writing.merge import merge as merge_caches
from wds_tensorcache.writing.merge import reshard as reshard_cache
from wds_tensorcache.writing.versions import OldCache
from wds_tensorcache.writing.writer import MAX_SAMPLES


def _shard_options(command: Callable[..., Any]) -> Callable[..., Any]:
    for option in (
        json_option,
        click.option("--no-dali-index", is_flag=True, help="Do not write .idx files for DALI."),
        click.option(
            "--max-nbytes", type=click.IntRange(1), default=1 << 30, show_default=True, help="Bytes of a shard."
        ),
        click.option(
            "--max-samples", type=click.IntRange(1), default=MAX_SAMPLES, show_default=True, help="Samples in a shard."
        ),
    ):
        command = option(command)
    return command


@click.command()
@click.argument("sources", nargs=-1, required=True, type=click.Path())
@click.argument("out", type=click.Path())
@click.option(
    "--prefix",
    "prefixes",
    multiple=True,
    metavar="TEXT",
    help="Prefix of the keys of a source, such as photos/; give one for each source, in order; it may be ''.",
)
@click.option("--mixed", is_flag=True, help="Merge caches even if they were made in different ways (fingerprints).")
@_shard_options
def merge(sources: tuple[str, ...], out: str, prefixes: tuple[str, ...], **options: Any) -> None:
    """Write the samples of all SOURCES into one cache in the new folder OUT.

    The bytes of members are copied. Equal keys are refused, unless prefixes make them different. An interrupted command
    creates no OUT; run the same command again to resume.
    """
    if prefixes and len(prefixes) != len(sources):
        raise click.UsageError(f"expected one --prefix for each source, got {len(prefixes)} for {len(sources)}")
    _copy(partial(merge_caches, sources, out, prefixes=prefixes), out, "merging", **options)


@click.command()
@click.argument("source", type=click.Path())
@click.argument("out", type=click.Path())
@_shard_options
def reshard(source: str, out: str, **options: Any) -> None:
    """Write the samples of SOURCE into shards of another length in the new folder OUT.

    The bytes of members are copied, in the same order. An interrupted command creates no OUT; run it again to resume.
    """
    _copy(partial(reshard_cache, source, out), out, "copying", **options)


def _copy(
    copy: Callable[..., CopyReport], out: str, title: str, no_dali_index: bool, as_json: bool, **options: Any
) -> None:
    output = Output(as_json)
    try:
        with output.progress(title) as show:
            report = copy(dali_index=not no_dali_index, progress=show, **options)
    except KeyboardInterrupt:
        output.note("the finished shards are kept: the same command resumes")
        raise
    output.line(f"{os.fspath(out)}: {report}")
    output.result({"out": os.fspath(out), **dataclasses.asdict(report)})


@click.command()
@click.argument("source", type=click.Path())
@click.argument("out", type=click.Path())
@click.argument("keys", nargs=-1)
@click.option(
    "--keys-from",
    metavar="FILE",
    type=click.File(encoding="utf-8-sig"),
    help="File with one key in each line; - for stdin.",
)
@json_option
def drop(source: str, out: str, keys: tuple[str, ...], keys_from: Iterable[str] | None, as_json: bool) -> None:
    """Write the new folder OUT with the samples of the folder SOURCE, but without KEYS.

    A key may also be the original name of a sample, such as 'photo (1)'. Shards that lose no sample are linked, if possible.
    """
    if not keys and keys_from is None:
        raise click.UsageError("expected keys, or --keys-from")
    lines = (line.rstrip("\r\n") for line in keys_from or ())
    wanted = [*keys, *filter(None, lines)]
    shards = OldCache(source).shards
    # an unknown key stays, so that the error names similar keys
    dropped = [key if key in shards or safe_key(key) not in shards else safe_key(key) for key in wanted]
    num_dropped = len({place for key in dropped for place in shards.find(key)})  # a key may occur twice
    tc.drop(source, out, dropped)
    output = Output(as_json)
    output.line(f"{os.fspath(out)}: without {format_count(num_dropped, 'sample')}")
    output.result({"out": os.fspath(out), "dropped": sorted(set(dropped))})
