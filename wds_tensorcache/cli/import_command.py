"""`tensorcache import`: shards from the files of a trainer."""

from __future__ import annotations

import dataclasses
import json
import os
from collections import Counter
from typing import Any

import click

from wds_tensorcache.cli.output import Output, json_option
from wds_tensorcache.errors import FormatError, StaleCacheError, format_count
from wds_tensorcache.importers.formats import FORMATS
from wds_tensorcache.importers.import_cache import import_cache
from wds_tensorcache.writing.writer import MAX_SAMPLES


def _pairs(context: click.Context, option: click.Parameter, values: tuple[str, ...]) -> dict[str, str]:
    pairs = {}
    for value in values:
        name, mark, text = value.partition("=")
        if not mark or not name or name in pairs:
            raise click.BadParameter(f"{value!r}, expected {option.metavar}, once for each name")
        pairs[name] = text
    return pairs


@click.command("import")
@click.argument("paths", metavar="SOURCE... OUT", nargs=-1, type=click.Path())
@click.option(
    "--format",
    "format_name",
    type=click.Choice(["auto", *(source_format.name for source_format in FORMATS)]),
    metavar="NAME",
    default="auto",
    show_default=True,
    help="Format of the files; see --list-formats.",
)
@click.option("--list-formats", is_flag=True, help="List the formats, and import nothing.")
@click.option("--narrow", is_flag=True, help="Store float32 as bfloat16 or float16 where no bit is lost.")
@click.option(
    "--trim",
    multiple=True,
    callback=_pairs,
    metavar="TENSOR=MASK",
    help="Leave out the rows of TENSOR after the last true element of MASK.",
)
@click.option("--drop-padding", is_flag=True, help="Trim even if the padding is not zero, for a model that masks it.")
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
    "--workers", type=click.IntRange(1), default=2, show_default=True, help="Number of processes that read files."
)
@click.option("--resume", is_flag=True, help="Continue after an interruption.")
@click.option(
    "--max-samples", type=click.IntRange(1), default=MAX_SAMPLES, show_default=True, help="Samples in a shard."
)
@click.option("--max-nbytes", type=click.IntRange(1), default=1 << 30, show_default=True, help="Bytes of a shard.")
@json_option
@click.pass_context
def import_command(
    context: click.Context,
    /,
    paths: tuple[str, ...],
    format_name: str,
    list_formats: bool,
    as_json: bool,
    workers: int,
    **options: Any,
) -> int:
    """Convert the files of a trainer to shards in the folder OUT.

    SOURCE is a folder, a file such as a tar, or a pattern such as 'photos-{000..099}.tar'. Several SOURCES must be tars or
    patterns of tars; import folders one by one.
    """
    output = Output(as_json)
    if list_formats:
        output.table(["format", "files"], [(source_format.name, source_format.title) for source_format in FORMATS])
        output.result([{"format": source_format.name, "files": source_format.title} for source_format in FORMATS])
        return 0
    if len(paths) < 2:
        raise click.UsageError("expected a source and the folder OUT", context)
    *source, out = paths
    options["fingerprint"] = {name: _json(value) for name, value in options["fingerprint"].items()}
    try:
        with output.progress("importing") as show:
            report = import_cache(source, out, format=format_name, num_workers=workers, progress=show, **options)
    except KeyboardInterrupt:
        output.note("the finished shards are kept: the same command with --resume continues")
        raise
    except StaleCacheError:
        output.note(
            "--resume needs the folder and the options of the first call; without them, import into a new folder"
        )
        raise
    except FormatError:
        if options["on_error"] == "stop":
            output.note("--on-error skip leaves bad samples out, and lists them")
        raise
    for skipped in report.skipped:
        has_name = skipped.what.startswith((skipped.name, *skipped.files))
        output.note(f"skipped {skipped.what}" if has_name else f"skipped {skipped.name}: {skipped.what}")
    for text in report.notes:
        output.note(text)
    if report.num_hashed:
        output.note(
            f"{report.num_hashed:,} of {report.num_written:,} keys have a hash in place of a name that is too long for a key; "
            "cache.original_name(key) returns the name"
        )
    for name, (count, first) in report.lacking.items():
        output.note(f"without {name!r}: {count:,} of {report.num_written:,} samples, for example {first}")
    if report.changed:
        samples, first = format_count(len(report.changed), "sample"), report.changed[0]
        output.note(f"files that have changed since their shards were written: {samples}, for example {first}")
    if report.num_gone:
        output.note(f"no longer in {', '.join(source)}: {format_count(report.num_gone, 'sample')} of the shards")
    if report.changed or report.num_gone:
        output.note("import into a new folder to have the files as they are now")
    if report.unused:
        counts = Counter(os.path.splitext(name)[1].lower() or "no suffix" for name in report.unused)
        listed = ", ".join(f"{count:,} of {suffix}" for suffix, count in counts.most_common(8))
        output.line(f"not used: {format_count(len(report.unused), 'file')}: {listed}")
    if report.nbytes_narrowable:
        share = report.nbytes_narrowable / report.nbytes
        output.line(f"--narrow would save about {share:.0%} of {report.nbytes:,} bytes, and lose no bit of any number")
    saved = report.nbytes_narrowed + report.nbytes_trimmed
    output.line(
        f"format {report.format}: {report.nbytes:,} bytes of tensors" + (f", {saved:,} bytes saved" if saved else "")
    )
    output.text(report)
    output.result({"out": out, **dataclasses.asdict(report), "num_bad_files": report.num_bad_files})
    return 0 if report.ok else 1


def _json(text: str) -> Any:
    """Return the value of a JSON text, or another text unchanged."""
    try:
        value = json.loads(text, parse_constant=str)
    except (ValueError, RecursionError):
        return text
    # JSON would change a text such as `1.10`
    return text if isinstance(value, float) and json.dumps(value) != text else value
