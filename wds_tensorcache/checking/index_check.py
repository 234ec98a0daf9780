"""Compare the footer, the `.index` file and the `.idx` file of a shard with its samples."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from wds_tensorcache.checking.shard_check import Checked
from wds_tensorcache.errors import FormatError, InvalidKeyError
from wds_tensorcache.shards.dali_index import build_dali_index, list_members, split_line, split_lines
from wds_tensorcache.shards.footer import build_footer, parse_index, read_footer, read_trailer
from wds_tensorcache.shards.index import ShardIndex
from wds_tensorcache.shards.index_paths import dali_index_path, sidecar_path
from wds_tensorcache.shards.load_index import open_sidecar
from wds_tensorcache.shards.names import TENSORS, split_member
from wds_tensorcache.storage.files import ShardFile

_CHUNK_NBYTES = 1 << 20
_Places = dict[tuple[str, str], tuple[Any, ...]]  # begin, length and other fields of each member, by key and suffix


def check_indexes(found: Checked, needs_idx: bool) -> Mapping[str, Any] | None:
    """Add the faults of a shard's indexes to `found`; return the fingerprint that they contain, if any."""
    reported = set(found.damaged)  # keys
    footer = _check_footer(found, reported)
    sidecar = None
    where = os.path.basename(sidecar_path(found.path))
    try:
        file = open_sidecar(found.path)
        if file is not None:
            sidecar = parse_index(file.read(0, file.nbytes), found.nbytes)
            if sidecar is None:
                found.fault(None, None, f"{where} is damaged or stale", "index")
            else:
                _compare_index(found, sidecar, where, reported)
    except (FormatError, OSError) as exc:
        found.fault(None, None, f"{where}: {exc}", "index")
    _check_idx(found, needs_idx, reported)
    index = footer or sidecar
    if index is None:
        return None
    # the shard itself does not contain these, so they cannot be compared; `repair` keeps them
    try:
        found.index = replace(found.index, origins=index.origins_of(found.index.keys))
    except FormatError as exc:
        found.fault(None, None, f"{exc}", "index")
    return index.fingerprint


def _check_footer(found: Checked, reported: set[str]) -> ShardIndex | None:
    where, end = "the index at its end", found.end
    try:
        file = ShardFile(found.path)
        if file.identity != found.identity:
            raise FormatError("the shard was changed while it was checked")
        index = read_footer(file.read, file.nbytes)
        place = None if index is None else read_trailer(file.read, file.nbytes, file.nbytes)
        at = None
        if end is not None and (index is None or index.end == end):
            at = _next_byte(file, end + 512, file.nbytes if place is None else place.begin)
    except (FormatError, OSError) as exc:
        found.fault(None, None, f"{where}: {exc}", "index")
        return None
    if index is not None:
        if end is not None and index.end != end:
            found.fault(None, end, f"{where} says that the archive ends at byte {index.end}", "index")
        elif at is not None:
            found.fault(None, at, f"the bytes between the end-of-archive marker and {where} are not zeros", "trailing")
        _compare_index(found, index, where, reported)
    elif end is not None and at is not None:
        what = "the bytes after the end-of-archive marker are not an index, or are a damaged or stale index"
        found.fault(None, at, what if at >= end + 1024 else "the end-of-archive marker is damaged", "trailing")
    return index


def _next_byte(file: ShardFile, begin: int, end: int) -> int | None:
    """Return the offset of the first byte in `[begin, end)` that is not zero; None if there is none."""
    for at in range(begin, end, _CHUNK_NBYTES):
        chunk = file.read(at, min(at + _CHUNK_NBYTES, end))
        if chunk.strip(b"\0"):
            return at + len(chunk) - len(chunk.lstrip(b"\0"))
    return None


def _compare_index(found: Checked, index: ShardIndex, where: str, reported: set[str]) -> None:
    """Add a fault for each sample on which an index disagrees with the shard."""
    if not found.report.faults and build_footer(replace(index, fingerprint=None, origins=None)) == build_footer(
        found.index
    ):
        return
    num_faults = len(found.report.faults)
    _compare(found, dict(_places(index)), dict(_places(found.index)), where, reported)
    keys = list(index.keys)
    if len(set(keys)) < len(keys):
        found.fault(None, None, f"{where} lists a sample twice", "index")
    elif len(found.report.faults) == num_faults and not reported and keys != list(found.index.keys):
        found.fault(None, None, f"{where} lists the samples in a different order", "index")


def _places(index: ShardIndex) -> Iterator[tuple[tuple[str, str], tuple[Any, ...]]]:
    """Yield, for each member in an index, its key and suffix, and its fields: offset, length, and more for tensors.

    The last two fields contain the further names of the tensors, and the texts of the references to them. Each is None if it is
    unknown, and for all members other than tensors.
    """
    keys, table = list(index.keys), index.members_in_order()
    columns = (table.rows, table.kinds, table.numbers, table.begins, table.sizes)
    for row, kind, at, begin, nbytes in zip(*(column.tolist() for column in columns), strict=True):
        suffix, cache = table.suffixes[kind], table.caches[kind]
        more: tuple[Any, ...] = (None, None)
        if cache is not None and suffix.endswith(TENSORS):
            layout = index.layouts[cache.layout.item(at)]
            further = None if index.layouts.further is None else layout.further
            more = (tuple(layout.tensors.values()), layout.data_begin, cache.digest.item(at), further, layout.texts)
        yield (keys[row], suffix), (begin, nbytes, *more)


def _compare(found: Checked, says: _Places, has: _Places, where: str, reported: set[str]) -> None:
    """Add a fault for the first difference between sidecar and shard in each sample; sort these faults by offset."""
    known, faults = {key for key, _ in has}, found.report.faults
    num_faults = len(faults)
    for key, suffix in sorted(says.keys() | has.keys()) if says != has else ():
        one, other = says.get((key, suffix)), has.get((key, suffix))
        if key in reported or one == other:
            continue
        if one is not None and other is not None and key not in found.doubtful:
            # A writer may not have read references, because they need `allow=`. Old writers did not list further names.
            pairs = zip(one[-2:], other[-2:], strict=True)
            if one[:-2] == other[:-2] and all(a == b or a is None or b is None for a, b in pairs):
                continue
        reported.add(key)
        if key not in known:
            _lose(found, key, where)
        elif one is None:
            found.fault(key, None if other is None else other[0], f"member {suffix!r} is not in {where}", "index")
        elif other is None:
            found.fault(key, one[0], f"member {suffix!r} is in {where}, but not in the shard", "index")
        else:
            found.fault(key, other[0], f"{where} disagrees with the shard about member {suffix!r}", "index")
    faults[num_faults:] = sorted(faults[num_faults:], key=lambda fault: -1 if fault.offset is None else fault.offset)


def _check_idx(found: Checked, needs_idx: bool, reported: set[str]) -> None:
    """Add the faults of DALI's index to `found`."""
    path, samples, expected = dali_index_path(found.path), list_members(found.index), None
    where = os.path.basename(path)
    with contextlib.suppress(InvalidKeyError):  # for example names from other writers
        expected = build_dali_index(samples)
    try:
        file = ShardFile(path)  # opens only ordinary files
        content = file.read(0, file.nbytes)
    except FileNotFoundError:
        if needs_idx and expected is not None:
            found.fault(None, None, f"{where} is missing, although other shards have an `.idx` file", "index")
        return
    except (FormatError, OSError) as exc:
        found.fault(None, None, f"{where}: {exc}", "index")
        return
    if content == expected:
        return
    try:
        width, lines = split_lines(content)
    except FormatError as exc:
        found.fault(None, None, f"{where} is damaged: {exc}", "index")
        return
    keys_by_line = {
        " ".join(str(field) for member in sample for field in member[:width]): key
        for sample, key in zip(samples, found.index.keys, strict=True)
    }
    known, says = set(keys_by_line.values()), set(lines)
    differing = [(number, line, _listed_keys(line, width)) for number, line in enumerate(lines, 2)]
    if known and lines and width == 4 and not any(known & set(keys) for *_, keys in differing):
        found.fault(None, None, f"{where} belongs to a different shard: this shard has none of its samples", "index")
        return
    for number, line, keys in differing:
        for key in keys if line not in keys_by_line else ():
            if key in reported:
                continue
            if key is None or key in known:
                found.fault(key, None, f"{where}, line {number}: {line[:80]!r} is not in the shard", "index")
            else:
                _lose(found, key, where)
            reported.update(() if key is None else (key,))
    for line, key in keys_by_line.items():
        if line not in says and key not in reported:
            found.fault(key, None, f"the sample is not in {where}", "index")


def _listed_keys(line: str, width: int) -> list[str | None]:
    """Return the keys of the members in a line of DALI's index; None if the line has none."""
    members = split_line(line, width)
    has_names = width == 4 and all(len(fields) == width for fields in members)
    splits = [split_member(name) for *_, name in members] if has_names else []
    return list(dict.fromkeys(split[0] for split in splits if split is not None)) or [None]


def _lose(found: Checked, key: str, where: str) -> None:
    found.report.num_lost += 1
    found.fault(key, None, f"the sample is lost: {where} lists it, but the shard does not contain it", "lost")
