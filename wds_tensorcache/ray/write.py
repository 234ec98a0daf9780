"""`write_ray`: write a dataset of Ray as a cache. Each task writes whole shards, and the driver lists the shards."""

from __future__ import annotations

import inspect
import os
import secrets
from collections.abc import Iterable, Mapping
from typing import Any

from ray.data import Datasink
from ray.exceptions import RayTaskError

from wds_tensorcache.arguments import check_options
from wds_tensorcache.errors import TensorCacheError
from wds_tensorcache.ray.commit import Mode, WriteJob, check_running, commit, delete_shards, start_write
from wds_tensorcache.ray.rows import KEY, samples_of_block
from wds_tensorcache.reading.cache import TensorCache
from wds_tensorcache.reading.open_cache import open
from wds_tensorcache.reading.store import Store
from wds_tensorcache.shards.fingerprint import as_fingerprint
from wds_tensorcache.shards.manifest import Manifest
from wds_tensorcache.storage.files import Files
from wds_tensorcache.storage.folder import folder_of
from wds_tensorcache.storage.memory_pool import Pool
from wds_tensorcache.storage.urls import is_url
from wds_tensorcache.writing.pattern import ShardPattern
from wds_tensorcache.writing.writer import MAX_SAMPLES, ShardWriter

_OWN_ARGS = "args_before_ray"  # the attribute of an error of a task that keeps its message
_OWN = ("pattern", "manifest", "footer", "overwrite", "resume", "allow", "fingerprint", "max_samples")
WRITER_OPTIONS = [name for name in inspect.signature(ShardWriter).parameters if name not in _OWN]


def write_ray(
    ds: Any,
    out: str | os.PathLike[str],
    *,
    key: str = KEY,
    overwrite: bool = False,
    append: bool = False,
    fingerprint: Mapping[str, Any] | None = None,
    max_samples: int = MAX_SAMPLES,
    min_samples: int | None = None,
    concurrency: int | None = None,
    ray_remote_args: dict[str, Any] | None = None,
    allow: Iterable[type] = (),
    **options: Any,
) -> TensorCache[Any]:
    """Write a dataset of Ray as a cache.

    Each task of the write makes its own whole shards, `part-WRITE-TASK-….tar`. When all tasks have finished, the driver lists
    their shards in `manifest.json`, in one change. Until then, readers see the folder as it was. Ray runs a task again if it
    fails or is killed. Only the shards of the attempt that succeeded are listed; other shards of the write are deleted.

    Rows of `read_ray(…, exact=True)` and of `ray_table` become their original samples; additional columns become new items. Any
    other row becomes a dict, nested at the dots of its column names, with arrays as torch tensors. In rows of `read_ray`,
    bfloat16 and other dtypes are exact, and nulls are left out. Columns whose names begin with a dot, such as `.jpg` and
    `.json`, become members outside the cache. They may contain all values that `ShardWriter.write` accepts for members.

    Args:
        ds: A `ray.data.Dataset`.
        out: A folder that the driver and all nodes share, created if it does not exist. Or an `s3://`, `gs://` or `az://` url,
            such as `s3://bucket/cache`.
        key: Name of the column with the keys: texts, or integers. Keys must be unique. This column does not become an item.
        overwrite: Replace the cache in the folder when the write is complete: all other `.tar` files in the folder are deleted,
            with their indexes. Files of killed writes are removed, too.
        append: Add to the cache in the folder. Several appends may run at the same time. Shards are ordered by name, so new
            samples follow those of earlier calls of `write_ray`; existing keys are refused.
        fingerprint: As for `ShardWriter`. Rows of `read_ray` need a fingerprint if their cache has a fingerprint, because
            functions of the dataset may have changed the samples. Pass the fingerprint of the cache, a new fingerprint, or
            `{}` for none.
        max_samples: Maximum number of samples in a shard.
        min_samples: Minimum number of rows of a task, except for the last task. By default, one task writes each block of the
            dataset, or each read task, into at least one shard. With a value, Ray does not fuse reading and writing.
        concurrency, ray_remote_args: As for `ds.write_datasink`.
        allow: Classes to write besides the types of the format.
        options: Other options of `ShardWriter`: `max_nbytes`, `dali_index`, `fsync`, `align`, `encoder`.

    Returns:
        The cache in the folder, opened, with `append` also its earlier samples. It is empty if there are no samples.

    Raises:
        FileExistsError: Without `overwrite` and `append`: the folder contains shards, or another write into it is in progress,
            was killed, or has finished during this write. With `overwrite`: another write is in progress, or at a url was
            killed. Or `out` is a file.
        InvalidKeyError: A key occurs twice, in the dataset or with `append` also in the folder. Or a key is neither text nor an
            integer, or some reader would misread it. Then no shard of the dataset is listed.
        KeyError: There is no column `key`.
        EncodeError: A value cannot be stored, or two columns have the same place in the sample. Or columns of `read_ray` lack a
            part of the sample, for example its lists: pass `exact=True` to `read_ray`.
        StaleCacheError: The rows come from a cache with a fingerprint, and `fingerprint` is None.
        TypeError: An option is unknown, a limit is no number, or JSON cannot represent the fingerprint.
        ValueError: The folder's name contains `%`, or `out` is a url that cannot be written. `max_samples` or `max_nbytes` is
            less than 1, JSON cannot represent a number in the fingerprint, or both `overwrite` and `append` are set.
        FormatError: A shard in the folder or an exact row is damaged.
        UnsafeSkeletonError: An exact row contains a class that is not in `allow`.
        RuntimeError: A node does not see the driver's folder.
        RemoteError: A request to the object store failed.
        RayTaskError: A function of the dataset raised an error. Without Ray's `raise_original_map_exception`, an `except` with
            the class of that error does not catch it.

    Cost: the driver reads the index of each new shard, with `append` also of each listed shard. It hashes the keys to 16
        bytes each.
    """
    if overwrite and append:
        raise ValueError("overwrite=True replaces the samples to which append=True would add; pass only one of them")
    check_options(write_ray, options, WRITER_OPTIONS)
    described = None if fingerprint is None else as_fingerprint(fingerprint)
    mode: Mode = "overwrite" if overwrite else "append" if append else "create"
    path, allow = resolve_folder(out), tuple(allow)
    options |= {"fingerprint": described, "max_samples": max_samples, "allow": allow}
    with start_write(path, mode, key, options) as job:
        sink = TensorCacheDatasink(job, min_samples)
        try:
            ds.write_datasink(sink, concurrency=concurrency, ray_remote_args=ray_remote_args)
        except RayTaskError as exc:
            # the text of Ray's error is the traceback of the task, and Ray appends its own lines to the message of the cause
            cause: Any = exc.cause
            if isinstance(cause, TensorCacheError) or _OWN_ARGS in vars(cause):
                cause.args = vars(cause).pop(_OWN_ARGS, cause.args)
                raise cause from None
            raise
        commit(job, sink.names)
    return open_output(path, described, allow)


def resolve_folder(out: str | os.PathLike[str]) -> str:
    """Return a folder's path or url; raise ValueError for a bad name."""
    path = os.fsdecode(out)
    path = (path.rstrip("/") or path) if is_url(path) else os.path.abspath(path)
    ShardPattern(f"{path}/%06d.tar")
    return path


def open_output(path: str, fingerprint: Mapping[str, Any] | None, allow: Iterable[type]) -> TensorCache[Any]:
    """Open the cache in a folder, also without shards."""
    if not Manifest.of(folder_of(path)).entries:
        return TensorCache(Store([], Files(), Pool(0), 1, fingerprint or {}))
    return open(path, allow=allow)


class TensorCacheDatasink(Datasink[list[str]]):  # type: ignore[misc]
    """A datasink whose tasks write shards. After the write, `names` contains the shards of all successful tasks."""

    def __init__(self, job: WriteJob, min_samples: int | None) -> None:
        self._job, self._min_samples = job, min_samples
        self.names: list[str] = []

    @property
    def min_rows_per_write(self) -> int | None:
        return self._min_samples

    def write(self, blocks: Iterable[Any], ctx: Any) -> list[str]:
        """Write blocks into unlisted shards, and return their names. Raise RuntimeError if the write has ended."""
        job = self._job
        check_running(job)
        # Two attempts of one task may run at the same time, when a node is slow or cut off. Random digits separate their names.
        name = f"part-{job.number:03d}-{ctx.task_idx:06d}-{job.id}{secrets.token_hex(3)}-%06d.tar"
        sink = ShardWriter(folder_of(job.folder).locate(name), manifest=False, **job.options)
        try:
            with sink:
                for block in blocks:
                    try:
                        for key, sample, members in samples_of_block(
                            block, job.key, job.options["fingerprint"] is not None, job.options["allow"]
                        ):
                            sink.write(key, sample, **members)
                    except (TensorCacheError, KeyError) as exc:
                        vars(exc)[_OWN_ARGS] = exc.args
                        raise
                    check_running(job)
            check_running(job)
        except BaseException:
            if job.mode != "build":  # the driver, or the next build, takes the finished shards
                delete_shards(sink._folder, _names(sink))
            raise
        return _names(sink)

    def on_write_complete(self, write_result: Any) -> None:
        self.names = [name for names in write_result.write_returns for name in names]


def _names(sink: ShardWriter) -> list[str]:
    return [sink._pattern.shard_name(number) for number in range(sink._number)]
