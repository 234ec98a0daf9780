"""Load the index of a shard: from its footer, otherwise from its sidecar `PATH.index`, otherwise by a scan."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Callable, Iterator
from typing import TypeVar

from wds_tensorcache.errors import FormatError, TensorCacheError
from wds_tensorcache.shards.footer import parse_index, read_footer
from wds_tensorcache.shards.index import ShardIndex
from wds_tensorcache.shards.index_paths import sidecar_path
from wds_tensorcache.shards.names import TENSORS, member_suffix
from wds_tensorcache.storage.files import File, ShardFile

_NAME_NBYTES = 100  # the width of a tar header's name field
_SIZE = slice(124, 136)  # a tar header's size field
_Parsed = TypeVar("_Parsed")


def load_index(file: File) -> ShardIndex:
    """Return the index of a shard from its footer, otherwise from its sidecar, otherwise from a scan. All three are equal.

    Raises:
        FormatError: The file is not a shard, or is damaged.
    """
    index = find_index(file, lambda: _read_sidecar(file.path))
    return scan(file) if index is None else index


def find_index(file: File, read_sidecar: Callable[[], bytes | None], *, tail: bytes | None = None) -> ShardIndex | None:
    """Return the index of a shard from its footer, otherwise from its sidecar; None if it has neither.

    Args:
        file: The shard.
        read_sidecar: Returns the sidecar; None if there is none.
        tail: The last bytes of the shard, if they were read already.

    Raises:
        FormatError: The index is malformed, or the sidecar does not match the shard.
    """
    try:
        index = read_footer(file.read, file.nbytes, tail)
        if index is None and (sidecar := read_sidecar()) is not None:
            index = parse_index(sidecar, file.nbytes)
            if index is not None:
                check_sidecar(index, file)
    except FormatError as exc:
        raise exc.at(file.path) from exc
    return index


def scan(file: File) -> ShardIndex:
    """Return the index of a shard from its tar headers. Cost: a remote shard is read as a whole."""
    from wds_tensorcache.shards.index_builder import scan_shard

    try:
        with file.read_through() as read:
            return scan_shard(read, file.nbytes)
    except TensorCacheError as exc:
        raise exc.at(file.path) from exc


def open_sidecar(path: str) -> ShardFile | None:
    """Return the opened sidecar of the shard at `path`; None if there is none."""
    try:
        return ShardFile(sidecar_path(path))
    except OSError as exc:
        if exc.errno in (errno.ENOENT, errno.ENAMETOOLONG):
            return None
        raise


def _read_sidecar(path: str) -> bytes | None:
    sidecar = open_sidecar(path)
    return None if sidecar is None else sidecar.read(0, sidecar.nbytes)


def parse_both(
    file: ShardFile, parse: Callable[[ShardFile], _Parsed | None], *, lenient: bool = False
) -> Iterator[_Parsed]:
    """Yield the results of `parse` for a shard and for its sidecar; either may contain an index.

    Args:
        file: The shard.
        parse: Function that returns None, or raises FormatError, for a file without an index.
        lenient: Skip a file that the system cannot read instead of raising OSError.
    """
    for is_sidecar in (False, True):
        parsed = None
        with contextlib.suppress(FormatError, *[OSError] * lenient):
            opened = open_sidecar(file.path) if is_sidecar else file
            parsed = None if opened is None else parse(opened)
        if parsed is not None:
            yield parsed


def check_sidecar(index: ShardIndex, file: File) -> None:
    """Raise FormatError unless the tar headers of the first, middle and last sample match a sidecar.

    A shard may have been replaced by one of the same length, next to which the old sidecar remains.
    """
    from wds_tensorcache.shards.tar import BLOCK, names_of, parse_number

    places = list(_places(index))
    begins = [begin for *_, begin, _ in places]
    headers = file.read_many([begin - BLOCK for begin in begins], begins)
    for (row, suffix, begin, nbytes), header in zip(places, headers, strict=True):
        key, stored_name = index.keys.raw(row), header[:_NAME_NBYTES].partition(b"\0")[0]
        if parse_number(header[_SIZE]) == nbytes and _is_member(stored_name, key, suffix):
            continue
        # extended headers may contain the name and the length
        members = names_of(file.read, begin, file.nbytes)
        if any(size == nbytes and _is_member(name, key, suffix) for name, size in members):
            continue
        listed, name = f"{key.decode(errors='replace')}.{suffix}", stored_name.decode(errors="replace")
        problem = f"the sidecar lists {listed!r:.200} of {nbytes} bytes where the shard has {name!r:.120}"
        remedy = "the sidecar is stale, and `tensorcache index` writes it anew, or the shard is damaged"
        problem = f"{problem}: {remedy}; `tensorcache verify` (tc.verify) reports which"
        raise FormatError(problem, offset=begin - BLOCK, kind="index")


def _places(index: ShardIndex) -> Iterator[tuple[int, str, int, int]]:
    """Yield the number of the sample, suffix, offset and length of three members: tensors if there is a cache."""
    for name, cache in index.caches.items():
        for at in _spread(len(cache)):
            row = at if cache.rows is None else cache.rows.item(at)
            nbytes = index.layouts.nbytes.item(cache.layout.item(at))
            yield row, member_suffix(name, TENSORS), cache.tensors_begin.item(at), nbytes
        return
    for suffix, member in index.members.items():
        for at in _spread(len(member.begin)):
            row = at if member.rows is None else member.rows.item(at)
            yield row, suffix, member.begin.item(at), member.nbytes.item(at)
        return


def _spread(count: int) -> list[int]:
    return sorted({0, count // 2, count - 1}) if count else []


def _is_member(name: bytes, key: bytes, suffix: str) -> bool:
    """Return whether a tar header names a sample's member; other writers may write suffixes in capitals."""
    return name.startswith(key + b".") and name[len(key) + 1 :].decode("utf-8", "surrogateescape").lower() == suffix
