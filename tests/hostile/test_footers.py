"""Footers with a right digest that lie."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import wds_tensorcache as tc
from tests.hostile.forged import COUNT, is_right, write
from tests.hostile.pickles import little_memory
from tests.shards.footers import U8, Change, forge, rename, replace


def both(*changes: Change) -> Change:
    return lambda arrays: [change(arrays) for change in changes]


COLUMNS = [f"cache.0.{name}" for name in ("skeleton_begin", "skeleton_nbytes", "tensors_begin", "layout", "digest")]
LIES: dict[str, Change] = {
    "another sample's everything": lambda arrays: arrays.update({n: arrays[n][[0, 2, 1, 3]] for n in COLUMNS}),
    "other shapes of as many bytes": replace(layouts__dims=np.array([2, 6], U8)),
    "another dtype": rename(forms=[[["x", "U8", 1], ["b", "U8", 1]]]),
}


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


@pytest.mark.long
def test_forms_and_layouts_without_number(tmp_path: Path) -> None:
    """A pass over all layouts for each form took minutes for a few megabytes."""
    for num_forms in (6_000, 60_000):
        path = write(tmp_path / f"{num_forms}.tar")
        forms = [[["x", "U8", 1], ["b", "BOOL", 1]], *[[["x", "U8", 1]]] * num_forms]  # and layouts that no sample has
        texts = [[f"tensor:{name}" for name, *_ in form] for form in forms]

        def grow(arrays: Any, count: int = 5 * num_forms) -> None:
            names = [f"layouts.{name}" for name in ("form", "data_begin", "dims")]
            arrays.update({name: np.tile(arrays[name], count) for name in names})

        forge(path, both(rename(forms=forms, references=texts), grow))
        started = time.process_time()
        # memory is traced for the shorter one: it takes much time
        with little_memory(100_000_000) if num_forms == 6_000 else contextlib.nullcontext(), tc.open(path) as cache:
            assert all(is_right(cache[i], i) for i in range(COUNT))
        assert time.process_time() - started < 20
