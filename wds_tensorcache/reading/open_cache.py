"""`tc.open`: open shards for random access."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Literal

from wds_tensorcache.arguments import as_int
from wds_tensorcache.codec.skeleton.types import allow_table
from wds_tensorcache.errors import list_names
from wds_tensorcache.reading.cache import TensorCache
from wds_tensorcache.reading.find_shards import CachePaths, find_shards
from wds_tensorcache.reading.store import Store, load_indexes
from wds_tensorcache.shards.fingerprint import as_fingerprint, check_fingerprint, common_fields
from wds_tensorcache.shards.names import cache_name
from wds_tensorcache.shards.shard import Shard
from wds_tensorcache.storage.files import Files, default_max_open
from wds_tensorcache.storage.memory_pool import Pool
from wds_tensorcache.storage.system import num_cores
from wds_tensorcache.storage.urls import conceal, is_url

if TYPE_CHECKING:
    from wds_tensorcache.shards.remote_indexes import RemoteIndexes
    from wds_tensorcache.storage.node_cache.cache import NodeCache


def open(
    source: CachePaths,
    *,
    cache: str | None = None,
    io: Literal["auto", "pread"] = "auto",
    num_threads: int | None = None,
    allow: Iterable[type] = (),
    pool_nbytes: int = 1 << 30,
    max_open_files: int | None = None,
    expect: Mapping[str, object] | None = None,
    index_folder: str | os.PathLike[str] | None = None,
    keep_indexes: bool | str | os.PathLike[str] = True,
    cache_dir: str | os.PathLike[str] | None = None,
    cache_nbytes: int | None = None,
) -> TensorCache:
    """Open shards for random access.

    Args:
        source: A folder, a manifest, a shard, a pattern (`"train-{000000..000099}.tar"`, `"train-*.tar"`), or a list of
            sources. A folder stands for its `manifest.json`, or else for its `*.tar` in the order of their names. A source may
            be a local path, or a url that begins with `s3://`, `gs://`, `az://`, `http://`, `https://` or `hf://`. Shards are
            uncompressed tar files by any writer. Braces and wildcards are expanded only in the text that you pass, not in the
            names of the files that it leads to. A url that ends in neither `.json` nor `.tar` is that of a folder. If you list
            a shard twice, or a folder contains it under two names, its samples occur twice. If a folder contains tars that are
            left out, a UserWarning names up to three: tars that its local manifest does not list, or compressed tars.
        cache: Name of the cache if samples have several (`NAME.tensorcache`), `""` for the cache without a name; by default the
            only cache. Samples that lack this cache are left out. If no sample has a cache, a sample is a dict of its members
            as bytes, as webdataset yields it before decoding: `{"__key__": …, "__url__": …, "jpg": b"…"}`. There are no
            batches of such samples, so `read_batch` raises BatchError; `tc.build` adds a cache.
        io: `"auto"` copies batches out of memory maps of local shards, and reads all other shards. A shard that was truncated
            or changed is refused before and after each copy. But **truncating a shard in place during a copy kills the
            process** (SIGBUS), and so does a disk that fails. `"pread"` uses only positioned reads, which raise an error.
        num_threads: Number of threads that read a batch; by default the number of cores, but at most four.
        allow: Classes that a sample may contain beyond the classes of the format. Only for shards that you trust: reading a
            sample creates objects of these classes.
        pool_nbytes: Maximum bytes of idle memory to keep for the next batches.
        max_open_files: The most local shards that this process keeps open, for all caches; by default a quarter of the
            system's limit, at most 256. The last call that passes it sets the limit.
        expect: Fields and values that the fingerprint of every shard must have; it may have more fields.
        index_folder: Folder or url of a folder with the indexes of remote shards, `NAME.tar.index` for `NAME.tar`, if they
            are not in or next to the shards. Ignored if all shards are local.
        keep_indexes: Keep indexes of remote shards on disk, for later runs: in a folder of the user, or in the folder given.
            False keeps none. The environment variable `TENSORCACHE_INDEXES` is the default folder; `off` keeps none. Ignored if
            all shards are local.
        cache_dir: Folder on a local disk of this node for the bytes of remote shards that were read. All processes of the
            node that pass it share it, and fetch each byte once. If needed, it is created with mode 0700. Ignored if all shards
            are local.
        cache_nbytes: The most bytes that the files in `cache_dir` may take on disk, over all processes; the least recently
            used shards are removed. With None, they may fill the disk up to the last fiftieth.

    Raises:
        FileNotFoundError: A file does not exist, or there are no shards. If a manifest lists a missing shard, the error is a
            MissingShardError.
        FormatError: A shard or manifest is damaged, or they do not match. A local manifest lists a url, or a remote manifest
            lists a file outside its folder. Or a manifest lists a file twice, perhaps under two names.
        RemoteError: A request to a server failed; a later read of a remote shard may raise it, too.
        StaleCacheError: The fingerprint of a shard does not match `expect`, or is missing.
        KeyError: No shard has a cache with this name; or `cache` is omitted, and the shards have several caches.
        ImportError: A url needs a package that is not installed; the message names the extra to install.
        NotImplementedError, OSError: `cache_dir` needs Linux; or it is not a folder that only this user can write.
        TypeError, ValueError: An argument is invalid; or `cache_dir` is on a network file system.
    """
    for option, value in (("max_open_files", max_open_files), ("num_threads", num_threads)):
        if value is not None and value < 1:
            raise ValueError(f"{option}={value}, expected at least 1")
    if io not in ("auto", "pread"):
        raise ValueError(f"io={io!r}, expected 'auto' or 'pread'")
    if cache_dir is None and cache_nbytes is not None:
        raise ValueError(f"cache_nbytes={cache_nbytes} needs cache_dir=, the folder whose length it limits")
    listing = find_shards(source)
    places = {shard.path: shard for shard in listing.shards}  # the listing may contain a shard twice
    remote_indexes = node_cache = None
    if any(map(is_url, places)):
        remote_indexes = _remote_indexes(index_folder, keep_indexes)
        node_cache = None if cache_dir is None else _node_cache(cache_dir, cache_nbytes, max_open_files)
    files, pool = Files(may_map=io == "auto", max_open=max_open_files, node_cache=node_cache), Pool(pool_nbytes)
    options: dict[str, Any] = {
        "files": files,
        "pool": pool,
        "allow": allow_table(allow),
        "remote_indexes": remote_indexes,
    }
    kind: type[Shard] = Shard
    try:
        for path, place in places.items():
            if place.entry is not None and is_url(path):
                files.expect(path, place.manifest, nbytes=place.entry.nbytes)
        # the manifest lists the caches; without a manifest, the indexes do
        listed = {path: place for path, place in places.items() if place.caches is not None}
        loaded = {
            path: Shard(path, "", entry=place.entry, **options) for path, place in places.items() if path not in listed
        }
        load_indexes(loaded.values())
        sources: dict[str, Any] = {path: listed.get(path) or loaded[path].index for path in places}
        name = _choose_name(cache, {path: source.caches for path, source in sources.items()})
        if name is None:
            from wds_tensorcache.shards.member_shard import MemberShard

            kind = MemberShard
        fingerprints = {path: source.fingerprint for path, source in sources.items()}
        if expect is not None:
            expected = as_fingerprint(expect)
            for path, fingerprint in fingerprints.items():
                check_fingerprint(path, fingerprint, expected)
        shards = []
        for place in listing.shards:
            is_counted = name is not None and place.path in listed
            count = sources[place.path].caches.get(name, 0) if is_counted else None
            index = loaded[place.path].index if place.path in loaded else None
            shard = kind(place.path, name or "", count=count, index=index, entry=place.entry, **options)
            if not shard.is_remote:
                files.expect(shard.path, place.manifest, place.status)
            shards.append(shard)
        num_threads = num_threads or min(4, num_cores())
        common = common_fields(fingerprints.values())
        return TensorCache(Store(shards, files, pool, num_threads, common, listing.left_out))
    except BaseException:
        files.close()
        raise


def _remote_indexes(folder: str | os.PathLike[str] | None, keep: bool | str | os.PathLike[str]) -> RemoteIndexes:
    from wds_tensorcache.shards.kept_indexes import KeptIndexes, default_folder
    from wds_tensorcache.shards.remote_indexes import RemoteIndexes

    if folder is not None:
        path = os.fspath(folder)
        folder = conceal(path) if is_url(path) else os.path.abspath(path)
    kept = None if keep is False else default_folder() if keep is True else os.path.abspath(os.fspath(keep))
    return RemoteIndexes(folder, None if kept is None else KeptIndexes(kept))


def _node_cache(path: str | os.PathLike[str], max_nbytes: int | None, max_open: int | None) -> NodeCache:
    from wds_tensorcache.storage.node_cache.cache import open_node_cache

    max_nbytes = None if max_nbytes is None else as_int("cache_nbytes", max_nbytes)
    return open_node_cache(path, max_nbytes, max_open=max_open or default_max_open())


def _choose_name(name: str | None, caches: Mapping[str, Iterable[str]]) -> str | None:
    """Return the name of the cache to open; None without a cache."""
    if name:
        cache_name(name)
    there = sorted({other for names in caches.values() for other in names})
    paths = list(caches)
    where = paths[0] if len(paths) == 1 else f"{paths[0]} and {len(paths) - 1} more"
    if name is not None and name not in there:
        unnamed = "; '' is the one without a name" if "" in there else ""
        raise KeyError(f"{where}: no cache {name!r}; there are {list_names(there, name)}{unnamed}")
    if name is None and len(there) > 1:
        raise KeyError(
            f"{where}: caches {list_names(there)}: choose one with --cache (cache=…), '' for the one without a name"
        )
    return next(iter(there), None) if name is None else name
