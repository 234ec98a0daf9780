"""`read_ray`: a cache as a dataset of Ray."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from wds_tensorcache.arguments import check_options
from wds_tensorcache.ray.need_ray import need_ray
from wds_tensorcache.ray.rows.bits import to_bits
from wds_tensorcache.reading.cache import TensorCache
from wds_tensorcache.reading.choose import Alternatives, Choose, Randomness
from wds_tensorcache.reading.join import JoinedCache
from wds_tensorcache.reading.open_cache import open
from wds_tensorcache.reading.positions import by_shard, spread
from wds_tensorcache.reading.schema import TensorSchema

if TYPE_CHECKING:
    from wds_tensorcache.codec.header import Layout
    from wds_tensorcache.ray.rows.columns import Kind

Array = np.ndarray[Any, Any]
_NUM_EXAMINED = 64  # samples whose small values determine the types of columns


def read_ray(
    source: Any,
    select: str | Iterable[str] | None = None,
    choose: Choose | None = None,
    *,
    values: bool = True,
    seed: int = 0,
    epoch: int = 0,
    override_num_blocks: int | None = None,
    concurrency: int | None = None,
    ray_remote_args: dict[str, Any] | None = None,
    **options: Any,
) -> Any:
    """Return a cache as a `ray.data.Dataset` with one row for each sample.

    A row has the column `__key__`, a column for each tensor, by its name in `tc.flatten`, and a column for each small value, by
    its path, such as `cond.0.prompt`. `tc.ray.ray_sample(row)` rebuilds the nested sample, from the column `__tensorcache__`.

    The columns of tensors have Ray's tensor types: of one shape, or ragged if shapes differ. bfloat16 is uint16 and an 8-bit
    float is uint8, bit for bit; `ds.iter_torch_batches(collate_fn=ray_collate())` gives tensors of bfloat16. Complex numbers
    have a last dimension of 2, and texts one of bytes or code points. If some samples lack a tensor, the
    column is ragged, and null there; batches of numpy and pandas have an empty array in place of null. If a tensor's number of
    dimensions or dtype differs, the column consists of Python objects.

    Small values of one type are columns of text, bools, 64-bit ints, floats or bytes; any other column consists of Python
    objects. Members outside the cache, such as pictures, are columns of bytes, named by a dot and the suffix: `.jpg`.

    Read tasks are ranges of consecutive samples with about equal bytes. Columns that `ds.select_columns` drops right after
    reading are not read. Ray gives the blocks in the order in which tasks end, unless you set its `preserve_order`.

    Args:
        source: Anything that `tc.open` takes, or an open cache or view, whose samples and tensors are read.
        select: Names or patterns of tensors to read, as in `Cache.select`; by default all.
        choose: Tensors or values that are alternatives of each other, as in `Cache.read_batch`; one is chosen at random.
        values: False leaves out the columns of small values. They are part of `__tensorcache__` in any case.
        seed, epoch: Determine which alternatives are chosen. The choice does not depend on the number of tasks.
        override_num_blocks, concurrency, ray_remote_args: As for `ray.data.read_datasource`: number of read tasks, how many
            run at the same time, and options of their `ray.remote`.
        options: Options of `tc.open`, if `source` is not an open cache.

    Raises:
        ImportError: Ray is not installed.
        KeyError: A pattern matches no tensor's name.
        BatchError: A name in `choose` matches no tensor and no value.
        TypeError: An option is unknown, or `source` is a JoinedCache or a SharedDataset.
        Exception: `tc.open` raised it.

    Cost: loads the index of every shard on the driver, and at most 64 skeletons; no tensor and no member is read. Each read
        task opens the cache on its own node, so all nodes need the same paths, or urls.
    """
    need_ray()
    import ray

    from wds_tensorcache.ray.tasks.datasource import CacheDatasource, Plan

    if isinstance(source, TensorCache):
        if options:
            raise TypeError(
                f"{next(iter(options))}= is an option of tc.open, but the cache is already open; leave it out"
            )
        cache: TensorCache[Any] = source
    elif hasattr(source, "read_batch"):
        what = f"source is a {type(source).__name__}, expected what tc.open takes, or the cache that it returns"
        remedy = "write its samples into one cache with tc.ShardWriter: writer.write(key, tc.realize(source[key]))"
        if isinstance(source, JoinedCache):
            remedy += "; or read each of its caches, and join the datasets with Dataset.join(…, on=('__key__',))"
        raise TypeError(f"{what}; {remedy}")
    else:
        check_options(read_ray, options, [name for name in inspect.signature(open).parameters if name != "source"])
        cache = open(source, **options)
    if select is not None:
        cache = cache.select(select)
    alternatives = Alternatives.for_caches(choose, [cache])
    schema = cache.schema if alternatives is None else alternatives.schema_of(cache.schema)
    numbers = list(spread(len(cache), _NUM_EXAMINED))
    plan = Plan(
        {name: _kind(tensor, len(cache)) for name, tensor in schema.items()},
        {name: array for name, tensor in schema.items() if (array := _absent(tensor)) is not None},
        tuple(name for name, tensor in schema.items() if isinstance(tensor.dtype, tuple)),
        {},
        values,
        tuple(cache.members),
        bool(cache.fingerprint),
        Randomness(seed, epoch, alternatives),
        tuple(options.get("allow", ())),
    )
    plan = plan.with_value_kinds(cache, np.array(numbers, np.int64)) if values and numbers else plan
    datasource = CacheDatasource(cache, _nbytes(cache, alternatives), plan)
    arguments: dict[str, Any] = {"override_num_blocks": override_num_blocks, "concurrency": concurrency}
    # newer versions of Ray take more of these options by name, and warn if `ray_remote_args` has them
    named = inspect.signature(ray.data.read_datasource).parameters.keys() & (ray_remote_args or {}).keys()
    rest = {name: value for name, value in (ray_remote_args or {}).items() if name not in named}
    arguments |= {name: value for name, value in (ray_remote_args or {}).items() if name in named}
    return ray.data.read_datasource(datasource, **arguments, **({"ray_remote_args": rest} if rest else {}))


def _kind(tensor: TensorSchema, count: int) -> Kind:
    if tensor.shape is None or isinstance(tensor.dtype, tuple):
        return "object"
    if tensor.num_samples < count:
        return "object" if _absent(tensor) is None else "optional"
    return "ragged" if any(isinstance(size, tuple) for size in tensor.shape) else "fixed"


def _absent(tensor: TensorSchema) -> Array | None:
    """Return what a ragged column has in place of a tensor that a sample lacks; None if the column cannot be ragged."""
    if tensor.shape is None or isinstance(tensor.dtype, tuple):
        return None
    shape = (0,) * len(tensor.shape)
    dtype = tensor.dtype
    bits = to_bits(torch.empty(shape, dtype=dtype) if isinstance(dtype, torch.dtype) else np.empty(shape, dtype))
    return bits if shape else None


def _nbytes(cache: TensorCache[Any], alternatives: Alternatives | None) -> Array:
    """Return the bytes of each sample that a task reads, int64 `[N]`: of members and tensors; of the average alternative."""
    found = np.zeros(len(cache), np.int64)
    for shard, which, rows in by_shard(cache._store, cache._where):
        layouts, numbers = shard.layouts_of(rows)
        sizes = [_layout_nbytes(layout, cache._wanted or (lambda name: True), alternatives) for layout in layouts]
        found[which] = np.array(sizes, np.int64)[numbers]
        for suffix, members in shard.index.members.items():
            at = shard.find_members(rows, suffix)
            found[which] += np.where(at >= 0, members.nbytes[at], 0).astype(np.int64)
    return found


def _layout_nbytes(layout: Layout, wanted: Any, alternatives: Alternatives | None) -> int:
    sizes = {name: tensor.end - tensor.begin for name, tensor in layout.tensors.items() if wanted(name)}
    return sum(sizes.values()) if alternatives is None else alternatives.chosen_nbytes(sizes)
