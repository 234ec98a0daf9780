"""`tensorcache stats`: sizes, numbers, histograms and repeated tensors."""

from __future__ import annotations

import click
from rich.text import Text

from wds_tensorcache.cli.cache_argument import cache_argument, cache_option, open_cache
from wds_tensorcache.cli.looking.marks import is_unicode, sparkline
from wds_tensorcache.cli.looking.schema import show_summary
from wds_tensorcache.cli.output import Output, json_option
from wds_tensorcache.errors import format_count
from wds_tensorcache.inspecting.survey import Survey, TensorStatistics
from wds_tensorcache.inspecting.text import dtype_text, number_text, shape_text
from wds_tensorcache.reading.positions import spread

_NUM_SHAPES = 5
_NUM_REPEATS = 5


class _Samples(click.ParamType):  # type: ignore[type-arg]
    name = "samples"

    def convert(self, value: object, parameter: click.Parameter | None, context: click.Context | None) -> int | None:
        if value is None or value == "all":
            return None
        if not str(value).isdecimal() or int(str(value)) < 1:
            self.fail(f"{value!r}, expected a number of samples, at least 1, or 'all'", parameter, context)
        return int(str(value))


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

    Sizes, shapes and dtypes cover all samples. Numbers and histograms cover --samples samples at equal distances from each
    other, which are read once, in bounded memory.
    """
    output = Output(as_json)
    with open_cache(path, cache_name) as cache, output.progress("reading samples") as show:
        survey = Survey(cache, spread(len(cache), len(cache) if samples is None else samples), show)
    described, tensors = survey.description, list(survey.tensors.values())
    output.result(
        {
            "num_samples": described.num_samples,
            "num_shards": described.num_shards,
            "nbytes": described.nbytes,
            "num_examined": len(survey.indices),
            "sample_nbytes": survey.sample_nbytes,
            "tensors": [tensor.record() for tensor in tensors],
            "values": [
                {"name": value.name, "text": str(value), "num_samples": value.num_samples}
                for value in described.values.values()
            ],
            "members": described.members,
            "repeats": survey.repeats,
            "fingerprint": described.fingerprint,
        }
    )
    show_summary(output, described)
    sizes = survey.sample_nbytes
    if survey.indices:
        mean = number_text(round(sizes.mean or 0))
        sizes_text = f"{number_text(sizes.min)} to {number_text(sizes.max)} bytes a sample, {mean} on average"
        output.line(f"numbers are those of {format_count(len(survey.indices), 'sample')}: {sizes_text}")
    output.line()
    columns = ["tensor", "dtype", "shape", "bytes", "min", "mean", "max", "std", "NaN", "Inf"]
    has_bars = is_unicode(output.console)
    output.table(
        [*columns, *["histogram"] * has_bars],
        [[*_cells(tensor), *[_bars(tensor)] * has_bars] for tensor in tensors],
        right=columns[3:],
    )
    for tensor in tensors:
        _show_shapes(output, tensor, described.num_samples)
    _show_repeats(output, survey)
    for tensor in tensors:
        if tensor.num_not_finite:
            keys = ", ".join(map(repr, tensor.not_finite)) + ", …" * (tensor.num_not_finite > len(tensor.not_finite))
            num_samples = format_count(tensor.num_not_finite, "sample")
            output.line(f"{tensor.description.name}: NaN or Inf in {num_samples}: {keys}", "bold red")
    for suffix, count in described.members.items():
        output.line(f"member .{suffix} in {format_count(count, 'sample')}")


def _cells(tensor: TensorStatistics) -> list[object]:
    described, values = tensor.description, tensor.values
    cells: list[object] = [described.name, dtype_text(described.dtype), shape_text(described.shape)]
    cells.append(f"{described.nbytes:,}")
    if values is None:
        return [*cells, *["-"] * 6]
    cells += map(number_text, (values.min, values.mean, values.max, values.std))
    return cells + [Text(f"{count:,}", "bold red" if count else "") for count in (values.num_nan, values.num_inf)]


def _bars(tensor: TensorStatistics) -> Text:
    return Text(sparkline(tensor.values.histogram) if tensor.values else "", "cyan", no_wrap=True)


def _show_shapes(output: Output, tensor: TensorStatistics, num_samples: int) -> None:
    described = tensor.description
    if described.num_shapes > 1:
        shown = [f"{list(shape)} in {count:,}" for shape, count in described.shapes.items()][:_NUM_SHAPES]
        more = ", …" * (described.num_shapes > _NUM_SHAPES)
        output.line(f"{described.name}: {described.num_shapes:,} shapes: {', '.join(shown)}{more}")
    if described.num_samples < num_samples:
        output.line(f"{described.name}: in {described.num_samples:,} of {num_samples:,} samples")


def _show_repeats(output: Output, survey: Survey) -> None:
    repeats = survey.repeats
    if not repeats.num_tensors:
        return
    about = "at least " * repeats.is_partial
    output.line(
        f"repeated: {about}{format_count(repeats.num_tensors, 'tensor')}; storing each once would save "
        f"{about}{repeats.nbytes:,} bytes in these {len(survey.indices):,} samples"
    )
    for repeat in repeats.most[:_NUM_REPEATS]:
        where = f"{repeat.name}, first in sample {repeat.key!r}"
        output.line(f"  {repeat.count:,} times {repeat.nbytes:,} bytes: {where}")
