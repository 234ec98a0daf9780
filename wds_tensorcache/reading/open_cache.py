"""Find the shards for `tc.open`, and decide how to read them."""

from __future__ import annotations

import glob
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

from braceexpand import braceexpand

from wds_tensorcache.codec.skeleton.types import allow_table
from wds_tensorcache.errors import FormatError
from wds_tensorcache.reading.base_cache import Cache
from wds_tensorcache.reading.cache import TensorCache
from wds_tensorcache.reading.store import Io, Store
from wds_tensorcache.shards.fingerprint import as_fingerprint, check_fingerprint, common_fields
from wds_tensorcache.shards.manifest import MANIFEST, locate_shards, read_manifest
from wds_tensorcache.shards.names import cache_name
from wds_tensorcache.shards.shard import Shard
from wds_tensorcache.storage.files import Files
from wds_tensorcache.storage.maps import CAN_COPY
from wds_tensorcache.storage.memory_pool import Pool
from wds_tensorcache.storage.system import file_system, memory_nbytes, overcommit_is_off

__all__ = ["Source", "are_counts", "existing_folder", "expand_braces", "find_shards", "num_cores", "open"]


Source: TypeAlias = "str | os.PathLike[str] | Sequence[Source]"


def open(
    source: Source,
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
    lists = {path: listed or Listed() for path, listed, _ in found}
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
            num_samples, counts = lists[path]
            count = counts.get(name, 0) if counts is not None else None
            shards.append(Shard(path, name, files, pool, table, count, indexes.get(path), num_samples))
            files.expect(shards[-1].path)
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


class Listed(NamedTuple):
    """The number of samples of a shard, and the number of samples with each cache, from the manifest; None if unknown."""

    num_samples: int | None = None
    caches: Mapping[str, int] | None = None


# path of a shard; if a manifest lists them, also its numbers of samples and its fingerprint
Found = tuple[str, "Listed | None", "Mapping[str, Any] | None"]


def find_shards(source: Any, listed: Callable[[str], list[Found]] | None = None) -> list[Found]:
    """Return the shards of a `source` as in `open`. `listed` replaces the function that returns the shards of a manifest."""
    listed = listed or _from_manifest
    if isinstance(source, (str, os.PathLike)):
        return _find_one(os.fspath(source), listed)
    if isinstance(source, (bytes, Cache)) or not isinstance(source, Sequence):
        raise TypeError(f"expected a path, a pattern or a list of them, got {type(source).__name__}")
    found = [shard for part in source for shard in find_shards(part, listed)]
    if not found:
        raise FileNotFoundError("no shards: the list is empty")
    return found


def _find_one(source: str, listed: Callable[[str], list[Found]]) -> list[Found]:
    """Return the shards of a path or pattern from the caller. Braces and wildcards are expanded nowhere else."""
    if "://" in source:
        raise ValueError(f"{source}: not a local path; stream it with wds.DataPipeline and tc.decode")
    if os.path.exists(source):
        return _find_path(source, listed)
    found: list[Found] = []
    for path in expand_braces(source):
        matches = [path] if os.path.exists(path) else sorted(glob.glob(_escape_existing(path)))
        if not matches:
            raise FileNotFoundError(f"{path} matches no file" if glob.has_magic(path) else f"{path} does not exist")
        for match in matches:
            if not os.path.exists(match):
                raise FileNotFoundError(f"{match} is a link to a file that does not exist")
            found += _find_path(match, listed)
    return found


def _find_path(path: str, listed: Callable[[str], list[Found]]) -> list[Found]:
    """Return the shards of a path to a folder, a manifest or a shard. Braces and wildcards in the path are literal."""
    if os.path.isdir(path):
        manifest = os.path.join(path, MANIFEST)
        if os.path.exists(manifest):
            return listed(manifest)
        shards = sorted(file for file in os.listdir(path) if file.endswith(".tar") and not file.startswith("."))
        if not shards:
            raise FileNotFoundError(f"{path} has neither {MANIFEST} nor any *.tar")
        return [(os.path.join(path, file), None, None) for file in shards]
    return listed(path) if path.endswith(".json") else [(path, None, None)]


def expand_braces(pattern: str) -> list[str]:
    """Return the expansion of a pattern with braces. In names of folders that exist, braces are literal."""
    rest = pattern[len(existing_folder(pattern)) :]
    if "{" not in rest:
        return [pattern]
    head = pattern[: len(pattern) - len(rest)]
    try:
        return [head + expanded for expanded in braceexpand(rest)]
    except ValueError:  # unbalanced braces may be part of a file's name
        return [pattern]


def _escape_existing(pattern: str) -> str:
    """Return a pattern for `glob` in which the names of leading folders that exist are escaped."""
    folder = existing_folder(pattern)
    return glob.escape(folder) + pattern[len(folder) :]


def existing_folder(pattern: str) -> str:
    """Return the longest prefix of a pattern that is the path of an existing folder, with the final slash; else `""`."""
    folder = os.path.dirname(pattern)
    while folder and not os.path.isdir(folder) and folder != os.path.dirname(folder):
        folder = os.path.dirname(folder)
    end = len(folder)
    while folder and end < len(pattern) and pattern[end] in (os.sep, os.altsep):
        end += 1
    return pattern[:end] if os.path.isdir(folder) else ""


def _from_manifest(path: str) -> list[Found]:
    """Return the shards that a manifest lists. Shards that are not listed are unfinished, and so left out."""
    entries, extra = read_manifest(path)
    caches, fingerprints = extra.get("caches", {}), extra.get("fingerprints", {})
    found: list[Found] = []
    for located in locate_shards(path, entries):
        entry, shard = located.entry, located.path
        if located.error is not None:
            raise located.error
        if located.nbytes != entry.nbytes:
            what = f"{shard} has {located.nbytes} bytes, but {path} says {entry.nbytes}: one of the two is stale"
            remedy = f"if tc.write_index was interrupted, call tc.write_index({shard!r}) again"
            raise FormatError(f"{what}; {remedy}, else call tc.verify, which tells what is intact", kind="index")
        counts = caches.get(entry.url) if isinstance(caches, dict) else None
        if counts is not None and not are_counts(counts):
            what = f"{path}: {entry.url} has caches {counts!r:.100}, expected numbers of samples by name"
            raise FormatError(f"{what}, each at least 1; call tc.write_index({shard!r})")
        fingerprint = fingerprints.get(entry.url) if isinstance(fingerprints, dict) else None
        if fingerprint is not None and not isinstance(fingerprint, dict):
            raise FormatError(f"{path}: {entry.url} has a fingerprint {fingerprint!r:.100}, expected a dict")
        found.append((shard, Listed(entry.num_samples, counts), fingerprint))
    if not found:
        raise FileNotFoundError(f"{path} lists no shards")
    return found


def are_counts(counts: Any) -> bool:
    """Return whether a value in a manifest is a dict from cache name to number of samples, each at least 1."""
    return isinstance(counts, dict) and all(type(count) is int and 0 < count < 1 << 63 for count in counts.values())


def _choose_name(name: str | None, caches: Mapping[str, Iterable[str]]) -> str:
    """Return the name of the cache to open, among those in the shards."""
    if name:
        cache_name(name)
    there = sorted({other for names in caches.values() for other in names})
    paths = list(caches)
    where = paths[0] if len(paths) == 1 else f"{paths[0]} and {len(paths) - 1} more"
    if name is not None and name not in there:
        raise KeyError(f"{where}: no cache {name!r}; there are {there}")
    if name is None and not there:
        raise KeyError(f"{where}: no cache, only other members; write one with tc.ShardWriter or tc.encoder()")
    if name is None and len(there) > 1:
        raise KeyError(f"{where}: caches {there}: choose one with cache=…, '' for the one without a name")
    return there[0] if name is None else name


def num_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


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
        reason += "; overcommit is off, but read-only maps do not count towards the memory limit"
    return Io("auto", f"{reason}; files outside the page cache are read ahead")
