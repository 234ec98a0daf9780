"""`build_ray`: a cache built by actors on a cluster, each with a model."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from wds_tensorcache.arguments import check_options
from wds_tensorcache.errors import TensorCacheError, add_note
from wds_tensorcache.ray.need_ray import need_ray
from wds_tensorcache.ray.rows.structure import KEY
from wds_tensorcache.ray.tasks.commit import commit, writing
from wds_tensorcache.ray.tasks.folder import WriteFolder
from wds_tensorcache.ray.write import WRITER_OPTIONS, folder_of, open_written
from wds_tensorcache.reading.cache import TensorCache
from wds_tensorcache.shards.fingerprint import as_fingerprint
from wds_tensorcache.storage.urls import shown
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
    """Build a cache on a cluster: run a model over a dataset in batches, in actors that each hold one model.

    If interrupted, call `build_ray` again with the same fingerprint: samples whose keys are in finished shards are not computed
    again. This also holds after an error, or if the driver is killed. If a worker is killed, Ray runs its batch again in a new
    one; nothing is lost, and nothing is doubled.

    Args:
        ds: A `ray.data.Dataset` of the items.
        model: Class, or other callable, that makes the model. Each actor calls it once, with `model_args` and `model_kwargs`.
            The model is called with a batch, as `ray_to_torch` returns it: tensors `[B, …]` or lists of B values by column.
            It returns nested dicts of tensors, arrays and lists `[B, …]`, or a list of B samples, as `fn` of `tc.build` does.
        out: A folder that the driver and all nodes share, or a url, as for `write_ray`.
        fingerprint: Description of how the model makes the samples, as for `tc.build`. A folder with another one is refused.
        key: Name of the column with the keys of the samples: texts, or integers. Keys must be unique.
        batch_size: Number of rows in a call. Other rows may form a batch after an interruption.
        num_gpus, num_cpus: GPUs and CPUs that each actor reserves.
        concurrency: Number of actors, or the smallest and the largest number.
        model_args, model_kwargs: Arguments for `model`.
        max_samples: Maximum number of samples in a shard.
        min_samples: Minimum number of samples for a task that writes, except the last one. An interruption loses the samples
            that do not fill a task yet.
        ray_remote_args: Other options of `ray.remote` for the actors, for example `resources`. A `runtime_env` is also that of
            the tasks that write.
        allow: Classes that samples may contain beyond those of the format.
        options: Other options of `ShardWriter`: `max_nbytes`, `dali_index`, `fsync`, `align`.

    Returns:
        The cache, opened.

    Raises:
        ImportError: Ray is not installed.
        StaleCacheError: The folder contains shards with another fingerprint.
        FileExistsError: Another write into the folder is in progress.
        InvalidKeyError: Two items have one key, or a key is neither text nor an integer.
        KeyError: There is no column `key`.
        ValueError: The model returned fewer or more samples than rows.
        TypeError: An option is unknown, or JSON cannot represent the fingerprint.
        FormatError: A finished shard is damaged.
        RemoteError: A request to the object store failed.
        Exception: The model raised it. A note names the folder; samples in finished shards are kept.

    Cost: the driver reads the indexes of all finished shards. Each node holds 16 bytes per finished sample. The dataset is read
        as a whole also when most samples are finished, because Ray reads all columns of a row together.
    """
    need_ray()
    import ray

    from wds_tensorcache.ray.tasks.actors import Compute, Missing, sorted_digests
    from wds_tensorcache.ray.tasks.datasink import CacheDatasink

    check_options(build_ray, options, WRITER_OPTIONS)
    made = as_fingerprint(fingerprint)
    folder, allow = folder_of(out), tuple(allow)
    options |= {"fingerprint": made, "max_samples": max_samples}
    smallest, largest = concurrency if isinstance(concurrency, tuple) else (concurrency, concurrency)
    with _noting(folder), writing(folder, "build", key, allow, options) as job:
        keys = [each for index in folder.load(folder.read().entries).values() for each in index.keys]
        if keys:
            missing = Missing(ray.put(sorted_digests(keys)), key)
            ds = ds.map_batches(missing, batch_format="pyarrow", batch_size=None)
        computed = ds.map_batches(
            Compute,
            batch_format="pyarrow",
            batch_size=batch_size,
            fn_constructor_args=(model, tuple(model_args), dict(model_kwargs or {}), key, allow),
            compute=ray.data.ActorPoolStrategy(min_size=smallest, max_size=largest),
            num_gpus=num_gpus or None,
            num_cpus=num_cpus,
            **(ray_remote_args or {}),
        )
        sink = CacheDatasink(job, min_samples)
        with _own_errors(computed):
            shared = {name: value for name, value in (ray_remote_args or {}).items() if name == "runtime_env"}
            computed.write_datasink(sink, ray_remote_args=shared)
        commit(folder, sink.parts or [], "build")
    return open_written(folder, made, allow)


@contextlib.contextmanager
def _own_errors(dataset: Any) -> Iterator[None]:
    """Let Ray raise errors of functions as what they are, so that callers can catch them by their class."""
    context = dataset.context
    before = context.raise_original_map_exception
    context.raise_original_map_exception = True
    try:
        yield
    finally:
        context.raise_original_map_exception = before


@contextlib.contextmanager
def _noting(folder: WriteFolder) -> Iterator[None]:
    """Add a note to an exception: where finished samples are, and that the next call resumes after them."""
    try:
        yield
    except BaseException as exc:
        # A folder that cannot be read may be the reason of the exception, which must not be replaced by another one.
        with contextlib.suppress(OSError, TensorCacheError):
            count = sum(entry.num_samples for entry in folder.read().entries.values())
            if count:
                add_note(exc, f"{count} finished samples are in {shown(folder.path)!r}; call build_ray again to resume")
        raise
