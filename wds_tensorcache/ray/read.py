"""`read_ray`: a cache as a dataset of Ray. A read task reads a range of samples in batches."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from itertools import chain, pairwise
from typing import Any

import numpy as np
import pyarrow as pa
import ray.data
from ray.data import Datasource
from ray.data.block import BlockMetadata
from ray.data.datasource import ReadTask
from ray.data.extensions import ArrowPythonObjectType

from wds_tensorcache.arguments import check_options
from wds_tensorcache.codec.lazy import Lazy
from wds_tensorcache.codec.tree import flatten, rebuild
from wds_tensorcache.errors import BatchError, EncodeError, unknown_name
from wds_tensorcache.ray.columns import Kind, carry, is_in_arrow, tensor_column, value_column, value_kind
from wds_tensorcache.ray.rows import KEY, MARK, MEMBER, RESERVED, Mark, describe_sample, exact_columns
from wds_tensorcache.reading.cache import Cache, TensorCache
from wds_tensorcache.reading.choose import Alternatives, Choose, Randomness
from wds_tensorcache.reading.collate import TENSOR_WAYS
from wds_tensorcache.reading.open_cache import open
from wds_tensorcache.reading.positions import by_shard, spread
from wds_tensorcache.reading.schema import TensorSchema
from wds_tensorcache.storage.threads import computed_once

Array = np.ndarray[Any, Any]
_NUM_EXAMINED = 64  # samples whose small values determine the types of columns
_MAX_ROWS = 4096
_BLOCK_NBYTES = 32 << 20


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
    named by its path, such as `cond.0.prompt`. The column `__tensorcache__` records the types of tensors and values. Members
    outside the cache, such as pictures, are columns of bytes, named by a dot and the suffix: `.jpg`.

    Tensors are columns of one shape, or ragged columns if shapes differ or some samples lack the tensor. A missing tensor is
    null, and an empty array in batches of numpy and pandas. bfloat16 is uint16 and an 8-bit float is uint8, bit for bit.
    Complex numbers get a last dimension of 2, and texts get a last dimension of bytes or code points. Small values are columns
    of text, bools, 64-bit ints, floats or bytes. Other values are Python objects, and so are tensors whose dtype or number of
    dimensions differs between samples, and 0-d tensors that some samples lack or whose dtype Arrow lacks. As Python objects,
    bfloat16 and other dtypes that Arrow lacks are `numpy.void` with the same bits.

    With `exact=True`, a row has the whole sample in two columns of bytes in place of the columns of tensors and values.
    `ray_sample(row)` returns the nested sample, and `write_ray` writes it, bit for bit.

    Read tasks are ranges of consecutive samples with about equal bytes. Columns that `ds.select_columns` drops right after
    reading are not read. Blocks come in the order in which tasks end. To keep the order of samples, set Ray's `preserve_order`.

    Args:
        source: Anything that `tc.open` takes, or an open cache or view, whose samples and tensors are read.
        select: Names or patterns of tensors to read, as in `Cache.select`; by default all. Small values and members are read in
            any case; to leave out their columns, use `ds.select_columns`.
        choose: Tensors or values that are alternatives of each other, as in `Cache.read_batch`. One alternative is chosen at
            random.
        exact: Read whole samples, to filter and copy them, or to change them as nested samples.
        values: False leaves out the columns of small values. `write_ray` then refuses the rows of samples that have any. Exact
            rows ignore this option.
        seed, epoch: Seed and epoch of the choice of alternatives, which does not depend on the number of tasks.
        override_num_blocks, concurrency, ray_remote_args: As for `ray.data.read_datasource`.
        options: Options of `tc.open`, if `source` is not an open cache.

    Raises:
        KeyError: A pattern in `select` matches no tensor's name.
        BatchError: A name in `choose` matches no tensor and no value, or a new name belongs to another tensor. Or the shards
            contain no cache, only other members.
        ValueError: `choose` has an unknown form, contains a name twice, or names a container of tensors.
        TypeError: An option is unknown, or given for an open cache; or `source` is a JoinedCache or a SharedDataset.
        Exception: `tc.open` raised it.
        EncodeError (in a read task): A tensor has the name of another column, such as `__key__`; pass `exact=True`.
        KeyError (in a read task): `ds.select_columns` named an unknown column. With more than 64 samples, such a column is null
            instead, unless `values` is False or `exact` is True.

    Cost: loads the index of every shard on the driver, and at most 64 skeletons; no tensor and no member is read. Each read
        task opens the cache on its own node, so all nodes need the same paths, or urls.
    """
    cache = _open(source, options)
    if select is not None:
        cache = cache.select(select)
    alternatives = Alternatives.for_caches(choose, [cache])
    randomness = Randomness(seed, epoch, alternatives)
    plan = Plan(
        alternatives.schema_of(cache.schema),
        len(cache),
        _find_value_kinds(cache, randomness) if values and not exact and len(cache) else None,
        exact,
        tuple(cache.members),
        bool(cache.fingerprint),
        randomness,
        tuple(cls for shard in cache._store.shards[:1] for cls in shard._allow.values()),
    )
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
        remedy = "write its samples as one cache: tc.build(source, lambda samples: samples, OUT, fingerprint=…)"
        raise TypeError(f"{problem}; {remedy}; or read each of its caches, and join the datasets with Dataset.join")
    check_options(read_ray, options, [name for name in inspect.signature(open).parameters if name != "source"])
    return open(source, **options)


def _find_value_kinds(cache: TensorCache[Any], randomness: Randomness) -> dict[str, str]:
    numbers = np.array(spread(len(cache), _NUM_EXAMINED), np.int64)
    rows = [describe_sample(sample)[1] for sample in _read_samples(cache._request_chosen(numbers, randomness))]
    return {name: value_kind(row.get(name) for row in rows) for name in dict.fromkeys(chain.from_iterable(rows))}


def _nbytes(cache: TensorCache[Any], alternatives: Alternatives) -> Array:
    """Return the bytes to read by sample, int64 `[N]`. Alternatives count as their average."""
    nbytes, wanted = np.zeros(len(cache), np.int64), cache._wanted or (lambda name: True)
    for shard, which, rows in by_shard(cache._store, cache._where):
        layouts, numbers = shard.layouts_of(rows)
        sizes = [
            {name: tensor.end - tensor.begin for name, tensor in layout.tensors.items() if wanted(name)}
            for layout in layouts
        ]
        nbytes[which] = np.array(list(map(alternatives.chosen_nbytes, sizes)), np.int64)[numbers]
        for suffix, members in shard.index.members.items():
            at = shard.find_members(rows, suffix)
            nbytes[which] += np.where(at >= 0, members.nbytes[at], 0).astype(np.int64)
    return nbytes


@dataclasses.dataclass(frozen=True, slots=True)
class Plan:
    """The columns of a dataset.

    Attributes:
        schema: Tensors that have columns, by name.
        count: Number of samples.
        value_kinds: Known kinds of the columns of small values, by name; None if small values have no columns.
        is_exact: True if the rows are exact.
        members: Suffixes of the members outside caches, each of which has a column.
        is_described: True if the cache has a fingerprint.
        randomness: Choice of alternatives.
        allow: Classes that samples may contain.
    """

    schema: Mapping[str, TensorSchema]
    count: int
    value_kinds: Mapping[str, str] | None
    is_exact: bool
    members: tuple[str, ...]
    is_described: bool
    randomness: Randomness
    allow: tuple[type, ...]

    def kind(self, name: str) -> Kind:
        tensor = self.schema[name]
        if tensor.shape is None or isinstance(tensor.dtype, tuple):
            return "object"
        if not tensor.shape and (tensor.num_samples < self.count or not is_in_arrow(tensor.dtype)):
            return "object"
        if tensor.num_samples < self.count:
            return "optional"
        return "ragged" if any(isinstance(size, tuple) for size in tensor.shape) else "fixed"


class TensorCacheDatasource(Datasource):  # type: ignore[misc]
    """The samples of a cache as rows.

    Threads/fork/pickle: used on the driver. Read tasks get the cache through Ray's object store, and open its files themselves.
    """

    def __init__(self, cache: Cache[Any], nbytes: Array, plan: Plan) -> None:
        super().__init__()
        self._cache, self._nbytes, self._plan = cache, nbytes, plan
        self._projection_map: dict[str, str] | None = None

    @computed_once
    def _reference(self) -> Any:
        return ray.put(self._cache)

    def supports_projection_pushdown(self) -> bool:
        return True

    def estimate_inmemory_data_size(self) -> int:
        return int(self._nbytes.sum())

    def get_read_tasks(
        self, parallelism: int, per_task_row_limit: int | None = None, data_context: Any = None
    ) -> list[ReadTask]:
        columns = None if self._projection_map is None else tuple(self._projection_map)
        tasks = []
        for begin, end in _cut_evenly(self._nbytes, parallelism):
            nbytes = self._nbytes[begin:end]
            sizes = {"num_rows": end - begin, "size_bytes": int(nbytes.sum())}
            fields = {field.name: sizes.get(field.name) for field in dataclasses.fields(BlockMetadata)}
            read = partial(_read, self._reference, begin, nbytes, self._plan, columns)
            tasks.append(ReadTask(read, BlockMetadata(**fields), per_task_row_limit=per_task_row_limit))
        return tasks


def _cut_evenly(nbytes: Array, count: int) -> list[tuple[int, int]]:
    """Cut samples into at most `count` ranges of about equal bytes. No range is empty."""
    if not len(nbytes):
        return []
    # each sample counts as a few bytes more, so that samples without tensors are spread, too
    ends = np.cumsum(nbytes + 64)
    cuts = np.searchsorted(ends - (nbytes + 64) / 2, ends[-1] * np.arange(1, max(count, 1)) / max(count, 1))
    return list(pairwise(np.unique(np.concatenate([[0], cuts, [len(nbytes)]])).tolist()))


def _read(reference: Any, begin: int, nbytes: Array, plan: Plan, columns: Sequence[str] | None) -> Iterator[Any]:
    """Yield tables of samples from `begin` on; `nbytes` contains their sizes."""
    cache = _cache_of(reference)
    count = 1 + max(int(nbytes.sum()) // _BLOCK_NBYTES, len(nbytes) // _MAX_ROWS)
    for first, end in _cut_evenly(nbytes, count):
        yield _read_table(cache, np.arange(begin + first, begin + end), plan, columns)


@lru_cache(maxsize=4)
def _cache_of(reference: Any) -> Cache[Any]:
    """Return the cache that all tasks of this process share."""
    cache: Cache[Any] = ray.get(reference)
    return cache


def _read_table(cache: Cache[Any], numbers: Array, plan: Plan, columns: Sequence[str] | None) -> Any:
    request = cache._request_chosen(numbers, plan.randomness)
    keys = [request.key(i) for i in range(len(numbers))]
    suffixes = {MEMBER + suffix: suffix for suffix in plan.members if columns is None or MEMBER + suffix in columns}
    direct = {KEY, *suffixes} if plan.is_exact else {KEY, *suffixes, *plan.schema}
    table: dict[str, Any] = {KEY: pa.array(keys, pa.string())}
    if not plan.is_exact:
        table |= _tensor_columns(cache, numbers, plan, columns)
    for name, suffix in suffixes.items():
        members = cache._find_members(cache._request(numbers), suffix, range(len(numbers)))
        table[name] = pa.array([members.get(i) for i in range(len(numbers))], pa.large_binary())
    if columns is None or not direct.issuperset(columns):
        samples = _read_samples(request)
        marks = [
            Mark(is_described=plan.is_described, original=cache._stored_name(number)) for number in numbers.tolist()
        ]
        if plan.is_exact:
            tensors = _read_tensors(cache, numbers, list(plan.schema), plan)
            samples = [rebuild(sample, partial(_tensor_of, tensors, i), Lazy) for i, sample in enumerate(samples)]
            table |= exact_columns(keys, samples, marks, plan.allow)
        else:
            table |= _value_columns(samples, marks, plan)
    if columns is None:
        return pa.table(table)
    for name in columns:
        if name not in table:
            if plan.value_kinds is None or plan.count <= _NUM_EXAMINED:
                raise KeyError(unknown_name("column", name, direct | table.keys()))
            table[name] = pa.nulls(len(numbers))  # only samples that were not examined may have this value
    return pa.table({name: table[name] for name in columns})


def _read_samples(request: Any) -> list[Any]:
    """Return the samples of a request. Skeletons in remote shards are read together."""
    request.rows.fetch_skeletons(range(len(request.rows)))
    return [request.sample(i) for i in range(len(request.rows))]


def _tensor_of(tensors: Mapping[str, Any], i: int, lazy: Any) -> Any:
    """Return the loaded tensor of sample `i`, or `lazy` itself."""
    rows = tensors.get(lazy.name)
    row = None if rows is None else rows[i] if isinstance(rows, list) else rows[i, ...]
    return lazy if row is None else row


def _tensor_columns(cache: Cache[Any], numbers: Array, plan: Plan, columns: Sequence[str] | None) -> dict[str, Any]:
    names = [name for name in plan.schema if columns is None or name in columns]
    table = {}
    for name, tensors in _read_tensors(cache, numbers, names, plan).items():
        if name in RESERVED:
            raise EncodeError(f"a tensor is called {name!r}, the name of another column; read it with exact=True")
        kind = plan.kind(name)
        if isinstance(tensors, list):
            arrays: Any = [None if tensor is None else carry(tensor, kind == "object") for tensor in tensors]
        else:
            arrays = carry(tensors, kind == "object")
        table[name] = tensor_column(arrays, kind, plan.schema[name])
    return table


def _value_columns(samples: Sequence[Any], marks: Sequence[Mark], plan: Plan) -> dict[str, Any]:
    """Return the column of marks and the columns of small values. Leave out values with the name of a tensor."""
    rows, declared = list(map(describe_sample, samples)), plan.value_kinds or {}
    names = dict.fromkeys((*declared, *chain.from_iterable(values for _, values, _ in rows)))
    table = {
        name: value_column([values.get(name) for _, values, _ in rows], declared.get(name, ""))
        for name in names
        if plan.value_kinds is not None and name not in plan.schema
    }
    objects = {name for name, column in table.items() if column.type == ArrowPythonObjectType()}
    texts = []
    for mark, (tensors, values, is_whole) in zip(marks, rows, strict=True):
        kinds: dict[str, Any] = dict.fromkeys((*plan.schema, *names))
        for name, value in values.items():
            kind = value_kind([value])
            # functions may change the type of a column, but Ray changes single values of ints with nulls, and of objects
            kinds[name] = kind if kind == "int" or (kind and name in objects) else "object"
        kinds |= {name: tensor.dtype for name, tensor in tensors.items()}
        is_whole = is_whole and values.keys() <= table.keys()
        texts.append(dataclasses.replace(mark, columns=kinds, is_whole=is_whole).encode())
    return {**table, MARK: pa.array(texts, pa.string())}


def _read_tensors(cache: Cache[Any], numbers: Array, names: Sequence[str], plan: Plan) -> dict[str, Any]:
    """Read tensors by name: a batch `[B, …]`, or B tensors or None."""
    tensors: dict[str, Any] = {}
    request = cache._request_chosen(numbers, plan.randomness)
    regular = tuple(name for name in names if not isinstance(plan.schema[name].dtype, tuple))
    if regular:
        # if structures differ between samples, each sample is read by itself
        with contextlib.suppress(BatchError):
            narrow = request if len(regular) == len(plan.schema) else request.keeping(regular)
            tensors.update(cache._read_batch(narrow, None, False, "auto", 0, TENSOR_WAYS))
    if not tensors.keys() >= set(names):
        rows = list(map(flatten, _read_samples(request)))
        for name in names:
            if name not in tensors:
                tensors[name] = [row[name].load() if name in row else None for row in rows]
    return {name: tensors[name] for name in names}
