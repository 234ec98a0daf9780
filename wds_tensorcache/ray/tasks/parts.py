"""Shards that one attempt of one write task makes, under names that no other attempt has."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterable
from typing import Any

import numpy as np

from wds_tensorcache.errors import InvalidKeyError
from wds_tensorcache.ray.rows.block_samples import samples_of_block
from wds_tensorcache.ray.tasks.folder import WriteFolder, index_names
from wds_tensorcache.ray.tasks.jobs import Part, WriteJob, key_digest
from wds_tensorcache.shards.names import NamedKey
from wds_tensorcache.storage.urls import is_url, join_url, shown
from wds_tensorcache.writing.writer import ShardWriter


def write_part(job: WriteJob, blocks: Iterable[Any], task: int) -> Part:
    """Write the samples of blocks into new shards.

    The names contain random digits: two attempts of one task may run at the same time, when a node is slow or cut off.

    Raises:
        KeyError: A block has no column of keys.
        InvalidKeyError, EncodeError, StaleCacheError: A sample cannot be written.
        RuntimeError: The driver has ended the write.
    """
    folder = WriteFolder(job.folder)
    _check_running(folder, job)
    base = f"part-{job.number:03d}-{task:06d}-{job.id}{secrets.token_hex(3)}"
    pattern = (
        join_url(job.folder, f"{base}-%06d.tar") if is_url(job.folder) else os.path.join(job.folder, f"{base}-%06d.tar")
    )
    digests: list[bytes] = []
    sink = ShardWriter(pattern, manifest=False, allow=job.allow, **job.options)
    try:
        with sink:
            for block in blocks:
                for key, sample, members in samples_of_block(
                    block, job.key, job.allow, has_fingerprint=job.options["fingerprint"] is not None
                ):
                    text = as_key(key, job.key)
                    sink.write(text, sample, **members)
                    digests.append(key_digest(text))
                _check_running(folder, job)
        _check_running(folder, job)
    except BaseException:
        if not job.keeps_shards:  # the driver, or the next build, takes the finished ones
            folder.remove(index_names(_names(base, sink)))
        raise
    return Part(tuple(_names(base, sink)), b"".join(digests))


def _names(base: str, sink: ShardWriter) -> list[str]:
    """Return the names of the shards that a writer has begun."""
    return [f"{base}-{number:06d}.tar" for number in range(sink._number)]


def _check_running(folder: WriteFolder, job: WriteJob) -> None:
    """Raise RuntimeError if the driver has ended a write, so that a late task leaves nothing."""
    if not folder.is_writing(job.id):
        what = "the write has ended, or this node sees another folder of this name"
        raise RuntimeError(f"{shown(job.folder)}: {what}; share the folder between all nodes")


def as_key(key: Any, column: str) -> str:
    """Return a value of the key column as text; raise InvalidKeyError if it is neither text nor an integer."""
    if isinstance(key, str):
        return key if isinstance(key, NamedKey) else str(key)
    if isinstance(key, (int, np.integer)) and not isinstance(key, (bool, np.bool_)):
        return str(int(key))
    raise InvalidKeyError(
        f"column {column!r} has a {type(key).__name__} as key, expected text or integers: {key!r:.100}"
    )
