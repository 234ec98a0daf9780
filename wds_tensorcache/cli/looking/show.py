"""`tensorcache show`: one sample as a tree, or one tensor in full."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import click
import numpy as np
from rich.console import Group
from rich.text import Text
from rich.tree import Tree

import wds_tensorcache as tc
from wds_tensorcache.cli.cache_argument import (
    cache_argument,
    cache_option,
    key_argument,
    open_cache,
    sample_key,
)
from wds_tensorcache.cli.looking.marks import heat_map, is_unicode, sparkline, values_text
from wds_tensorcache.cli.output import Output, json_option
from wds_tensorcache.codec.dtypes import dtype_name
from wds_tensorcache.codec.lazy import Lazy
from wds_tensorcache.codec.tree import flatten
from wds_tensorcache.errors import plain, unknown_name
from wds_tensorcache.inspecting.plane import find_planes
from wds_tensorcache.inspecting.survey import stored_nbytes
from wds_tensorcache.inspecting.text import number_text, tensor_text
from wds_tensorcache.inspecting.tree import Node, describe_samples
from wds_tensorcache.inspecting.values import ValueSample, ValueStatistics, as_numbers, measure
from wds_tensorcache.reading.description import value_text

_NUM_MEASURED = 200  # tensors of a sample
_NUM_DRAWN, _NUM_PLANES = 8, 16
_MEMBER_CHARS = 200
_MAX_NBYTES_PRINTED = 1 << 28
_MAX_NBYTES_QUOTED = 1 << 12  # of texts and dates


@click.command("show")
@cache_argument
@key_argument
@click.option("--tensor", metavar="NAME", help="Show only this tensor, in full.")
@click.option(
    "--heat-map/--no-heat-map", "maps", default=None, help="Draw tensors; by default, if stdout is a terminal."
)
@cache_option
@json_option
def show_command(
    path: str, key: str, tensor: str | None, maps: bool | None, cache_name: str | None, as_json: bool
) -> None:
    """Show the sample KEY in CACHE: its structure, values, tensors and other members.

    A heat map shows one plane of a tensor, such as the first channel of a latent or of a video's middle frame: dark for
    low values, bright for high values, red for NaN and infinity. Colors range over [0, 1] or [-1, 1] if the values fill
    it, otherwise from the 1st to the 99th percentile. Use --tensor to show more planes.
    """
    output = Output(as_json)
    maps = output.is_terminal if maps is None else maps
    with open_cache(path, cache_name) as cache:
        key = sample_key(cache, key)
        sample = cache[key]
        if tensor is None:
            _show_sample(output, cache, key, sample, maps)
        elif tensor in (tensors := flatten(sample)):
            _show_tensor(output, key, tensors[tensor], maps)
        else:
            raise KeyError(f"sample {key!r}: {unknown_name('tensor', tensor, tensors)}")


def _show_sample(output: Output, cache: tc.TensorCache, key: str, sample: Any, maps: bool) -> None:
    root, tensors = describe_samples([sample]), flatten(sample)
    measured = {name: _measure(key, lazy) for name, lazy in list(tensors.items())[:_NUM_MEASURED]}
    members = {suffix: cache.read_members([key], suffix)[0] for suffix in cache[[key]].members}
    nbytes = stored_nbytes(tensors)
    output.result(
        {
            "key": key,
            "nbytes": nbytes,
            "structure": root,
            "tensors": [
                {"name": name, "text": tensor_text(lazy), "nbytes": lazy.nbytes, "values": measured.get(name)}
                for name, lazy in tensors.items()
            ],
            "members": {suffix: {"nbytes": len(content)} for suffix, content in members.items()},
        }
    )
    if output.as_json:
        return
    name = cache._name_at(cache._find(key), key)
    title = Text().append(f"sample {plain(repr(key))}", "bold")
    title.append(f" ({plain(name)})" if name not in (None, key) else "").append(f"  {nbytes:,} bytes of tensors")
    tree = Tree(title, guide_style="dim")
    drawn = list(tensors)[: _NUM_DRAWN * maps]

    def grow(tree: Tree, nodes: Iterable[Node]) -> None:
        for node in nodes:
            label = Text().append(f"{plain(node.name)}  " if node.name else "", "bold")
            if node.tensor in tensors:
                lazy, values = tensors[node.tensor], measured.get(node.tensor)
                tree.add(Group(*_tensor_lines(output, label, lazy, values, node.tensor in drawn)))
            else:
                style = {"value": "", "tensor": "cyan", "ndarray": "cyan"}.get(node.kind, "dim")
                grow(tree.add(label.append(plain(node.text), style)), node.children)

    grow(tree, root.children or (root,))
    output.show(tree)
    for suffix, content in members.items():
        output.line(f"member .{suffix}: {len(content):,} bytes{_preview(content)}")


def _tensor_lines(
    output: Output, label: Text, lazy: Lazy, values: ValueStatistics | None, is_drawn: bool
) -> list[Text]:
    label.append(plain(tensor_text(lazy)), "cyan").append(" (numpy)" * (lazy._reference.kind == "ndarray"), "dim")
    if values is not None:
        label.append("  ").append_text(values_text(values))
    elif getattr(lazy.dtype, "kind", "") in ("U", "S", "M", "m") and lazy.nbytes <= _MAX_NBYTES_QUOTED:
        array: Any = lazy.load()
        printable = array.astype(str) if array.dtype.kind in "Mm" else array
        label.append(f"  {plain(value_text(printable.tolist()))}")
    planes = find_planes(lazy.name, lazy.dtype, lazy.shape) if is_drawn else None
    if planes is None:
        return [label]
    width = min(48, max(8, output.console.width - 16))
    return [label, *heat_map(planes.load(lazy, 1), output.console, width, 8)]


def _measure(key: str, lazy: Lazy) -> ValueStatistics | None:
    numbers = ValueSample()
    try:
        values = measure(lazy, numbers)
    except tc.TensorCacheError as exc:
        raise exc.at(f"sample {key!r}") from exc
    if values is not None:
        values.histogram = numbers.make_histogram()
    return values


def _preview(content: bytes) -> str:
    try:
        text = content.decode()
    except UnicodeDecodeError:
        return ""
    return f": {text[:_MEMBER_CHARS].strip()}{'…' * (len(text) > _MEMBER_CHARS)}"


def _show_tensor(output: Output, key: str, lazy: Lazy, maps: bool) -> None:
    values = _measure(key, lazy)
    output.result(
        {
            "key": key,
            "name": lazy.name,
            "kind": lazy._reference.kind,
            "dtype": dtype_name(lazy.dtype),
            "shape": tuple(lazy.shape),
            "nbytes": lazy.nbytes,
            "values": values,
        }
    )
    if output.as_json:
        return
    numpy = " (numpy)" if lazy._reference.kind == "ndarray" else ""
    output.line(f"{lazy.name}  {tensor_text(lazy)}{numpy}  {lazy.nbytes:,} bytes", "bold")
    if values is not None:
        counts = {"values": values.num_values, "zeros": values.num_zero, "NaN": values.num_nan, "Inf": values.num_inf}
        rows = [("min", repr(values.min)), ("max", repr(values.max))]
        rows += [("mean", number_text(values.mean)), ("std", number_text(values.std))]
        rows += [(name, f"{count:,}") for name, count in counts.items()]
        if values.histogram is not None and is_unicode(output.console):
            rows.append(("histogram", sparkline(values.histogram)))
        output.table(["", ""], rows)
    if maps:
        _show_maps(output, lazy)
    if lazy.nbytes <= _MAX_NBYTES_PRINTED:
        value = lazy.load()
        array = value if isinstance(value, np.ndarray) else as_numbers(value)
        if array is not None:
            output.text(
                np.array2string(array, threshold=200, precision=4, max_line_width=min(output.console.width, 128))
            )


def _show_maps(output: Output, lazy: Lazy) -> None:
    planes = find_planes(lazy.name, lazy.dtype, lazy.shape)
    if planes is None:
        return
    width = output.console.width
    size = min(32, max(8, width - 2))
    loaded = planes.load(lazy, _NUM_PLANES)
    if len(loaded) == 1:
        maps = [heat_map(loaded, output.console, min(width - 2, 128), 24)]
    else:
        maps = [heat_map(plane[None], output.console, size, size // 2) for plane in loaded]
        output.line(f"the first {len(maps):,} of {planes.count:,} planes")
    columns = max(1, width // (size + 2))
    for begin in range(0, len(maps), columns):
        for lines in zip(*maps[begin : begin + columns], strict=True):
            output.console.print(Text("  ").join(lines), soft_wrap=True)
        output.line()
