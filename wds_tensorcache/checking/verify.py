"""Check shards and everything that lies beside them."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from typing import Any

from wds_tensorcache.checking.report import Fault, Report
from wds_tensorcache.checking.shard_check import Checked, check_shard
from wds_tensorcache.checking.sidecars import check_beside
from wds_tensorcache.codec.skeleton.builders import allow_table
from wds_tensorcache.errors import FormatError, Kind
from wds_tensorcache.reading.open_cache import Found, are_counts, find_shards, num_cores
from wds_tensorcache.shards.catalog import MANIFEST, dali_index_path
from wds_tensorcache.shards.lookup import KeyTable
from wds_tensorcache.shards.manifest import ShardEntry, locate_shards, read_manifest
from wds_tensorcache.storage.readahead import Readers, in_order
from wds_tensorcache.storage.threads import ThreadPool

__all__ = ["check_all", "verify"]


def verify(source: Any, *, threads: int | None = None, allow: Iterable[type] = ()) -> Report:
    """Check every byte of shards that something tells of, and whether what lies beside them is true.

    Recomputed are the checksums of all tar headers and both digests of every sample; every skeleton is decoded. Compared are
    the two halves, the index (behind the shard, or in a file beside it), DALI's `.idx`, and where `source` is a folder or a
    manifest, that. Of other members (`jpg`, …) nothing says what their bytes should be: they are only read.

    Args:
        source: What `open` takes: a folder, a manifest, a shard, a pattern, or a list of those.
        threads: How many check shards, or read ahead in them; by default as many as there are cores.
        allow: Classes that skeletons may build; only for shards that you trust. Without, samples that need them are counted
            in `num_unread`, and only their digests are compared.

    Returns:
        All faults, not just the first; true when there are none.

    Raises:
        FileNotFoundError: There is no such file, or no shard.

    What it finds is damage, not malice: who writes a shard can give a wrong sample a right digest. `open` and `decode` are safe
    with any, and refuse what `Report.needs` names.

    Memory: at most 16 MiB for each thread, and the indexes of as many shards; nothing of what is decoded is kept.
    """
    report, _ = check_all(source, threads, allow)
    return report


def check_all(
    source: Any, threads: int | None, allow: Iterable[type], keep: bool = False
) -> tuple[Report, list[tuple[Checked, Mapping[str, Any] | None]]]:
    """Return the report, and with `keep` what was found of each shard, with its fingerprint."""
    threads = num_cores() if threads is None else threads
    if threads < 1:
        raise ValueError(f"threads={threads}, expected at least 1")
    table = allow_table(allow)
    report = Report()
    manifests: dict[str, _Manifest] = {}

    def listed(path: str) -> list[Found]:
        manifests[path] = _Manifest(path)
        return [(shard, None, None) for shard in manifests[path].shards(report)]

    spellings: dict[str, str] = {}
    for path, *_ in find_shards(source, listed):
        spellings.setdefault(os.path.realpath(path), path)
    paths = list(spellings.values())
    with_idx = {_without_number(path) for path in paths if os.path.exists(dali_index_path(path))}
    kept, keys = [], []
    # where there are fewer shards than threads, the others read ahead
    walkers = max(1, min(threads, len(paths)))  # none is there, if the manifest lists only missing ones
    with ExitStack() as stack:

        def start(count: int) -> ThreadPool | None:
            return stack.enter_context(ThreadPool(count, "tensorcache-verify")) if count else None

        readers = Readers(start(threads - walkers), max(1, threads // walkers - 1))
        walking = start(walkers if threads > 1 else 0)
        stack.callback(setattr, readers, "is_stopped", True)  # an interrupt need not wait for the rest of large shards

        def check(path: str) -> tuple[Checked, Mapping[str, Any] | None] | Fault:
            try:
                found = check_shard(path, table, readers)
            except (FormatError, OSError) as exc:
                kind = exc.kind if isinstance(exc, FormatError) else "unreadable"
                reason = exc.reason if isinstance(exc, FormatError) else str(exc)
                return Fault(path, None, None, f"cannot be opened: {reason}", kind)
            return found, check_beside(found, _without_number(path) in with_idx)

        for result in in_order(paths, check, walking, walkers):
            if isinstance(result, Fault):
                report.faults.append(result)
                report.num_missing += 1
                report.num_lost += sum(manifest.num_samples(result.shard) for manifest in manifests.values())
                continue
            found, fingerprint = result
            for manifest in manifests.values():
                fingerprint = manifest.check(found, fingerprint)
            report.faults += found.faults
            report.num_shards += 1
            report.num_samples += found.num_samples
            report.num_damaged += found.num_damaged
            report.num_lost += len(found.lost)
            report.num_unverified += found.num_unverified
            report.num_unread += found.num_unread
            report.needs |= found.needs
            report.nbytes += found.nbytes
            keys.append((found.index.keys, None))
            if keep:
                kept.append((found, fingerprint))
    report.num_repeated = len(KeyTable(keys).shared())
    return report, kept


def _without_number(path: str) -> str:
    """Return what the shards of one writer have in common."""
    return re.sub(r"[0-9]+", "#", path)


def _names(value: Any) -> list[str]:
    return [name for name in value if isinstance(name, str)] if isinstance(value, (dict, list)) else []


class _Manifest:
    """What a manifest says of shards, compared with what they are."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._entries: dict[str, ShardEntry] = {}  # by absolute path
        self._caches: dict[str, Any] = {}
        self._fingerprints: dict[str, Any] = {}
        self._is_ours = False

    def shards(self, report: Report) -> list[str]:
        """Return the shards that are listed or in the manifest's folder; put into `report` those that are not both."""
        folder = os.path.dirname(self._path)

        def fault(shard: str, what: str, kind: Kind = "index") -> None:
            report.faults.append(Fault(shard, None, None, what, kind))

        paths: list[str] = []
        unread = False
        try:
            entries, extra = read_manifest(self._path)
        except FileNotFoundError:
            raise
        except (FormatError, OSError) as exc:
            entries, extra, unread = [], {}, True
            fault(self._path, exc.reason if isinstance(exc, FormatError) else str(exc))
        self._is_ours = bool(extra)
        for table, name in ((self._caches, "caches"), (self._fingerprints, "fingerprints")):
            if isinstance(extra.get(name, {}), dict):
                table.update(extra.get(name, {}))
            else:
                fault(self._path, f"{name} is a {type(extra[name]).__name__}, expected an object")
        for located in locate_shards(self._path, entries):
            entry, path = located.entry, located.path
            if located.same_as is not None:
                fault(path, f"{os.path.basename(self._path)} lists it twice, also as {located.same_as!r:.200}")
                self._entries.setdefault(os.path.abspath(path), entry)
            elif "://" in entry.url:
                fault(self._path, f"{entry.url} is not a local path: it was not looked at")
            elif located.error is not None:
                where, is_there = os.path.basename(self._path), not isinstance(located.error, FileNotFoundError)
                what = f"it cannot be read ({located.error})" if is_there else "it is missing"
                kind: Kind = "unreadable" if is_there else "missing"
                fault(path, f"{what}; {where} has it, with {entry.num_samples} samples", kind)
                report.num_missing += 1
                report.num_lost += entry.num_samples
            else:
                paths.append(path)
                self._entries[os.path.abspath(path)] = entry
        # those wait until they replace others, or have been replaced: readers of the manifest do not see them
        waiting = {*_names(extra.get("held")), *_names(extra.get("gone"))}
        for name in sorted(os.listdir(folder or ".")):
            path = os.path.join(folder, name)
            if name in waiting:
                continue
            if name.endswith(".tar") and not name.startswith(".") and os.path.abspath(path) not in self._entries:
                paths.append(path)
                if not unread and os.path.basename(self._path) == MANIFEST:
                    fault(path, f"{MANIFEST} does not list it")
        if not paths and not report.faults:
            raise FileNotFoundError(f"{self._path} lists no shards")
        return paths

    def num_samples(self, path: str) -> int:
        """Return how many samples a shard has, as far as the manifest tells."""
        entry = self._entries.get(os.path.abspath(path))
        return 0 if entry is None else entry.num_samples

    def check(self, found: Checked, fingerprint: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
        """Add to `found` what the manifest says otherwise of a shard; return its fingerprint, if need be the manifest's."""
        entry = self._entries.get(os.path.abspath(found.path))
        if entry is None:
            return fingerprint
        where, index = os.path.basename(self._path), found.index
        if entry.nbytes != found.nbytes:
            found.fault(None, None, f"it has {found.nbytes} bytes, but {where} says {entry.nbytes}", "index")
        if entry.num_samples != found.num_samples:
            found.fault(
                None, None, f"it has {found.num_samples} samples, but {where} says {entry.num_samples}", "index"
            )
        counts, caches = self._caches.get(entry.url), {name: len(columns) for name, columns in index.caches.items()}
        if counts is not None and not are_counts(counts):
            found.fault(None, None, f"{where} has caches {counts!r:.200}, expected numbers of samples by name", "index")
        elif counts is not None and counts != caches and len(index.keys) == entry.num_samples:
            found.fault(None, None, f"its caches have {caches} samples, but {where} says {counts!r:.200}", "index")
        listed = self._fingerprints.get(entry.url)
        if listed is not None and not isinstance(listed, dict):
            found.fault(None, None, f"{where} has a fingerprint {listed!r:.100}, expected fields by name", "index")
        elif fingerprint is None or (listed is None and not self._is_ours):
            return fingerprint or listed
        elif json.dumps(listed, sort_keys=True) != json.dumps(fingerprint, sort_keys=True):  # 1 is not 1.0
            found.fault(None, None, f"it was made with {fingerprint!r:.200}, but {where} says {listed!r:.200}", "index")
        return fingerprint
