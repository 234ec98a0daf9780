"""Find the shards that `tc.open` is asked for, and decide how they are read."""

from __future__ import annotations

import glob
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from braceexpand import braceexpand

from wds_tensorcache.codec.skeleton.builders import allow_table
from wds_tensorcache.errors import FormatError
from wds_tensorcache.reading.cache import TensorCache
from wds_tensorcache.reading.join import JoinedCache
from wds_tensorcache.reading.shard_set import Store
from wds_tensorcache.shards.catalog import MANIFEST
from wds_tensorcache.shards.fingerprint import as_fingerprint, check_fingerprint, common_fields
from wds_tensorcache.shards.manifest import locate_shards, read_manifest
from wds_tensorcache.shards.names import cache_name
from wds_tensorcache.shards.shard import Shard
from wds_tensorcache.storage.files import Files
from wds_tensorcache.storage.maps import CAN_COPY
from wds_tensorcache.storage.pool import Pool
from wds_tensorcache.storage.system import file_system, memory_nbytes, overcommit_is_off

__all__ = ["Io", "are_counts", "existing_folder", "expand_braces", "find_shards", "num_cores", "open"]


@dataclass(frozen=True, slots=True)
class Io:
    """How files are read: `method` is "auto", "mmap" or "pread"; `reason` says what that means here, and why."""

    method: str
    reason: str


def open(
    source: Any,
    *,
    name: str | None = None,
    join: str | None = None,
    io: str = "auto",
    threads: int | None = None,
    allow: Iterable[type] = (),
    pool_nbytes: int = 1 << 30,
    max_open_files: int | None = None,
    expect: Mapping[str, Any] | None = None,
) -> Any:
    """Open shards for random access.

    Args:
        source: A folder (its `manifest.json`, or else its `*.tar` in the order of their names), a manifest, a shard, a
            pattern (`"train-{000000..000099}.tar"`, `"train-*.tar"`), or a list of those; uncompressed local tars of any
            writer. Only what you type is a pattern: names that it leads to stand for themselves. A shard that you list twice,
            or that a folder has under two names, gives its samples twice.
        name: Which cache, where samples have several (`NAME.tensorcache`), `""` for the one without a name. By default the
            only one. Samples that lack it are not counted.
        join: `"key"` joins several caches of the same keys, sample by sample: `source` is a list of what `open` takes, or of
            caches, whose samples are dicts, and gives one dict of all their items; or a dict of those, and gives each
            cache's sample under its name. The order is the first one's.
        io: `"pread"` reads by positioned reads alone. `"auto"` also copies small tensors out of maps, batch by batch by size
            and by what is in memory, and only where a shard that is cut short meanwhile is an error: for the time of the
            copy, other processes that want to write to the shard wait. `"mmap"` copies out of maps without that, and **a
            shard that is cut short in place kills the process** (SIGBUS). What was decided, and why, is in `cache.io`.
        threads: How many read a batch; by default up to four, as many as there are cores.
        allow: Classes that skeletons may build; only for shards that you trust.
        pool_nbytes: Idle memory that is kept for the next batches.
        max_open_files: A quarter of what the system allows by default, at most 256.
        expect: Fields that the fingerprint of every shard must have, with these values; it may have others.

    Returns:
        A `TensorCache`; with `join`, a `JoinedCache`, which has the same methods.

    Raises:
        FileNotFoundError: There is no such file, or no shard. A MissingShardError: a manifest lists a shard that is not there.
        FormatError: A shard or manifest is damaged, or does not match the other. A manifest lists a url that is no local
            file, or one file twice, under any names.
        StaleCacheError: A shard was made otherwise than `expect` says, or says nothing of it.
        KeyError: The shards have no cache of that name, or several and none was named; joined caches lack keys.
    """
    if join is not None:
        if join != "key":
            raise ValueError(f"join={join!r}, expected 'key'")
        options: dict[str, Any] = {"name": name, "io": io, "threads": threads, "allow": allow}
        options |= {"pool_nbytes": pool_nbytes, "max_open_files": max_open_files, "expect": expect}
        if isinstance(source, (str, os.PathLike)):
            raise TypeError(f"join={join!r} needs a list or a dict of what is joined, got {source!r}")
        named = isinstance(source, Mapping)
        parts = [
            part if isinstance(part, (TensorCache, JoinedCache)) else open(part, **options)
            for part in (source.values() if named else source)
        ]
        return JoinedCache(parts, tuple(source) if named else None)
    if max_open_files is not None and max_open_files < 1:
        raise ValueError(f"max_open_files={max_open_files}, expected at least 1")
    if io not in ("auto", "mmap", "pread"):
        raise ValueError(f"io={io!r}, expected 'auto', 'mmap' or 'pread'")
    if threads is not None and threads < 1:
        raise ValueError(f"threads={threads}, expected at least 1")
    found = find_shards(source)
    files, pool = Files(max_open_files), Pool(pool_nbytes)
    table = allow_table(allow)
    try:
        # a manifest says which caches there are; without one, the indexes do
        indexes = {path: Shard(path, "", files, pool, table).index for path, counts, _ in found if counts is None}
        name = _choose_name(
            name, {path: indexes[path].caches if counts is None else counts for path, counts, _ in found}
        )
        made = {path: indexes[path].fingerprint if path in indexes else listed for path, _, listed in found}
        for path, fingerprint in made.items():
            if expect is not None:
                check_fingerprint(path, fingerprint, as_fingerprint(expect))
        shards = []
        for path, counts, _ in found:
            count = counts.get(name, 0) if counts is not None else None
            shards.append(Shard(path, name, files, pool, table, count, indexes.get(path)))
            files.expect(shards[-1].path)
        return TensorCache(
            Store(
                shards,
                files,
                pool,
                _choose_io(io, found),
                threads or min(4, num_cores()),
                common_fields(made.values()),
            )
        )
    except BaseException:
        files.close()
        raise


# a shard; how many samples each of its caches has, and how it was made, if a manifest says so
Found = tuple[str, "Mapping[str, int] | None", "Mapping[str, Any] | None"]


def find_shards(source: Any, listed: Callable[[str], list[Found]] | None = None) -> list[Found]:
    """Return the shards of what `open` takes; `listed` returns those of a manifest, which says how many samples each has."""
    listed = listed or _from_manifest
    if isinstance(source, (str, os.PathLike)):
        return _find_one(os.fspath(source), listed)
    if isinstance(source, (bytes, TensorCache, JoinedCache)) or not isinstance(source, Sequence):
        raise TypeError(f"expected a path, a pattern or a list of them, got {type(source).__name__}")
    found = [shard for part in source for shard in find_shards(part, listed)]
    if not found:
        raise FileNotFoundError("no shards: the list is empty")
    return found


def _find_one(source: str, listed: Callable[[str], list[Found]]) -> list[Found]:
    """Return the shards of what the caller typed: the only text in which braces and wildcards mean something."""
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
                raise FileNotFoundError(f"{match} is a link to what does not exist")
            found += _find_path(match, listed)
    return found


def _find_path(path: str, listed: Callable[[str], list[Found]]) -> list[Found]:
    """Return the shards of a folder, a manifest or a shard; the path stands for itself, whatever characters it has."""
    if os.path.isdir(path):
        manifest = os.path.join(path, MANIFEST)
        if os.path.exists(manifest):
            return listed(manifest)
        shards = sorted(file for file in os.listdir(path) if file.endswith(".tar") and not file.startswith("."))
        if not shards:
            raise FileNotFoundError(f"{path} has neither {MANIFEST} nor *.tar")
        return [(os.path.join(path, file), None, None) for file in shards]
    return listed(path) if path.endswith(".json") else [(path, None, None)]


def expand_braces(pattern: str) -> list[str]:
    """Return what a pattern with braces stands for; folders that are there under just these names keep their braces."""
    rest = pattern[len(existing_folder(pattern)) :]
    if "{" not in rest:
        return [pattern]
    head = pattern[: len(pattern) - len(rest)]
    try:
        return [head + expanded for expanded in braceexpand(rest)]
    except ValueError:  # unbalanced: a file may be called so
        return [pattern]


def _escape_existing(pattern: str) -> str:
    """Return a glob pattern whose first folders, as many as are there under just these names, stand for themselves."""
    folder = existing_folder(pattern)
    return glob.escape(folder) + pattern[len(folder) :]


def existing_folder(pattern: str) -> str:
    """Return the longest beginning of a pattern that is a folder's path, with the slash after it."""
    folder = os.path.dirname(pattern)
    while folder and not os.path.isdir(folder) and folder != os.path.dirname(folder):
        folder = os.path.dirname(folder)
    end = len(folder)
    while folder and end < len(pattern) and pattern[end] in (os.sep, os.altsep):
        end += 1
    return pattern[:end] if os.path.isdir(folder) else ""


def _from_manifest(path: str) -> list[Found]:
    """Return what a manifest lists: it alone says what is finished."""
    entries, extra = read_manifest(path)
    caches, fingerprints = extra.get("caches", {}), extra.get("fingerprints", {})
    found: list[Found] = []
    for located in locate_shards(path, entries):
        entry, shard = located.entry, located.path
        if located.error is not None:
            raise located.error
        if located.nbytes != entry.nbytes:
            what = f"{shard} has {located.nbytes} bytes, but {path} says {entry.nbytes}: it is of another state"
            remedy = f"call tc.index({shard!r}) again if that was broken off"
            raise FormatError(f"{what}; {remedy}, or tc.verify, which tells what is whole", kind="index")
        counts = caches.get(entry.url) if isinstance(caches, dict) else None
        if counts is not None and not are_counts(counts):
            raise FormatError(f"{path}: {entry.url} has caches {counts!r:.100}, expected numbers of samples by name")
        fingerprint = fingerprints.get(entry.url) if isinstance(fingerprints, dict) else None
        if fingerprint is not None and not isinstance(fingerprint, dict):
            raise FormatError(f"{path}: {entry.url} has a fingerprint {fingerprint!r:.100}, expected fields by name")
        found.append((shard, counts, fingerprint))
    if not found:
        raise FileNotFoundError(f"{path} lists no shards")
    return found


def are_counts(counts: Any) -> bool:
    """Return whether a value of a manifest is a number of samples for each cache by name."""
    return isinstance(counts, dict) and all(type(count) is int and 0 <= count < 1 << 63 for count in counts.values())


def _choose_name(name: str | None, caches: Mapping[str, Iterable[str]]) -> str:
    """Return the name of the cache to open, of those that the shards have."""
    if name:
        cache_name(name)
    there = sorted({other for names in caches.values() for other in names})
    paths = list(caches)
    where = paths[0] if len(paths) == 1 else f"{paths[0]} and {len(paths) - 1} more"
    if name is not None and name not in there:
        raise KeyError(f"{where}: no cache {name!r}; there are {there}")
    if name is None and not there:
        raise KeyError(f"{where}: no cache in it, only other members; write one with tc.ShardWriter or tc.encoder()")
    if name is None and len(there) > 1:
        raise KeyError(f"{where}: caches {there}: choose one with name=…, '' for the one without a name")
    return there[0] if name is None else name


def num_cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _choose_io(io: str, found: Sequence[Found]) -> Io:
    if io != "auto":
        return Io(io, "asked for")
    if not CAN_COPY:
        return Io("pread", "maps are not safe to copy from: this system has neither read leases nor process_vm_readv")
    kind, is_network = file_system(found[0][0])
    if is_network:
        return Io("pread", f"{kind} is a network file system, through whose maps one waits page by page")
    nbytes, memory = sum(os.path.getsize(path) for path, *_ in found), memory_nbytes()
    if memory is not None and nbytes > memory:
        return Io("pread", f"{nbytes:,} bytes of shards do not stay in {memory:,} bytes of memory")
    reason = f"on {kind or 'a local file system'}: maps for small tensors that are in memory, preadv for all else"
    if overcommit_is_off():
        reason += "; overcommit is off, and read-only maps take nothing of the limit"
    return Io("auto", f"{reason}, cold files read ahead")
