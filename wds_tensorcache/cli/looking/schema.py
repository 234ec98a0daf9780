"""`tensorcache schema`: names, dtypes and shapes."""

from __future__ import annotations

import click

from wds_tensorcache.cli.cache_argument import cache_argument, cache_option, open_cache
from wds_tensorcache.cli.output import Output, json_option
from wds_tensorcache.errors import format_count
from wds_tensorcache.inspecting.survey import tensor_record
from wds_tensorcache.inspecting.text import dtype_text, shape_text
from wds_tensorcache.reading.description import Description


@click.command("schema")
@cache_argument
@cache_option
@json_option
def schema_command(path: str, cache_name: str | None, as_json: bool) -> None:
    """Show names, dtypes and shapes of the tensors in CACHE, and types of other values.

    Tensors of all samples are counted from the indexes. Values come from at most 64 samples. No tensor is read.
    """
    output = Output(as_json)
    with open_cache(path, cache_name) as cache:
        described = cache.describe()
    values = described.values.values()
    output.result(
        {
            "num_samples": described.num_samples,
            "num_shards": described.num_shards,
            "nbytes": described.nbytes,
            "tensors": [tensor_record(tensor) for tensor in described.tensors.values()],
            "values": [
                {"name": value.name, "types": value.types, "num_samples": value.num_samples} for value in values
            ],
            "members": described.members,
            "fingerprint": described.fingerprint,
        }
    )
    show_summary(output, described)
    output.table(
        ["tensor", "dtype", "shape", "samples", "bytes"],
        [
            (
                tensor.name,
                dtype_text(tensor.dtype) + " (numpy)" * (tensor.kind == "ndarray"),
                shape_text(tensor.shape),
                f"{tensor.num_samples:,}",
                f"{tensor.nbytes:,}",
            )
            for tensor in described.tensors.values()
        ],
        right=["samples", "bytes"],
    )
    if values:
        output.line()
        rows = [(value.name, str(value), f"{value.num_samples:,}") for value in values]
        output.table(
            ["value", f"of {format_count(described.num_examined, 'sample')}", "samples"], rows, right=["samples"]
        )
    if described.members:
        output.line()
        output.table(["member", "samples"], [(f".{name}", f"{count:,}") for name, count in described.members.items()])
    for name, value in described.fingerprint.items():
        output.line(f"fingerprint {name} = {value!r:.200}", "dim")


def show_summary(output: Output, described: Description) -> None:
    counts = f"{format_count(described.num_samples, 'sample')} in {format_count(described.num_shards, 'shard')}"
    output.line(f"{counts}, {described.nbytes:,} bytes of tensors", "bold")
