"""Compare what lies beside a shard's samples (footer, index file, DALI's `.idx`) with the samples themselves."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from wds_tensorcache.checking.shard_check import Checked
from wds_tensorcache.errors import FormatError, KeyRuleError
from wds_tensorcache.shards.catalog import dali_index_path, dali_samples
from wds_tensorcache.shards.footer import build_footer, parse_footer, read_footer
from wds_tensorcache.shards.index import ShardIndex
from wds_tensorcache.shards.manifest import build_idx
from wds_tensorcache.shards.names import SKELETON, TENSORS
from wds_tensorcache.shards.sidecar import open_sidecar, sidecar_path
from wds_tensorcache.storage.files import ShardFile

__all__ = ["check_beside"]

_CHUNK_NBYTES = 1 << 20
_NUMBER = re.compile(r"[0-9]{1,19}")
_Places = dict[tuple[str, str], Any]  # where a member, or what an index says of it, is, by key and suffix


def check_beside(found: Checked, needs_idx: bool) -> Mapping[str, Any] | None:
    """Add to `found` what is wrong with the indexes of its shard, and return the fingerprint that they hold.

    Args:
        found: What `check_shard` returned.
        needs_idx: Whether a missing `.idx` is wrong.
    """
    path, reported = found.path, set(found.damaged)
    behind = _check_footer(found, reported)
    beside = None
    where = os.path.basename(sidecar_path(path))
    try:
        file = open_sidecar(path)
        beside = None if file is None else parse_footer(file.read(0, file.nbytes), found.nbytes)
        if beside is not None:
            _compare(found, beside, where, reported)
        elif file is not None:
            found.fault(None, None, f"{where} is damaged, or of another state of the shard", "index")
    except (FormatError, OSError) as exc:
        found.fault(None, None, f"{where}: {exc}", "index")
    _check_idx(found, needs_idx, reported)
    index = behind or beside
    return None if index is None else index.fingerprint


def _check_footer(found: Checked, reported: set[str]) -> ShardIndex | None:
    try:
        file = ShardFile(found.path)
        if file.identity != found.identity:
            raise FormatError("the shard was changed while it was looked at")
        index = read_footer(file.read, file.nbytes)
        at = None if index is not None or found.end is None else _next_byte(file, found.end + 512)
    except (FormatError, OSError) as exc:
        found.fault(None, None, f"the index behind it: {exc}", "index")
        return None
    if index is not None:
        if found.end is not None and index.end != found.end:
            found.fault(None, found.end, f"the index behind it has the end of the archive at byte {index.end}", "index")
        _compare(found, index, "the index behind it", reported)
    elif found.end is not None and at is not None:
        what = "what lies behind the end-of-archive marker is no index, a damaged one, or of another state"
        found.fault(None, at, what if at >= found.end + 1024 else "the end-of-archive marker is damaged", "trailing")
    return index


def _next_byte(file: ShardFile, begin: int) -> int | None:
    """Return the offset of the first byte from `begin` on that is not zero."""
    for at in range(begin, file.nbytes, _CHUNK_NBYTES):
        chunk = file.read(at, min(at + _CHUNK_NBYTES, file.nbytes))
        if chunk.strip(b"\0"):
            return at + len(chunk) - len(chunk.lstrip(b"\0"))
    return None


def _compare(found: Checked, index: ShardIndex, where: str, reported: set[str]) -> None:
    """Add a fault for each sample of which an index says something else than the shard."""
    plain = replace(index, fingerprint=None)
    if not found.faults and build_footer(plain) == build_footer(found.index):
        return
    says, has = dict(_places(index)), dict(_places(found.index))
    before, known = len(found.faults), {key for key, _ in has}
    for key, suffix in sorted(says.keys() | has.keys()) if says != has else ():
        if key in reported:
            continue
        one, other = says.get((key, suffix)), has.get((key, suffix))
        if other is None and key not in known:
            _lost(found, key, where)
        elif one is None:
            found.fault(key, None if other is None else other[0], f"its {suffix!r} is not in {where}", "index")
        elif other is None:
            found.fault(key, one[0], f"its {suffix!r} is in {where}, but not in the shard", "index")
        elif one != other and not (key not in found.doubtful and _differ_in_references(one, other)):
            found.fault(key, other[0], f"{where} says something else of its {suffix!r} than the shard", "index")
        else:
            continue
        reported.add(key)
    if len(found.faults) == before and not reported and list(index.keys) != list(found.index.keys):
        found.fault(None, None, f"{where} has the samples in another order, or one twice", "index")
    added = found.faults[before:]
    found.faults[before:] = sorted(added, key=lambda fault: fault.offset if fault.offset is not None else -1)


def _lost(found: Checked, key: str, where: str) -> None:
    found.lost.add(key)
    found.fault(key, None, f"it is lost: {where} has it, the shard has not", "lost")


def _differ_in_references(one: tuple[Any, ...], other: tuple[Any, ...]) -> bool:
    """Return whether two places are one but for references that were not read, for want of `allow=`."""
    return one[:-1] == other[:-1] and None in (one[-1], other[-1])


def _places(index: ShardIndex) -> Iterator[tuple[tuple[str, str], tuple[Any, ...]]]:
    keys = list(index.keys)
    for name, cache in index.caches.items():
        prefix = f"{name}." if name else ""
        for at, row in enumerate(range(len(keys)) if cache.rows is None else cache.rows.tolist()):
            layout = index.layouts[cache.layout.item(at)]
            yield (keys[row], prefix + SKELETON), (cache.skeleton_begin.item(at), cache.skeleton_nbytes.item(at), None)
            described = (tuple(layout.tensors.values()), layout.data_begin, cache.digest.item(at), layout.texts)
            yield (keys[row], prefix + TENSORS), (cache.tensors_begin.item(at), *described)
    for suffix, member in index.members.items():
        for at, row in enumerate(range(len(keys)) if member.rows is None else member.rows.tolist()):
            yield (keys[row], suffix), (member.begin.item(at), member.nbytes.item(at), None)


def _check_idx(found: Checked, needs_idx: bool, reported: set[str]) -> None:
    path = dali_index_path(found.path)
    where = os.path.basename(path)
    try:
        file = ShardFile(path)  # which opens nothing but ordinary files
        content = file.read(0, file.nbytes)
    except FileNotFoundError:
        if needs_idx:
            with contextlib.suppress(KeyRuleError):  # it cannot have one
                build_idx(dali_samples(found.index))
                found.fault(None, None, f"{where} is missing, which other shards have", "index")
        return
    except (FormatError, OSError) as exc:
        found.fault(None, None, f"{where}: {exc}", "index")
        return
    samples = dali_samples(found.index)
    with contextlib.suppress(KeyRuleError):  # such as other writers' names
        if build_idx(samples) == content:
            return
    lines = content.decode("utf-8", "surrogateescape").splitlines()
    head = lines[0].split() if lines else []
    if len(head) != 2 or head[0] not in ("v1.1", "v1.2") or head[1] != str(len(lines) - 1):
        found.fault(None, None, f"{where} is damaged: it begins with {lines[0][:40] if lines else ''!r}", "index")
        return
    has: _Places = {}
    for sample, key in zip(samples, found.index.keys, strict=True):
        has |= {(key, suffix): (begin, nbytes) for suffix, begin, nbytes, _ in sample}
    width = 4 if head[0] == "v1.2" else 3
    by_place = {place: member for member, place in has.items()}
    says: _Places = {}
    for number, line in enumerate(lines[1:], 2):
        fields = line.split()
        groups = [fields[at : at + width] for at in range(0, len(fields), width)]
        if not groups or len(fields) % width or not all(_is_member(*group) for group in groups):
            found.fault(None, None, f"{where}, line {number}: {line[:80]!r} is no sample", "index")
            continue
        for suffix, begin, nbytes, *name in groups:
            place = int(begin), int(nbytes)
            # version 1.1 has no names
            key = name[0][: -len(suffix) - 1] if name else by_place.get(place, ("", ""))[0]
            says[key, suffix.lower()] = place
    known = {key for key, _ in has}
    if known and says and not any(key in known for key, _ in says):
        found.fault(None, None, f"{where} is of another shard: none of its samples is in this one", "index")
        return
    for key, suffix in sorted(says.keys() | has.keys()) if says != has else ():
        if key in reported or says.get((key, suffix)) == has.get((key, suffix)):
            continue
        reported.add(key)
        if key and key not in known:
            _lost(found, key, where)
            continue
        what = "not in" if (key, suffix) not in says else "elsewhere in" if (key, suffix) in has else "only in"
        found.fault(key, None, f"its {suffix!r} is {what} {where}, which is of another state of the shard", "index")


def _is_member(suffix: str, begin: str, nbytes: str, name: str = "") -> bool:
    """Return whether fields of a line describe a member; `name` is empty in version 1.1."""
    are_numbers = _NUMBER.fullmatch(begin) is not None and _NUMBER.fullmatch(nbytes) is not None
    return are_numbers and (not name or name.endswith(f".{suffix}"))
