"""`tensorcache cat`: one tensor, small value or member as a file."""

from __future__ import annotations

import base64
import json
import sys
from types import SimpleNamespace
from typing import Any

import click
import numpy as np
import safetensors.numpy
import safetensors.torch
import torch

import wds_tensorcache as tc
from wds_tensorcache.cli.cache_argument import (
    cache_argument,
    cache_option,
    key_argument,
    open_cache,
    sample_key,
)
from wds_tensorcache.cli.output import Output, json_option, to_json
from wds_tensorcache.codec.dtypes import dtype_name
from wds_tensorcache.codec.lazy import Lazy
from wds_tensorcache.codec.tree import flatten, repeats_much
from wds_tensorcache.errors import unknown_name
from wds_tensorcache.inspecting.tree import small_values
from wds_tensorcache.inspecting.values import as_numbers, read_parts


@click.command("cat")
@cache_argument
@key_argument
@click.argument("name", metavar="[NAME]", required=False)
@click.option(
    "--as",
    "form",
    type=click.Choice(["npy", "safetensors", "raw"]),
    default="npy",
    show_default=True,
    help="Format of the file; raw is the bytes of the elements, in C order, little-endian.",
)
@click.option("--member", metavar="SUFFIX", help="Write the member KEY.SUFFIX, such as jpg, instead of a value.")
@cache_option
@json_option
def cat_command(
    path: str, key: str, name: str | None, form: str, member: str | None, cache_name: str | None, as_json: bool
) -> None:
    """Write the tensor or small value NAME of the sample KEY in CACHE to stdout, as in `cat CACHE KEY NAME > x.npy`.

    numpy has no bfloat16 and no float8; write these dtypes with --as safetensors. Strings and bytes are written unchanged,
    and other small values as JSON. Binary content is not written to a terminal. With --json, a tensor becomes nested arrays
    of numbers, and a member becomes base64.
    """
    if (name is None) == (member is None):
        raise click.UsageError("expected either the NAME of a tensor or small value, or --member")
    output = Output(as_json)
    with open_cache(path, cache_name) as cache:
        key = sample_key(cache, key)
        if member is not None:
            (content,) = cache.read_members([key], member)
            output.result({"key": key, "member": member, "base64": base64.b64encode(content).decode()})
            if not as_json:
                _open_stdout(_is_text(content)).write(content)
            return
        sample = cache[key]
        values = dict(small_values(sample))
        if name in values:
            if repeats_much(values[name]):
                raise click.UsageError(f"{name!r:.100} contains itself, or one object too often for JSON; use Python")
            output.result({"key": key, "name": name, "value": values[name]})
            if not as_json:
                _write_value(values[name])
            return
        tensors = flatten(sample)
        if name not in tensors:
            raise KeyError(f"sample {key!r}: {unknown_name('tensor or small value', name, [*tensors, *values])}")
        lazy: Lazy = tensors[name]
        try:
            if as_json:
                output.result(_as_json(key, lazy))
            else:
                _write(lazy, form)
        except tc.TensorCacheError as exc:
            raise exc.at(f"sample {key!r}") from exc


def _write_value(value: Any) -> None:
    content = value.encode("utf-8", "surrogatepass") if isinstance(value, str) else value
    if not isinstance(value, (str, bytes, bytearray)):
        content = json.dumps(to_json(value)).encode()
    _open_stdout(_is_text(content)).write(content)


def _write(lazy: Lazy, form: str) -> None:
    stdout = _open_stdout()
    if form == "raw":
        for buffer, _ in read_parts(lazy):
            stdout.write(buffer)
        return
    value = lazy.load()
    if form == "safetensors":
        save: Any = safetensors.torch.save if isinstance(value, torch.Tensor) else safetensors.numpy.save
        try:
            content = save({lazy.name: value})
        except (KeyError, TypeError, ValueError, safetensors.SafetensorError) as exc:
            raise click.UsageError(f"safetensors cannot store {_dtype(lazy)}; use --as raw, or --json") from exc
        stdout.write(content)
        return
    array = value
    if isinstance(value, torch.Tensor):
        try:
            array = value.numpy()
        except TypeError as exc:
            raise click.UsageError(f"numpy has no {_dtype(lazy)}; use --as safetensors") from exc
    # a pipe has no position, which numpy needs for an ordinary file
    np.lib.format.write_array(SimpleNamespace(write=stdout.write), array, allow_pickle=False)


def _as_json(key: str, lazy: Lazy) -> dict[str, Any]:
    value = lazy.load()
    numbers = value if isinstance(value, np.ndarray) and value.dtype.kind in "USMm" else as_numbers(value)
    if numbers is None:
        raise click.UsageError(f"{_dtype(lazy)} has no numbers for JSON; use --as raw")
    values = numbers.astype(str) if numbers.dtype.kind in "Mm" else numbers
    values = np.char.decode(values, "latin-1") if values.dtype.kind == "S" else values
    return {"key": key, "name": lazy.name, "dtype": _dtype(lazy), "shape": tuple(lazy.shape), "values": values.tolist()}


def _dtype(lazy: Lazy) -> str:
    return dtype_name(lazy.dtype)


def _is_text(content: bytes) -> bool:
    try:
        return content.decode().replace("\n", "").replace("\t", "").isprintable()
    except UnicodeDecodeError:
        return False


def _open_stdout(is_text: bool = False) -> Any:
    if sys.stdout.isatty() and not is_text:
        raise click.UsageError("this is binary: redirect it to a file, as in `> FILE`")
    return sys.stdout.buffer
