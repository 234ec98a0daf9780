"""`tensorcache stats`: sizes, numbers, histograms and repeated tensors."""

from __future__ import annotations

import click
from rich.text import Text

from wds_tensorcache.cli.cache_argument import cache_argument, cache_option, open_cache
from wds_tensorcache.cli.looking.marks import is_unicode, number, sparkline
from wds_tensorcache.cli.looking.schema import shape_text
from wds_tensorcache.cli.output import Output, json_option, plain
from wds_tensorcache.errors import format_count
from wds_tensorcache.inspecting.statistics import CacheStatistics, TensorStatistics, collect_statistics
from wds_tensorcache.inspecting.tree import short_dtype

_NUM_SHAPES = 5
_NUM_REPEATS = 5


class _Samples(click.ParamType):  # type: ignore[type-arg]
    name = "samples"

    def convert(self, value: object, parameter: click.Parameter | None, context: click.Context | None) -> int | None:
        if value is None or value == "all":
            return None
        try:
            count = int(str(value))
        except ValueError:
            count = 0
        if count < 1:
            self.fail(f"{value!r}, expected a number of samples, at least 1, or 'all'", parameter, context)
        return count


@click.command("stats")
@cache_argument
@click.option(
    "--samples",
    type=_Samples(),
    default="1000",
    show_default=True,
    metavar="N|all",
    help="Samples whose tensors are read.",
)
@cache_option
@json_option
def stats_command(path: str, samples: int | None, cache_name: str | None, as_json: bool) -> None:
    """Show statistics of CACHE: sizes, shapes, numbers, histograms and repeated tensors.

    Sizes, shapes and dtypes are those of all samples. Numbers are those of --samples samples at equal distances from each
    other, read once and in bounded memory.
    """
    output = Output(as_json)
    with open_cache(path, cache_name) as cache, output.progress("reading samples") as show:
        found = collect_statistics(cache, samples, show)
    output.result(found)
    if as_json:
        return
    output.line(
        f"{format_count(found.num_samples, 'sample')} in {format_count(found.num_shards, 'shard')}, "
        f"{found.nbytes:,} bytes of tensors",
        "bold",
    )
    sizes = found.sample_nbytes
    if found.num_examined:
        spread = (
            f"{number(sizes.min)} to {number(sizes.max)} bytes a sample, {number(round(sizes.mean or 0))} on average"
        )
        output.line(f"numbers are those of {format_count(found.num_examined, 'sample')}: {spread}")
    output.line()
    _show_tensors(output, found)
    _show_shapes(output, found)
    _show_repeats(output, found)
    for each in found.tensors:
        if each.num_not_finite:
            keys = ", ".join(map(repr, each.not_finite)) + (", …" if each.num_not_finite > len(each.not_finite) else "")
            output.line(f"{each.name}: NaN or Inf in {format_count(each.num_not_finite, 'sample')}: {keys}", "bold red")
    for suffix, count in found.members.items():
        output.line(f"member .{suffix} in {format_count(count, 'sample')}")


def _show_tensors(output: Output, found: CacheStatistics) -> None:
    columns = ["tensor", "dtype", "shape", "bytes", "min", "mean", "max", "std", "NaN", "Inf"]
    has_bars = is_unicode(output.console)
    output.table(
        [*columns, *(["histogram"] if has_bars else [])],
        [[*_cells(each), *([_bars(each)] if has_bars else [])] for each in found.tensors],
        right=columns[3:],
    )


def _cells(each: TensorStatistics) -> list[object]:
    cells: list[object] = [
        each.name,
        "/".join(map(short_dtype, each.dtypes)),
        shape_text(each.shape),
        f"{each.nbytes:,}",
    ]
    values = each.values
    if values is None:
        return [*cells, *["-"] * 6]
    cells += map(number, (values.min, values.mean, values.max, values.std))
    return cells + [Text(f"{count:,}", "bold red" if count else "") for count in (values.num_nan, values.num_inf)]


def _bars(each: TensorStatistics) -> Text:
    return Text(sparkline(each.values.histogram) if each.values else "", "cyan", no_wrap=True)


def _show_shapes(output: Output, found: CacheStatistics) -> None:
    for each in found.tensors:
        if each.num_shapes > 1:
            shown = ", ".join(f"{list(some.shape)} in {some.num_samples:,}" for some in each.shapes[:_NUM_SHAPES])
            more = ", …" if each.num_shapes > _NUM_SHAPES else ""
            output.line(f"{each.name}: {each.num_shapes:,} shapes: {shown}{more}")
        if each.num_samples < found.num_samples:
            output.line(f"{each.name}: in {each.num_samples:,} of {found.num_samples:,} samples")


def _show_repeats(output: Output, found: CacheStatistics) -> None:
    repeats = found.repeats
    if not repeats.num_tensors:
        return
    about = "about " if repeats.is_estimate else ""
    output.line(
        f"repeated: {about}{format_count(repeats.num_tensors, 'tensor')}; storing each once would save "
        f"{about}{repeats.nbytes:,} bytes in these {found.num_examined:,} samples"
    )
    for each in repeats.most[:_NUM_REPEATS]:
        where = f"sample {plain(repr(each.key))}"
        output.line(f"  {each.count:,} times {each.nbytes:,} bytes: {plain(each.name)}, first in {where}")
