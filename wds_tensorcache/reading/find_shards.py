"""The shards of a path, url, pattern, folder or manifest."""

from __future__ import annotations

import fnmatch
import glob
import os
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from shlex import quote
from typing import Any, NamedTuple, TypeAlias
from urllib.parse import unquote

from braceexpand import braceexpand

from wds_tensorcache.arguments import user_level
from wds_tensorcache.errors import FormatError, RemoteError, format_count
from wds_tensorcache.shards.manifest import MANIFEST, FoundShard, locate_shards, read_manifest
from wds_tensorcache.shards.tar import unpack_remedy
from wds_tensorcache.storage.folder import folder_of
from wds_tensorcache.storage.urls import check_not_url, conceal, is_url, is_web, shown, split_url

CachePaths: TypeAlias = "str | os.PathLike[str] | Sequence[CachePaths]"
_Listed: TypeAlias = "Callable[[str], list[FoundShard] | None]"
_NUM_SHOWN = 3
_COMPRESSIONS = {"gz": "gzip", "tgz": "gzip", "bz2": "bzip2", "xz": "xz", "zst": "zstd"}
_IS_TAR = re.compile(r"[^.].*\.(tar(\.(gz|bz2|xz|zst))?|tgz)", re.IGNORECASE | re.DOTALL).fullmatch


class Found(NamedTuple):
    """The shards of a source. `left_out` is a message about omitted shards; None if no shard is omitted."""

    shards: list[FoundShard]
    left_out: str | None


def find_shards(
    source: Any,
    listed: _Listed | None = None,
    *,
    local_for: str | None = None,
    copies: bool = False,
) -> Found:
    """Return the shards of a `source` as in `open`. Warn if a folder contains shards that are left out.

    Args:
        listed: Function that returns the shards of a manifest, or None if it does not exist; `_read_listed` by default.
        local_for: Past participle of an action that needs local shards, such as `"verified"`. Urls then raise ValueError.
        copies: True if the caller makes a new cache of the shards. Left-out shards then raise FormatError instead of a warning.

    Raises:
        FileNotFoundError: A file or object does not exist, or a list, folder or manifest has no shard. Or a remote folder
            has no manifest, and the server cannot list it.
        FormatError: A manifest is damaged or stale, or lists a shard twice, or a shard that is not in its folder.
        RemoteError, ImportError: A request failed; or a url needs a package that is not installed.
        TypeError, ValueError: The source is not valid.

    Cost: one request for each manifest or listing at a url; no request for the url of a shard.
    """
    shards: list[FoundShard] = []
    messages: list[str] = []
    texts = list(iterate_texts(source))
    if not texts:
        raise FileNotFoundError("no shards: the list is empty")
    for text in texts:
        if local_for is not None and is_url(text):
            problem = f"{shown(text)}: only local shards can be {local_for}"
            raise ValueError(f"{problem}; copy them to a disk first, with a tool of the store")
        for path in expand_pattern(text):
            shards += _find(path, listed or _read_listed, messages)
    for message in messages:
        if copies:
            raise FormatError(message, kind="index")
        warnings.warn(message, stacklevel=user_level())
    return Found(shards, next(iter(messages), None))


def iterate_texts(source: Any) -> Iterator[str]:
    """Yield the paths, urls and patterns in nested lists. Raise TypeError for anything else."""
    if isinstance(source, (str, os.PathLike)):
        yield os.fspath(source)
        return
    is_cache = hasattr(source, "read_batch")
    if isinstance(source, bytes) or is_cache or not isinstance(source, Sequence):
        raise TypeError(f"expected a path, a pattern or a list of them, got {type(source).__name__}")
    for part in source:
        yield from iterate_texts(part)


def expand_pattern(source: str) -> Iterator[str]:
    """Yield the paths that match a path or pattern from the caller. Braces and wildcards are expanded nowhere else."""
    if is_url(source):
        yield from _expand_url(source)
        return
    if os.path.exists(source):
        yield source
        return
    check_not_url(source)
    head = existing_folder(source)  # in the names of folders that exist, braces and wildcards are literal
    for path in (head + expanded for expanded in _expand_all(source[len(head) :])):
        folder = existing_folder(path)
        pattern = glob.escape(folder) + path[len(folder) :]
        matches = [path] if os.path.exists(path) else sorted(glob.glob(pattern))
        if not matches:
            raise FileNotFoundError(
                f"{path or repr(path)} {'matches no file' if glob.has_magic(path) else 'does not exist'}"
            )
        for match in matches:
            if not os.path.exists(match):
                raise FileNotFoundError(f"{match} is a link to a file that does not exist")
            yield match


def _expand_url(source: str) -> Iterator[str]:
    """Yield the urls that match a url or pattern, concealed. Cost: one request for each pattern with wildcards."""
    # urlsplit drops line ends and tabs silently, and would name another object.
    if not source.isprintable():
        raise ValueError(f"a url with characters that are not printable: {shown(source)!r:.200}")
    head, path, query = split_url(source)
    if not head.partition("://")[2]:
        raise ValueError(f"{shown(source)!r:.200}: expected a server or a bucket after '://'")
    wildcards = "*[" if is_web(source) else "*?["  # in a web server's url, `?` begins a query
    for url in (conceal(head + expanded + query) for expanded in _expand_all(path)):
        parent, _, pattern = url.rpartition("/")
        if not set(wildcards) & set(split_url(url)[1]):
            yield url
            continue
        if set(wildcards) & set(split_url(parent)[1]):
            raise ValueError(f"{url}: expected wildcards only in the last part of a url, not in folders")
        pattern, folder = unquote(pattern) if is_web(url) else pattern, folder_of(parent)
        names = [name for name in folder.names() if not name.startswith(".") and fnmatch.fnmatchcase(name, pattern)]
        if not names:
            raise FileNotFoundError(f"{url} matches no object")
        yield from map(folder.locate, names)


def _expand_all(pattern: str) -> list[str]:
    try:
        return list(braceexpand(pattern)) if "{" in pattern else [pattern]
    except ValueError:  # unbalanced braces may be part of a name
        return [pattern]


def _find(path: str, listed: _Listed, messages: list[str]) -> list[FoundShard]:
    """Return the shards of a folder, a manifest or a shard. Braces and wildcards in the path are literal."""
    name = split_url(path)[1] if is_url(path) else path
    if os.path.isdir(path) or (is_url(path) and not name.endswith((".json", ".tar"))):
        return _find_in_folder(path, listed, messages)
    if not name.endswith(".json"):
        return [FoundShard(path)]
    shards = listed(path)
    if shards is None:
        raise FileNotFoundError(f"{path} does not exist")
    return shards


def _find_in_folder(path: str, listed: _Listed, messages: list[str]) -> list[FoundShard]:
    folder = folder_of(path)
    manifest = os.path.join(path, MANIFEST) if not folder.is_remote else folder.locate(MANIFEST)
    kinds = "; a url that ends in neither .json nor .tar is that of a folder" if folder.is_remote else ""
    # without a manifest, all tars are shards; with one, the shards that it does not list may be unfinished
    shards, names = listed(manifest), None
    if shards is None:
        try:
            names = folder.names()
        except RemoteError as exc:
            why = "web servers have no listings" if is_web(path) else str(exc)
            problem = f"{path} has no {MANIFEST}, and its server cannot list the folder ({why})"
            remedy = f"check the url; upload the {MANIFEST} of the cache, or pass the urls of the shards"
            raise FileNotFoundError(f"{problem}{kinds}; {remedy}, such as '…/train-{{000000..000099}}.tar'") from exc
        shards = [FoundShard(folder.locate(name)) for name in shard_names(names)]
    if not folder.is_remote:
        left_out = _describe_left_out(path, [shard.path for shard in shards], has_manifest=names is None)
    else:
        left_out = _describe_packed(sorted(filter(_is_packed, names or ())))
    if not shards and names is not None:
        if names and not folder.is_remote:
            from wds_tensorcache.storage.locks import find_writer

            if writer := find_writer(path):
                left_out = f"a writer in {writer} has not finished its first shard; close it, or wait until it ends"
        raise FileNotFoundError(f"{path} has neither {MANIFEST} nor any *.tar{f'; {left_out}' if left_out else kinds}")
    if left_out:
        messages.append(f"{path}: {left_out}")
    return shards


def shard_names(names: Iterable[str]) -> list[str]:
    """Return the sorted names that end in `.tar`, except hidden files."""
    return sorted(name for name in names if name.endswith(".tar") and not name.startswith("."))


def _describe_left_out(folder: str, listed: list[str], *, has_manifest: bool) -> str:
    """Describe a folder's tars that are not `listed`, or return `""`."""
    try:
        names = os.listdir(folder)
    except OSError:  # the folder cannot be listed, but its files may be readable
        return ""
    packed = [os.path.join(folder, name) for name in sorted(filter(_is_packed, names))]
    unlisted: list[str] = []
    if has_manifest:
        head = os.path.join(os.path.abspath(folder), "")
        extra_names = set(shard_names(names)).difference(path.removeprefix(head) for path in listed)
        listed_paths = set(map(os.path.abspath, listed)) if extra_names else ()
        unlisted = [os.path.join(folder, name) for name in sorted(extra_names) if head + name not in listed_paths]
    if unlisted:
        from wds_tensorcache.storage.locks import find_writer

        # A writer renames a shard before it lists the shard in the manifest. If no writer is active now, the manifest, read
        # again, lists all shards except those of killed writers.
        if find_writer(folder):
            unlisted = []
        else:
            manifest = os.path.join(folder, MANIFEST)
            listed = [shard.path for shard in locate_shards(manifest, read_manifest(manifest)[0]) if not shard.error]
    if not unlisted and not packed:
        return ""  # saves a stat of each file
    identities = {file_identity(path) for path in listed if os.path.exists(path)}  # links have other names
    unlisted, packed = (
        [path for path in paths if os.path.isfile(path) and file_identity(path) not in identities]
        for paths in (unlisted, packed)
    )
    reasons = [_describe_packed(packed)]
    if unlisted:
        problem = f"{MANIFEST} does not list {len(unlisted):,} of the shards in the folder ({_list_first(unlisted)})"
        command = f"`tensorcache index {quote(folder)}` (or tc.write_index of each of them)"
        remedy = f"add them with {command}, or move them to another folder"
        reasons.insert(0, f"{problem}, so their samples are left out; {remedy}")
    return "; ".join(filter(None, reasons))


def is_tar(path: object) -> bool:
    """Return whether a path or url names a tar, compressed or not."""
    text = os.fspath(path) if isinstance(path, (str, os.PathLike)) else ""
    name = (split_url(text)[1] if is_url(text) else text).rpartition("/")[2]
    return _IS_TAR(name) is not None


def _is_packed(name: str) -> bool:
    return not name.endswith(".tar") and _IS_TAR(name) is not None


def _describe_packed(paths: Sequence[str]) -> str:
    reasons = list[str]()
    if misnamed := [path for path in paths if path.lower().endswith(".tar")]:
        reasons.append(f"{_show_left_out(misnamed, 'other tar')} because the names of shards end in .tar; rename them")
    if compressed := [path for path in paths if path not in misnamed]:
        folder = os.path.dirname(compressed[0]) or "…"
        remedies = [
            unpack_remedy(_COMPRESSIONS[ending.lower().rpartition(".")[2]], f"*{ending}", repr(f"{folder}/*{ending}"))
            for ending in dict.fromkeys(path[path.lower().rindex(".t") - len(path.lower()) :] for path in compressed)
        ]
        problem = f"{_show_left_out(compressed, 'compressed tar')} because only plain tars can be opened"
        reasons.append("; ".join([problem, *remedies]))
    return "; ".join(reasons)


def _show_left_out(paths: Sequence[str], noun: str) -> str:
    return f"{format_count(len(paths), noun)} {'is' if len(paths) == 1 else 'are'} left out ({_list_first(paths)})"


def _list_first(paths: Sequence[str]) -> str:
    names = [os.path.basename(path) for path in paths[:_NUM_SHOWN]]
    return ", ".join(map(repr, names)) + ", …" * (len(paths) > _NUM_SHOWN)


def file_identity(path: str) -> tuple[int, int]:
    """Return numbers that are equal for all names of the same file."""
    status = os.stat(path)
    return status.st_dev, status.st_ino


def existing_folder(pattern: str) -> str:
    """Return the longest prefix that is an existing folder, else `""`."""
    folder = os.path.dirname(pattern)
    while folder and not os.path.isdir(folder):
        folder = os.path.dirname(folder)
    return folder


def _read_listed(path: str) -> list[FoundShard] | None:
    """Return the shards that a manifest lists; None without the manifest."""
    try:
        entries, extra = read_manifest(path)
    except FileNotFoundError:
        return None
    shards: list[FoundShard] = []
    for shard in locate_shards(path, entries, extra):
        if shard.error is not None:
            raise shard.error
        if shard.status is not None and shard.entry is not None and shard.status.st_size != shard.entry.nbytes:
            problem = f"{shard.path} has {shard.status.st_size} bytes, but {path} says {shard.entry.nbytes}"
            remedy = f"run `tensorcache index {quote(shard.path)}` (tc.write_index) if another tool changed the shard"
            checks = "`tensorcache verify` (tc.verify) tells what is intact"
            raise FormatError(f"{problem}: one of the two is stale; {remedy}; {checks}", kind="index")
        shards.append(shard)
    if not shards:
        remedy = "if a writer with overwrite=True was killed, write the shards again"
        raise FileNotFoundError(f"{path} lists no shards; {remedy}")
    return shards
