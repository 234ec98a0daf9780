"""Write what is whole of damaged shards into new ones."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from typing import Any

from wds_tensorcache.building.verify import check_all
from wds_tensorcache.errors import FormatError, KeyRuleError
from wds_tensorcache.shards.catalog import Catalog, dali_index_path, write_dali_index
from wds_tensorcache.shards.report import Report
from wds_tensorcache.shards.rewrite import copy_pieces
from wds_tensorcache.shards.storage import ShardFile

__all__ = ["repair"]


def repair(
    source: Any,
    out: str | os.PathLike[str],
    *,
    drop: bool = True,
    threads: int | None = None,
    allow: Iterable[type] = (),
) -> Report:
    """Write shards again, without samples that are damaged, with new indexes and a manifest; `source` stays as it is.

    Samples without a fault, and members that belong to none, keep their bytes, tar headers included. Behind a damaged header
    the tar goes on at the next one that is whole; a tail that was cut off is lost. A sample that has lost but another member,
    say a `jpg`, stays without it. Of two samples of one key in a shard, the first that is whole stays. Shards keep their names
    and fingerprints; one of which nothing is left is not written.

    Args:
        source: As of `verify`.
        out: A folder that is empty, or not there.
        drop: Leave damaged samples out. False writes nothing if there are any, or anything of the tar is lost.
        threads: As of `verify`.
        allow: As of `verify`.

    Returns:
        What is wrong with `source`, as of `verify`; keys of samples that are lost are in the faults where an index, `.idx` or
        the tar tells them.

    Raises:
        FileExistsError: `out` is not empty, or is where a shard is.
        FileNotFoundError: There is no such file, or no shard.
        FormatError: With `drop=False`, a sample is damaged. A shard was changed meanwhile.
        ValueError: Two shards have one name, in different folders.

    Memory: as of `verify`, with the indexes of all shards at once.
    """
    out = os.fspath(out)
    if os.path.exists(out) and (not os.path.isdir(out) or os.listdir(out)):
        raise FileExistsError(f"{out} is not empty; shards are repaired into a folder of their own")
    report, found = check_all(source, threads, allow, keep=True)
    names = [os.path.basename(checked.path) for checked, _ in found]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"shards of several folders are called {twice[0]!r}; repair one folder at a time")
    if not drop:
        for checked, _ in found:
            if checked.faults and (checked.num_damaged or checked.is_broken):
                raise FormatError(f"{len(checked.faults)} faults, and drop=False; the first: {checked.faults[0]}")
    os.makedirs(out, exist_ok=True)
    catalog = Catalog(out)
    for name, (checked, fingerprint) in zip(names, found, strict=True):
        if not checked.pieces:
            continue
        path, file = os.path.join(out, name), ShardFile(checked.path)
        if file.identity != checked.identity:
            raise FormatError(f"{checked.path}: the shard was changed while it was repaired")
        index = copy_pieces(file, checked.pieces, path, fingerprint)
        with contextlib.suppress(KeyRuleError):  # names that DALI's index cannot hold
            write_dali_index(dali_index_path(path), index)
        catalog.add(path, index)
    return report
