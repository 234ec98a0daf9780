"""`tensorcache export`: files of torch, numpy and safetensors from a cache."""

from __future__ import annotations

import dataclasses

import click

from wds_tensorcache.cli.cache_argument import cache_argument, cache_option, open_cache
from wds_tensorcache.cli.output import Output, json_option
from wds_tensorcache.errors import list_names
from wds_tensorcache.integrations.exporting import KINDS, export_cache
from wds_tensorcache.reading.find_shards import find_shards


@click.command()
@cache_argument
@click.argument("out", type=click.Path(file_okay=False))
@click.option("--as", "kind", type=click.Choice(KINDS), default="pt", show_default=True, help="Kind of files.")
@cache_option
@json_option
def export(path: str, out: str, kind: str, cache_name: str | None, as_json: bool) -> None:
    """Write each sample of CACHE into a file in the folder OUT, or all samples into a WebDataset tar.

    No part of this package is needed to read the files.
    """
    output = Output(as_json)
    find_shards(path, copies=True)  # the error, before `tc.open` warns of the same
    try:
        with open_cache(path, cache_name) as cache, output.progress("exporting") as show:
            report = export_cache(cache, out, kind, progress=show)
    except KeyboardInterrupt:
        output.note("the finished files are kept: the same command continues")
        raise
    for key, name in report.renamed.items():
        output.note(f"sample {key} is in {name}: its original name is not safe as the name of a file, or is in use")
    for name, dtype in report.widened.items():
        output.note(f"{name} is {dtype} in the files, which changes no number")
    for name, cls in report.as_text.items():
        output.note(f"{name} is a {cls}, which JSON cannot hold: the files have a short text of it; pt has it whole")
    if report.num_without:
        output.note(f"{report.num_without:,} samples in the shards have no such cache, and were not exported")
    if report.other_caches:
        names = list_names(report.other_caches)
        output.note(f"the samples also have the caches {names}, which were not exported: export them with --cache")
    output.text(report)
    output.result({"out": out, **dataclasses.asdict(report)})
