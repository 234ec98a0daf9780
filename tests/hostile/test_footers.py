"""Footers with a right digest that lie, and index files that are none."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import wds_tensorcache as tc
from tests.hostile.forged import COUNT, is_right, write
from tests.hostile.pickles import little_memory
from tests.shards.footers import U8, U64, Arrays, Change, forge, put, rename, replace

COLUMNS = tuple(
    f"cache.0.{name}" for name in ("skeleton_begin", "skeleton_nbytes", "tensors_begin", "layout", "digest")
)


def take(order: list[int], *names: str) -> Change:
    """Return a change that gives samples the numbers of other samples."""
    return lambda arrays: arrays.update({name: arrays[name][order] for name in names})


def swap(*names: str) -> Change:
    return take([0, 2, 1, 3], *names)


def keys(text: bytes) -> Change:
    return replace(keys__text=np.frombuffer(text, U8))


def both(*changes: Change) -> Change:
    return lambda arrays: [change(arrays) for change in changes]


# Samples 1 and 3 alone have the cache, the index says, with the columns of samples 0 and 2.
FEWER = both(take([0, 2], *COLUMNS), replace(cache__0__rows=np.array([1, 3], U8)))
NONE = np.empty(0, U8)
LIES: dict[str, Change] = {
    "another sample's everything": swap(*COLUMNS),
    "another sample's skeleton": swap("cache.0.skeleton_begin", "cache.0.skeleton_nbytes"),
    "other keys": keys(b"k0k2k1k3"),
    "rows of other samples": FEWER,
    "at 2^64 - 1": put("cache.0.skeleton_begin", 1, (1 << 64) - 1),
    "overflowing shapes": replace(layouts__dims=np.full(2, 1 << 61, U64)),
    "other shapes of as many bytes": replace(layouts__dims=np.array([2, 6], U8)),
    "another dtype": rename(forms=[[["x", "U8", 1], ["b", "U8", 1]]]),
    "no layouts": replace(layouts__form=NONE, layouts__data_begin=NONE, layouts__dims=NONE),
    "a member of another sample": take([1, 0, 2, 3], "member.0.begin"),
    "members without end": replace(member__0__nbytes=np.full(COUNT, 1 << 63, U64)),
}


def longest_skeletons(arrays: Arrays) -> None:
    """Half of the shard for each sample."""
    begins = arrays["cache.0.skeleton_begin"].astype(np.int64)
    arrays["cache.0.skeleton_nbytes"] = np.full(len(begins), begins[-1] // 2, U64)


def overlapping_skeletons(arrays: Arrays) -> None:
    """From each skeleton to the end of the last one."""
    begins = arrays["cache.0.skeleton_begin"].astype(np.int64)
    arrays["cache.0.skeleton_nbytes"] = (begins[-1] + 100 - begins).astype(U64)


def many_layouts(arrays: Arrays) -> None:
    """Forms and layouts that no sample has."""
    forms, count = [[["x", "U8", 1], ["b", "BOOL", 1]]], 300_000
    rename(forms=forms + [[["x", "U8", 1]]] * 60_000, references=[["tensor:x", "tensor:b"]] + [["tensor:x"]] * 60_000)(
        arrays
    )
    for name in ("form", "data_begin", "dims"):
        arrays[f"layouts.{name}"] = np.tile(arrays[f"layouts.{name}"], count)


USES: list[Callable[[Any, int], Any]] = [
    lambda cache, i: tc.realize(cache[i]),
    lambda cache, i: tc.realize(cache[f"k{i}"]),
    lambda cache, i: cache.read_tensors([i], collate="list"),
    lambda cache, i: cache.read_batch([i, COUNT - 1])["i"].tolist(),
    lambda cache, i: [cache.read_members([i], name) for name in cache.members],
]


@pytest.mark.parametrize("io", ["auto", "pread"])
@pytest.mark.parametrize("what", LIES)
def test_a_forged_footer_serves_bytes_of_its_shard_at_most(tmp_path: Path, what: str, io: Any) -> None:
    """The author of a footer could as well forge the samples; so values may be wrong, but no read fails in another way."""
    path = write(tmp_path / "x.tar", text=True)
    forge(path, LIES[what])
    with contextlib.suppress(tc.TensorCacheError), tc.open(path, io=io) as cache:
        for use, i in itertools.product(USES, range(COUNT)):
            # KeyError, IndexError: the index has no such sample, or the sample no such tensor
            with contextlib.suppress(tc.TensorCacheError, KeyError, IndexError):
                use(cache, i)
    assert any(fault.kind == "index" for fault in tc.verify(path).faults)


def test_an_index_is_made_again_of_the_bytes(tmp_path: Path) -> None:
    path = write(tmp_path / "x.tar")
    forge(path, swap(*COLUMNS))
    assert not tc.verify(path).ok
    tc.repair(path, tmp_path / "out")
    with tc.open(tmp_path / "out") as cache:
        assert all(is_right(cache[i], i) for i in range(COUNT))


@pytest.mark.parametrize("lie", [longest_skeletons, overlapping_skeletons])
def test_skeletons_that_overlap(tmp_path: Path, lie: Any) -> None:
    """Each may be there, but all of them together would take the square of the shard."""
    path = tmp_path / "x.tar"
    with tc.ShardWriter(path, manifest=False, dali_index=False, fsync=False) as sink:
        for i in range(500):
            sink.write(f"k{i}", {"i": i})
    forge(path, lie)
    with little_memory(5_000_000), pytest.raises(tc.FormatError, match=r"x\.tar: .*(overlap|beyond)"):
        tc.open(path)


def test_forms_and_layouts_without_number(tmp_path: Path) -> None:
    """A pass over all layouts for each form took minutes for a few megabytes."""
    path = write(tmp_path / "x.tar")
    forge(path, many_layouts)
    with little_memory(1 << 30), tc.open(path) as cache:
        assert all(is_right(cache[i], i) for i in range(COUNT))


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs FIFOs")
@pytest.mark.parametrize("name", ["x.tar", "x.tar.index", "manifest.json"])
def test_what_is_no_file(tmp_path: Path, name: str) -> None:
    """Opening a FIFO waits until a writer opens it; /dev/zero has no end."""
    if name != "x.tar":
        write(tmp_path / "x.tar", footer=False)
    os.mkfifo(tmp_path / name)
    sources = [tmp_path] if name == "manifest.json" else [tmp_path, tmp_path / "x.tar"]
    for _ in range(2):
        for source in sources:
            with pytest.raises(tc.FormatError, match=f"{name}: expected a file, found a folder, pipe or device"):
                tc.open(source)
        os.remove(tmp_path / name)
        os.symlink("/dev/zero", tmp_path / name)
