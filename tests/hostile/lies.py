"""Footers with a right digest that lie: changes of the index of a shard from `tests.hostile.forged.write`."""

from __future__ import annotations

import struct
from dataclasses import replace
from typing import Any

import numpy as np

from tests.hostile.forged import COUNT
from tests.shards.forged_index import Change, changed, columns, swap, swap_keys, unchecked
from wds_tensorcache.codec.header import form_of
from wds_tensorcache.shards.footer import MAGIC, _digest
from wds_tensorcache.shards.index import MemberColumns, ShardIndex, narrow
from wds_tensorcache.shards.key_table import Keys

COLUMNS = ("skeleton_begin", "skeleton_nbytes", "tensors_begin", "layout", "digest")


def layouts(**changes: Any) -> Change:
    return lambda index: replace(index, layouts=unchecked(index.layouts, **changes))


def rename(index: ShardIndex) -> ShardIndex:
    keys = [key.replace("k", "q") for key in index.keys]
    return replace(index, keys=Keys(np.frombuffer("".join(keys).encode(), np.uint8), index.keys.ends))


def members(**changes: Any) -> Change:
    def change(index: ShardIndex) -> ShardIndex:
        return replace(index, members={"txt": replace(index.members["txt"], **changes)})

    return change


def member_of_another(index: ShardIndex) -> ShardIndex:
    return members(begin=index.members["txt"].begin[[1, 0, 2, 3]])(index)


def skeletons_for_members(index: ShardIndex) -> ShardIndex:
    (cache,) = index.caches.values()
    return members(begin=cache.skeleton_begin, nbytes=cache.skeleton_nbytes)(index)


def one_twice(index: ShardIndex) -> ShardIndex:
    (cache,) = index.caches.values()
    return columns(index, **{name: getattr(cache, name)[[0, 0, 2, 3]] for name in COLUMNS})


def fewer(index: ShardIndex) -> ShardIndex:
    """Samples 1 and 3 alone have the cache, says it, with what samples 0 and 2 have."""
    (cache,) = index.caches.values()
    return columns(index, rows=np.array([1, 3], np.uint8), **{name: getattr(cache, name)[[0, 2]] for name in COLUMNS})


LIES: dict[str, Change] = {
    "another sample's everything": swap(*COLUMNS),
    "another sample's tensors": swap("tensors_begin", "digest"),
    "another sample's skeleton": swap("skeleton_begin", "skeleton_nbytes"),
    "one sample twice": one_twice,
    "other keys": swap_keys,
    "keys that are not there": rename,
    "rows of other samples": fewer,
    "outside": changed("tensors_begin", 1, 1 << 40),
    "at 2^64 - 1": changed("skeleton_begin", 1, (1 << 64) - 1),
    "in the end of the archive": lambda index: changed("skeleton_begin", 1, index.end)(index),
    "overflowing shapes": layouts(dims=np.full(2, 1 << 61, np.uint64)),
    "other shapes of as many bytes": layouts(form=np.zeros(1, np.uint8), dims=np.array([2, 6], np.uint8)),
    "another dtype": layouts(forms=(form_of((("b", "U8", 1), ("x", "U8", 1))),)),
    "other names": layouts(
        forms=(form_of((("b", "BOOL", 1), ("y", "U8", 1))),), references=(("tensor:b", "tensor:y"),)
    ),
    "other kinds": layouts(references=(("ndarray:x", "ndarray:b"),)),
    "tensors that begin elsewhere": layouts(data_begin=np.array([8], np.uint8)),
    "no layouts": layouts(form=np.empty(0, np.uint8), data_begin=np.empty(0, np.uint8), dims=np.empty(0, np.uint8)),
    "no digests": lambda index: columns(index, digest=np.zeros(COUNT, np.uint64)),
    "another cache": lambda index: replace(index, caches={"other": index.caches[""]}),
    "a member of another sample": member_of_another,
    "skeletons for members": skeletons_for_members,
    "members without end": members(nbytes=np.full(COUNT, 1 << 63, np.uint64)),
    "shorter members": members(nbytes=np.full(COUNT, 3, np.uint8)),
    "members of 2^33 and more": members(nbytes=np.full(COUNT, (1 << 33) + 7, np.uint64)),
    "members of other samples for all": lambda index: replace(
        index, members={"gif": MemberColumns(None, index.members["txt"].begin, index.members["txt"].nbytes)}
    ),
}


def longest_skeletons(index: ShardIndex) -> ShardIndex:
    """Half of the shard for each sample."""
    return columns(index, skeleton_nbytes=narrow([index.end // 2] * len(index.keys)))


def overlapping_skeletons(index: ShardIndex) -> ShardIndex:
    """From each skeleton to the end of the archive."""
    (cache,) = index.caches.values()
    return columns(index, skeleton_nbytes=narrow(index.end - cache.skeleton_begin.astype(np.int64)))


def many_layouts(index: ShardIndex) -> ShardIndex:
    """Forms and layouts that no sample has."""
    table, count = index.layouts, 300_000
    lying = unchecked(
        table,
        forms=table.forms + (form_of(()),) * 60_000,
        references=table.references + ((),) * 60_000,
        form=np.zeros(count, np.uint8),
        data_begin=np.full(count, table.data_begin[0], np.uint8),
        dims=np.tile(table.dims, count),
    )
    return replace(index, layouts=lying)


def replace_in_footer(shard: bytes, old: bytes, new: bytes) -> bytes:
    """Return the shard with other bytes in its footer, and a right digest."""
    numbers = struct.unpack("<QQQ", shard[-40:-16])
    body = shard[-40 - numbers[0] : -40]
    assert len(old) == len(new)
    assert old in body
    body = body.replace(old, new)
    return shard[: -40 - numbers[0]] + body + struct.pack("<QQQQ8s", *numbers, _digest(body, numbers), MAGIC)
