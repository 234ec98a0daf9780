"""Footers with a right digest that lie, and index files that are none."""

from __future__ import annotations

import contextlib
import os
import struct
import time
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import wds_tensorcache as tc
from tests.hostile.forged import COUNT, is_right, write
from tests.shards.forged_index import Change, changed, columns, forge, swap, swap_keys, unchecked
from wds_tensorcache.codec.header import form_of
from wds_tensorcache.shards.footer import MAGIC, _digest
from wds_tensorcache.shards.index import MemberColumns, ShardIndex, narrow
from wds_tensorcache.shards.key_table import Keys
from wds_tensorcache.storage.files import ShardFile

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
    "in the first header": changed("tensors_begin", 1, 3),
    "overflowing shapes": layouts(dims=np.full(2, 1 << 61, np.uint64)),
    "shapes of 2^64 - 1": layouts(dims=np.full(2, (1 << 64) - 1, np.uint64)),
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


def uses(cache: Any) -> list[Callable[[int], Any]]:
    """Return what gives sample i, or its member, and says whether it is right."""

    def tensors(i: int) -> bool:
        read = cache.read_tensors([i], collate="list")
        return bool((read["x"][0] == i).all()) and read["x"][0].shape == (6,) and read["b"][0].dtype == torch.bool

    def batch(i: int) -> bool:
        read = cache.read_batch([i, COUNT - 1])
        return bool((read["x"][0] == i).all()) and read["i"][0] == i

    def member(i: int) -> bool:
        number = int(cache.keys()[i][1:])
        return all(cache.read_members([i], name) == [b"text %d" % number] for name in cache.members)

    return [lambda i: is_right(cache[i], i), tensors, batch, member, lambda i: is_right(cache[f"k{i}"], i)]


@pytest.mark.parametrize("io", ["auto", "pread"])
@pytest.mark.parametrize("what", LIES)
def test_a_forged_footer_serves_bytes_of_its_shard_at_most(tmp_path: Path, what: str, io: str) -> None:
    """The author of a footer could as well forge the samples; so values may be wrong, but no read fails in another way."""
    path = write(tmp_path / "x.tar", text=True)
    forge(path, LIES[what])
    with contextlib.suppress(tc.TensorCacheError), tc.open(path, io=io) as cache:
        for use in uses(cache):
            for i in range(COUNT):
                # KeyError, IndexError: the index has no such sample, or the sample no such tensor
                with contextlib.suppress(tc.TensorCacheError, KeyError, IndexError):
                    use(i)
    assert any(fault.kind == "index" for fault in tc.verify(path).faults)


def test_an_index_is_made_again_of_the_bytes(tmp_path: Path) -> None:
    path = write(tmp_path / "x.tar")
    forge(path, swap(*COLUMNS))
    assert not tc.verify(path).ok
    tc.repair(path, tmp_path / "out")
    with tc.open(tmp_path / "out") as cache:
        assert all(is_right(cache[i], i) for i in range(COUNT))


def test_skeletons_as_long_as_the_shard(tmp_path: Path) -> None:
    """Each may be there, but all of them together would take the square of the shard."""
    path = tmp_path / "x.tar"
    with tc.ShardWriter(path, manifest=False, dali_index=False, fsync=False) as sink:
        for i in range(500):
            sink.write(f"k{i}", {"i": i})
    forge(path, lambda index: columns(index, skeleton_nbytes=narrow([index.end // 2] * 500)))
    tracemalloc.start()
    with pytest.raises(tc.FormatError, match=r"x\.tar: .*(overlap|beyond)"), tc.open(path) as cache:
        cache.read_batch(range(100))
    assert tracemalloc.get_traced_memory()[1] < 5_000_000
    tracemalloc.stop()


def test_overlapping_skeletons(tmp_path: Path) -> None:
    path = tmp_path / "x.tar"
    with tc.ShardWriter(path, manifest=False, dali_index=False, fsync=False) as sink:
        for i in range(100):
            sink.write(f"k{i}", {"i": i})

    def longer(index: ShardIndex) -> ShardIndex:
        (cache,) = index.caches.values()
        nbytes = index.end - cache.skeleton_begin.astype(np.int64)  # each to the end of the archive
        return columns(index, skeleton_nbytes=narrow(nbytes))

    forge(path, longer)
    with pytest.raises(tc.FormatError, match=r"x\.tar: the index has members that overlap"):
        tc.open(path)


def test_forms_and_layouts_without_number(tmp_path: Path) -> None:
    """A pass over all layouts for each form took minutes for a few megabytes."""
    path = write(tmp_path / "x.tar")

    def many(index: ShardIndex) -> ShardIndex:
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

    forge(path, many)
    started = time.process_time()
    with tc.open(path) as cache:
        assert all(is_right(cache[i], i) for i in range(COUNT))
    assert time.process_time() - started < 3


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


def test_a_folder_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(tc.FormatError, match="expected a file"):
        ShardFile(str(tmp_path))


@pytest.mark.parametrize("spelled", ["-0", "0.0", "0e0", "00", "false", "null"])
def test_how_an_index_spells_numbers(tmp_path: Path, spelled: str) -> None:
    """As in the header of a member: what one reader takes for 0, another may not."""
    path = tmp_path / "x.tar"
    with tc.ShardWriter(path, manifest=False, dali_index=False) as sink:
        sink.write("k", {"éé": torch.tensor(1, dtype=torch.uint8)})
    shard = path.read_bytes()
    written = rb'["\u00e9\u00e9","U8",0]'
    for number, is_read in (("0", True), (spelled, False)):
        changed = f'["éé","U8",{number}'.encode().ljust(len(written) - 1) + b"]"
        numbers = struct.unpack("<QQQ", shard[-40:-16])
        body = shard[-40 - numbers[0] : -40].replace(written, changed)
        assert changed in body
        trailer = struct.pack("<QQQQ8s", *numbers, _digest(body, numbers), MAGIC)
        path.write_bytes(shard[: -40 - numbers[0]] + body + trailer)
        if is_read:
            assert tc.open(path)["k"]["éé"].load() == 1
        else:
            with pytest.raises(tc.FormatError, match="the index is incomplete"):
                tc.open(path)
