"""`tensorcache bench`: how fast this machine reads a cache, next to upper limits of this machine."""

from __future__ import annotations

import dataclasses
import os
from importlib.util import find_spec

import click

from wds_tensorcache.cli.cache_argument import cache_argument, cache_option
from wds_tensorcache.cli.looking.marks import is_unicode
from wds_tensorcache.cli.output import Output, json_option
from wds_tensorcache.errors import format_count
from wds_tensorcache.inspecting.bench import measure_rates, plot_rates
from wds_tensorcache.storage.atomic import write_atomically

_WIDTH = 30  # of the longest bar
_PLOTS = (".png", ".svg", ".pdf")


def _check_plot(context: click.Context, option: click.Parameter, path: str | None) -> str | None:
    if path is not None and os.path.splitext(path)[1].lower() not in _PLOTS:
        raise click.BadParameter(f"{path!r}, expected a name that ends in {', '.join(_PLOTS)}")
    if path is not None and find_spec("matplotlib") is None:
        raise click.UsageError("--plot needs matplotlib: pip install matplotlib")
    return path


@click.command()
@cache_argument
@click.option("--batch-size", type=click.IntRange(1), default=32, show_default=True, help="Samples in a batch.")
@click.option(
    "--seconds",
    type=click.FloatRange(0, 600),
    default=1.0,
    show_default=True,
    help="Time of a run; there are three of each.",
)
@click.option(
    "--max-nbytes",
    type=click.IntRange(1),
    default=1 << 30,
    show_default=True,
    help="Bytes of the samples to read, at most a quarter of the memory.",
)
@click.option("--threads", type=click.IntRange(1, 1024), help="Number of threads; by default the number of cores.")
@click.option(
    "--plot", metavar="FILE", callback=_check_plot, help="Also draw the rates into this .png, .svg or .pdf file."
)
@cache_option
@json_option
def bench(
    path: str,
    batch_size: int,
    seconds: float,
    max_nbytes: int,
    threads: int | None,
    plot: str | None,
    cache_name: str | None,
    as_json: bool,
) -> None:
    """Measure how fast this machine reads CACHE in random order, and say what limits it.

    There are four rates from the page cache: read_batch, the loader, and as their limits copies of as many bytes in memory
    and positioned reads of the same bytes. The last batch of each run of the first two is checked.
    """
    output = Output(as_json)
    with output.progress("measuring") as show:
        report = measure_rates(
            path,
            cache=cache_name,
            batch_size=batch_size,
            seconds=seconds,
            max_nbytes=max_nbytes,
            num_threads=threads,
            progress=show,
        )
    if plot is not None:
        write_atomically(plot, [plot_rates(report, os.path.splitext(plot)[1][1:].lower())])
    output.result(dataclasses.asdict(report))
    output.line(
        f"{report.num_used:,} of {format_count(report.num_samples, 'sample')}, {report.nbytes_used:,} bytes of tensors, "
        f"batches of {report.batch_size:,}, {format_count(report.num_cores, 'core')}"
    )
    output.line()
    highest = max(rate.nbytes_per_s for rate in report.rates)
    mark = "█" if is_unicode(output.console) else "#"
    rows = []
    for rate in report.rates:
        bar = mark * max(1, round(_WIDTH * rate.nbytes_per_s / highest))
        rows.append((rate.name, rate.num_threads, f"{rate.nbytes_per_s / 1e9:.3g}", f"{rate.samples_per_s:,.0f}", bar))
    output.table(("", "threads", "GB/s", "samples/s", ""), rows, right=("threads", "GB/s", "samples/s"))
    output.line()
    output.line(report.limit)
