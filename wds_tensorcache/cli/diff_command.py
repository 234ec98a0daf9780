"""`tensorcache diff`: the differences between two caches."""

from __future__ import annotations

import dataclasses

import click

from wds_tensorcache.cli.cache_argument import cache_option, open_cache
from wds_tensorcache.cli.output import Output, json_option
from wds_tensorcache.errors import format_count
from wds_tensorcache.inspecting.diff import diff_caches
from wds_tensorcache.storage.urls import shown


@click.command("diff")
@click.argument("first", type=click.Path())
@click.argument("second", type=click.Path())
@click.option("--limit", type=click.IntRange(0), default=20, show_default=True, help="Number of differences to list.")
@cache_option
@json_option
def diff_command(first: str, second: str, limit: int, cache_name: str | None, as_json: bool) -> int:
    """Compare the samples of FIRST and SECOND by key: tensors bit for bit, small values, and other members.

    Tensors of samples with equal digests and skeletons are not read. The exit status is 0 if all samples are equal, and 1 if
    they differ. Fingerprints, the order of samples and of keys in dicts, and samples without the cache are not compared.
    """
    output = Output(as_json)
    with (
        open_cache(first, cache_name) as one,
        open_cache(second, cache_name) as two,
        output.progress("comparing") as show,
    ):
        diff = diff_caches(one, two, show)
    if diff.num_without:
        output.note(f"not compared: {format_count(diff.num_without, 'sample')} in the shards, without this cache")
    output.result({"is_equal": diff.is_equal, **dataclasses.asdict(diff)})
    names = shown(first), shown(second)
    if names[0] == names[1]:
        names = "the first cache", "the second cache"
    lines = [f"only in {names[0]}: {key}" for key in diff.only_first]
    lines += [f"only in {names[1]}: {key}" for key in diff.only_second]
    lines += [f"{change.key}: {change.name}: {change.what}" for change in diff.changes]
    for line in lines[:limit]:
        output.line(line)
    if len(lines) > limit:
        output.line(f"… and {len(lines) - limit:,} more; --limit lists them")
    output.line(
        f"{format_count(diff.num_equal, 'sample')} equal, {diff.num_changed:,} changed, "
        f"{len(diff.only_first):,} only in the first, {len(diff.only_second):,} only in the second",
        "bold",
    )
    return 0 if diff.is_equal else 1
