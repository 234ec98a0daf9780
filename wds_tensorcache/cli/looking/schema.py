"""`tensorcache schema`: names, dtypes and shapes."""

from __future__ import annotations

from typing import Any

import click

from wds_tensorcache.cli.cache_argument import cache_argument, cache_option, open_cache
from wds_tensorcache.cli.output import Output, json_option, plain
from wds_tensorcache.codec.dtypes import dtype_name
from wds_tensorcache.errors import format_count
from wds_tensorcache.inspecting.tree import short_dtype
from wds_tensorcache.reading.description import TensorDescription


@click.command("schema")
@cache_argument
@cache_option
@json_option
def schema_command(path: str, cache_name: str | None, as_json: bool) -> None:
    """Show names, dtypes and shapes of the tensors in CACHE, and types of other values.

    Tensors of all samples are counted in the indexes; values are those of at most 64 samples. No tensor is read.
    """
    output = Output(as_json)
    with open_cache(path, cache_name) as cache:
        found = cache.describe()
    output.result(
        {
            "num_samples": found.num_samples,
            "num_shards": found.num_shards,
            "nbytes": found.nbytes,
            "tensors": [_record(each) for each in found.tensors.values()],
            "values": [
                {"name": each.name, "types": each.types, "num_samples": each.num_samples}
                for each in found.values.values()
            ],
            "members": found.members,
            "fingerprint": found.fingerprint,
        }
    )
    output.line(
        f"{format_count(found.num_samples, 'sample')} in {format_count(found.num_shards, 'shard')}, "
        f"{found.nbytes:,} bytes of tensors",
        "bold",
    )
    output.table(
        ["tensor", "dtype", "shape", "samples", "bytes"],
        [
            (
                each.name,
                "/".join(map(short_dtype, _dtypes(each))) + ("" if each.kind == "tensor" else " (numpy)"),
                shape_text(each.shape),
                f"{each.num_samples:,}",
                f"{each.nbytes:,}",
            )
            for each in found.tensors.values()
        ],
        right=["samples", "bytes"],
    )
    if found.values:
        output.line()
        output.table(
            ["value", f"of {found.num_examined:,} samples", "samples"],
            [(each.name, str(each), f"{each.num_samples:,}") for each in found.values.values()],
            right=["samples"],
        )
    if found.members:
        output.line()
        output.table(["member", "samples"], [(f".{suffix}", f"{count:,}") for suffix, count in found.members.items()])
    for name, value in found.fingerprint.items():
        output.line(f"fingerprint {plain(name)} = {plain(f'{value!r:.200}')}", "dim")


def shape_text(shape: tuple[Any, ...] | None) -> str:
    """Return a shape as text, for example `[3..7, 16]`; `[…]` if samples differ in their number of dimensions."""
    if shape is None:
        return "[…]"
    return f"[{', '.join('..'.join(map(str, size)) if isinstance(size, tuple) else str(size) for size in shape)}]"


def _dtypes(described: TensorDescription) -> tuple[Any, ...]:
    return described.dtype if isinstance(described.dtype, tuple) else (described.dtype,)


def _record(described: TensorDescription) -> dict[str, Any]:
    return {
        "name": described.name,
        "kind": described.kind,
        "dtypes": [dtype_name(dtype) for dtype in _dtypes(described)],
        "shape": described.shape,
        "num_samples": described.num_samples,
        "nbytes": described.nbytes,
        "num_shapes": described.num_shapes,
        "shapes": [{"shape": shape, "num_samples": count} for shape, count in described.shapes.items()],
    }
