"""Indexes with a right digest that lie about a shard from `tests.hostile.forged.write`: changes for `tests.shards.footers.forge`."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np

from tests.hostile.forged import COUNT
from tests.shards.footers import Arrays

Change = Callable[[Arrays], object]
COLUMNS = tuple(
    f"cache.0.{name}" for name in ("skeleton_begin", "skeleton_nbytes", "tensors_begin", "layout", "digest")
)
U8, U64 = np.uint8, np.uint64


def put(name: str, at: int, value: int) -> Change:
    """Return a change of one number."""

    def change(arrays: Arrays) -> None:
        arrays[name] = arrays[name].astype(U64)
        arrays[name][at] = value

    return change


def take(order: list[int], *names: str) -> Change:
    """Return a change that gives samples the numbers of other samples."""
    return lambda arrays: arrays.update({name: arrays[name][order] for name in names})


def swap(*names: str) -> Change:
    return take([0, 2, 1, 3], *names)


def replace(**changes: Any) -> Change:
    """Return a change of arrays by name, in which `__` stands for a dot."""
    return lambda arrays: arrays.update({name.replace("__", "."): np.asarray(array) for name, array in changes.items()})


def rename(**changes: Any) -> Change:
    """Return a change of entries of the JSON in an index."""

    def change(arrays: Arrays) -> None:
        names = json.loads(arrays["names"].tobytes()) | changes
        arrays["names"] = np.frombuffer(json.dumps(names).encode(), U8)

    return change


def keys(text: bytes) -> Change:
    return replace(keys__text=np.frombuffer(text, U8))


def both(*changes: Change) -> Change:
    return lambda arrays: [change(arrays) for change in changes]


def skeletons_for_members(arrays: Arrays) -> None:
    arrays["member.0.begin"], arrays["member.0.nbytes"] = (arrays[name] for name in COLUMNS[:2])


# Samples 1 and 3 alone have the cache, the index says, with the columns of samples 0 and 2.
FEWER = both(take([0, 2], *COLUMNS), replace(cache__0__rows=np.array([1, 3], U8)))
NONE = np.empty(0, U8)
LIES: dict[str, Change] = {
    "another sample's everything": swap(*COLUMNS),
    "another sample's tensors": swap("cache.0.tensors_begin", "cache.0.digest"),
    "another sample's skeleton": swap("cache.0.skeleton_begin", "cache.0.skeleton_nbytes"),
    "one sample twice": take([0, 0, 2, 3], *COLUMNS),
    "other keys": keys(b"k0k2k1k3"),
    "keys that are not there": keys(b"q0q1q2q3"),
    "rows of other samples": FEWER,
    "outside": put("cache.0.tensors_begin", 1, 1 << 40),
    "at 2^64 - 1": put("cache.0.skeleton_begin", 1, (1 << 64) - 1),
    "in the end of the archive": put("cache.0.skeleton_begin", 1, 12288),
    "overflowing shapes": replace(layouts__dims=np.full(2, 1 << 61, U64)),
    "other shapes of as many bytes": replace(layouts__dims=np.array([2, 6], U8)),
    "another dtype": rename(forms=[[["x", "U8", 1], ["b", "U8", 1]]]),
    "other names": rename(forms=[[["y", "U8", 1], ["b", "BOOL", 1]]], references=[["tensor:y", "tensor:b"]]),
    "other kinds": rename(references=[["ndarray:x", "ndarray:b"]]),
    "tensors that begin elsewhere": replace(layouts__data_begin=np.array([8], U8)),
    "no layouts": replace(layouts__form=NONE, layouts__data_begin=NONE, layouts__dims=NONE),
    "no digests": replace(cache__0__digest=np.zeros(COUNT, U64)),
    "another cache": rename(caches=["other"]),
    "a member of another sample": take([1, 0, 2, 3], "member.0.begin"),
    "skeletons for members": skeletons_for_members,
    "members without end": replace(member__0__nbytes=np.full(COUNT, 1 << 63, U64)),
    "shorter members": replace(member__0__nbytes=np.full(COUNT, 3, U8)),
    "members of 2^33 and more": replace(member__0__nbytes=np.full(COUNT, (1 << 33) + 7, U64)),
    "members of other samples for all": rename(members=["gif"]),
}


def longest_skeletons(arrays: Arrays) -> None:
    """Half of the shard for each sample."""
    begins = arrays["cache.0.skeleton_begin"].astype(U64)
    arrays["cache.0.skeleton_nbytes"] = np.full(len(begins), begins[-1] // 2)


def overlapping_skeletons(arrays: Arrays) -> None:
    """From each skeleton to the end of the last one."""
    begins = arrays["cache.0.skeleton_begin"].astype(U64)
    arrays["cache.0.skeleton_nbytes"] = begins[-1] + 100 - begins


def many_layouts(arrays: Arrays) -> None:
    """Forms and layouts that no sample has."""
    forms, count = [[["x", "U8", 1], ["b", "BOOL", 1]]], 300_000
    rename(forms=forms + [[["x", "U8", 1]]] * 60_000, references=[["tensor:x", "tensor:b"]] + [["tensor:x"]] * 60_000)(
        arrays
    )
    for name in ("form", "data_begin", "dims"):
        arrays[f"layouts.{name}"] = np.tile(arrays[f"layouts.{name}"], count)
