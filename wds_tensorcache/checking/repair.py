"""`repair`: new shards from the intact samples of damaged shards."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from contextlib import closing, suppress
from typing import Any

from wds_tensorcache.checking.report import RepairReport
from wds_tensorcache.checking.shard_check import Checked
from wds_tensorcache.checking.verify import ShardsToCheck
from wds_tensorcache.errors import FormatError, InvalidKeyError
from wds_tensorcache.progress import Progress, ProgressOption
from wds_tensorcache.shards.dali_index import write_dali_index
from wds_tensorcache.shards.manifest import MANIFEST, Manifest, entry_of
from wds_tensorcache.shards.names import dali_index_path
from wds_tensorcache.storage.files import Files
from wds_tensorcache.storage.folder import folder_of
from wds_tensorcache.writing.copy_shards import write_shard
from wds_tensorcache.writing.new_folder import check_new, new_folder


def repair(
    source: Any,
    out: str | os.PathLike[str],
    *,
    drop: bool = True,
    num_threads: int | None = None,
    allow: Iterable[type] = (),
    progress: ProgressOption = None,
) -> RepairReport:
    """Write the intact samples of shards into a new folder.

    The new folder has new indexes and a manifest, and `source` is not changed.

    Samples without a fault are copied with their tar headers, byte for byte. Entries that belong to no sample, such as folders
    and links, may be left out. Where headers are damaged, the index at the shard's end or in its sidecar shows the places of
    samples, even if it is stale. A sample without headers gets new headers if its bytes match the digests in the index, the
    skeleton and the tensors. Without an index, reading resumes at the next intact header. Samples after the point where a shard
    was cut off are lost. Reading also resumes after a single block of zeros, and after more zeros if an index says that the
    archive ends later. Members after the end-of-archive marker are dropped, since readers do not see them. A sample that has
    lost only a member outside its cache, for example a `jpg`, is kept without that member. If two samples in a shard have the
    same key, the first intact sample with the most caches is kept. If a whole or partial copy of another shard has replaced a
    shard, the copy is left out.

    Shards keep their names, their order and their fingerprints. A damaged shard without intact members is not written. The
    folder appears by one rename when it is complete. A killed process leaves a hidden folder next to `out`, which the next
    call deletes if the file system has locks.

    Args:
        source: Shards, as in `verify`.
        out: A new folder, or an empty folder, which is replaced. If there is nothing to write, it is not made or changed.
        drop: False raises FormatError, and writes nothing, if a sample is damaged, any part of a tar is lost, or a shard is
            missing or unreadable.
        num_threads: Number of threads, as in `verify`.
        allow: Classes that skeletons may build, as in `verify`.
        progress: As in `verify`. The bytes of every shard count twice: they are checked, then written.

    Returns:
        The faults of `source`, as `verify` reports them, and counts of the written shards, samples and bytes. The faults name
        each lost sample whose key is in an index, an `.idx` file or the tar.

    Raises:
        FileExistsError: `out` is a file, is not empty, or is the current folder or a mount point.
        FileNotFoundError: A file does not exist, or there are no shards.
        FormatError: With `drop=False`, a sample is damaged or lost, or a shard is missing or unreadable. Or a shard was changed
            during the call.
        OSError: The disk is full, the parent folder of `out` is read-only, …
        ImportError: `progress` is True, and `tqdm` is not installed.
        TypeError: `source` is not a path, a pattern or a list of them; or an item of `allow` is not a class.
        ValueError: Two shards in different folders have the same name, or would have the same `.idx` file. Or `out` is an empty
            string or a url, `source` is a url, or `num_threads` is less than 1.

    Memory: as in `verify`, but with the indexes of all shards at once.
    """
    out = check_new(out, "choose a new folder for repaired shards")
    report = RepairReport()
    shards = ShardsToCheck(source, report)
    with closing(Progress(progress, 2 * shards.nbytes, desc="repair", unit="B", unit_scale=True)) as bar:
        parts = shards.check(num_threads, allow, bar, keep=True)
        _check_names([part.path for part in parts])
        if not drop and (report.num_lost or report.num_missing or any(map(_has_lost, parts))):
            problem = f"{len(report.faults)} faults, and drop=False (--strict) allows no loss, so nothing was written"
            raise FormatError(f"{problem}; the first fault: {report.faults[0]}")
        # Hazard: a shard and its copy would repeat keys. The shard with the most samples is kept.
        by_size = sorted(parts, key=lambda part: (len(part.index.keys), not part.copy_of))
        best = set({part.copy_of or part.path: part.path for part in by_size}.values())
        kept = [part for part in parts if part.path in best and (part.ranges or not _has_lost(part))]
        if kept:
            with new_folder(out) as folder:
                _write(kept, folder, report, lambda nbytes: bar.show(shards.nbytes + nbytes))
        bar.show(2 * shards.nbytes)
    return report


def _has_lost(part: Checked) -> bool:
    return part.report.num_damaged > 0 or part.is_broken


def _check_names(paths: list[str]) -> None:
    by_name: dict[str, str] = {}
    for path in paths:
        name = os.path.basename(path)
        if (other := by_name.setdefault(name, path)) is not path:
            raise ValueError(f"two shards are named {name!r}: {other} and {path}; repair one folder at a time")
    for path in paths:
        idx = os.path.basename(dali_index_path(path))
        if idx in by_name:
            problem = f"its DALI index would be named {idx!r}, but {by_name[idx]} uses that name"
            raise ValueError(f"{path}: {problem}; repair the two shards one by one")
        by_name[idx] = path


def _write(parts: list[Checked], folder: str, report: RepairReport, show: Callable[[int], object]) -> None:
    manifest, files, done = Manifest(), Files(), 0
    for part in parts:
        if files.get(part.path).identity != part.identity:
            raise FormatError(f"{part.path}: the shard was changed during the repair; try again")
        path = os.path.join(folder, os.path.basename(part.path))
        origins = map(part.index.origin, range(len(part.index.keys)))
        index = write_shard(path, part.ranges, files, part.fingerprint, origins)
        with suppress(InvalidKeyError):  # DALI's index cannot contain some names
            write_dali_index(folder_of(folder), os.path.basename(path), index)
        manifest.add(entry_of(path, index), index)
        report.num_shards_written += 1
        report.num_samples_written += len(index.keys)
        report.nbytes_written += os.path.getsize(path)
        done += part.nbytes
        show(done)
    folder_of(folder).write(MANIFEST, manifest.build())  # in the order of the sample indices
