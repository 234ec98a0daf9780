"""Checks of shards, their sidecars and their manifests."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Set
from contextlib import AbstractContextManager, closing, nullcontext, suppress
from functools import partial
from typing import Any

from wds_tensorcache.checking.index_check import check_indexes
from wds_tensorcache.checking.report import Fault, Report
from wds_tensorcache.checking.shard_check import Checked, check_shard
from wds_tensorcache.codec.skeleton.types import allow_table
from wds_tensorcache.errors import FormatError, Kind, format_count
from wds_tensorcache.progress import Progress, ProgressOption
from wds_tensorcache.reading.find_shards import file_identity, find_shards, shard_names
from wds_tensorcache.shards.fingerprint import as_text
from wds_tensorcache.shards.key_table import Keys, KeyTable
from wds_tensorcache.shards.manifest import (
    MANIFEST,
    FoundShard,
    ShardEntry,
    are_counts,
    locate_shards,
    read_manifest,
    stored_digest,
)
from wds_tensorcache.shards.names import dali_index_path
from wds_tensorcache.storage.locks import find_writer
from wds_tensorcache.storage.readahead import Readers
from wds_tensorcache.storage.system import num_cores
from wds_tensorcache.storage.threads import Threads, run_in_order

_CHUNK = 1 << 20


def verify(
    source: Any, *, num_threads: int | None = None, allow: Iterable[type] = (), progress: ProgressOption = None
) -> Report:
    """Check all checksums, digests and indexes of shards, and their manifest.

    `verify` recomputes the checksums of all tar headers and both digests of every sample, and decodes every skeleton. It
    compares the samples with the index at the shard's end, the `.index` file and the `.idx` file. It also checks that skeleton
    and tensors of each sample belong together. If `source` is a folder or manifest, `verify` checks the manifest, too. Other
    members (`jpg`, …) have no digests, so they are only read.

    Args:
        source: Shards, as for `open`: a folder, a manifest, a shard, a pattern, or a list of sources.
        num_threads: Number of threads; by default the number of cores.
        allow: Classes that skeletons may build; only for shards that you trust. Samples that need other classes are
            counted in `Report.num_unread`: only their digests are compared.
        progress: Show rate and time left with `tqdm`; by default only if `tqdm` is installed and stderr is a terminal. Or a
            function of the number of bytes checked so far and the total number of bytes: `progress=lambda done, total: …`. The
            caller's thread calls it at the beginning, after each shard, and ten times a second during large shards.

    Returns:
        A report of all faults.

    Raises:
        FileNotFoundError: A file does not exist, or there are no shards.
        ImportError: `progress` is True, and `tqdm` is not installed.
        TypeError, ValueError: `source` is not a path, a pattern or a list of them, or is a url. Or `num_threads` is less than
            1, or an item of `allow` is not a class.

    The report shows damage, not malice: an attacker can store the right digests for a forged sample. `open` and `decode` are
    safe with any shard, and refuse the classes in `Report.needs`.

    Memory: at most 16 MiB per thread, plus the indexes of one shard per thread and the keys of all shards.
    """
    shards = ShardsToCheck(source, Report())
    with closing(Progress(progress, shards.nbytes, desc="verify", unit="B", unit_scale=True)) as bar:
        shards.check(num_threads, allow, bar)
    return shards.report


class ShardsToCheck:
    """The shards of a source, and the manifests that list them."""

    def __init__(self, source: Any, report: Report) -> None:
        self.report = report
        self._manifests: list[_Manifest] = []
        shards = find_shards(source, self._list_manifest, local_for="verified or repaired").shards
        # of several spellings, the first; `_Manifest.check` knows only its own
        paths = [*(path for manifest in self._manifests for path in manifest.paths), *(shard.path for shard in shards)]
        spellings = {os.path.realpath(path): path for path in reversed(paths)}
        self._sizes = {path: _nbytes(path) for path in (spellings[os.path.realpath(shard.path)] for shard in shards)}
        self.nbytes = sum(self._sizes.values())

    def _list_manifest(self, path: str) -> list[FoundShard] | None:
        if not os.path.exists(path):
            return None
        self._manifests.append(_Manifest(path, self.report))
        return [FoundShard(shard) for shard in self._manifests[-1].paths]

    def check(self, num_threads: int | None, allow: Iterable[type], bar: Progress, keep: bool = False) -> list[Checked]:
        """Check the shards and complete `report`. With `keep`, return the findings in each shard that can be opened."""
        num_threads = num_cores() if num_threads is None else num_threads
        if num_threads < 1:
            raise ValueError(f"num_threads={num_threads}, expected at least 1")
        table, paths, sizes = allow_table(allow), list(self._sizes), self._sizes
        with_idx = {_without_number(path) for path in paths if os.path.exists(dali_index_path(path))}
        reached = dict.fromkeys(paths, 0)  # bytes

        def reach(path: str, offset: int) -> None:
            # neither a second pass nor appended bytes count
            reached[path] = max(reached[path], min(offset, sizes[path]))

        def show() -> None:
            bar.show(sum(reached.values()))

        def check(path: str) -> Checked | Fault:
            try:
                checked = check_shard(path, table, readers, partial(reach, path))
            except (FormatError, OSError) as exc:
                kind = exc.kind if isinstance(exc, FormatError) else "unreadable"
                return Fault(path, None, None, f"cannot be opened: {_reason(exc)}", kind)
            check_indexes(checked, _without_number(path) in with_idx)
            return checked

        show()
        kept, keys, parts = list[Checked](), dict[str, Keys](), list[Report]()
        # if there are fewer shards than threads, the other threads read ahead
        walkers = max(1, min(num_threads, len(paths)))  # no path is left if the manifest lists only missing shards
        # this thread checks the shards if no other thread does; otherwise it only waits, and shows the progress
        with (
            _threads(num_threads - walkers) as reading,
            _threads(walkers if num_threads > 1 or bar.is_shown else 0) as walking,
        ):
            readers = Readers(reading, max(1, num_threads // walkers - 1))
            try:
                for path, checked in zip(paths, run_in_order(paths, check, walking, walkers, show), strict=True):
                    reach(path, sizes[path])
                    show()
                    if isinstance(checked, Fault):
                        lost = sum(manifest.num_samples(path) for manifest in self._manifests)
                        parts.append(Report([checked], num_missing=1, num_lost=lost))
                        continue
                    for manifest in self._manifests:
                        manifest.check(checked)
                    parts.append(checked.report)
                    keys[path] = checked.index.keys
                    if keep:
                        kept.append(checked)
            finally:
                readers.is_stopped = True  # so that an interrupt does not wait for the rest of large shards
        repeated = set(KeyTable((of, None) for of in keys.values()).shared())
        self.report.num_repeated = len(repeated)
        for manifest in self._manifests:
            manifest.check_partial_copies(keys, repeated)
        for part in parts:
            self.report.add(part)
        return kept


def _threads(count: int) -> AbstractContextManager[Threads | None]:
    return Threads(count, "tensorcache-verify") if count else nullcontext()


def _reason(error: FormatError | OSError) -> str:
    return error.reason if isinstance(error, FormatError) else str(error)


def _nbytes(path: str) -> int:
    with suppress(OSError):
        return os.path.getsize(path)
    return 0


def _without_number(path: str) -> str:
    """Mask a path's numbers, so that one writer's paths are equal."""
    return re.sub(r"[0-9]+", "#", path)


class _Manifest:
    """A manifest, compared with the shards of its folder."""

    def __init__(self, path: str, report: Report) -> None:
        self._path, self._where, self._report = path, os.path.basename(path), report
        self.paths: dict[str, None] = {}  # of shards that are listed, or in the manifest's folder
        self._entries: dict[str, ShardEntry] = {}  # by absolute path
        self._by_digest: dict[str, str] = {}  # paths by the digest of the index
        self._unlike: dict[str, Checked] = {}  # by path: shards without the index that is listed
        # paths of shards that have lost their index, by the path of another shard that has it
        self._originals: dict[str, str] = {}
        entries, extra = None, dict[str, Any]()
        try:
            entries, extra = read_manifest(path)
        except (FormatError, OSError) as exc:
            self._fault(path, _reason(exc))
        self._is_ours = bool(extra)
        self._caches, self._fingerprints = extra.get("caches", {}), extra.get("fingerprints", {})
        if not isinstance(self._caches, dict) or not isinstance(self._fingerprints, dict):
            self._fault(path, "expected caches and fingerprints to be objects")
            self._caches = self._fingerprints = {}
        for located in locate_shards(path, entries or []):
            self._add(located)
        folder = os.path.dirname(path)
        shards = [os.path.join(folder, name) for name in shard_names(os.listdir(folder or os.curdir))]
        listed_files = set(map(file_identity, filter(os.path.exists, self.paths)))  # links have other names
        unlisted = [
            shard
            for shard in shards
            if os.path.abspath(shard) not in self._entries
            and not (os.path.exists(shard) and file_identity(shard) in listed_files)
        ]
        self.paths |= dict.fromkeys(unlisted)
        if unlisted and entries is not None and self._where == MANIFEST and not find_writer(folder or os.curdir):
            # read again: a writer that has just ended has listed its shards
            listed = {os.path.abspath(located.path) for located in locate_shards(path, read_manifest(path)[0])}
            for shard in unlisted:
                if os.path.abspath(shard) not in listed:
                    self._fault(shard, f"{MANIFEST} does not list it")
        if not self.paths and not report.faults:
            raise FileNotFoundError(f"{path} lists no shards")

    def _fault(self, shard: str, problem: str, kind: Kind = "index") -> None:
        self._report.faults.append(Fault(shard, None, None, problem, kind))

    def _add(self, located: FoundShard) -> None:
        """Add a listed shard, or report why it cannot be read."""
        entry, path, error = located.entry, located.path, located.error
        assert entry is not None
        if located.same_as is not None:
            self._fault(path, f"{self._where} lists it twice, also as {located.same_as!r:.200}")
            self._entries.setdefault(os.path.abspath(path), entry)
        elif "://" in entry.url:
            self._fault(self._path, f"{entry.url} is not a local path, so it was not checked")
        elif error is not None:
            is_missing = isinstance(error, FileNotFoundError)
            problem = "the shard is missing" if is_missing else f"the shard cannot be read ({error})"
            problem = f"{problem}; {self._where} lists it with {format_count(entry.num_samples, 'sample')}"
            self._fault(path, problem, "missing" if is_missing else "unreadable")
            self._report.num_missing += 1
            self._report.num_lost += entry.num_samples
        else:
            self.paths[path] = None
            self._entries[os.path.abspath(path)] = entry
            if entry.digest is not None:
                self._by_digest.setdefault(entry.digest, path)

    def num_samples(self, path: str) -> int:
        entry = self._entries.get(os.path.abspath(path))
        return 0 if entry is None else entry.num_samples

    def check(self, checked: Checked) -> None:
        """Report differences between manifest and shard. A shard without a fingerprint gets the manifest's fingerprint."""
        entry = self._entries.get(os.path.abspath(checked.path))
        if checked.path not in self.paths:
            return
        digest = None
        with suppress(OSError, FormatError):  # then its faults are in the report
            digest = stored_digest(checked.path)
        self._check_copy(checked, entry, digest)
        if entry is None or entry.digest not in (None, digest) or entry.nbytes != checked.nbytes:
            self._unlike[checked.path] = checked
        if entry is None or checked.copy_of is not None:
            return

        def differ(fact: str, listed_value: object) -> None:
            checked.fault(None, None, f"the shard {fact}, but {self._where} says {listed_value}", "index")

        num_samples, caches = checked.report.num_samples, {name: len(of) for name, of in checked.index.caches.items()}
        counts, listed = self._caches.get(entry.url), self._fingerprints.get(entry.url)
        if entry.nbytes != checked.nbytes:
            differ(f"has {checked.nbytes} bytes", entry.nbytes)
        if checked.is_broken:  # without an index, the manifest alone shows how many samples a cut has removed
            checked.report.num_lost = max(checked.report.num_lost, entry.num_samples - num_samples)
        if entry.num_samples != num_samples:
            differ(f"has {format_count(num_samples, 'sample')}", entry.num_samples)
        if entry.digest not in (None, digest):
            differ("has no index" if digest is None else f"has an index with the digest {digest}", entry.digest)
        if counts is not None and not are_counts(counts):
            differ("has numbers of samples by cache", f"{counts!r:.200}")
        elif counts is not None and counts != caches and len(checked.index.keys) == entry.num_samples:
            differ(f"has {caches} samples in its caches", f"{counts!r:.200}")
        fingerprint, is_known = checked.fingerprint, isinstance(listed, dict) or listed is None
        if is_known and (fingerprint is None or (listed is None and not self._is_ours)):
            checked.fingerprint = fingerprint or listed
        elif as_text(listed) != as_text(fingerprint):
            differ(f"was made with {fingerprint!r:.200}", f"{listed!r:.200}")

    def _check_copy(self, checked: Checked, entry: ShardEntry | None, digest: str | None) -> None:
        """Report if another listed shard has been copied over a shard."""
        original, stored = self._by_digest.get(digest or "", checked.path), None
        if original == checked.path or (entry and entry.digest == digest):
            return
        with suppress(OSError, FormatError):
            stored = stored_digest(original)
        if stored == digest:
            self._report_copy(checked, original)
        elif stored is None:
            self._originals[checked.path] = original

    def check_partial_copies(self, keys: Mapping[str, Keys], repeated: Set[str]) -> None:
        """Report shards whose intact members are all copies from another shard."""
        if not self._unlike or not repeated:
            return
        for path, damaged_path in self._originals.items():
            copy, damaged = self._unlike.get(path), self._unlike.get(damaged_path)
            with suppress(OSError):
                if copy and damaged and damaged.ranges and _has_ranges(path, damaged):
                    self._report_copy(copy, damaged_path)
        listed = [path for path in self.paths if path in keys and path not in self._unlike]
        owners = {key: path for path in listed for key in keys[path] if key in repeated}
        for path, checked in self._unlike.items():
            original = next((owners[key] for key in keys[path] if key in owners), None)
            with suppress(OSError):
                if original is not None and checked.copy_of is None and _has_ranges(original, checked):
                    self._report_copy(checked, original, "part of ")

    def _report_copy(self, checked: Checked, original: str, part: str = "") -> None:
        checked.copy_of = original
        num_listed = self.num_samples(checked.path)
        lost = f"; lost: {format_count(num_listed, 'sample')} that {self._where} lists" if num_listed else ""
        checked.fault(None, None, f"the shard is {part}a copy of {os.path.basename(original)}{lost}", "lost")
        checked.report.num_lost = max(checked.report.num_lost, num_listed)


def _has_ranges(path: str, checked: Checked) -> bool:
    """Return whether a file equals a shard wherever the shard is intact."""
    with open(path, "rb") as file, open(checked.path, "rb") as other:
        for span in checked.ranges:
            for begin in range(span.begin, span.end, _CHUNK):
                nbytes = min(_CHUNK, span.end - begin)
                # the padding after the last member may be cut
                content = os.pread(other.fileno(), nbytes, begin)
                if os.pread(file.fileno(), len(content), begin) != content:
                    return False
    return True
