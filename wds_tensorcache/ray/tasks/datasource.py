"""The datasource of `tc.ray.read_ray`: read tasks are ranges of samples with about equal bytes, each read in batches."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import ray
from ray.data import Datasource
from ray.data.block import BlockMetadata
from ray.data.datasource import ReadTask

from wds_tensorcache.codec.tree import flatten
from wds_tensorcache.errors import BatchError
from wds_tensorcache.ray.rows.bits import to_bits
from wds_tensorcache.ray.rows.columns import Kind, value_kind
from wds_tensorcache.ray.rows.structure import KEY, MEMBER
from wds_tensorcache.ray.rows.table import make_table, values_of
from wds_tensorcache.reading.cache import Cache
from wds_tensorcache.reading.choose import Randomness

Array = np.ndarray[Any, Any]
_MAX_CACHES = 4  # caches that a worker process keeps open
_MAX_ROWS = 4096
_BLOCK_NBYTES = 32 << 20
_caches: OrderedDict[str, Cache[Any]] = OrderedDict()


@dataclasses.dataclass(frozen=True, slots=True)
class Plan:
    """The columns of a dataset.

    Attributes:
        kinds: Kinds of the tensor columns by name.
        absent: Empty arrays of the dtypes and numbers of dimensions of optional tensors, by name.
        mixed: Names of tensors whose dtypes differ between samples.
        value_kinds: Kinds of the columns of small values by name, as far as they are known.
        has_values: True if small values have columns.
        members: Suffixes of the members outside caches, each of which has a column.
        is_described: True if the cache has a fingerprint.
        randomness: Choice of alternatives.
        allow: Classes that samples may contain.
    """

    kinds: Mapping[str, Kind]
    absent: Mapping[str, Array]
    mixed: tuple[str, ...]
    value_kinds: Mapping[str, str]
    has_values: bool
    members: tuple[str, ...]
    is_described: bool
    randomness: Randomness
    allow: tuple[type, ...]

    def with_value_kinds(self, cache: Cache[Any], numbers: Array) -> Plan:
        """Return a plan that has the kinds of the columns of small values, from those of the samples at `numbers`."""
        request = cache._request_chosen(numbers, self.randomness)
        samples = [request.sample(i) for i in range(len(numbers))]
        found = {name: value_kind(values) for name, values in values_of(samples).items()}
        return dataclasses.replace(self, value_kinds=found)


class CacheDatasource(Datasource):  # type: ignore[misc]
    """The samples of a cache as rows.

    Args:
        cache: Cache, with only the selected tensors.
        nbytes: Bytes of each sample's selected tensors and of its members, int64 `[N]`.
        plan: Columns.

    Threads/fork/pickle: used on the driver. Read tasks get the cache through Ray's object store, and open its files themselves.
    """

    def __init__(self, cache: Cache[Any], nbytes: Array, plan: Plan) -> None:
        super().__init__()
        self._cache, self._nbytes, self._plan = cache, nbytes, plan
        self._projection_map: dict[str, str] | None = None
        self._reference: Any = None

    def get_name(self) -> str:
        return "Tensorcache"

    def supports_projection_pushdown(self) -> bool:
        return True

    def estimate_inmemory_data_size(self) -> int:
        return int(self._nbytes.sum())

    def get_read_tasks(
        self, parallelism: int, per_task_row_limit: int | None = None, data_context: Any = None
    ) -> list[ReadTask]:
        if not len(self._nbytes):
            return []
        if self._reference is None:
            self._reference = ray.put(self._cache)
        columns = None if self._projection_map is None else tuple(self._projection_map)
        tasks = []
        for begin, end in cut_evenly(self._nbytes, parallelism):
            read = _Read(self._reference, begin, end, self._nbytes[begin:end], self._plan, columns)
            known = {"num_rows": end - begin, "size_bytes": int(self._nbytes[begin:end].sum())}
            fields = {field.name: known.get(field.name) for field in dataclasses.fields(BlockMetadata)}
            tasks.append(ReadTask(read, BlockMetadata(**fields), per_task_row_limit=per_task_row_limit))
        return tasks


def cut_evenly(nbytes: Array, count: int) -> list[tuple[int, int]]:
    """Return at most `count` ranges of samples, `[begin, end)`, with about equal bytes; none of them is empty."""
    # each sample counts as a few bytes more, so that samples without tensors are spread, too
    ends = np.cumsum(nbytes + 64)
    cuts = np.searchsorted(ends - (nbytes + 64) / 2, ends[-1] * np.arange(1, max(count, 1)) / max(count, 1))
    edges = np.unique(np.concatenate([[0], cuts, [len(nbytes)]])).tolist()
    return list(pairwise(edges))


class _Read:
    """A read task: yields tables of the samples `[begin, end)`."""

    def __init__(
        self, reference: Any, begin: int, end: int, nbytes: Array, plan: Plan, columns: Sequence[str] | None
    ) -> None:
        self._reference, self._begin, self._end = reference, begin, end
        self._nbytes, self._plan, self._columns = nbytes, plan, columns

    def __call__(self) -> Iterator[Any]:
        cache = _open_once(self._reference)
        for begin, end in _batches(self._nbytes):
            numbers = np.arange(self._begin + begin, self._begin + end)
            yield read_table(cache, numbers, self._plan, self._columns)


def _batches(nbytes: Array) -> Iterator[tuple[int, int]]:
    """Yield ranges of samples whose tensors and members have about 32 MiB, but at least one sample."""
    ends = np.cumsum(nbytes)
    begin = 0
    while begin < len(nbytes):
        before = ends[begin - 1] if begin else 0
        end = int(np.searchsorted(ends, before + _BLOCK_NBYTES, "right"))
        end = min(max(end, begin + 1), begin + _MAX_ROWS)
        yield begin, end
        begin = end


def _open_once(reference: Any) -> Cache[Any]:
    """Return the cache of this process: tasks in one process share its files and indexes."""
    name = reference.hex()
    cache = _caches.get(name)
    if cache is None:
        cache = _caches[name] = ray.get(reference)
        while len(_caches) > _MAX_CACHES:
            _caches.popitem(last=False)
    _caches.move_to_end(name)
    return cache


def read_table(cache: Cache[Any], numbers: Array, plan: Plan, columns: Sequence[str] | None = None) -> Any:
    """Return the table of the samples at `numbers`, with only these columns, if they are given.

    Cost: one batch of ranged reads for the tensors, and one read for each skeleton and each member.
    """
    suffixes = [suffix for suffix in plan.members if columns is None or MEMBER + suffix in columns]
    names = [name for name in plan.kinds if columns is None or name in columns]
    request = cache._request_chosen(numbers, plan.randomness)
    keys = [request.key(i) for i in range(len(numbers))]
    lacks_samples = columns is not None and {*columns} <= {KEY, *plan.kinds, *(MEMBER + each for each in plan.members)}
    samples = [] if lacks_samples else [request.sample(i) for i in range(len(numbers))]
    table = make_table(
        keys,
        samples,
        _read_bits(cache, numbers, names, plan),
        plan.kinds,
        plan.value_kinds if columns is None else {},
        has_values=plan.has_values and not lacks_samples,
        is_described=plan.is_described,
        originals=[] if lacks_samples else [cache._stored_name(number) for number in numbers.tolist()],
        members={MEMBER + suffix: _read_members(cache, numbers, suffix) for suffix in suffixes},
        allow=plan.allow,
        columns=columns,
        absent=plan.absent,
    )
    return table if columns is None else table.select([name for name in columns if name in table.column_names])


def _read_members(cache: Cache[Any], numbers: Array, suffix: str) -> list[bytes | None]:
    """Return a member of each sample; None where a sample lacks it."""
    found = cache._find_members(cache._request(numbers), suffix, range(len(numbers)))
    return [found.get(i) for i in range(len(numbers))]


def _read_bits(cache: Cache[Any], numbers: Array, names: Sequence[str], plan: Plan) -> dict[str, Any]:
    """Return the bits of tensors by name: an array `[B, …]`, or B arrays with None where a sample lacks the tensor."""
    found: dict[str, Any] = {}
    plain = [name for name in names if name not in plan.mixed]
    if plain:
        try:
            request = _request(cache, numbers, plain, plan)
            found.update(cache._read_tensors(request, None, False, "auto", 0))
        except BatchError:  # structures differ between samples, so each sample is read for itself
            found.clear()
    for name in found:
        tensors = found[name]
        found[name] = (
            [one if one is None else to_bits(one) for one in tensors] if isinstance(tensors, list) else to_bits(tensors)
        )
    alone = [name for name in names if name not in found]
    if alone:
        request = _request(cache, numbers, alone, plan)
        each = [flatten(request.sample(i)) for i in range(len(numbers))]
        found |= {name: [to_bits(row[name].load()) if name in row else None for row in each] for name in alone}
    return {name: found[name] for name in names}


def _request(cache: Cache[Any], numbers: Array, names: Sequence[str], plan: Plan) -> Any:
    """Return the request for the tensors `names` of samples."""
    request = cache._request_chosen(numbers, plan.randomness)
    return request if len(names) == len(plan.kinds) else request.keeping(tuple(names))
