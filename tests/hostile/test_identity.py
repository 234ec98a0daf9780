"""Shards that are replaced, written to, cut short or deleted under lazy tensors: an error, never foreign bytes or a signal."""

from __future__ import annotations

import itertools
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import wds_tensorcache as tc
from tests.children import run_in_child
from tests.reading.batches import write as write_samples


def write(path: Path, value: int) -> bytes:
    """Write samples of a small and a large tensor."""
    large = torch.full((100_000,), value, dtype=torch.uint8)
    samples = [{"small": large[:64], "large": large, "i": 1}] * 3
    write_samples(path, samples, overwrite=True, manifest=False, dali_index=False)
    os.utime(path, (1000, 1000))  # so that every later write changes it: time stamps count the system's ticks
    return path.read_bytes()


def _grow(path: Path) -> None:
    nbytes = path.stat().st_size
    os.truncate(path, 700)
    os.truncate(path, nbytes)


def _rewrite(path: Path) -> None:
    with path.open("r+b") as file:
        file.write(path.with_name("other.tar").read_bytes())


def _restore(path: Path) -> None:
    """Its bytes are the same again, but they were different for a while."""
    content = path.read_bytes()
    os.truncate(path, 1000)
    path.write_bytes(content)


CHANGES: dict[str, Callable[[Path], object]] = {
    "replaced": lambda path: os.replace(path.with_name("other.tar"), path),
    "deleted": Path.unlink,
    "rewritten": _rewrite,
    "written anew": lambda path: path.write_bytes(path.read_bytes()[:3000]),
    "cut": lambda path: os.truncate(path, 700),
    "grown again": _grow,
    "restored": _restore,
}


def assert_refused_or_old(use: Callable[[], Any], path: Path, may_be_old: bool) -> None:
    try:
        result = use()
    except (tc.TensorCacheError, FileNotFoundError) as exc:
        assert str(path) in str(exc)  # noqa: PT017
    else:
        assert may_be_old
        assert bool((result == 1).all())


def use_open_ones(path: Path, change: str, io: Any) -> None:
    may_be_old = change in ("replaced", "deleted")  # the file that is open is the one that was
    cache = tc.open(path, io=io, num_threads=2)
    batch, lazy, small = cache.read_batch([0, 1, 2]), cache[1]["large"], cache[1]["small"]
    view = lazy.load(copy=False) if may_be_old else None
    loaded = pickle.loads(pickle.dumps(lazy))
    loaded.load()
    CHANGES[change](path)
    for use in (
        lambda: cache.read_batch([0, 1])["small"],
        lambda: cache.read_tensors([2, 1])["large"],
        lambda: cache.read_batch([0, 1, 2], collate="pad")["large"],
        lambda: torch.tensor(batch["i"].tolist()),
        lambda: cache[1]["large"].load(),
        lazy.load,
        small.load,
        lambda: lazy[1:3],
        lambda: lazy.load(copy=False).clone(),
        lambda: tc.decode_sample(*tc.encode_sample(lazy)).load(),
        loaded.load,
        lambda: loaded[3:5],
        lambda: pickle.loads(pickle.dumps(lazy)).load(),
    ):
        assert_refused_or_old(use, path, may_be_old)
    assert view is None or bool((view == 1).all())


def use_a_pickled_one(path: Path, change: str, io: Any) -> None:
    pickled = pickle.dumps(tc.open(path, io=io)[1]["large"])
    CHANGES[change](path)
    lazy = pickle.loads(pickled)
    for use in (lazy.load, lambda: lazy[3:5], lambda: lazy.load(out=torch.empty(100_000, dtype=torch.uint8))):
        assert_refused_or_old(use, path, may_be_old=False)


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_shard_is_refused(tmp_path: Path, change: str) -> None:
    path = tmp_path / "x.tar"

    def work() -> None:
        for use, io in itertools.product((use_open_ones, use_a_pickled_one), ("auto", "pread")):
            content, other = write(path, 1), write(tmp_path / "other.tar", 2)
            assert len(content) == len(other)
            use(path, change, io)

    assert run_in_child(work, kill_after_s=60) == 0  # a signal ends the child, not the tests


def test_a_shard_that_is_replaced_under_a_cache(tmp_path: Path) -> None:
    for name in "ab":
        write_samples(tmp_path / f"{name}.tar", {name: torch.tensor(1)})
    cache = tc.open(tmp_path, max_open_files=1)
    lazy = cache[0]
    assert [int(sample) for sample in cache] == [1, 1]
    write_samples(tmp_path / "a.tar", {"a": torch.tensor(2)}, overwrite=True)
    for use in (lambda: cache[0], lazy.load, lambda: cache.read_batch([1, 0])):
        with pytest.raises(tc.FormatError, match=r"a\.tar: the shard was changed since it was opened; open it"):
            use()
    assert int(cache[1]) == 1
    cache.close()
