"""Indexes of shards, from footers, sidecars (`PATH.index`) or scans."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TypeVar

from wds_tensorcache.errors import FormatError, TensorCacheError
from wds_tensorcache.shards.footer import parse_index, read_footer
from wds_tensorcache.shards.index import ShardIndex
from wds_tensorcache.shards.names import sidecar_path, suffix_after
from wds_tensorcache.shards.tar import BLOCK, names_of, parse_number
from wds_tensorcache.storage.files import File, ShardFile, open_if_exists

_NAME_NBYTES = 100  # the width of a tar header's name field
_SIZE = slice(124, 136)  # a tar header's size field
_Parsed = TypeVar("_Parsed")


def load_index(file: File) -> ShardIndex:
    """Load a shard's index from footer, sidecar or scan, in this order. Raise FormatError if the shard is damaged."""
    index = find_index(file, lambda: _read_sidecar(file.path))
    return scan(file) if index is None else index


def find_index(file: File, read_sidecar: Callable[[], bytes | None], *, tail: bytes | None = None) -> ShardIndex | None:
    """Return a shard's index from its footer, else its sidecar.

    None if neither is valid. `tail` contains the last bytes of the shard if the caller has read them. Raises FormatError if the
    index is malformed, or if the sidecar does not match the shard.
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
    """Build the index of a shard. Raise errors as `scan_shard` does. Cost: a remote shard is read as a whole."""
    from wds_tensorcache.shards.index_builder import scan_shard

    try:
        with file.read_through() as read:
            return scan_shard(read, file.nbytes, file.path)
    except TensorCacheError as exc:
        raise exc.at(file.path) from exc


def _read_sidecar(path: str) -> bytes | None:
    sidecar = open_if_exists(sidecar_path(path))
    return None if sidecar is None else sidecar.read(0, sidecar.nbytes)


def parse_both(file: File, parse: Callable[[File], _Parsed | None], *, lenient: bool = False) -> Iterator[_Parsed]:
    """Yield the results of `parse` for a shard and its local sidecar.

    Skip a result that is None, a FormatError and, if `lenient`, an OSError.
    """
    for is_sidecar in (False, True) if isinstance(file, ShardFile) else (False,):
        parsed = None
        with contextlib.suppress(FormatError, *[OSError] * lenient):
            opened = open_if_exists(sidecar_path(file.path)) if is_sidecar else file
            parsed = None if opened is None else parse(opened)
        if parsed is not None:
            yield parsed


def check_sidecar(index: ShardIndex, file: File) -> None:
    """Raise FormatError unless a sidecar matches three of the shard's tar headers."""
    # Hazard: another shard of the same length may have replaced the shard, but not its sidecar.
    columns = index.columns()
    if not columns:
        return
    suffix, _, rows, begins, sizes = columns[1 if index.caches else 0]
    places = sorted({0, len(begins) // 2, len(begins) - 1}) if len(begins) else []
    headers = file.read_many([begins.item(at) - BLOCK for at in places], [begins.item(at) for at in places])
    for at, header in zip(places, headers, strict=True):
        key, begin, nbytes = index.keys.raw(at if rows is None else rows.item(at)), begins.item(at), sizes.item(at)
        stored_name = header[:_NAME_NBYTES].partition(b"\0")[0]
        if parse_number(header[_SIZE]) == nbytes and _is_member(stored_name, key, suffix):
            continue
        # extended headers may contain the name and the length
        members = names_of(file.read, begin, file.nbytes)
        if any(size == nbytes and _is_member(name, key, suffix) for name, size, _ in members):
            continue
        listed, name = f"{key.decode(errors='replace')}.{suffix}", stored_name.decode(errors="replace")
        problem = f"the sidecar lists {listed!r:.200} of {nbytes} bytes where the shard has {name!r:.120}"
        remedy = "the sidecar is stale, and `tensorcache index` writes it anew, or the shard is damaged"
        problem = f"{problem}: {remedy}; `tensorcache verify` (tc.verify) reports which"
        raise FormatError(problem, offset=begin - BLOCK, kind="index")


def _is_member(name: bytes, key: bytes, suffix: str) -> bool:
    # other writers may write suffixes in capitals
    stored = suffix_after(key, name)
    return stored is not None and stored.decode("utf-8", "surrogateescape").lower() == suffix
