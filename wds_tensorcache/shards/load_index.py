"""Load the index of a local shard: from its footer, otherwise from its sidecar `PATH.index`, otherwise by a scan."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Callable, Iterator
from typing import TypeVar

from wds_tensorcache.errors import FormatError, TensorCacheError
from wds_tensorcache.shards.footer import parse_index, read_footer
from wds_tensorcache.shards.index import ShardIndex
from wds_tensorcache.shards.index_builder import scan_shard
from wds_tensorcache.shards.index_paths import sidecar_path
from wds_tensorcache.shards.names import TENSORS, member_suffix
from wds_tensorcache.shards.tar import BLOCK, names_of, parse_number
from wds_tensorcache.storage.files import ShardFile

__all__ = ["check_sidecar", "load_index", "open_sidecar", "parse_both"]

_NAME_NBYTES = 100  # the width of a tar header's name field
_SIZE = slice(124, 136)  # a tar header's size field
_MAX_OCTAL = 1 << 33  # a pax record may declare a length from here on
_Parsed = TypeVar("_Parsed")


def load_index(file: ShardFile) -> ShardIndex:
    """Return the index of a shard from its footer, otherwise from its sidecar, otherwise from a scan. All three are equal.

    Raises:
        FormatError: The file is not a shard, or is damaged.
    """
    try:
        index = read_footer(file.read, file.nbytes)
        if index is None and (sidecar := open_sidecar(file.path)) is not None:
            index = parse_index(sidecar.read(0, sidecar.nbytes), file.nbytes)
            if index is not None:
                check_sidecar(index, file.read, file.nbytes)
        return scan_shard(file.read, file.nbytes) if index is None else index
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


def check_sidecar(
    index: ShardIndex,
    read: Callable[[int, int], bytes],
    shard_nbytes: int,
    read_blocks: Callable[[list[int]], list[bytes]] | None = None,
) -> None:
    """Raise FormatError unless the tar headers of the first, middle and last sample match a sidecar.

    Hazard: a shard may be replaced by one of the same length, and keep the old sidecar.

    Args:
        index: Index in the sidecar.
        read: `read(begin, end)` returns bytes of the shard.
        shard_nbytes: Length of the shard.
        read_blocks: Returns the blocks of the shard at several offsets; by default `read` is called for each.
    """
    places = list(_places(index))
    begins = [begin - BLOCK for *_, begin, _ in places]
    headers = [read(at, at + BLOCK) for at in begins] if read_blocks is None else read_blocks(begins)
    for (row, suffix, begin, nbytes), header in zip(places, headers, strict=True):
        key, there = index.keys.raw(row), header[:_NAME_NBYTES].partition(b"\0")[0]
        is_same = parse_number(header[_SIZE]) == nbytes or nbytes >= _MAX_OCTAL
        # extended headers of other writers may contain the name
        names = names_of(read, begin, shard_nbytes)
        if not is_same or not (_is_member(there, key, suffix) or any(_is_member(name, key, suffix) for name in names)):
            listed, name = f"{key.decode(errors='replace')}.{suffix}", there.decode(errors="replace")
            what = f"the sidecar lists {listed!r:.200} of {nbytes} bytes where the shard has {name!r:.120}"
            remedy = "the sidecar is stale, and `tensorcache index` writes it anew, or the shard is damaged"
            what = f"{what}: {remedy}; `tensorcache verify` (tc.verify) reports which"
            raise FormatError(what, offset=begin - BLOCK, kind="index")


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
