"""Find the shards of a path, a pattern, a folder or a manifest."""

from __future__ import annotations

import glob
import os
import warnings
from collections.abc import Callable, Iterable, Sequence
from shlex import quote
from typing import Any, TypeAlias

from braceexpand import braceexpand

from wds_tensorcache.arguments import user_level
from wds_tensorcache.errors import FormatError, did_you_mean
from wds_tensorcache.reading.cache import Cache
from wds_tensorcache.reading.packed import describe_packed, packed_names, shown_names
from wds_tensorcache.reading.remote.find import find_remote
from wds_tensorcache.shards.manifest import MANIFEST, Found, ListedCounts, locate_shards, parse_entry, read_manifest
from wds_tensorcache.storage.locks import is_being_written
from wds_tensorcache.storage.remote.urls import check_not_url, is_url, shown

__all__ = ["CachePaths", "existing_folder", "expand_braces", "file_identity", "find_shards", "shard_names"]

CachePaths: TypeAlias = "str | os.PathLike[str] | Sequence[CachePaths]"


def find_shards(
    source: Any,
    listed: Callable[[str], list[Found]] | None = None,
    *,
    local_for: str | None = None,
    copies: bool = False,
) -> list[Found]:
    """Return the shards of a `source` as in `open`. Warn if a local folder contains shards that its manifest does not list.

    Args:
        listed: Replaces the function that returns the shards of a local manifest.
        local_for: Past participle of an action that needs local shards, such as `"verified"`. Urls then raise ValueError.
        copies: A new cache is made of the shards: raise FormatError instead of the warning.
    """
    listed = listed or _from_manifest
    if isinstance(source, (str, os.PathLike)):
        path = os.fspath(source)
        if local_for is not None and is_url(path):
            what = f"{shown(path)}: only local shards can be {local_for}"
            raise ValueError(f"{what}; copy them to a disk first, with a tool of the store")
        return _find_one(path, listed, copies)
    if isinstance(source, (bytes, Cache)) or not isinstance(source, Sequence):
        raise TypeError(f"expected a path, a pattern or a list of them, got {type(source).__name__}")
    found = [shard for part in source for shard in find_shards(part, listed, local_for=local_for, copies=copies)]
    if not found:
        raise FileNotFoundError("no shards: the list is empty")
    return found


def _find_one(source: str, listed: Callable[[str], list[Found]], copies: bool) -> list[Found]:
    """Return the shards of a path or pattern from the caller. Braces and wildcards are expanded nowhere else."""
    if is_url(source):
        shards = find_remote(source)
        left_out = {counts.left_out for _, counts, _ in shards if counts is not None}
        for message in sorted(filter(None, left_out)):
            _report(message, copies)
        return shards
    if os.path.exists(source):
        return _find_path(source, listed, copies)
    check_not_url(source)
    found: list[Found] = []
    for path in expand_braces(source):
        matches = [path] if os.path.exists(path) else sorted(glob.glob(_escape_existing(path)))
        if not matches:
            raise FileNotFoundError(
                f"{path} matches no file" if glob.has_magic(path) else f"{path} does not exist{_near(path)}"
            )
        for match in matches:
            if not os.path.exists(match):
                raise FileNotFoundError(f"{match} is a link to a file that does not exist")
            found += _find_path(match, listed, copies)
    return found


def _near(path: str) -> str:
    """Return the end of a message about a path that does not exist: similar names, or that its folder does not exist either."""
    folder, name = os.path.split(path.rstrip(os.sep))
    try:
        names = (each for each in os.listdir(folder or os.curdir) if os.path.splitext(each)[1] in ("", ".json", ".tar"))
        return did_you_mean(name, names)
    except OSError:
        return f"; there is no folder {folder} that can be read"


def _find_path(path: str, listed: Callable[[str], list[Found]], copies: bool) -> list[Found]:
    """Return the shards of a path to a folder, a manifest or a shard. Braces and wildcards in the path are literal."""
    if os.path.isdir(path):
        manifest = os.path.join(path, MANIFEST)
        if os.path.exists(manifest):
            found = listed(manifest)
            paths = [shard for shard, *_ in found]
            reasons = [_unlisted(path, paths), _packed(path, paths)]
        else:
            shards, packed = shard_names(os.listdir(path)), _packed(path, [])
            if not shards:
                end = "" if packed is None else f"; {packed}"
                raise FileNotFoundError(f"{path} has neither {MANIFEST} nor any *.tar{end}")
            found, reasons = [(os.path.join(path, file), None, None) for file in shards], [packed]
        text = "; ".join(filter(None, reasons))
        if not text:
            return found
        left_out = f"{path}: {text}"
        _report(left_out, copies)
        return [(shard, (counts or ListedCounts())._replace(left_out=left_out), made) for shard, counts, made in found]
    return listed(path) if path.endswith(".json") else [(path, None, None)]


def _report(left_out: str, copies: bool) -> None:
    """Warn of shards that are left out; raise FormatError if a new cache would lack them."""
    if copies:
        raise FormatError(left_out, kind="index")
    warnings.warn(left_out, stacklevel=user_level())


def shard_names(names: Iterable[str]) -> list[str]:
    """Return the sorted names of shards among the names of files: those that end in `.tar`, without hidden ones."""
    return sorted(name for name in names if name.endswith(".tar") and not name.startswith("."))


def _unlisted(folder: str, listed: list[str]) -> str | None:
    """Return the end of a message if a folder contains shards that its manifest does not list; None if it cannot be listed."""
    listed_paths = set(map(os.path.normpath, listed))
    try:
        names = shard_names(os.listdir(folder))
    except OSError:  # a folder may permit reading files by name, but no listing
        return None
    paths = [os.path.normpath(os.path.join(folder, name)) for name in names]
    unlisted = [path for path in paths if path not in listed_paths]
    # Hazard: a writer names a shard before it lists it. If no writer is active now, those that named shards have ended, so
    # the manifest, read again, lists them; unless they were killed.
    if not unlisted or is_being_written(folder):
        return None
    manifest = os.path.join(folder, MANIFEST)
    located = [each.path for each in locate_shards(manifest, read_manifest(manifest)[0]) if each.error is None]
    are_listed = set(map(file_identity, located))  # links have other names
    unlisted = [path for path in unlisted if os.path.isfile(path) and file_identity(path) not in are_listed]
    if not unlisted:
        return None
    shown = shown_names([os.path.basename(path) for path in unlisted])
    what = f"{MANIFEST} does not list {len(unlisted):,} of the shards in the folder ({shown})"
    command = f"`tensorcache index {quote(folder)}` (or tc.write_index of each of them)"
    remedy = f"add them with {command}, or move them to another folder"
    return f"{what}, so their samples are left out; {remedy}"


def _packed(folder: str, listed: list[str]) -> str | None:
    """Return the end of a message if a folder contains tars that are neither `listed` nor end in `.tar`."""
    try:
        names = packed_names(os.listdir(folder))
    except OSError:  # a folder may permit reading files by name, but no listing
        return None
    if not names:
        return None
    are_listed = {file_identity(path) for path in listed if os.path.exists(path)}
    paths = [os.path.join(folder, name) for name in names]
    left_out = [path for path in paths if os.path.isfile(path) and file_identity(path) not in are_listed]
    return describe_packed([os.path.basename(path) for path in left_out]) if left_out else None


def file_identity(path: str) -> tuple[int, int]:
    """Return numbers that are equal for all names of one file."""
    status = os.stat(path)
    return status.st_dev, status.st_ino


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
    found: list[Found] = []
    for located in locate_shards(path, entries):
        entry, shard = located.entry, located.path
        if located.error is not None:
            raise located.error
        if located.nbytes != entry.nbytes:
            what = f"{shard} has {located.nbytes} bytes, but {path} says {entry.nbytes}: one of the two is stale"
            remedy = f"run `tensorcache index {quote(shard)}` (tc.write_index) if another tool changed the shard"
            checks = "`tensorcache verify` (tc.verify) tells what is intact"
            raise FormatError(f"{what}; {remedy}; {checks}", kind="index")
        found.append(parse_entry(shard, entry, extra, manifest=path, status=located.status))
    if not found:
        raise FileNotFoundError(f"{path} lists no shards")
    return found
