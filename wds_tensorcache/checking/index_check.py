"""The comparison of a shard's indexes and `.idx` file with its samples."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from wds_tensorcache.checking.shard_check import Checked
from wds_tensorcache.errors import FormatError, InvalidKeyError, format_count
from wds_tensorcache.shards.after_end import first_nonzero
from wds_tensorcache.shards.dali_index import build_dali_index, list_members, split_line, split_lines
from wds_tensorcache.shards.footer import build_footer, parse_index, read_footer, read_trailer
from wds_tensorcache.shards.index import ShardIndex
from wds_tensorcache.shards.names import TENSORS, dali_index_path, sidecar_path, split_member
from wds_tensorcache.storage.files import ShardFile, open_if_exists

_FOOTER = "the index at its end"
_REMEDY = "`tensorcache index` writes it anew"
_Places = Mapping[tuple[str, str], tuple[Any, ...]]  # the fields of each member, by key and suffix


def check_indexes(checked: Checked, needs_idx: bool) -> None:
    """Add the faults of a shard's indexes to `checked`. Also add the fingerprint and origins, which only indexes contain."""
    footer = sidecar = None
    try:
        footer = _read_footer(checked)
    except (FormatError, OSError) as exc:
        checked.fault(None, None, f"{_FOOTER}: {exc}", "index")
    where = os.path.basename(sidecar_path(checked.path))
    try:
        file = open_if_exists(sidecar_path(checked.path))
        sidecar = None if file is None else parse_index(file.read(0, file.nbytes), checked.nbytes)
        if file is not None and sidecar is None:
            checked.fault(None, None, f"{where} is damaged or stale; {_REMEDY}", "index")
    except (FormatError, OSError) as exc:
        checked.fault(None, None, f"{where}: {exc}", "index")
    lost: set[str] = set()  # keys
    rebuilt = build_footer(checked.index, checked.nbytes)
    for name, index in ((_FOOTER, footer), (where, sidecar)):
        if (
            index is not None
            and build_footer(replace(index, fingerprint=None, origins=None), checked.nbytes) != rebuilt
        ):
            listed, present = list(_places(index)), list(_places(checked.index))
            is_in_order = [member for member, _ in listed] == [member for member, _ in present]
            _compare(checked, dict(listed), dict(present), name, lost, is_in_order)
    _check_idx(checked, needs_idx, lost)
    index = footer or sidecar
    if index is None:
        return
    # fingerprint and origins are not in the shard itself, so they cannot be compared; `repair` keeps them
    checked.fingerprint = index.fingerprint
    try:
        checked.index = replace(checked.index, origins=index.origins_of(checked.index.keys))
    except FormatError as exc:
        checked.fault(None, None, f"{exc}", "index")


def _read_footer(checked: Checked) -> ShardIndex | None:
    """Return a shard's footer, and check the bytes after the archive."""
    file, end = ShardFile(checked.path), checked.end
    if file.identity != checked.identity:
        raise FormatError("the shard was changed while it was checked")
    index = read_footer(file.read, file.nbytes)
    trailer = None if index is None else read_trailer(file.read, file.nbytes, file.nbytes)
    if end is None:
        return index
    if index is not None and index.end != end:
        checked.fault(None, end, f"{_FOOTER} says that the archive ends at byte {index.end}", "index")
        return index
    at = first_nonzero(file, end + 512, file.nbytes if trailer is None else trailer.begin)
    if at is not None and index is not None:
        checked.fault(None, at, f"the bytes between the end-of-archive marker and {_FOOTER} are not zeros", "trailing")
    elif at is not None:
        problem = "the bytes after the end-of-archive marker are not an index, or are a damaged or stale index"
        checked.fault(None, at, problem if at >= end + 1024 else "the end-of-archive marker is damaged", "trailing")
    return index


def _places(index: ShardIndex) -> Iterator[tuple[tuple[str, str], tuple[Any, ...]]]:
    """Yield the key, suffix and fields of each member."""
    # Fields: offset, length, and for tensors layout and digest. The last two are the further names of the tensors, and the
    # texts of the references to them; None if unknown.
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


def _compare(
    checked: Checked,
    listed_places: _Places,
    present_places: _Places,
    where: str,
    lost: set[str],
    is_in_order: bool = False,
) -> None:
    """Add faults for lost samples or members, and one for other differences."""
    keys = {key for key, _ in present_places}
    if keys and not any(key in keys for key, _ in listed_places):
        checked.fault(None, None, f"{where} belongs to a different shard, or is wrong; {_REMEDY}", "index")
        return
    differing: dict[str, None] = {}
    for key, suffix in sorted(listed_places.keys() | present_places.keys()):
        listed, present = listed_places.get((key, suffix)), present_places.get((key, suffix))
        if key in checked.damaged or key in lost or (listed and present and _are_equal(checked, key, listed, present)):
            continue
        if present is not None or (key in keys and not checked.is_broken):
            differing[key] = None
            continue
        lost.add(key)
        problem = f"the sample is lost: {where} lists it, but the shard does not contain it"
        if key in keys:
            problem = f"member {suffix!r} is lost: {where} lists it, but the shard does not contain it"
        checked.report.num_lost += key not in keys
        checked.fault(key, None, problem, "lost")
    if differing or not (is_in_order or lost or checked.damaged or checked.is_broken):
        samples = f" about {format_count(len(differing), 'sample')}" if differing else ""
        checked.fault(
            next(iter(differing), None), None, f"{where} disagrees with the shard{samples}; {_REMEDY}", "index"
        )


def _are_equal(checked: Checked, key: str, listed: tuple[Any, ...], present: tuple[Any, ...]) -> bool:
    if listed == present or key in checked.doubtful:
        return listed == present
    # A writer may not have read references, because they need `allow=`. Old writers did not list further names.
    pairs = zip(listed[-2:], present[-2:], strict=True)
    return listed[:-2] == present[:-2] and all(a == b or a is None or b is None for a, b in pairs)


def _check_idx(checked: Checked, needs_idx: bool, lost: set[str]) -> None:
    path, samples, expected = dali_index_path(checked.path), list_members(checked.index), None
    where = os.path.basename(path)
    with contextlib.suppress(InvalidKeyError):  # for example names from other writers
        expected = build_dali_index(samples)
    try:
        file = ShardFile(path)  # opens only ordinary files
        content = file.read(0, file.nbytes).replace(b" ./", b" ")  # DALI's `wds2idx` writes the names in the tar
        if content == expected:
            return
        width, lines = split_lines(content)
    except FileNotFoundError:
        if needs_idx and expected is not None:
            checked.fault(None, None, f"{where} is missing, although other shards have an `.idx` file", "index")
        return
    except (FormatError, OSError) as exc:
        checked.fault(None, None, f"{where}: {exc}", "index")
        return
    members = [member for sample in samples for member in sample]
    if width == 4:
        listed = [fields for line in lines for fields in split_line(line, width) if len(fields) == width]
        _compare(checked, _by_name(listed), _by_name(list(map(str, member)) for member in members), where, lost)
    elif " ".join(lines) != " ".join(f"{suffix} {begin} {nbytes}" for suffix, begin, nbytes, _ in members):
        checked.fault(None, None, f"{where} disagrees with the shard; {_REMEDY}", "index")


def _by_name(members: Iterable[list[str]]) -> _Places:
    return {split: tuple(fields) for fields in members if (split := split_member(fields[3])) is not None}
