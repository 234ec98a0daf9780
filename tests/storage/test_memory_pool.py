"""Arenas come back when the last tensor over them is gone, and not before."""

from __future__ import annotations

import gc
import os
import random
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import wds_tensorcache as tc
from tests.children import run_in_child
from tests.reading.batches import folder_of, write
from tests.same import tensor_bytes

MIB = 1 << 20


@pytest.fixture
def without_gc() -> Iterator[None]:
    """Reference counts alone must bring arenas back."""
    gc.disable()
    yield
    gc.enable()


def sample(i: int) -> Any:
    """A sample with tensors of 80 and 120 KB, too large for separate memory, and a small one."""
    x, y = torch.full((20_000,), i, dtype=torch.int32), np.full((3, 10_000), i, np.float32)
    return {"x": x, "y": y, "small": torch.full((4,), i)}


shards = folder_of([sample(i) for i in range(40)], max_samples=20)


@pytest.fixture
def cache(shards: str) -> Iterator[Any]:
    with tc.open(shards, pool_nbytes=16 * MIB, num_threads=2) as opened:
        yield opened


# Parts of a batch or a tensor that a caller holds. Each keeps memory of an arena, and returns its content.
HELD: list[Callable[[Any], Any]] = [
    lambda t: t,
    lambda t: t[1:],
    lambda t: t.reshape(-1)[5:7],
    lambda t: t.numpy()[1:],
    lambda t: memoryview(t.numpy()),
    lambda t: torch.from_numpy(t.numpy()[1:]),
    lambda t: t.untyped_storage(),
    lambda t: torch.utils.dlpack.from_dlpack(torch.utils.dlpack.to_dlpack(t)),
]


def contents(held: Any) -> bytes:
    if isinstance(held, torch.UntypedStorage):
        held = torch.empty(0, dtype=torch.uint8).set_(held)
    return tensor_bytes(held) if isinstance(held, torch.Tensor) else held.tobytes()


# ways to take memory, each with a sample's number
TAKE: dict[str, Callable[[Any, int], torch.Tensor]] = {
    "batch": lambda cache, i: cache.read_batch([i, (i + 1) % 40, i])["x"],
    "row": lambda cache, i: cache.read_batch([1, i, 3], collate="list")["x"][1],
    "padded": lambda cache, i: cache.read_batch([i, 2, 3], collate="pad")["x"],
    "array of a batch": lambda cache, i: torch.from_numpy(cache.read_batch([1, i, 3])["y"]),
    "load": lambda cache, i: cache[i]["x"].load(),
    "array": lambda cache, i: torch.from_numpy(cache[i]["y"].load()),
    "part": lambda cache, i: cache[i]["x"][:19_000],
}


def test_no_memory_is_reused_while_it_is_held(cache: Any, without_gc: None) -> None:
    """Threads take, hold and drop; what is held keeps its contents."""
    wrong: list[int] = []

    def work(seed: int) -> None:
        rng = random.Random(seed)
        held: list[tuple[Any, bytes]] = []
        for _ in range(120):
            taken = rng.choice(HELD)(TAKE[rng.choice(list(TAKE))](cache, rng.randrange(40)))
            held.append((taken, contents(taken)))
            del taken
            if len(held) > rng.randrange(1, 12):
                kept, expected = held.pop(rng.randrange(len(held)))
                if contents(kept) != expected:
                    wrong.append(seed)
                if isinstance(kept, torch.Tensor) and not kept.is_inference() and rng.random() < 0.5:
                    kept.zero_()  # the caller's memory alone
                del kept
        wrong.extend(seed for kept, expected in held if contents(kept) != expected)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.parametrize("number", range(len(HELD)))
@pytest.mark.parametrize("how", TAKE)
def test_it_comes_back_when_the_last_holder_goes(cache: Any, without_gc: None, how: str, number: int) -> None:
    take = partial(TAKE[how], cache)
    taken = take(1)
    address = taken.data_ptr()
    held = HELD[number](taken)
    del taken
    expected = contents(held)
    others = [take(1) for _ in range(3)]
    assert address not in {other.data_ptr() for other in others}
    for other in others:
        other.fill_(99)
    assert contents(held) == expected
    del other, others, held
    assert take(1).data_ptr() == address  # the memory that came back last is taken first


@pytest.mark.parametrize("num_batches", [1, 3])
def test_idle_memory_is_bounded(shards: str, num_batches: int) -> None:
    """Whether batches of one size exceed the limit, or those of several sizes."""
    with tc.open(shards, pool_nbytes=16 * MIB) as opened:
        indices = [list(range(40)) * (16 - number) for number in range(num_batches)]  # up to 128 MB each
        opened.read_batch(indices[0])
        before = resident_nbytes()
        held = [opened.read_batch(part) for part in indices]
        assert resident_nbytes() - before > 100 * MIB
        del held
        opened.read_batch([1])
        assert resident_nbytes() - before < 40 * MIB


def resident_nbytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_a_forked_child_has_its_own(cache: Any) -> None:
    batch = cache.read_batch([1, 2])["x"]
    cache.read_batch([5, 6])

    def work() -> None:
        batch.fill_(77)
        others = [cache.read_batch([3, 4])["x"] for _ in range(3)]
        assert all(other[:, 5].tolist() == [3, 4] for other in others)
        assert bool((batch == 77).all())

    assert run_in_child(work) == 0
    assert batch[:, 5].tolist() == [1, 2]


def test_arenas_come_back_after_batch_errors(tmp_path: Path, without_gc: None) -> None:
    with tc.open(write(tmp_path, [{"x": torch.zeros(1 + i), "i": i} for i in range(3)])) as cache:

        def address() -> int:
            return cache.read_batch(range(2, 3))["x"].data_ptr()

        before = address()
        for collate, error in (("stack", tc.BatchError), (lambda samples: 1 / 0, ZeroDivisionError)):
            with pytest.raises(error):
                cache.read_batch(range(3), collate=collate)
            assert address() == before
        batch = cache.read_batch(range(3), collate="list")
        leaves = batch["i"]
        del batch
        assert leaves == [0, 1, 2]
        assert address() == before  # small values do not keep the tensors
