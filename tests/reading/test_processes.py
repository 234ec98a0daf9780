"""A TensorCache in other processes and in many threads at once."""

from __future__ import annotations

import contextlib
import itertools
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import wds_tensorcache as tc
from tests.children import run_in_child, switching_often
from tests.conftest import diffusion_sample
from tests.reading.batches import folder_of, write
from tests.same import assert_same

COUNT = 24
WRITTEN = [diffusion_sample(i) | {"big": torch.full((9000,), float(i))} for i in range(COUNT)]
folder = folder_of(WRITTEN, max_samples=7)


@pytest.fixture
def cache(folder: str) -> Iterator[tc.TensorCache]:
    with tc.open(folder, num_threads=2) as opened:
        yield opened


def check(cache: tc.TensorCache, numbers: list[int]) -> None:
    """Assert that `cache` has exactly the samples with these numbers, by every way to them."""
    assert len(cache) == len(numbers)
    assert list(cache.keys()) == [f"{i:03d}" for i in numbers]
    for i, number in enumerate(numbers):
        assert_same(WRITTEN[number], cache[i])
    assert_same(WRITTEN[numbers[-1]], cache.__getitems__([-1])[0])
    for rows in (range(len(numbers)), [*range(len(numbers))] * 4):  # the second in several threads
        batch = cache.read_batch(rows)
        latents = torch.stack([WRITTEN[numbers[i]]["latent"]["samples"] for i in rows])
        assert torch.equal(batch["latent"]["samples"], latents)
        assert batch["cond"][0][1]["prompt"] == [f"photo {numbers[i]}" for i in rows]


@pytest.mark.parametrize("protocol", [2, pickle.HIGHEST_PROTOCOL])
def test_pickle(cache: tc.TensorCache, protocol: int) -> None:
    for view, numbers in (
        (cache, list(range(COUNT))),
        (cache[20:2:-3], list(range(20, 2, -3))),
        (cache.filter(lambda entry: entry.key < "003"), [0, 1, 2]),
    ):
        with pickle.loads(pickle.dumps(view, protocol)) as copied:
            check(copied, numbers)
    with pickle.loads(pickle.dumps(cache.select(["latent.*"]), protocol)) as copied:
        assert list(copied.schema) == ["latent.samples"]
    check(cache, list(range(COUNT)))
    assert "017" in cache
    assert len(pickle.dumps(cache)) < 2000  # nor has it files after use


def write_numbers(folder: Path, begin: int, count: int, **options: Any) -> None:
    numbers = range(begin, begin + count)
    samples = [{"x": torch.full((30,), n), "large": torch.full((9000,), n), "i": n} for n in numbers]
    write(folder / "%d.tar", samples, max_samples=4, overwrite=True, **options)


VIEWS: dict[str, Callable[[tc.TensorCache], Any]] = {
    "cache": lambda cache: cache,
    "range": lambda cache: cache[2:10],
    "numbers": lambda cache: cache[[7, 1, 1, 5]],
    "tensors": lambda cache: cache.select(["x"]),
    "filtered": lambda cache: cache.filter(lambda entry: entry.key > "002"),
    "joined": lambda cache: tc.join({"a": cache, "b": cache}),
}
USES: dict[str, Callable[[Any], Any]] = {
    "sample": lambda view: view[0],
    "batch": lambda view: view.read_batch([1, 0]),
    "keys": lambda view: list(view.keys()),
    "key": lambda view: "007" in view,
    "schema": lambda view: view.schema,
    "members": lambda view: view.members,
    "samples": list,
}


@pytest.mark.parametrize("manifest", [True, False])
@pytest.mark.parametrize("count", [12, 9, 15])
@pytest.mark.parametrize("name", VIEWS)
def test_a_pickled_view_of_shards_that_are_written_again(tmp_path: Path, name: str, count: int, manifest: bool) -> None:
    write_numbers(tmp_path, 0, 12, manifest=manifest)
    with tc.open(tmp_path) as cache:
        view = VIEWS[name](cache)
        pickled = pickle.dumps(view)
        if not manifest:
            assert pickled.count(b"0.tar") == 1
    with pickle.loads(pickled) as copied:
        pickled_again = pickle.dumps(copied)  # nothing was read from this one
    write_numbers(tmp_path, 100, count, manifest=manifest)
    for content in (pickled, pickled_again):
        for use in USES.values():
            changed = pytest.raises(tc.FormatError, match=r"\d\.tar: the shard was changed since .*; open it again")
            with pickle.loads(content) as copied, changed:
                use(copied)
    with tc.open(tmp_path) as cache:
        assert int(cache[0]["x"][0]) == cache[0]["i"] == 100


@contextlib.contextmanager
def threads(work: Callable[[int], None], count: int = 1) -> Iterator[None]:
    """Call `work` again and again, each thread with its number, until the block ends."""
    stop = threading.Event()

    def work_again(number: int) -> None:
        while not stop.is_set():
            work(number)

    with ThreadPoolExecutor(count) as executor:
        futures = [executor.submit(work_again, number) for number in range(count)]
        try:
            yield
        finally:
            stop.set()
        for future in futures:
            future.result()


def test_fork_while_threads_read(cache: tc.TensorCache) -> None:
    seeded = [np.random.default_rng(seed) for seed in range(3)]

    def read(number: int) -> None:
        numbers = seeded[number].integers(0, COUNT, 4)
        assert cache.read_batch(numbers)["big"][:, 0].tolist() == numbers.tolist()
        assert cache[int(numbers[0])]["big"][5].item() == numbers[0]

    with threads(read, 3):
        for _ in range(3):
            assert run_in_child(lambda: check(cache, list(range(COUNT))), kill_after_s=20) == 0


def test_fork_while_a_thread_collects_names_of_joined_caches(tmp_path: Path) -> None:
    has_begun, may_end = threading.Event(), threading.Event()

    class Slow:
        def __len__(self) -> int:
            return 1

        def __getitem__(self, index: int) -> Any:
            has_begun.set()
            assert may_end.wait(60)
            return {"x": torch.zeros(1)}

    cache = tc.open(write(tmp_path / "a.tar", [{"x": torch.zeros(1)}]))

    def collate(source: Any) -> None:
        assert len(tc.Loader(tc.join({"a": source}), 1, collate={"a.x": "pad"})) == 1

    collate(cache)  # imports modules
    with (
        tc.SharedDataset(Slow(), f"fork-{tmp_path.name}", directory=tmp_path) as shared,
        ThreadPoolExecutor(1) as executor,
    ):
        future = executor.submit(collate, shared)
        has_begun.wait(60)
        status = run_in_child(lambda: collate(cache), kill_after_s=20)
        may_end.set()
        future.result()
    assert status == 0


def test_fork_while_a_thread_decodes_batches(tmp_path: Path) -> None:
    """The child uses the batch whose values the thread is decoding."""
    path = write(tmp_path / "a.tar", [{"x": torch.zeros(1), "text": f"text {i}"} for i in range(2000)])
    batches, has_begun = list[Any](), threading.Event()

    def decode(_: int) -> None:
        with tc.open(path) as cache:
            batches.append(cache.read_batch(range(2000)))
            has_begun.set()
            assert batches[-1]["text"][7] == "text 7"

    with threads(decode):
        has_begun.wait()
        for _ in range(2):
            assert run_in_child(lambda: batches[-1]["text"].tolist().index("text 9"), kill_after_s=60) == 0


def test_each_thread_has_its_own_collate(tmp_path: Path) -> None:
    """Samples lack tensors, which `collate` fixes; comparing arguments runs code of the caller, while another thread reads."""
    names = ["x", "y", "z"]
    samples = [{name: torch.zeros(2) for name in names[:count]} for count in (1, 2, 3)]

    class Ways(dict[str, Any]):
        def __ne__(self, other: object) -> bool:
            if threading.current_thread() is threading.main_thread():
                with ThreadPoolExecutor(1) as executor:
                    assert executor.submit(cache.read_batch, [0], collate={"z": "pad"}).result().keys() == {"x", "z"}
            return dict(self) != other

    with tc.open(write(tmp_path, samples)) as cache:
        for _ in range(2):
            assert cache.read_batch([0], collate=Ways(y="pad")).keys() == {"x", "y"}


def test_threads_open_shards_without_an_index(tmp_path: Path) -> None:
    """Two threads at a time scan samples that have the same names, but are tensors in one shard and arrays in the other."""
    values, options = (
        (torch.zeros(2), np.zeros(2, np.float32)),
        {"footer": False, "dali_index": False, "manifest": False},
    )
    for i in range(50):
        for kind, pair in (("t", values), ("a", values[::-1])):
            write(tmp_path / f"{i}{kind}.tar", [dict(zip((f"x{i}", "y"), pair, strict=True))] * 12, **options)

    def kinds(name: str) -> set[Any]:
        with tc.open(tmp_path / name) as cache:
            return {tensor.dtype for tensor in cache.schema.values()}

    expected = {torch.float32, np.dtype(np.float32)}
    with switching_often(), ThreadPoolExecutor(2) as executor:
        for i in range(50):
            assert list(executor.map(kinds, [f"{i}t.tar", f"{i}a.tar"])) == [expected, expected]


def test_closing_while_threads_read(folder: str) -> None:
    cache, started = tc.open(folder, num_threads=2), threading.Barrier(5)

    def read() -> None:
        for count in itertools.count():
            try:
                batch = cache.read_batch([count % COUNT, 3])
            except (ValueError, RuntimeError) as exc:
                assert "closed" in str(exc) or "shutdown" in str(exc)  # noqa: PT017
                return
            assert batch["big"][:, 0].tolist() == [count % COUNT, 3]
            if not count:
                started.wait(60)

    with ThreadPoolExecutor(4) as executor:
        futures = [executor.submit(read) for _ in range(4)]
        started.wait(60)
        cache.close()
        for future in futures:
            future.result()


@pytest.mark.long
def test_torch_keeps_its_number_of_threads_and_starts_none(tmp_path: Path) -> None:
    # not in the process whose threads are counted
    write(tmp_path / "a.tar", [{"x": torch.from_numpy(np.full(1 << 16, i, "f4")), "y": i} for i in range(64)])
    code = f"""
import os, threading, numpy, torch, wds_tensorcache as tc
torch.set_num_threads(5)
for num_threads in (1, 2):
    cache = tc.open("{tmp_path}/a.tar", num_threads=num_threads)
    before = len(os.listdir("/proc/self/task"))
    batch = cache.read_batch(range(63, -1, -1))
    print(len(os.listdir("/proc/self/task")) - before, torch.get_num_threads())
    later = threading.Thread(target=lambda: print(torch.get_num_threads()))
    later.start()
    later.join()
    assert (batch["x"].numpy() == numpy.arange(63, -1, -1)[:, None]).all()
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert ran.stdout.splitlines() == ["0 5", "5", "1 5", "5"]
