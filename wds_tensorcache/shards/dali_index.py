"""DALI's index of a shard, `NAME.idx`: its path, building and parsing it, and whether it is stale."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence

from wds_tensorcache.errors import FormatError, InvalidKeyError
from wds_tensorcache.shards.index import ShardIndex
from wds_tensorcache.shards.names import TENSORS, member_suffix
from wds_tensorcache.shards.sidecar import check_replaceable
from wds_tensorcache.storage.atomic import write_atomically

__all__ = [
    "SUFFIX",
    "Entry",
    "build_dali_index",
    "dali_index_path",
    "is_dali_index",
    "list_members",
    "parse_dali_index",
    "split_lines",
    "write_dali_index",
]

SUFFIX = ".idx"
# a member: extension, offset and length of the content in bytes, and the member's name ("" in version 1.1)
Entry = tuple[str, int, int, str]
_WIDTHS = {"v1.1": 3, "v1.2": 4}  # fields of a member
_NUMBER = re.compile(r"[0-9]{1,19}").fullmatch
_NUM_COMPARED = 64


def dali_index_path(path: str) -> str:
    """Return the path at which DALI's tools put the index of the shard at `path`."""
    return os.path.splitext(path)[0] + SUFFIX


def list_members(index: ShardIndex) -> list[list[Entry]]:
    """Return the members of each sample, in the order of the shard."""
    samples: list[list[Entry]] = [[] for _ in range(len(index.keys))]
    keys, table = list(index.keys), index.members_in_order()
    columns = (table.rows, table.kinds, table.begins, table.sizes)
    for row, kind, begin, nbytes in zip(*(column.tolist() for column in columns), strict=True):
        suffix = table.suffixes[kind]
        samples[row].append((suffix, begin, nbytes, f"{keys[row]}.{suffix}"))
    return samples


def build_dali_index(samples: Iterable[Sequence[Entry]]) -> bytes:
    """Return the index of samples, version 1.2: the bytes that DALI's own `wds2idx` writes.

    Raises:
        InvalidKeyError: A name or an extension is empty, or contains white space, which separates fields in this format; or
            a sample has no members.
    """
    lines: list[bytes] = []
    for sample in samples:
        line = " ".join([f"{suffix} {begin} {nbytes} {name}" for suffix, begin, nbytes, name in sample])
        encoded = line.encode("utf-8", "surrogateescape")
        if not sample or len(encoded.split()) != 4 * len(sample):
            raise InvalidKeyError(
                f"sample {len(lines)} with the members {[name for *_, name in sample]!r:.200}: DALI's index cannot hold it; "
                f"expected at least one member, and neither white space nor empty extensions"
            )
        lines.append(encoded)
    return b"".join([b"v1.2 %d\n" % len(lines), *[line + b"\n" for line in lines]])


def write_dali_index(path: str, index: ShardIndex, fsync: bool = True) -> None:
    """Write DALI's index of a shard to `path`; raise FileExistsError if the path is a shard, or not a file."""
    check_replaceable(path)
    write_atomically(path, [build_dali_index(list_members(index))], fsync)


def parse_dali_index(content: bytes, *, lenient: bool = False) -> list[list[Entry] | None]:
    """Return the members of each line, or None for a damaged line.

    Args:
        content: Bytes of an index of version 1.1 or 1.2.
        lenient: Accept a wrong number of lines, and skip only the damaged members of a line.

    Raises:
        FormatError: The first line is damaged.
    """
    width, lines = split_lines(content, lenient=lenient)
    return [_parse_line(line.split(), width, lenient) for line in lines]


def split_lines(content: bytes, *, lenient: bool = False) -> tuple[int, list[str]]:
    """Return the number of fields per member (4, or 3 in version 1.1), and the lines of the samples.

    Raises:
        FormatError: The first line is damaged.
    """
    first, *lines = content.decode("utf-8", "surrogateescape").splitlines() or [""]
    head = first.split()
    width = _WIDTHS.get(first[:4] if lenient else "".join(head[:1]), 0)
    if not width or not (lenient or head[1:] == [str(len(lines))]):
        raise FormatError(f"it begins with {first[:40]!r}", kind="index")
    return width, lines


def _parse_line(fields: list[str], width: int, lenient: bool) -> list[Entry] | None:
    entries: list[Entry] = []
    for at in range(0, len(fields), width):
        suffix, begin, nbytes, name, *_ = [*fields[at : at + width], "", "", ""]
        is_number = _NUMBER(begin) and _NUMBER(nbytes)
        if is_number and (lenient or width == 3 or name.endswith(f".{suffix}")):
            entries.append((suffix, int(begin), int(nbytes), name))
        elif not lenient:
            return None
    return entries or None


def is_dali_index(path: str, index: ShardIndex, name: str) -> bool:
    """Return whether an index is current for a shard: compares the number of samples, and 64 tensor members of cache `name`."""
    if not os.path.isfile(path):
        return False
    with open(path, "rb") as file:
        lines = file.read().splitlines()
    if not lines or lines[0].split()[-1:] != [b"%d" % len(index.keys)] or len(lines) != len(index.keys) + 1:
        return False
    columns, suffix = index.caches.get(name), member_suffix(name, TENSORS).encode()
    if columns is None or not len(columns):
        return True
    for at in {*range(0, len(columns), max(1, len(columns) // _NUM_COMPARED)), len(columns) - 1}:
        row = at if columns.rows is None else columns.rows.item(at)
        nbytes = index.layouts.nbytes.item(columns.layout.item(at))
        words = lines[1 + row].lower().split()
        wanted = [suffix, b"%d" % columns.tensors_begin.item(at), b"%d" % nbytes]
        if not any(words[first : first + 3] == wanted for first in range(0, len(words), 4)):
            return False
    return True
