"""`tensorcache import`: shards from the files of a trainer."""

from __future__ import annotations

import dataclasses
import json
import os
from collections import Counter
from typing import Any

import click

from wds_tensorcache.cli.output import Output, json_option
from wds_tensorcache.integrations.importers.formats import FORMATS
from wds_tensorcache.integrations.importers.import_cache import import_cache
from wds_tensorcache.writing.writer import MAX_SAMPLES

__all__ = ["import_command"]


def _list_formats(context: click.Context, option: Any, value: bool) -> None:
    if value:
        Output().table(["format", "files"], [(each.name, each.title) for each in FORMATS])
        context.exit()


def _pairs(context: click.Context, option: click.Parameter, values: tuple[str, ...]) -> dict[str, str]:
    found = {}
    for value in values:
        name, mark, text = value.partition("=")
        if not mark or not name:
            raise click.BadParameter(f"{value!r}, expected NAME=VALUE")
        found[name] = text
    return found


@click.command("import")
@click.argument("source", type=click.Path(exists=True, file_okay=False))
@click.argument("out", type=click.Path())
@click.option(
    "--format", "format_name", default="auto", show_default=True, help="Format of the files; see --list-formats."
)
@click.option(
    "--list-formats", is_flag=True, is_eager=True, expose_value=False, callback=_list_formats, help="List formats."
)
@click.option("--narrow", is_flag=True, help="Store float32 as bfloat16 or float16 where no bit is lost.")
@click.option(
    "--trim",
    multiple=True,
    callback=_pairs,
    metavar="TENSOR=MASK",
    help="Leave out the rows of TENSOR after the last true element of MASK.",
)
@click.option(
    "--drop-padding", is_flag=True, help="Trim even if the padding is not constant, for a model that masks it."
)
@click.option(
    "--fingerprint",
    multiple=True,
    callback=_pairs,
    metavar="NAME=VALUE",
    help="Add an entry to the fingerprint; VALUE is JSON or text.",
)
@click.option(
    "--on-error",
    type=click.Choice(["stop", "skip"]),
    default="stop",
    show_default=True,
    help="Stop at a bad sample, or leave it out.",
)
@click.option("--trust", is_flag=True, help="Read pickles that may run code.")
@click.option(
    "--workers", type=click.IntRange(1), default=2, show_default=True, help="Number of threads that read files."
)
@click.option("--resume", is_flag=True, help="Continue after an interruption.")
@click.option(
    "--max-samples", type=click.IntRange(1), default=MAX_SAMPLES, show_default=True, help="Samples in a shard."
)
@click.option("--max-nbytes", type=click.IntRange(1), default=1 << 30, show_default=True, help="Bytes of a shard.")
@json_option
def import_command(source: str, out: str, format_name: str, as_json: bool, workers: int, **options: Any) -> int:
    """Import the files in SOURCE, which a trainer has written, into shards in the folder OUT."""
    output = Output(as_json)
    options["fingerprint"] = {name: _json(value) for name, value in options["fingerprint"].items()}
    with output.progress("importing") as show:
        report = import_cache(source, out, format=format_name, num_workers=workers, progress=show, **options)
    for each in report.skipped:
        output.note(f"skipped {each.name}: {each.what}")
    if report.unused:
        counts = Counter(os.path.splitext(name)[1].lower() or "no suffix" for name in report.unused)
        listed = ", ".join(f"{count:,} of {suffix}" for suffix, count in counts.most_common(8))
        output.text(f"{len(report.unused):,} files were not used: {listed}")
    if report.nbytes_narrowable:
        share = report.nbytes_narrowable / report.nbytes
        output.text(f"--narrow would save about {share:.0%} of {report.nbytes:,} bytes, and lose no bit of any number")
    saved = report.nbytes_narrowed + report.nbytes_trimmed
    output.text(
        f"format {report.format}: {report.nbytes:,} bytes of tensors" + (f", {saved:,} bytes saved" if saved else "")
    )
    output.text(report)
    output.result(dataclasses.asdict(report))
    return 0 if report.ok else 1


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text
