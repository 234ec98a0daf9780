"""Open shards for random access: `tc.open`, which chooses the cache and how to read it."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

from wds_tensorcache.codec.skeleton.types import allow_table
from wds_tensorcache.errors import list_names
from wds_tensorcache.reading.cache import TensorCache
from wds_tensorcache.reading.find_shards import CachePaths, Found, ListedCounts, find_shards
from wds_tensorcache.reading.store import Io, Store
from wds_tensorcache.shards.fingerprint import as_fingerprint, check_fingerprint, common_fields
from wds_tensorcache.shards.names import cache_name
from wds_tensorcache.shards.shard import Shard
from wds_tensorcache.storage.files import Files
from wds_tensorcache.storage.maps import CAN_COPY
from wds_tensorcache.storage.memory_pool import Pool
from wds_tensorcache.storage.system import file_system, memory_nbytes, num_cores, overcommit_is_off

__all__ = ["open"]


def open(
    source: CachePaths,
    *,
    cache: str | None = None,
    io: Literal["auto", "mmap", "pread"] = "auto",
    num_threads: int | None = None,
    allow: Iterable[type] = (),
    pool_nbytes: int = 1 << 30,
    max_open_files: int | None = None,
    expect: Mapping[str, object] | None = None,
) -> TensorCache:
    """Open shards for random access.

    Args:
        source: A folder (its `manifest.json`, or else its `*.tar` in the order of their names), a manifest, a shard, a
            pattern (`"train-{000000..000099}.tar"`, `"train-*.tar"`), or a list of those. Shards are local, uncompressed
            tar files by any writer. Braces and wildcards are expanded only in the text that you pass, not in file names
            found through it. If you list a shard twice, or a folder contains it under two names, its samples occur twice.
        cache: Name of the cache if samples have several (`NAME.tensorcache`), `""` for the one without a name; by default
            the only one. Samples that lack this cache are left out.
        io: `"pread"` uses only positioned reads. `"auto"` may also copy small tensors out of memory maps. It decides for
            each batch, by its size and by whether the page cache contains it. It copies only if truncating a shard
            meanwhile raises an error; during a copy, other processes that open the shard for writing wait. `"mmap"` copies
            without this protection: **truncating a shard in place then kills the process** (SIGBUS). `cache.io` shows the
            decision and the reason.
        num_threads: Number of threads that read a batch; by default the number of cores, but at most four.
        allow: Classes that a sample may contain beyond those of the format. Only for shards that you trust: reading a sample
            creates objects of these classes.
        pool_nbytes: Maximum bytes of idle memory to keep for the next batches.
        max_open_files: Maximum number of open files; by default a quarter of the system's limit, at most 256.
        expect: Fields and values that the fingerprint of every shard must have; it may have more fields.

    Raises:
        FileNotFoundError: A file does not exist, or there are no shards. It is a MissingShardError if a manifest lists a shard
            that does not exist.
        FormatError: A shard or manifest is damaged, or they do not match; or a manifest lists a url that is not a local file,
            or lists one file twice, perhaps under two names.
        StaleCacheError: The fingerprint of a shard does not match `expect`, or is missing.
        KeyError: No shard has a cache with this name; or `cache` is omitted, and the shards have several caches or none.
        TypeError, ValueError: An argument is invalid.
    """
    if max_open_files is not None and max_open_files < 1:
        raise ValueError(f"max_open_files={max_open_files}, expected at least 1")
    if io not in ("auto", "mmap", "pread"):
        raise ValueError(f"io={io!r}, expected 'auto', 'mmap' or 'pread'")
    if num_threads is not None and num_threads < 1:
        raise ValueError(f"num_threads={num_threads}, expected at least 1")
    found = find_shards(source)
    files, pool = Files(max_open_files), Pool(pool_nbytes)
    table = allow_table(allow)
    lists = {path: listed or ListedCounts() for path, listed, _ in found}
    try:
        # the manifest lists the caches; without one, the indexes do
        indexes = {
            path: Shard(path, "", files, pool, table, num_samples=listed.num_samples).index
            for path, listed in lists.items()
            if listed.caches is None
        }
        name = _choose_name(
            cache,
            {path: indexes[path].caches if listed.caches is None else listed.caches for path, listed in lists.items()},
        )
        made = {path: indexes[path].fingerprint if path in indexes else listed for path, _, listed in found}
        for path, fingerprint in made.items():
            if expect is not None:
                check_fingerprint(path, fingerprint, as_fingerprint(expect))
        shards = []
        for path, *_ in found:
            num_samples, counts, manifest = lists[path]
            count = counts.get(name, 0) if counts is not None else None
            shards.append(Shard(path, name, files, pool, table, count, indexes.get(path), num_samples))
            files.expect(shards[-1].path, manifest)
        return TensorCache(
            Store(
                shards,
                files,
                pool,
                _choose_io(io, found),
                num_threads or min(4, num_cores()),
                common_fields(made.values()),
            )
        )
    except BaseException:
        files.close()
        raise


def _choose_name(name: str | None, caches: Mapping[str, Iterable[str]]) -> str:
    """Return the name of the cache to open, among those in the shards."""
    if name:
        cache_name(name)
    there = sorted({other for names in caches.values() for other in names})
    paths = list(caches)
    where = paths[0] if len(paths) == 1 else f"{paths[0]} and {len(paths) - 1} more"
    if name is not None and name not in there:
        raise KeyError(f"{where}: no cache {name!r}; there are {list_names(there, name)}")
    if name is None and not there:
        raise KeyError(f"{where}: no cache, only other members; write one with tc.ShardWriter or tc.encoder()")
    if name is None and len(there) > 1:
        raise KeyError(f"{where}: caches {list_names(there)}: choose one with cache=…, '' for the one without a name")
    return there[0] if name is None else name


def _choose_io(io: str, found: Sequence[Found]) -> Io:
    if io != "auto":
        return Io(io, "chosen by the caller")
    if not CAN_COPY:
        return Io("pread", "copies from maps are not safe: this system has neither read leases nor process_vm_readv")
    kind, is_network = file_system(found[0][0])
    if is_network:
        return Io("pread", f"{kind} is a network file system: reading through a memory map would wait for each page")
    nbytes, memory = sum(os.path.getsize(path) for path, *_ in found), memory_nbytes()
    if memory is not None and nbytes > memory:
        return Io("pread", f"{nbytes:,} bytes of shards do not fit into {memory:,} bytes of memory")
    reason = f"on {kind or 'a local file system'}: maps for small samples in the page cache, else preadv"
    if overcommit_is_off():
        reason += "; overcommit is off, but read-only maps do not count toward the memory limit"
    return Io("auto", f"{reason}; files outside the page cache are read ahead")
