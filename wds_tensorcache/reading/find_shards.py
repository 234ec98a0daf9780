"""Find the shards of a path, a pattern, a folder or a manifest."""

from __future__ import annotations

import glob
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from braceexpand import braceexpand

from wds_tensorcache.errors import FormatError
from wds_tensorcache.reading.base_cache import Cache
from wds_tensorcache.shards.manifest import MANIFEST, locate_shards, read_manifest

__all__ = ["CachePaths", "Found", "ListedCounts", "are_counts", "existing_folder", "expand_braces", "find_shards"]

CachePaths: TypeAlias = "str | os.PathLike[str] | Sequence[CachePaths]"


class ListedCounts(NamedTuple):
    """Numbers of samples of a shard in its manifest: all samples, and those of each cache; the absolute path of the manifest.

    None if unknown.
    """

    num_samples: int | None = None
    caches: Mapping[str, int] | None = None
    manifest: str | None = None


# path of a shard; if a manifest lists them, also its numbers of samples and its fingerprint
Found = tuple[str, "ListedCounts | None", "Mapping[str, Any] | None"]


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
    manifest = os.path.abspath(path)
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
        found.append((shard, ListedCounts(entry.num_samples, counts, manifest), fingerprint))
    if not found:
        raise FileNotFoundError(f"{path} lists no shards")
    return found


def are_counts(counts: Any) -> bool:
    """Return whether a value in a manifest is a dict from cache name to number of samples, each at least 1."""
    return isinstance(counts, dict) and all(type(count) is int and 0 < count < 1 << 63 for count in counts.values())
