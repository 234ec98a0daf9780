"""`tensorcache index`, `verify` and `repair`."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

import click

import wds_tensorcache as tc
from wds_tensorcache.checking.report import Report
from wds_tensorcache.cli.cache_argument import threads_option
from wds_tensorcache.cli.output import Output, json_option
from wds_tensorcache.errors import format_count, plain
from wds_tensorcache.storage.urls import is_url
from wds_tensorcache.writing.index_shard import index_folder, index_shard


@click.command()
@click.argument("shards", nargs=-1, required=True, type=click.Path())
@click.option("--no-dali-index", is_flag=True, help="Do not write the .idx file for DALI.")
@json_option
def index(shards: tuple[str, ...], no_dali_index: bool, as_json: bool) -> None:
    """Index SHARDS that another program made, so that opening them needs no scan.

    Shards that the manifest.json in their folder does not list are added to it. If SHARDS is a folder, a new manifest.json is
    written for all shards in the folder.
    """
    for path in shards:
        if not is_url(path) and not os.path.exists(path):
            raise click.UsageError(f"{path!r} does not exist")
    output = Output(as_json)
    results: list[dict[str, Any]] = []
    with output.progress("indexing") as show:
        for done, path in enumerate(shards):
            if os.path.isdir(path):
                report = index_folder(path, dali_index=not no_dali_index, show=show)
                results.append({"folder": path, **dataclasses.asdict(report)})
            else:
                show(done, len(shards))
                shard_index, manifest = index_shard(path, not no_dali_index)
                results.append({"shard": path, "num_samples": len(shard_index.keys), "added_to": manifest})
    for result in results:
        if "folder" in result:
            _print_folder(output, result)
        else:
            added = f", added to {result['added_to']}" if result["added_to"] else ""
            output.line(f"{result['shard']}: {format_count(result['num_samples'], 'sample')}{added}")
    output.result(results)


def _print_folder(output: Output, result: dict[str, Any]) -> None:
    folder, counts = result["folder"], result["num_samples"]
    for name in result["added"]:
        output.line(f"{os.path.join(folder, name)}: {format_count(counts[name], 'sample')}, added to the manifest")
    for url in result["removed"]:
        output.line(f"{os.path.join(folder, url)} does not exist: removed from the manifest")
    if result["num_repeated"]:
        keys = format_count(result["num_repeated"], "key")
        output.note(f"{folder}: {keys} in several shards; a look-up of such a key raises KeyError")
    output.line(f"{folder}: {format_count(len(counts), 'shard')}, {format_count(sum(counts.values()), 'sample')}")


@click.command()
@click.argument("source", type=click.Path())
@threads_option
@json_option
def verify(source: str, threads: int | None, as_json: bool) -> int:
    """Check every byte, index and manifest of SOURCE: a folder, a shard, a manifest or a pattern.

    The exit status is 1 if SOURCE has a fault.
    """
    output = Output(as_json)
    with output.progress("verifying") as show:
        report = tc.verify(source, num_threads=threads, progress=show)
    return _print(output, report)


@click.command()
@click.argument("source", type=click.Path())
@click.argument("out", type=click.Path())
@click.option("--strict", is_flag=True, help="Write nothing if a sample is damaged or lost.")
@threads_option
@json_option
def repair(source: str, out: str, strict: bool, threads: int | None, as_json: bool) -> int:
    """Write the intact samples of SOURCE into the new folder OUT, with new indexes.

    The exit status is 1 if SOURCE has a fault.
    """
    output = Output(as_json)
    with output.progress("repairing") as show:
        report = tc.repair(source, out, drop=not strict, num_threads=threads, progress=show)
    return _print(output, report)


def _print(output: Output, report: Report) -> int:
    # a line break in the name of a shard must not begin a line that looks like ours
    faults = [dataclasses.replace(fault, shard=plain(fault.shard), what=plain(fault.what)) for fault in report.faults]
    output.text(dataclasses.replace(report, faults=faults))
    output.result({**dataclasses.asdict(report), "needs": sorted(report.needs), "ok": report.ok})
    return 0 if report.ok else 1
