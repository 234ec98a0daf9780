"""`tensorcache view`: a page about a cache, in a file or served."""

from __future__ import annotations

import json
import os
import sys
import webbrowser

import click

from wds_tensorcache.cli.cache_argument import cache_argument, cache_option, open_cache
from wds_tensorcache.cli.output import Output, json_option
from wds_tensorcache.errors import format_count
from wds_tensorcache.inspecting.report.data import file_limits, make_cards, overview
from wds_tensorcache.inspecting.report.page import build_page
from wds_tensorcache.inspecting.report.server import PageServer
from wds_tensorcache.inspecting.survey import Survey
from wds_tensorcache.reading.positions import spread
from wds_tensorcache.storage.atomic import write_atomically
from wds_tensorcache.storage.urls import is_url, name_of
from wds_tensorcache.storage.urls import shown as shown_url

_DOCTYPE = b"<!doctype html>"
_NUM_NAMED = 10  # marked samples, in the text
_NUM_SURVEYED = 256  # samples that the server examines before it starts


@click.command("view")
@cache_argument
@click.option("-o", "--output", type=click.Path(dir_okay=False), metavar="FILE", help="Write the page to this file.")
@click.option("--serve", is_flag=True, help="Show the whole cache from a server on this machine, until Ctrl-C.")
@click.option(
    "--samples",
    type=click.IntRange(1),
    help="Samples in the file [1000]; with --serve, samples to examine before the start [256].",
)
@cache_option
@click.option("--port", type=click.IntRange(0, 65535), default=0, help="Port of the server; by default a free one.")
@click.option("--no-open", is_flag=True, help="Do not open a browser.")
@json_option
def view_command(
    path: str,
    output: str | None,
    serve: bool,
    samples: int | None,
    cache_name: str | None,
    port: int,
    no_open: bool,
    as_json: bool,
) -> int:
    """Show CACHE as a page: structure, sizes, statistics, and samples with their latents drawn as pictures.

    With -o, the page is one file that needs no network. It shows up to --samples samples at equal distances from each other.
    1,000 samples take less than 10 MB. With --serve, a server on this machine shows all samples, and reads each sample when
    the user scrolls to it.
    """
    if serve == (output is not None):
        raise click.UsageError("pass either -o FILE or --serve")
    if output is not None:
        _check_output(output)
    shown = Output(as_json)
    # a url's query may be a signature
    title = name_of(shown_url(path).rstrip("/")) if is_url(path) else os.path.basename(os.path.abspath(path))
    with open_cache(path, cache_name) as cache:
        indices = spread(len(cache), samples or (_NUM_SURVEYED if serve else 1000))
        with shown.progress("examining samples") as progress:
            survey = Survey(cache, indices, progress, for_page=True)
        report = overview(survey, title)
        if output is None:
            return _serve(PageServer(survey, report, port), shown, no_open)
        with shown.progress("drawing samples") as progress:
            report["samples"] = make_cards(survey, file_limits(survey), progress)
    page = build_page(report)
    write_atomically(output, [page])
    marked = [card["key"] for card in report["samples"] if card["marks"]]
    shown.line(f"{output}: {len(indices):,} of {report['num_samples']:,} samples, {len(page):,} bytes")
    if marked:
        names = ", ".join(marked[:_NUM_NAMED]) + ", …" * (len(marked) > _NUM_NAMED)
        count = format_count(len(marked), "sample")
        shown.line(f"marked: {count} with NaN, infinities, unusual numbers, or damage: {names}")
    shown.result(
        {
            "output": os.path.abspath(output),
            "nbytes": len(page),
            "num_samples": report["num_samples"],
            "num_shown": len(indices),
            "num_marked": len(marked),
            "marked": marked,
            "errors": {str(at): text for at, text in survey.errors.items()},
        }
    )
    for at, text in survey.errors.items():
        shown.note(f"sample {at} cannot be read: {text}")
    return 1 if survey.errors else 0


def _check_output(path: str) -> None:
    """Refuse missing folders, and existing files other than pages."""
    if not os.path.basename(path):
        raise click.UsageError(f"-o {path!r}, expected the name of a file")
    folder = os.path.dirname(os.path.abspath(path))
    if not os.path.isdir(folder):
        raise click.UsageError(f"{path}: there is no folder {folder}")
    if os.path.isfile(path):
        with open(path, "rb") as file:
            if file.read(len(_DOCTYPE)).lower() == _DOCTYPE:
                return
    if os.path.exists(path):
        raise click.UsageError(f"{path} exists and is not a page; choose another name for -o")


def _serve(server: PageServer, shown: Output, no_open: bool) -> int:
    with server:
        if shown.as_json:
            print(json.dumps({"url": server.url}))  # one line, since the command continues
        shown.line(server.url)
        sys.stdout.flush()
        shown.note("Ctrl-C ends the server. The address contains a password: pass it to no other person.")
        if not no_open and _has_display():
            webbrowser.open(server.url)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            shown.note("ended")
    return 0


def _has_display() -> bool:
    # without a display, Python might start a browser that takes over the terminal
    return sys.platform != "linux" or any(map(os.environ.get, ("DISPLAY", "WAYLAND_DISPLAY")))
