"""Footers with a right digest that lie, and index files that are none."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import wds_tensorcache as tc
from tests.hostile.forged import COUNT, is_right, write
from tests.hostile.lies import COLUMNS, LIES, longest_skeletons, many_layouts, overlapping_skeletons, swap
from tests.hostile.pickles import little_memory
from tests.shards.footers import body_of, forge, put_footer

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


@pytest.mark.parametrize("spelled", ["-0", "0.0", "0e0", "00", "false", "null"])
def test_how_an_index_spells_numbers(tmp_path: Path, spelled: str) -> None:
    """As in the header of a member: what one reader takes for 0, another may not."""
    path = tmp_path / "x.tar"
    with tc.ShardWriter(path, manifest=False, dali_index=False) as sink:
        sink.write("k", {"éé": torch.tensor(1, dtype=torch.uint8)})
    body = body_of(path)
    written = rb'["\u00e9\u00e9","U8",0]'
    assert written in body
    for number, is_read in (("0", True), (spelled, False)):
        changed = f'["éé","U8",{number}'.encode().ljust(len(written) - 1) + b"]"
        put_footer(path, body.replace(written, changed))
        if is_read:
            assert tc.open(path)["k"]["éé"].load() == 1
        else:
            with pytest.raises(tc.FormatError, match="the index is incomplete"):
                tc.open(path)
