"""`tensorcache ls`: keys and sizes."""

from __future__ import annotations

import dataclasses
import fnmatch
import os
import re
from collections.abc import Iterator
from itertools import islice
from typing import Any

import click

import wds_tensorcache as tc
from wds_tensorcache.cli.cache_argument import cache_argument, cache_option, open_cache
from wds_tensorcache.cli.output import Output, json_option
from wds_tensorcache.reading.schema import Entry
from wds_tensorcache.storage.folder import folder_of
from wds_tensorcache.storage.urls import is_url
from wds_tensorcache.writing.build_failures import list_failures


@click.command("ls")
@cache_argument
@click.option("--glob", "pattern", metavar="PATTERN", help="Only keys, or names, that match, such as 'photos/*'.")
@click.option("--limit", type=click.IntRange(0), metavar="N", help="At most N samples.")
@click.option("--failed", is_flag=True, help="Items that failed in `tc.build(…, on_error='record')`, and their errors.")
@click.option("--long", "-l", "is_long", is_flag=True, help="Also names, shapes and other members.")
@cache_option
@json_option
def ls_command(
    path: str,
    pattern: str | None,
    limit: int | None,
    failed: bool,
    is_long: bool,
    cache_name: str | None,
    as_json: bool,
) -> None:
    """List the samples in CACHE: bytes of their tensors, and keys.

    CACHE is a folder, a shard, a manifest, a pattern in quotes such as 'cache/train-*.tar', or a url. With --long, each key is
    followed by the original name of the sample, such as the path of a photo. No tensor is read.

    With --failed, CACHE is a folder, here or at a url, and each line is the key of an item that has no sample (or its number,
    if its key is unknown), its error, and the last line of your own code in its traceback.
    """
    output = Output(as_json)
    if failed:
        _list_failed(path, pattern, limit, output)
        return
    with open_cache(path, cache_name) as cache:
        entries = islice(_match_entries(cache, pattern), limit)
        having = cache._having() if is_long else {}
        if as_json:
            output.results(_record(cache, index, entry, having, is_long) for index, entry in entries)
            return
        count = nbytes = 0
        for index, entry in entries:
            count, nbytes = count + 1, nbytes + entry.nbytes
            line = f"{entry.nbytes:>15,}  {entry.key}"
            if is_long:
                record = _record(cache, index, entry, having, True)
                name = "" if record["name"] in (None, entry.key) else f"  ({record['name']})"
                shapes = (f"{name} {list(shape)}" for name, shape in entry.shapes.items())
                line += "  ".join([name, *shapes, *(f".{suffix}" for suffix in record["members"])])
            output.line(line)
        if output.is_terminal:
            output.line(f"{nbytes:>15,}  bytes in {count:,} of {len(cache):,} samples", "dim")


def _list_failed(path: str, pattern: str | None, limit: int | None, output: Output) -> None:
    if not is_url(path) and not os.path.isdir(path):
        raise click.UsageError(f"{path}: expected a folder, because --failed lists the failures in a folder")
    is_match = re.compile(fnmatch.translate(pattern or "*")).match
    failures = [failure for failure in list_failures(folder_of(path)) if is_match(failure.key)][:limit]
    output.results(dataclasses.asdict(failure) | {"key": failure.key or None} for failure in failures)
    for failure in failures:
        output.line(f"{failure.key or f'item {failure.item}'}  {failure}")


def _match_entries(cache: tc.TensorCache, pattern: str | None) -> Iterator[tuple[int, Entry]]:
    is_match = re.compile(fnmatch.translate(pattern)).match if pattern is not None else None
    for index, entry in enumerate(cache._entries()):
        if is_match is None or is_match(entry.key) or is_match(cache._name_at(index, entry.key) or ""):
            yield index, entry


def _record(cache: tc.TensorCache, index: int, entry: Entry, having: dict[str, Any], is_long: bool) -> dict[str, Any]:
    record: dict[str, Any] = {"key": entry.key, "nbytes": entry.nbytes}
    if is_long:
        record["name"] = cache._name_at(index, entry.key)
        record["shapes"] = entry.shapes
        record["members"] = [suffix for suffix, mask in having.items() if mask[index]]
    return record
