"""Write what is whole of damaged shards into new ones."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from wds_tensorcache.checking.report import Report
from wds_tensorcache.checking.shard_check import Checked
from wds_tensorcache.checking.verify import check_all
from wds_tensorcache.errors import FormatError, KeyRuleError
from wds_tensorcache.shards.catalog import MANIFEST, Listing, dali_index_path, write_dali_index
from wds_tensorcache.storage.atomic import find_temporary, fsync_folder, temporary_path
from wds_tensorcache.storage.files import ShardFile
from wds_tensorcache.storage.locks import Held
from wds_tensorcache.writing.rewrite import copy_pieces

__all__ = ["repair"]

_WRITTEN = re.compile(r".*\.(tar|idx|tmp)|manifest\.json", re.DOTALL).fullmatch  # what repair writes into its folder


def repair(
    source: Any,
    out: str | os.PathLike[str],
    *,
    drop: bool = True,
    threads: int | None = None,
    allow: Iterable[type] = (),
) -> Report:
    """Write shards again, without samples that are damaged, with new indexes and a manifest; `source` stays as it is.

    Samples without a fault, and members that belong to none, keep their bytes, tar headers included. Where headers are damaged,
    samples are saved by the index at the shard's end or in its sidecar, even a stale one: a sample that the index places, and
    whose bytes have the digests that the index, the skeleton and the tensors declare, is whole, and gets new tar headers.
    Without an index, reading resumes at the next header that is whole; a tail that was cut off is lost. It also resumes after a
    single block of zeros, and after more zeros if an index says that the archive ends later. Otherwise two blocks are the
    end-of-archive marker, and members after it are dropped, since readers do not see them. A sample that has lost only another
    member, for example a `jpg`, stays without it. Of two samples of one key in a shard, the first whole one with a cache stays,
    or the first whole one if neither has a cache.

    Shards keep their names, their order and their fingerprints. One of which nothing is left is not written; one that has no
    samples, but no fault either, is.

    All is written into a hidden folder beside `out`, which becomes `out` when it is complete: whatever happens, `out` is whole
    or as it was. What a call that was killed left beside `out` goes at the next call, where the file system has locks. Shards
    of a rebuild that was broken off (`build(digest=…)`) are no part of what readers see, and are left out.

    Args:
        source: As of `verify`.
        out: A folder that is empty, which is replaced, or not there. If nothing at all is left, it stays as it is.
        drop: Leave damaged samples out. False writes nothing if there are any, or anything of the tar is lost.
        threads: As of `verify`.
        allow: As of `verify`.

    Returns:
        What is wrong with `source`, as of `verify`; keys of samples that are lost are in the faults where an index, `.idx` or
        the tar tells them.

    Raises:
        FileExistsError: `out` is not empty, or is where a shard is, or where a disk is mounted.
        FileNotFoundError: There is no such file, or no shard.
        FormatError: With `drop=False`, a sample is damaged. A shard was changed meanwhile.
        OSError: The disk is full, the folder around `out` cannot be written to, …
        ValueError: Two shards have one name, in different folders, or one `.idx`; `out` is empty.

    Memory: as of `verify`, with the indexes of all shards at once.
    """
    out = os.fsdecode(out)
    if not out:
        raise ValueError("out='', expected a folder")
    out = os.path.realpath(out)
    if os.path.isdir(out) and os.path.samefile(out, os.curdir):
        raise FileExistsError(f"{out} is the current folder, and cannot be replaced; choose a folder in it")
    if os.path.exists(out) and (not os.path.isdir(out) or os.listdir(out)):
        raise FileExistsError(f"{out} is not empty; shards are repaired into a folder of their own")
    if os.path.ismount(out):
        raise FileExistsError(f"{out} is where a disk is mounted, and cannot be replaced; choose a folder in it")
    report, found = check_all(source, threads, allow, keep=True)
    _check_names([checked.path for checked, _ in found])
    if not drop and (report.num_lost or report.num_missing or any(_has_lost(checked) for checked, _ in found)):
        first = report.faults[0]
        raise FormatError(f"{len(report.faults)} faults, and drop=False; the first: {first}")
    left = [(checked, made) for checked, made in found if checked.pieces or not _has_lost(checked)]
    if left:
        with _complete_or_nothing(out) as folder:
            _write(left, folder)
    return report


def _has_lost(checked: Checked) -> bool:
    return checked.num_damaged > 0 or checked.is_broken


def _check_names(paths: list[str]) -> None:
    """Raise ValueError if shards cannot be in one folder."""
    by_name: dict[str, str] = {}
    for path in paths:
        name = os.path.basename(path)
        other = by_name.setdefault(name, path)
        if other is not path:
            both = f"shards of several folders are called {name!r}: {other} and {path}"
            raise ValueError(f"{both}; repair one folder at a time")
    by_idx: dict[str, str] = {}
    for path in paths:
        idx = os.path.basename(dali_index_path(path))
        if idx in by_name or by_idx.setdefault(idx, path) is not path:
            other = by_name.get(idx) or by_idx[idx]
            raise ValueError(f"{path}: its index for DALI would be {idx!r}, as {other} has it; repair them one by one")


def _write(found: list[tuple[Checked, Mapping[str, Any] | None]], folder: str) -> None:
    listing = Listing()
    for checked, fingerprint in found:
        name, file = os.path.basename(checked.path), ShardFile(checked.path)
        if file.identity != checked.identity:
            raise FormatError(f"{checked.path}: the shard was changed while it was repaired")
        path = os.path.join(folder, name)
        index = copy_pieces(file, checked.pieces, path, fingerprint)
        with contextlib.suppress(KeyRuleError):  # names that DALI's index cannot hold
            write_dali_index(dali_index_path(path), index)
        listing.add(path, index)
    listing.write(os.path.join(folder, MANIFEST), listing.entries)  # in the order in which samples were numbered


@contextlib.contextmanager
def _complete_or_nothing(out: str) -> Iterator[str]:
    """Give a folder that becomes `out` at the end of the `with` block, and goes if that fails."""
    parent, name = os.path.split(out)
    os.makedirs(parent, exist_ok=True)
    for stray in find_temporary(parent, re.escape(name)):
        # OSError: another user's, no folder, or one that goes at this moment
        with contextlib.suppress(OSError), _locked(stray) as is_ours:
            if is_ours and all(map(_WRITTEN, os.listdir(stray))):
                shutil.rmtree(stray, ignore_errors=True)
    folder = temporary_path(out)
    try:
        os.mkdir(folder)
        with _locked(folder):
            yield folder
            if os.path.isdir(out):
                shutil.copymode(out, folder)
                if os.name != "posix":
                    os.rmdir(out)  # elsewhere a folder cannot take an empty one's place
            # Hazard: a name may reach the disk before what it names; but all of it is there by now.
            os.rename(folder, out)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    fsync_folder(parent)


@contextlib.contextmanager
def _locked(folder: str) -> Iterator[bool]:
    """Say that a living process writes a folder; give whether it is known that no other does.

    Raises:
        OSError: It is no folder, or another user's.
    """
    if os.name != "posix":
        yield False
        return
    with Held(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_NONBLOCK) as held:
        yield held.lock() is True
