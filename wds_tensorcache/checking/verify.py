"""Check shards, their sidecars and their manifests."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from typing import Any

from wds_tensorcache.checking.index_check import check_indexes
from wds_tensorcache.checking.progress import ByteProgress
from wds_tensorcache.checking.report import Fault, Report
from wds_tensorcache.checking.shard_check import Checked, check_shard
from wds_tensorcache.codec.skeleton.types import allow_table
from wds_tensorcache.errors import FormatError, Kind
from wds_tensorcache.progress import ProgressOption
from wds_tensorcache.reading.find_shards import find_shards, shard_names
from wds_tensorcache.shards.index_paths import dali_index_path
from wds_tensorcache.shards.key_table import KeyTable
from wds_tensorcache.shards.manifest import (
    MANIFEST,
    FoundShard,
    ShardEntry,
    are_counts,
    locate_shards,
    read_manifest,
    stored_digest,
)
from wds_tensorcache.storage.readahead import Readers
from wds_tensorcache.storage.system import num_cores
from wds_tensorcache.storage.threads import Threads, run_in_order


def verify(
    source: Any, *, num_threads: int | None = None, allow: Iterable[type] = (), progress: ProgressOption = None
) -> Report:
    """Check every byte that a checksum or digest covers, and whether sidecars and manifest match the shards.

    `verify` recomputes the checksums of all tar headers and both digests of every sample, and decodes every skeleton. It
    compares the samples with the index at the shard's end or in its `.index` file, and with the `.idx` file. It also checks
    that skeleton and tensors of each sample belong together. If `source` is a folder or manifest, `verify` checks the
    manifest, too. Other members (`jpg`, …) have no digests, so they are only read.

    Args:
        source: Shards, as for `open`: a folder, a manifest, a shard, a pattern, or a list of those.
        num_threads: Number of threads; by default the number of cores.
        allow: Classes that skeletons may build; only for shards that you trust. Samples that need other classes are
            counted in `Report.num_unread`: only their digests are compared.
        progress: Show rate and time left with `tqdm`; by default only if `tqdm` is installed and stderr is a terminal. Or a
            function of the bytes that are checked and the bytes in all: `progress=lambda done, total: …`. The caller's thread
            calls it at the beginning, after each shard, and ten times a second during large shards.

    Returns:
        A report of all faults.

    Raises:
        FileNotFoundError: A file does not exist, or there are no shards.
        ImportError: `progress` is True, and `tqdm` is not installed.

    The report shows damage, not malice: an attacker can store the right digests for a forged sample. `open` and `decode` are
    safe with any shard, and refuse the classes in `Report.needs`.

    Memory: at most 16 MiB per thread, plus the indexes of one shard per thread.
    """
    report = Report()
    with ByteProgress(progress, "verify") as bar:
        check_all(source, num_threads, allow, report, bar)
    return report


def check_all(
    source: Any, num_threads: int | None, allow: Iterable[type], report: Report, bar: ByteProgress, keep: bool = False
) -> list[tuple[Checked, Mapping[str, Any] | None]]:
    """Fill in `report`, and show the progress in `bar`; with `keep`, return the findings of each shard and its fingerprint."""
    num_threads = num_cores() if num_threads is None else num_threads
    if num_threads < 1:
        raise ValueError(f"num_threads={num_threads}, expected at least 1")
    table = allow_table(allow)
    manifests: list[_Manifest] = []

    def listed(path: str) -> list[FoundShard] | None:
        if not os.path.exists(path):
            return None
        manifests.append(_Manifest(path))
        return [FoundShard(shard) for shard in manifests[-1].shards(report)]

    spellings: dict[str, str] = {}
    for shard in find_shards(source, listed, local_for="verified or repaired").shards:
        spellings.setdefault(os.path.realpath(shard.path), shard.path)
    paths = list(spellings.values())
    bar.begin({path: _nbytes(path) for path in paths})
    with_idx = {_without_number(path) for path in paths if os.path.exists(dali_index_path(path))}
    kept, keys = [], []
    # if there are fewer shards than threads, the other threads read ahead
    walkers = max(1, min(num_threads, len(paths)))  # no path is left if the manifest lists only missing shards
    # without a thread that walks over shards, this thread does it; otherwise it only waits, and shows the progress
    with (
        _threads(num_threads - walkers) as reading,
        _threads(walkers if num_threads > 1 or bar.is_shown else 0) as walking,
    ):
        readers = Readers(reading, max(1, num_threads // walkers - 1))

        def check(path: str) -> tuple[Checked, Mapping[str, Any] | None] | Fault:
            try:
                found = check_shard(path, table, readers, partial(bar.reach, path))
            except (FormatError, OSError) as exc:
                kind = exc.kind if isinstance(exc, FormatError) else "unreadable"
                return Fault(path, None, None, f"cannot be opened: {_reason(exc)}", kind)
            return found, check_indexes(found, _without_number(path) in with_idx)

        try:
            for path, result in zip(paths, run_in_order(paths, check, walking, walkers, bar.show), strict=True):
                bar.finish(path)
                if isinstance(result, Fault):
                    report.faults.append(result)
                    report.num_missing += 1
                    report.num_lost += sum(manifest.num_samples(result.shard) for manifest in manifests)
                    continue
                found, fingerprint = result
                for manifest in manifests:
                    fingerprint = manifest.check(found, fingerprint)
                report.add(found.report)
                keys.append((found.index.keys, None))
                if keep:
                    kept.append((found, fingerprint))
        finally:
            readers.is_stopped = True  # so that an interrupt does not wait for the rest of large shards
    report.num_repeated = len(KeyTable(keys).shared())
    return kept


def _threads(count: int) -> AbstractContextManager[Threads | None]:
    return Threads(count, "tensorcache-verify") if count else nullcontext()


def _reason(error: FormatError | OSError) -> str:
    return error.reason if isinstance(error, FormatError) else str(error)


def _nbytes(path: str) -> int:
    """Return the length of a file; 0 if it cannot be found, which is then a fault."""
    with suppress(OSError):
        return os.path.getsize(path)
    return 0


def _without_number(path: str) -> str:
    """Return a path with its numbers masked; all shards of one writer have the same result."""
    return re.sub(r"[0-9]+", "#", path)


class _Manifest:
    """A manifest, compared with the shards of its folder."""

    def __init__(self, path: str) -> None:
        self._path, self._where = path, os.path.basename(path)
        self._entries: dict[str, ShardEntry] = {}  # by absolute path
        self._caches: dict[str, Any] = {}
        self._fingerprints: dict[str, Any] = {}
        self._is_ours = False

    def shards(self, report: Report) -> list[str]:
        """Return the shards that are listed or in the manifest's folder; report shards that are not both."""

        def fault(shard: str, what: str, kind: Kind = "index") -> None:
            report.faults.append(Fault(shard, None, None, what, kind))

        paths: list[str] = []
        entries: list[ShardEntry] | None = None
        try:
            entries, extra = read_manifest(self._path)
        except FileNotFoundError:
            raise
        except (FormatError, OSError) as exc:
            extra = {}
            fault(self._path, _reason(exc))
        self._is_ours = bool(extra)
        for table, name in ((self._caches, "caches"), (self._fingerprints, "fingerprints")):
            if isinstance(extra.get(name, {}), dict):
                table.update(extra.get(name, {}))
            else:
                fault(self._path, f"{name} is a {type(extra[name]).__name__}, expected an object")
        for located in locate_shards(self._path, entries or []):
            entry, path, error = located.entry, located.path, located.error
            assert entry is not None
            if located.same_as is not None:
                fault(path, f"{self._where} lists it twice, also as {located.same_as!r:.200}")
                self._entries.setdefault(os.path.abspath(path), entry)
            elif "://" in entry.url:
                fault(self._path, f"{entry.url} is not a local path, so it was not checked")
            elif error is not None:
                is_missing = isinstance(error, FileNotFoundError)
                what = "the shard is missing" if is_missing else f"the shard cannot be read ({error})"
                what = f"{what}; {self._where} lists it with {entry.num_samples} samples"
                fault(path, what, "missing" if is_missing else "unreadable")
                report.num_missing += 1
                report.num_lost += entry.num_samples
            else:
                paths.append(path)
                self._entries[os.path.abspath(path)] = entry
        folder = os.path.dirname(self._path)
        for name in shard_names(os.listdir(folder or os.curdir)):
            path = os.path.join(folder, name)
            if os.path.abspath(path) not in self._entries:
                paths.append(path)
                if entries is not None and self._where == MANIFEST:
                    fault(path, f"{MANIFEST} does not list it")
        if not paths and not report.faults:
            raise FileNotFoundError(f"{self._path} lists no shards")
        return paths

    def num_samples(self, path: str) -> int:
        """Return the number of samples of a shard according to the manifest."""
        entry = self._entries.get(os.path.abspath(path))
        return 0 if entry is None else entry.num_samples

    def check(self, found: Checked, fingerprint: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
        """Add the differences between manifest and shard to `found`; return the shard's fingerprint, or else the manifest's."""
        entry = self._entries.get(os.path.abspath(found.path))
        if entry is None:
            return fingerprint

        def differ(what: str, says: object) -> None:
            found.fault(None, None, f"the shard {what}, but {self._where} says {says}", "index")

        def wrong(what: str) -> None:
            found.fault(None, None, f"{self._where} has {what}", "index")

        num_samples, caches = found.report.num_samples, {name: len(of) for name, of in found.index.caches.items()}
        counts, listed = self._caches.get(entry.url), self._fingerprints.get(entry.url)
        if entry.nbytes != found.nbytes:
            differ(f"has {found.nbytes} bytes", entry.nbytes)
        if entry.num_samples != num_samples:
            differ(f"has {num_samples} samples", entry.num_samples)
        if entry.digest is not None and (digest := stored_digest(found.path)) != entry.digest:
            differ("has no index" if digest is None else f"has an index with the digest {digest}", entry.digest)
        if counts is not None and not are_counts(counts):
            wrong(f"caches {counts!r:.200} for this shard, expected numbers of samples by name")
        elif counts is not None and counts != caches and len(found.index.keys) == entry.num_samples:
            differ(f"has {caches} samples in its caches", f"{counts!r:.200}")
        if listed is not None and not isinstance(listed, dict):
            wrong(f"the fingerprint {listed!r:.100} for this shard, expected fields by name")
        elif fingerprint is None or (listed is None and not self._is_ours):
            return fingerprint or listed
        elif json.dumps(listed, sort_keys=True) != json.dumps(fingerprint, sort_keys=True):  # `==` takes 1 for 1.0
            differ(f"was made with {fingerprint!r:.200}", f"{listed!r:.200}")
        return fingerprint
