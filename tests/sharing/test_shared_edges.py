"""Interrupts, closing, forks, wrappers and sizes at which SharedDataset has failed before."""

from __future__ import annotations

import mmap
import os
import pickle
import random
import re
import signal
import socket
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, DataLoader, Subset

import wds_tensorcache as tc
from tests.children import finish, start, wait_until
from tests.same import assert_same
from tests.sharing.datasets import wait_until_empty

LARGE = 20_000  # elements of 4 bytes: more than 64 KiB


class Numbers:
    """Each sample is a tensor of its index."""

    def __init__(self, count: int, numel: int = 3) -> None:
        self.count, self.numel = count, numel

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"x": torch.full((self.numel,), index, dtype=torch.int32)}


def mapped_segments(directory: Path) -> int:
    return sum(
        f"{directory}/" in line and "segment-" in line for line in Path("/proc/self/maps").read_text().splitlines()
    )


def on_disk(folder: Path) -> int:
    """Return the bytes of memory that segments take, without the parts of blocks that are larger than a page."""
    ratio = max(1, os.statvfs(folder).f_frsize // mmap.PAGESIZE)
    return sum(512 * path.stat().st_blocks for path in folder.glob("segment-*")) // ratio


@pytest.mark.parametrize("seed", range(6))
def test_the_limit_holds(directory: Path, seed: int) -> None:
    """Also with a limit that is an integer of numpy, and while a process without one adds more."""
    chance = random.Random(seed)
    samples = [{"x": b"." * chance.randrange(150), "i": torch.tensor(i)} for i in range(300)]
    samples += [{"x": torch.full((LARGE,), i)} for i in range(300, 304)]
    # Segments of at most four pages: a file system such as ext4 lists more runs of a file's pages in a page of its own.
    limit = np.uint64(200_000 if seed % 2 else 30_000)
    folder = directory / f"wds_tensorcache-{os.geteuid()}" / "limit"
    with (
        tc.SharedDataset(samples, "limit", directory=directory, max_nbytes=limit) as shared,  # type: ignore[arg-type]
        tc.SharedDataset(samples, "limit", directory=directory) as unlimited,
    ):
        for _ in range(2):
            for index in chance.sample(range(304), 304):
                assert_same(samples[index], shared[index])
                assert on_disk(folder) <= shared.stats().nbytes <= limit
        stats = shared.stats()
        assert int(limit) - 100_000 < stats.nbytes
        assert 0 < stats.num_samples < 304
        assert stats.passed_through == 2 * (304 - stats.num_samples)
        assert stats.misses == stats.passed_through + stats.num_samples
        assert shared.read_batch(range(300))["i"].tolist() == list(range(300))
        list(unlimited)
        assert unlimited.stats().num_samples == 304


class Waiting(Numbers):
    """Numbers whose loads wait for a signal of the test."""

    def __init__(self, count: int) -> None:
        super().__init__(count)
        self.is_loading, self.may_finish = threading.Event(), threading.Event()

    def __getitem__(self, index: int) -> dict[str, Any]:
        self.is_loading.set()
        assert self.may_finish.wait(20)
        return super().__getitem__(index)


def test_closing_while_a_thread_loads(directory: Path) -> None:
    dataset = Waiting(3)
    shared = tc.SharedDataset(dataset, "closed", directory=directory)
    with ThreadPoolExecutor(1) as pool:
        sample = pool.submit(shared.__getitem__, 1)
        assert dataset.is_loading.wait(20)
        shared.close()
        with pytest.raises(ValueError, match="closed"):
            shared[2]
        dataset.may_finish.set()
        assert sample.result()["x"].tolist() == [1, 1, 1]
    del sample
    assert mapped_segments(directory) == 0
    wait_until_empty(directory)
    with tc.SharedDataset(Numbers(3), "closed", directory=directory) as again:
        assert again[2]["x"].tolist() == [2, 2, 2]


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")  # fork, from Python 3.12 on
def test_a_child_that_was_forked_while_a_thread_loads_frees_the_memory(directory: Path) -> None:
    dataset = Waiting(3)
    shared = tc.SharedDataset(dataset, "forked", directory=directory)
    thread = threading.Thread(target=lambda: shared[1])
    thread.start()
    assert dataset.is_loading.wait(20)

    def work() -> None:
        dataset.may_finish.set()
        assert shared[0]["x"].tolist() == [0, 0, 0]
        shared.close()
        assert os.getpid() not in tc.shared_list(directory)[0].holders

    child = start(work)
    dataset.may_finish.set()
    thread.join()
    assert finish([child]) == [0]
    shared.close()
    wait_until_empty(directory)


def test_closing_gives_up_memory_except_under_tensors_in_use(directory: Path) -> None:
    with tc.SharedDataset(Numbers(4, LARGE), "freed", directory=directory) as shared:
        for index in range(4):
            shared[index]
        lazy = shared[2]["x"]
        assert mapped_segments(directory) == 1
    assert mapped_segments(directory) == 1
    assert lazy.load()[-1] == 2
    del lazy
    assert mapped_segments(directory) == 0


def test_threads_of_a_forked_child(directory: Path) -> None:
    def work() -> None:
        with ThreadPoolExecutor(8) as pool:
            samples = list(pool.map(shared.__getitem__, range(8)))
            assert [sample["x"].tolist() for sample in samples] == [[i] * 3 for i in range(8)]

    with tc.SharedDataset(Numbers(8), "forked", directory=directory) as shared:
        shared[0]
        assert finish([start(work) for _ in range(40)]) == [0] * 40


def test_a_forked_child_is_a_holder_before_its_first_access(directory: Path) -> None:
    gate, opened = os.pipe()

    def wait() -> None:
        os.close(opened)
        os.read(gate, 1)

    shared = tc.SharedDataset(Numbers(3), "held", directory=directory)
    child = start(wait)
    try:
        shared.close()
        wait_until(lambda: [info.holders for info in tc.shared_list(directory)] == [(child,)], timeout_s=10)
        with pytest.raises(BlockingIOError, match=rf"processes \[{child}\]"):
            tc.shared_clear("held", directory)
    finally:
        os.close(opened)
        os.close(gate)
        assert finish([child]) == [0]


def test_a_folder_is_freed_after_a_kill_during_its_removal(directory: Path) -> None:
    ready, told = os.pipe()

    def work() -> None:
        shared = tc.SharedDataset(Numbers(3), "removing", directory=directory)
        shared[0]
        [folder] = directory.glob("*/*")
        (folder / "head.json").unlink()
        (folder / "holders").unlink()
        os.write(told, b"1")
        signal.pause()

    child = start(work)
    os.read(ready, 1)
    os.kill(child, signal.SIGKILL)
    assert finish([child]) == [-signal.SIGKILL]
    wait_until_empty(directory)
    os.close(ready)
    os.close(told)


def test_clearing_removes_links_and_sockets_but_no_folders(directory: Path, tmp_path: Path) -> None:
    """A link in the place of shared memory is neither opened nor cleared."""
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "file").write_text("kept")
    shared = tc.SharedDataset(Numbers(3), "odd", directory=directory, persistent=True)
    shared[0]
    [folder] = directory.glob("*/odd")
    (folder / "link").symlink_to(outside)
    (folder / "file").symlink_to(outside / "file")
    with socket.socket(socket.AF_UNIX) as listener:
        fd = os.open(folder, os.O_RDONLY)
        listener.bind(f"/proc/self/fd/{fd}/socket")  # the path of a socket has at most 107 bytes
        os.close(fd)
    (folder / "inner").mkdir()
    (folder / "inner" / "file").write_text("kept")
    shared.close()
    names = sorted(os.listdir(folder))
    with pytest.raises(IsADirectoryError, match=f"{folder}/inner is a folder that another program made"):
        tc.shared_clear("odd", directory)
    assert sorted(os.listdir(folder)) == names
    with tc.SharedDataset(Numbers(3), "odd", directory=directory) as shared:
        assert shared.stats().num_samples == 1
    (folder / "inner").rename(tmp_path / "inner")
    tc.shared_clear("odd", directory)
    assert not folder.exists()
    folder.symlink_to(outside)
    with pytest.raises(FileNotFoundError, match="no shared memory 'odd'"):
        tc.shared_clear("odd", directory)
    with pytest.raises(PermissionError, match="odd has owner"):
        tc.SharedDataset(Numbers(3), "odd", directory=directory)
    assert [(file.name, file.read_text()) for file in outside.iterdir()] == [("file", "kept")]


@pytest.mark.long
def test_a_batch_of_more_than_2_to_the_19_samples(directory: Path) -> None:
    samples = [{"x": torch.zeros(LARGE), "y": torch.tensor([i])} for i in range(3)]
    indices = np.arange((1 << 19) + 4) % 3
    with tc.SharedDataset(samples, "many", directory=directory) as shared:
        assert torch.equal(shared.select("y").read_batch(indices)["y"][:, 0], torch.from_numpy(indices))


class Digested(Numbers):
    """A dataset with `_fingerprint`, like those of Hugging Face."""

    def __init__(self, digest: str) -> None:
        super().__init__(4)
        self._fingerprint = digest


def wrapped(*parts: Sequence[int]) -> list[Any]:
    return [Subset(Numbers(8), part) for part in parts]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        tuple(wrapped([0, 1, 2], [0, 1, 3])),
        tuple(wrapped(torch.tensor([0, 1]), torch.tensor([0, 2]))),  # type: ignore[arg-type]
        (ConcatDataset(wrapped([0], [1, 2])), ConcatDataset(wrapped([0], [1, 3]))),
        (Subset(Numbers(4), [0]), Subset(Numbers(5), [0])),  # type: ignore[arg-type]
        (Digested("a"), Digested("b")),
    ],
)
def test_datasets_with_other_fingerprints_are_refused(directory: Path, one: Any, other: Any) -> None:
    with tc.SharedDataset(one, "wrapped", directory=directory) as shared:
        shared[0]
        with pytest.raises(
            tc.StaleCacheError, match=f"holders: .*{os.getpid()}.*tc.shared_clear.*{re.escape(str(directory))}"
        ):
            tc.SharedDataset(other, "wrapped", directory=directory)
        pickle.loads(pickle.dumps(shared)).close()
    with tc.SharedDataset(other, "wrapped", directory=directory) as shared:
        assert_same(other[0], shared[0])


def test_views_of_a_cache_have_other_fingerprints(directory: Path, tmp_path: Path) -> None:
    with tc.ShardWriter(str(tmp_path / "cache")) as writer:
        for i in range(8):
            writer.write(f"{i}", {"x": i})
    cache = tc.open(tmp_path / "cache")
    with tc.SharedDataset(cache[::2], "part", directory=directory) as shared:
        for other in (cache[1::2], cache[::2][::-1]):
            with pytest.raises(tc.StaleCacheError, match="part holds samples of another dataset"):
                tc.SharedDataset(other, "part", directory=directory)
        with tc.SharedDataset(tc.open(tmp_path / "cache")[::2], "part", directory=directory) as equal:
            assert equal[3] == shared[3] == {"x": 6}


class OpensLater(Numbers):
    """A dataset that opens its file at the first access, in an attribute that wrappers have, too."""

    dataset: Any = None
    indices: Any = None

    def __getitem__(self, index: int) -> dict[str, Any]:
        self.dataset, self.indices = [1, 2, 3], [index]
        return super().__getitem__(index)


class Sub(tc.SharedDataset):
    extra = 0


def test_copies_share_the_memory_although_the_dataset_has_changed(directory: Path) -> None:
    dataset = Subset(OpensLater(8), list(range(8)))  # type: ignore[arg-type]
    with Sub(dataset, "later", directory=directory) as shared:
        shared.extra = 7
        shared[0]
        with tc.SharedDataset(dataset, "later", directory=directory) as other:
            assert other[0]["x"].tolist() == [0, 0, 0]
        dataset.indices = list(reversed(range(8)))
        with pickle.loads(pickle.dumps(shared)) as copied:
            assert (type(copied), copied.extra, copied.stats().num_samples) == (Sub, 7, 1)
        with pytest.raises(tc.StaleCacheError, match="another dataset"):
            tc.SharedDataset(dataset, "later", directory=directory)


def test_samples_that_are_not_lazy(directory: Path) -> None:
    dataset = Numbers(6, LARGE)
    with tc.SharedDataset(dataset, "loaded", directory=directory, lazy=False) as shared:
        for view in (shared, shared[:], shared.select("x"), pickle.loads(pickle.dumps(shared))):
            for _ in range(2):
                found = [view[2], next(iter(view[[2]])), *view.__getitems__([2])]
                for sample in found:
                    assert type(sample["x"]) is torch.Tensor
                    assert_same(dataset[2], sample)
                    sample["x"][:] = -1
        assert torch.equal(next(iter(DataLoader(shared, 3)))["x"], shared.read_batch([0, 1, 2])["x"])  # type: ignore[arg-type]


def test_tensors_that_only_some_samples_have(directory: Path) -> None:
    samples = [{"x": torch.ones(2), "mask": torch.ones(1) if i % 2 else None} for i in range(4)]
    with tc.SharedDataset(samples, "optional", directory=directory) as shared:
        shared[0]
        view = shared.select("mask")
        assert [list(sample) for sample in (view[0], view[1])] == [["mask"], ["mask"]]
        assert view.select("*a*")[1]["mask"].shape == (1,)
        assert "mask" not in shared.select("x").select("mask")[1]
        list(shared)
        with pytest.raises(KeyError, match="unknown tensor 'musk'; there are 'mask', 'x'"):
            shared.select("musk")


def test_select_and_repr_load_nothing(directory: Path) -> None:
    samples = [{"x": torch.tensor(i), "last": torch.tensor(i) if i == 1099 else None} for i in range(1100)]
    with tc.SharedDataset(samples, "selected", directory=directory) as shared:
        assert shared.select("x").select("y")[3] == {"last": None}
        shared[:10].select("y")
        assert "1,100 samples, 1 of them in shared memory\n  x: int64 []\n" in repr(shared)
        assert (shared.stats().misses, shared.stats().hits) == (1, 0)
        list(shared)
        assert len(shared.schema) == 2
        assert list(shared.select("l*")[1099]) == ["last"]
        for view, pattern in ((shared, "y"), (shared.select("x"), "last"), (shared[[3, 3]], "last")):
            with pytest.raises(KeyError, match=f"unknown tensor '{pattern}'"):
                view.select(pattern)
        assert len(shared[:0].select("x")) == 0  # as for a view of a TensorCache
    assert "1,100 samples\n  tensors unknown: " in repr(shared)
