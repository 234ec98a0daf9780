"""`read_ray`: a cache as a dataset of Ray."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np
import ray.data

from wds_tensorcache.arguments import check_options
from wds_tensorcache.ray.datasource import TensorCacheDatasource, Plan
from wds_tensorcache.reading.cache import TensorCache
from wds_tensorcache.reading.choose import Alternatives, Choose, Randomness
from wds_tensorcache.reading.join import JoinedCache
from wds_tensorcache.reading.open_cache import open
from wds_tensorcache.reading.positions import by_shard, spread

if TYPE_CHECKING:
    from wds_tensorcache.codec.header import Layout

Array = np.ndarray[Any, Any]
_NUM_EXAMINED = 64  # samples whose small values determine the types of columns


def read_ray(
    source: Any,
    select: str | Iterable[str] | None = None,
    choose: Choose | None = None,
    *,
    exact: bool = False,
    values: bool = True,
    seed: int = 0,
    epoch: int = 0,
    override_num_blocks: int | None = None,
    concurrency: int | None = None,
    ray_remote_args: dict[str, Any] | None = None,
    **options: Any,
) -> Any:
    """Return a cache as a `ray.data.Dataset` with one row for each sample.

    A row has the column `__key__`, and a column for each tensor, by its name in `tc.flatten`. Each small value has a column
    named by its path, such as `cond.0.prompt`. The column `__tensorcache__` has their types. Members outside the cache, such as
    pictures, are columns of bytes, named by a dot and the suffix: `.jpg`.

    Tensors are columns of one shape, or ragged columns if shapes differ or some samples lack the tensor. A missing tensor is
    null, and an empty array in batches of numpy and pandas. bfloat16 is uint16 and an 8-bit float is uint8, bit for bit;
    `ray_collate` gives batches of torch. Complex numbers have a last dimension of 2, and texts one of bytes or code points.
    Small values are columns of text, bools, 64-bit ints, floats or bytes. Anything else, also a tensor whose dtype or number of
    dimensions differs, is a column of Python objects.

    With `exact=True`, a row has the whole sample in two columns of bytes in place of the columns of tensors and values.
    `ray_sample(row)` returns the nested sample, and `write_ray` writes it, bit for bit.

    Read tasks are ranges of consecutive samples with about equal bytes. Columns that `ds.select_columns` drops right after
    reading are not read. Ray gives the blocks in the order in which tasks end, unless you set its `preserve_order`.

    Args:
        source: Anything that `tc.open` takes, or an open cache or view, whose samples and tensors are read.
        select: Names or patterns of tensors to read, as in `Cache.select`; by default all.
        choose: Tensors or values that are alternatives of each other, as in `Cache.read_batch`; one is chosen at random.
        exact: Read whole samples, to filter and copy them, or to change them as nested samples.
        values: False leaves out the columns of small values.
        seed, epoch: Determine which alternatives are chosen. The choice does not depend on the number of tasks.
        override_num_blocks, concurrency, ray_remote_args: As for `ray.data.read_datasource`.
        options: Options of `tc.open`, if `source` is not an open cache.

    Raises:
        KeyError: A pattern matches no tensor's name.
        BatchError: A name in `choose` matches no tensor and no value.
        TypeError: An option is unknown, or `source` is a JoinedCache or a SharedDataset.
        Exception: `tc.open` raised it.

    Cost: loads the index of every shard on the driver, and at most 64 skeletons; no tensor and no member is read. Each read
        task opens the cache on its own node, so all nodes need the same paths, or urls.
    """
    cache = _open(source, options)
    if select is not None:
        cache = cache.select(select)
    alternatives = Alternatives.for_caches(choose, [cache])
    plan = Plan(
        cache.schema if alternatives is None else alternatives.schema_of(cache.schema),
        len(cache),
        {},
        exact,
        values,
        tuple(cache.members),
        bool(cache.fingerprint),
        Randomness(seed, epoch, alternatives),
        tuple(options.get("allow", ())),
    )
    if values and not exact and len(cache):
        plan = plan.with_value_kinds(cache, np.array(list(spread(len(cache), _NUM_EXAMINED)), np.int64))
    return ray.data.read_datasource(
        TensorCacheDatasource(cache, _nbytes(cache, alternatives), plan),
        override_num_blocks=override_num_blocks,
        concurrency=concurrency,
        ray_remote_args=ray_remote_args,
    )


def _open(source: Any, options: dict[str, Any]) -> TensorCache[Any]:
    if isinstance(source, TensorCache):
        if options:
            raise TypeError(
                f"{next(iter(options))}= is an option of tc.open, but the cache is already open; leave it out"
            )
        return source
    if hasattr(source, "read_batch"):
        problem = f"source is a {type(source).__name__}, expected what tc.open takes, or the cache that it returns"
        remedy = "write its samples into one cache with tc.ShardWriter: writer.write(key, tc.realize(source[key]))"
        if isinstance(source, JoinedCache):
            remedy += "; or read each of its caches, and join the datasets with Dataset.join(…, on=('__key__',))"
        raise TypeError(f"{problem}; {remedy}")
    check_options(read_ray, options, [name for name in inspect.signature(open).parameters if name != "source"])
    return open(source, **options)


def _nbytes(cache: TensorCache[Any], alternatives: Alternatives | None) -> Array:
    """Return the bytes that a task reads of each sample, int64 `[N]`. Alternatives count as their average."""
    nbytes = np.zeros(len(cache), np.int64)
    for shard, which, rows in by_shard(cache._store, cache._where):
        layouts, numbers = shard.layouts_of(rows)
        sizes = [_layout_nbytes(layout, cache._wanted or (lambda name: True), alternatives) for layout in layouts]
        nbytes[which] = np.array(sizes, np.int64)[numbers]
        for suffix, members in shard.index.members.items():
            at = shard.find_members(rows, suffix)
            nbytes[which] += np.where(at >= 0, members.nbytes[at], 0).astype(np.int64)
    return nbytes


def _layout_nbytes(layout: Layout, wanted: Any, alternatives: Alternatives | None) -> int:
    sizes = {name: tensor.end - tensor.begin for name, tensor in layout.tensors.items() if wanted(name)}
    return sum(sizes.values()) if alternatives is None else alternatives.chosen_nbytes(sizes)
