"""`build_ray`: build a cache with actors on a cluster. Each actor holds a model."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import ray.data

from wds_tensorcache.arguments import check_options
from wds_tensorcache.errors import add_note
from wds_tensorcache.ray.batches import ray_to_torch
from wds_tensorcache.ray.commit import commit, key_digests, listed_shards, shard_keys, start_write
from wds_tensorcache.ray.rows import KEY, Mark, exact_columns, keys_of
from wds_tensorcache.ray.write import WRITER_OPTIONS, TensorCacheDatasink, open_output, resolve_folder
from wds_tensorcache.reading.cache import TensorCache
from wds_tensorcache.shards.fingerprint import as_fingerprint
from wds_tensorcache.storage.urls import shown
from wds_tensorcache.writing.build_batch import Batch
from wds_tensorcache.writing.writer import MAX_SAMPLES


def build_ray(
    ds: Any,
    model: Callable[..., Any],
    out: str | os.PathLike[str],
    *,
    fingerprint: Mapping[str, Any],
    key: str = KEY,
    batch_size: int = 32,
    num_gpus: float = 0,
    num_cpus: float | None = None,
    concurrency: int | tuple[int, int] = 1,
    model_args: Sequence[Any] = (),
    model_kwargs: Mapping[str, Any] | None = None,
    max_samples: int = MAX_SAMPLES,
    min_samples: int = 256,
    ray_remote_args: dict[str, Any] | None = None,
    allow: Iterable[type] = (),
    **options: Any,
) -> TensorCache[Any]:
    """Build a cache on a cluster: actors run a model over batches.

    Each actor holds one model. After an error or an interruption, or if the driver was killed, call `build_ray` again with the
    same fingerprint. Samples with keys in finished shards are not computed again. If a worker is killed, Ray runs its batch
    again in a new worker.

    Args:
        ds: A `ray.data.Dataset` of the items.
        model: Class, or other callable, that makes the model. Each actor calls it once, with `model_args` and `model_kwargs`.
            The model is called with a batch, as `ray_to_torch` returns it: tensors `[B, …]` or lists of B values by column.
            It returns nested dicts of tensors, arrays and lists `[B, …]`, or a list of B samples, as `fn` of `tc.build` does.
            The samples contain only these values: other columns and members are not copied.
        out: A folder that the driver and all nodes share, or a url, as for `write_ray`.
        fingerprint: Description of how the model makes the samples, as for `tc.build`. A folder with another fingerprint
            is refused.
        key: Name of the column with the keys of the samples: texts, or integers. Keys must be unique.
        batch_size: Number of rows in a call. After an interruption, a batch may consist of other rows.
        num_gpus, num_cpus: GPUs and CPUs that each actor reserves.
        concurrency: Number of actors, or the smallest and the largest number.
        model_args, model_kwargs: Arguments for `model`.
        max_samples: Maximum number of samples in a shard.
        min_samples: Minimum number of samples for a task that writes, except for the last task. An interruption loses samples
            that do not fill a task yet.
        ray_remote_args: Other options of `ray.remote` for the actors, for example `resources`. A `runtime_env` also applies to
            the tasks that write.
        allow: Classes that samples may contain besides the types of the format.
        options: Other options of `ShardWriter`: `max_nbytes`, `dali_index`, `fsync`, `align`, `encoder`.

    Returns:
        The cache, opened.

    Raises:
        StaleCacheError: The folder contains shards with another fingerprint.
        FileExistsError: Another write into the folder is in progress, or at a url was killed.
        InvalidKeyError: One call computed two items with the same key, a key is neither text nor an integer, or some reader
            would misread it.
        KeyError: There is no column `key`.
        EncodeError: The model returned a value that cannot be stored.
        ValueError: The model returned fewer or more samples than rows, or a tuple, or None as a sample. The folder's name
            contains `%`, or `out` is a url that cannot be written. `max_samples` or `max_nbytes` is less than 1, or JSON cannot
            represent a number in the fingerprint.
        TypeError: An option is unknown, a limit is no number, or JSON cannot represent the fingerprint.
        FormatError: A finished shard is damaged.
        RemoteError: A request to the object store failed.
        RuntimeError: A node does not see the driver's folder.
        Exception: The model raised it. Samples in finished shards are kept; from Python 3.11 on, a note names their folder.

    Cost: the driver reads the indexes of all finished shards. Each node holds 16 bytes per finished sample. The dataset is read
        as a whole even if most samples are finished, because Ray reads all columns of a row together.
    """
    check_options(build_ray, options, WRITER_OPTIONS)
    described = as_fingerprint(fingerprint)
    path, allow = resolve_folder(out), tuple(allow)
    options |= {"fingerprint": described, "max_samples": max_samples, "allow": allow}
    smallest, largest = concurrency if isinstance(concurrency, tuple) else (concurrency, concurrency)
    with start_write(path, "build", key, options) as job:
        finished = key_digests(shard_keys(listed_shards(job)))
        if len(finished):
            arguments = {"digests": ray.put(np.sort(finished)), "key": key}
            ds = ds.map_batches(_leave_out, batch_format="pyarrow", batch_size=None, fn_kwargs=arguments)
        computed = ds.map_batches(
            _Compute,
            batch_format="pyarrow",
            batch_size=batch_size,
            fn_constructor_args=(model, tuple(model_args), dict(model_kwargs or {}), key, allow),
            compute=ray.data.ActorPoolStrategy(min_size=smallest, max_size=largest),
            num_gpus=num_gpus or None,
            num_cpus=num_cpus,
            **(ray_remote_args or {}),
        )
        sink = TensorCacheDatasink(job, min_samples)
        shared = {name: value for name, value in (ray_remote_args or {}).items() if name == "runtime_env"}
        context = computed.context
        before, context.raise_original_map_exception = context.raise_original_map_exception, True
        try:
            computed.write_datasink(sink, ray_remote_args=shared)
        except BaseException as exc:
            add_note(exc, f"samples in finished shards stay in {shown(path)!r}; call build_ray again to resume")
            raise
        finally:
            context.raise_original_map_exception = before
        commit(job, sink.names)
    return open_output(path, described, allow)


def _keys(table: Any, key: str) -> list[str]:
    return keys_of({name: table[name].to_pylist() if name == key else () for name in table.column_names}, key)


def _leave_out(table: Any, digests: Any, key: str) -> Any:
    """Drop the rows whose key digests are in the sorted `digests`."""
    if not table.num_rows:
        return table
    finished = ray.get(digests)  # a view of Ray's memory, which a node has once
    keys = key_digests(_keys(table, key))
    near = np.minimum(np.searchsorted(finished, keys), len(finished) - 1)
    return table.filter(pa.array(finished[near] != keys))


class _Compute:
    """A model in an actor. It is called with a block, and returns exact rows."""

    def __init__(
        self,
        model: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        key: str,
        allow: tuple[type, ...],
    ) -> None:
        self._model, self._key, self._allow = model(*args, **kwargs), key, allow

    def __call__(self, table: Any) -> Any:
        keys = _keys(table, self._key) if table.num_rows else []
        samples: Iterable[Any] = ()
        if keys:
            samples = Batch(self._model(ray_to_torch(table)), len(keys), lambda i: f"key {keys[i]!r}").rows()
        columns = exact_columns(keys, samples, [Mark()] * len(keys), self._allow)
        return pa.table({self._key: pa.array(keys, pa.string()), **columns})
