"""Rows and batches of Ray as samples and torch tensors, and samples as a block of Ray."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from wds_tensorcache.codec.lazy import Lazy
from wds_tensorcache.codec.sample import decode_sample, encode_sample
from wds_tensorcache.codec.tree import flatten, rebuild
from wds_tensorcache.ray.need_ray import need_ray
from wds_tensorcache.ray.rows.bits import to_bits
from wds_tensorcache.ray.rows.restore import plain_sample, restore_sample
from wds_tensorcache.ray.rows.structure import STRUCTURE, parse_structure
from wds_tensorcache.shards.names import NamedKey

if TYPE_CHECKING:
    from wds_tensorcache.ray.rows.columns import Kind


def ray_sample(row: Mapping[str, Any], *, allow: Iterable[type] = ()) -> Any:
    """Return the nested sample of one row of a dataset that `read_ray` made.

    Tensors have their own dtypes again, for example bfloat16, and small values their own types. A tensor is left out if its
    column is null or was dropped. Changed columns replace values of the sample, and new columns become new items of it. A row
    of any other dataset becomes a dict, nested at the dots of the names of its columns. Columns of members, such as `.jpg`, are
    left out.

    Args:
        row: Values by column, as `ds.take`, `ds.iter_rows` and functions of `ds.map` have them.
        allow: Classes that samples may contain beyond those of the format.

    Raises:
        ImportError: Ray is not installed.
        FormatError: `read_ray` did not make the bytes in the column `__tensorcache__`.
        EncodeError: Two columns have one place in the sample.
        UnsafeSkeletonError: The sample contains a class that is not in `allow`.

    Memory: tensors are newly allocated, on the CPU.
    """
    need_ray()
    from wds_tensorcache.ray.rows.columns import column_values

    row = {name: column_values([value])[0] for name, value in row.items()}
    raw = row.get(STRUCTURE)
    sample = plain_sample(row) if raw is None else restore_sample(parse_structure(raw), row, allow=allow)
    return _owned(sample)


def _owned(sample: Any) -> Any:
    def copy(leaf: Any) -> Any:
        if isinstance(leaf, Lazy):
            return leaf.load()
        return leaf.clone() if isinstance(leaf, torch.Tensor) else leaf.copy()

    return rebuild(sample, copy)


def ray_collate(*, dtypes: Mapping[str, torch.dtype] | None = None) -> Any:
    """Return a collate function for `ds.iter_torch_batches`, which gives batches bfloat16 and other dtypes of torch.

    Batches are those of `ray_to_torch`. Ray moves them to a device only if all their columns are tensors: select such
    columns first, or move the tensors yourself.

    Args:
        dtypes: As for `ray_to_torch`.

    Raises:
        ImportError: Ray is not installed.
    """
    need_ray()
    from wds_tensorcache.ray.tasks.collate import TorchCollate

    return TorchCollate(dtypes)


def ray_to_torch(batch: Any, *, dtypes: Mapping[str, torch.dtype] | None = None) -> dict[str, Any]:
    """Return the columns of a batch as torch tensors, in functions of `ds.map_batches` for example.

    Args:
        batch: Batch of a dataset that `read_ray` made, in any of Ray's formats: numpy, pandas or pyarrow.
        dtypes: Dtypes of tensors by column, for batches without the column `__tensorcache__`, which records them.

    Returns:
        By column: a tensor `[B, …]` of the stored dtype, for example bfloat16, if the shapes agree; else a list of B tensors,
        with None where a sample lacks the tensor. Numbers are a tensor `[B]`, other values a list. Arrays of texts and dates
        stay arrays of numpy. The column `__tensorcache__` is left out.

    Raises:
        ImportError: Ray is not installed.
        FormatError: `read_ray` did not make the bytes in the column `__tensorcache__`.
        TypeError: `batch` has none of these formats.

    Memory: tensors are newly allocated, on the CPU.
    """
    need_ray()
    from wds_tensorcache.ray.rows.torch_columns import to_torch

    return to_torch(batch, dtypes or {})


def ray_from_torch(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Return tensors as columns of a batch, such as a function of `ds.map_batches` returns; the inverse of `ray_to_torch`.

    Args:
        tensors: By column: a tensor `[B, …]` of any dtype, or a list of B tensors. Other values stay as they are.

    Returns:
        By column: an array of numpy `[B, …]`, or a list of B arrays. bfloat16 is uint16 with the same bits, and all other
        dtypes are as in the columns of `read_ray`.

    Raises:
        ValueError: The format cannot store a dtype.

    Memory: aliases tensors on the CPU; those on a GPU are copied.
    """
    return {name: _as_column(value) for name, value in tensors.items()}


def _as_column(value: Any) -> Any:
    if isinstance(value, list):
        return [_as_column(each) for each in value]
    return to_bits(value.detach().cpu()) if isinstance(value, torch.Tensor) else value


def ray_table(
    keys: Sequence[str],
    samples: Sequence[Any],
    *,
    optional: Iterable[str] = (),
    values: bool = True,
    allow: Iterable[type] = (),
) -> Any:
    """Return a block of a dataset, a `pyarrow.Table`, with one row for each nested sample.

    Return it from a function of `ds.map_batches` to hand tensors of any dtype to `write_ray`. The columns are those of
    `read_ray`.

    Args:
        keys: Key of each sample.
        samples: Nested samples, of torch tensors, numpy arrays and other values.
        optional: Names of tensors that samples of other blocks may lack. Ray does not combine a block with nulls in a column
            of tensors with a block that has none, unless both know that the tensor is optional.
        values: False leaves out the columns of small values.
        allow: Classes that samples may contain beyond those of the format.

    Raises:
        ImportError: Ray is not installed.
        EncodeError: A value cannot be stored, or a tensor is called `__key__` or `__tensorcache__`.
        ValueError: The numbers of keys and samples differ.

    Memory: tensors are copied.
    """
    need_ray()
    allow = tuple(allow)
    if len(keys) != len(samples):
        raise ValueError(f"{len(keys)} keys for {len(samples)} samples, expected one key for each sample")
    from wds_tensorcache.ray.rows.table import make_table

    lazy = [decode_sample(*encode_sample(sample, allow=allow), allow=allow) for sample in samples]
    tensors: dict[str, list[Any]] = {}
    for at, sample in enumerate(lazy):
        for name, value in flatten(sample).items():
            tensors.setdefault(name, [None] * len(lazy))[at] = to_bits(value)
    kinds: dict[str, Kind] = dict.fromkeys(optional, "object")
    originals = [key.original if isinstance(key, NamedKey) else None for key in keys]
    return make_table(list(keys), lazy, tensors, kinds, {}, has_values=values, originals=originals, allow=allow)
