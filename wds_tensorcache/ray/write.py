"""`write_ray`: a dataset of Ray as a cache."""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterable, Mapping
from typing import Any

from wds_tensorcache.arguments import check_options
from wds_tensorcache.ray.need_ray import need_ray
from wds_tensorcache.ray.rows.structure import KEY
from wds_tensorcache.ray.tasks.commit import Mode, commit, writing
from wds_tensorcache.ray.tasks.folder import WriteFolder
from wds_tensorcache.reading.cache import TensorCache
from wds_tensorcache.reading.open_cache import open
from wds_tensorcache.reading.store import Store
from wds_tensorcache.shards.fingerprint import as_fingerprint
from wds_tensorcache.storage.files import Files
from wds_tensorcache.storage.memory_pool import Pool
from wds_tensorcache.storage.urls import is_url, join_url
from wds_tensorcache.writing.pattern import ShardPattern
from wds_tensorcache.writing.writer import MAX_SAMPLES, ShardWriter

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

    Each task of the write makes its own whole shards, `part-WRITE-TASK-….tar`. When all tasks have finished, the
    driver lists their shards in `manifest.json`, in one change. Before, readers see the folder as it was. A task that fails or
    is killed is run again by Ray; only the shards of the attempt that succeeded are listed, and the rest are deleted. So no
    sample is lost, and none is doubled.

    Rows of `read_ray` become the nested samples that they were, with changed columns, new columns and without dropped ones;
    bfloat16 and other dtypes are exact. `ray_table` makes such rows of any samples. In any other dataset, a row becomes a
    dict, nested at the dots of the columns' names, with arrays as torch tensors. Columns whose names begin with a dot, such as
    `.jpg` and `.json`, become members outside the cache; their values are those that `ShardWriter.write` accepts.

    Args:
        ds: A `ray.data.Dataset`.
        out: A folder that the driver and all nodes share, made if it does not exist; or a url, `s3://bucket/cache`, also of
            `gs://` or `az://`.
        key: Name of the column with the keys: texts, or integers. Keys must be unique.
        overwrite: Replace the cache in the folder: when the write is complete, the manifest lists only the new shards, and the
            old ones are deleted. It also removes what a killed write left.
        append: Add to the cache in the folder. Several appends may run at the same time. New samples follow the existing ones;
            existing keys are refused.
        fingerprint: As for `ShardWriter`. Rows of `read_ray` need one if the cache that was read has one, because functions
            of the dataset may have changed the samples: pass that of the cache, a new one, or `{}` to leave it out.
        max_samples: Maximum number of samples in a shard.
        min_samples: Minimum number of rows of a task, except for the last one. By default, each block of the dataset, or each
            read task, is written by one task, and has at least one shard. A value keeps Ray from fusing reading and writing.
        concurrency, ray_remote_args: As for `ds.write_datasink`: how many tasks write at the same time, and options of their
            `ray.remote`.
        allow: Classes to write besides the types of the format.
        options: Other options of `ShardWriter`: `max_nbytes`, `dali_index`, `fsync`, `align`.

    Returns:
        The cache, opened. It is empty if the dataset is empty.

    Raises:
        ImportError: Ray is not installed.
        FileExistsError: The folder contains shards, and neither `overwrite` nor `append` is set; or another write into it has
            finished meanwhile.
        InvalidKeyError: A key occurs twice, in the dataset or with `append` also in the folder; or is not a text or an integer;
            or some reader would misread it. Nothing of the dataset is listed.
        KeyError: There is no column `key`.
        EncodeError: A value cannot be stored, or two columns have one place in the sample.
        StaleCacheError: The rows come from a cache with a fingerprint, and `fingerprint` is None.
        TypeError: An option is unknown, or JSON cannot represent the fingerprint.
        ValueError: The folder's name contains `%`, or both `overwrite` and `append` are set.
        FormatError: A shard in the folder is damaged.
        RemoteError: A request to the object store failed.
        Exception: A function of the dataset raised it. Ray adds its own class to errors of tasks.

    Cost: the driver reads the index of each new shard, and keeps 16 bytes per sample until the end.
    """
    need_ray()
    from wds_tensorcache.ray.tasks.datasink import CacheDatasink

    if overwrite and append:
        raise ValueError("overwrite=True replaces the samples to which append=True would add; pass only one of them")
    check_options(write_ray, options, WRITER_OPTIONS)
    made = None if fingerprint is None else as_fingerprint(fingerprint)
    mode: Mode = "overwrite" if overwrite else "append" if append else "create"
    folder = folder_of(out)
    allow = tuple(allow)
    options |= {"fingerprint": made, "max_samples": max_samples}
    with writing(folder, mode, key, allow, options) as job:
        sink = CacheDatasink(job, min_samples)
        ds.write_datasink(sink, concurrency=concurrency, ray_remote_args=ray_remote_args)
        commit(folder, sink.parts or [], mode)
    return open_written(folder, made, allow)


def folder_of(out: str | os.PathLike[str]) -> WriteFolder:
    """Return the folder of the argument `out`; raise ValueError if it cannot contain shards."""
    path = os.fsdecode(out)
    folder = path if is_url(path) else os.path.abspath(path)
    ShardPattern(join_url(folder, "%06d.tar") if is_url(folder) else os.path.join(folder, "%06d.tar"))
    return WriteFolder(folder)


def open_written(folder: WriteFolder, fingerprint: Mapping[str, Any] | None, allow: Iterable[type]) -> TensorCache[Any]:
    """Return the cache in a folder, which may have no shards."""
    if not folder.read().entries:
        return TensorCache(Store([], Files(), Pool(0), 1, fingerprint or {}))
    return open(folder.path, allow=allow)
