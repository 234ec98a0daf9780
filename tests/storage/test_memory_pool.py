"""Arenas come back when the last tensor over them is gone, and not before."""

from __future__ import annotations

import gc
import os
import random
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import wds_tensorcache as tc
from tests.same import tensor_bytes
from wds_tensorcache.storage.memory_pool import Pool

MIB = 1 << 20


@pytest.fixture
def without_gc() -> Iterator[None]:
    """Reference counts alone must bring arenas back."""
    gc.disable()
    yield
    gc.enable()


def tensor_over(pool: Pool, nbytes: int) -> torch.Tensor:
    return torch.frombuffer(pool.lease(nbytes), dtype=torch.uint8)


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Samples of 80 and 120 KB, too large for separate memory, and a small one."""
    folder = tmp_path_factory.mktemp("arena")
    with tc.ShardWriter(folder / "%d.tar", max_samples=20, fsync=False) as sink:
        for i in range(40):
            sink.write(
                str(i),
                {
                    "x": torch.full((20_000,), i, dtype=torch.int32),
                    "y": np.full((3, 10_000), i, np.float32),
                    "small": torch.full((4,), i),
                },
            )
    return folder


@pytest.fixture
def cache(shards: Path) -> Iterator[Any]:
    with tc.open(shards, pool_nbytes=16 * MIB, num_threads=2) as opened:
        yield opened


# Parts of a batch or a tensor that a caller holds. Each keeps memory of an arena, and returns its content.
HELD: list[Callable[[Any], Any]] = [
    lambda t: t,
    lambda t: t[1:],
    lambda t: t[0],
    lambda t: t.view(torch.uint8),
    lambda t: t.reshape(-1)[5:7],
    lambda t: t.detach().unsqueeze(0),
    lambda t: t.numpy(),
    lambda t: t.numpy()[1:],
    lambda t: t[1:].numpy().reshape(-1)[3:],
    lambda t: memoryview(t.numpy()),
    lambda t: torch.from_numpy(t.numpy()[1:]),
    lambda t: list(t.unbind())[-1],
    lambda t: t.untyped_storage(),
    lambda t: torch.utils.dlpack.from_dlpack(torch.utils.dlpack.to_dlpack(t)),
    lambda t: torch.nn.Parameter(t, requires_grad=False),
]


def contents(held: Any) -> bytes:
    if isinstance(held, torch.UntypedStorage):
        held = torch.empty(0, dtype=torch.uint8).set_(held)
    return tensor_bytes(held) if isinstance(held, torch.Tensor) else held.tobytes()


def sources(cache: Any, rng: random.Random) -> torch.Tensor:
    i = rng.randrange(40)
    how = rng.randrange(5)
    if how == 0:
        batch = cache.read_batch([i, (i + 1) % 40, i])
        return batch["x"] if rng.random() < 0.5 else torch.from_numpy(batch["y"])
    if how == 1:
        lists = cache.read_batch([i, 3], collate="list")
        return lists["x"][0]
    if how == 2:
        return cache[i]["x"].load()
    if how == 3:
        return torch.from_numpy(cache[i]["y"].load())
    return cache[i]["x"][: rng.randrange(19_000, 20_000)]


def test_no_memory_is_reused_while_it_is_held(cache: Any, without_gc: None) -> None:
    """Threads take, hold and drop; what is held keeps its contents."""
    wrong: list[str] = []

    def work(seed: int) -> None:
        rng = random.Random(seed)
        held: list[tuple[Any, bytes]] = []
        for _ in range(120):
            taken = rng.choice(HELD)(sources(cache, rng))
            held.append((taken, contents(taken)))
            del taken
            if len(held) > rng.randrange(1, 12):
                kept, expected = held.pop(rng.randrange(len(held)))
                if contents(kept) != expected:
                    wrong.append(f"seed {seed}")
                if isinstance(kept, torch.Tensor) and not kept.is_inference() and rng.random() < 0.5:
                    kept.zero_()  # the caller's memory alone
                del kept
        wrong.extend(f"seed {seed}" for kept, expected in held if contents(kept) != expected)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert cache._store.pool.num_leases == 0
    assert 0 < cache._store.pool.idle_nbytes <= 16 * MIB + 4 * MIB  # four threads may bring back one each at once


@pytest.mark.parametrize("number", range(len(HELD)))
@pytest.mark.parametrize("how", ["batch", "load", "array", "part"])
def test_it_comes_back_when_the_last_holder_goes(cache: Any, without_gc: None, how: str, number: int) -> None:
    pool = cache._store.pool
    take: dict[str, Callable[[], Any]] = {
        "batch": lambda: cache.read_batch([1, 2, 3])["x"],
        "load": lambda: cache[1]["x"].load(),
        "array": lambda: torch.from_numpy(cache[1]["y"].load()),
        "part": lambda: cache[1]["x"][:19_000],
    }
    take[how]()
    assert pool.num_leases == 0
    held = HELD[number](take[how]())
    expected = contents(held)
    assert pool.num_leases == 1
    others = [take[how]() for _ in range(3)]
    for other in others:
        other.fill_(99)
    assert contents(held) == expected
    del other, others
    assert pool.num_leases == 1
    idle = pool.idle_nbytes
    del held
    assert (pool.num_leases, pool.idle_nbytes > idle) == (0, True)


def test_gradients_hold_it(cache: Any, without_gc: None) -> None:
    pool = cache._store.pool
    weight = torch.ones(20_000, requires_grad=True)
    loss = (cache.read_batch([4, 5])["x"].float() * weight).sum() + (
        cache[6]["x"].load().view(torch.float32) * weight
    ).sum()
    assert pool.num_leases >= 1
    cache.read_batch([7, 8])["x"].fill_(1)
    loss.backward()
    assert weight.grad is not None
    assert weight.grad[3] == 9 + torch.tensor(6, dtype=torch.int32).view(torch.float32)
    del loss
    assert pool.num_leases == 0


# --- the pool ---


def test_the_same_memory_again(without_gc: None) -> None:
    pool = Pool()
    first = tensor_over(pool, 100_000)
    address = first.data_ptr()
    assert address % os.sysconf("SC_PAGE_SIZE") == 0
    second = tensor_over(pool, 100_000)
    assert second.data_ptr() != address
    del first
    assert tensor_over(pool, 99_000).data_ptr() == address


def test_a_view_of_the_lease_holds_it(without_gc: None) -> None:
    pool = Pool()
    view = pool.lease(100_000).data
    assert pool.num_leases == 1
    array = np.frombuffer(view, np.uint8)[5:]
    del view
    assert pool.num_leases == 1
    del array
    assert pool.num_leases == 0


@pytest.mark.parametrize("nbytes", [0, 1, 65_536, 65_537, 1_000_000, 8 * MIB + 1, 33 * MIB])
def test_sizes(nbytes: int) -> None:
    pool = Pool()
    array = pool.lease(nbytes)
    assert (array.nbytes, array.dtype) == (nbytes, np.uint8)
    array[:] = 7
    del array
    assert nbytes <= pool.idle_nbytes <= 1.13 * nbytes + 65_536


def test_idle_memory_is_bounded() -> None:
    pool = Pool(4 * MIB)
    held = [pool.lease(MIB) for _ in range(10)]
    assert (pool.num_leases, pool.idle_nbytes) == (10, 0)
    while held:
        held.pop()
        assert pool.idle_nbytes <= 4 * MIB
    assert pool.idle_nbytes == 4 * MIB
    del held
    pool.lease(3 * MIB)  # what was used last stays
    assert (pool.idle_nbytes, pool._idle[3 * MIB][0].closed) == (4 * MIB, False)
    pool.lease(5 * MIB)
    assert pool.idle_nbytes == 4 * MIB
    assert Pool(0).lease(5).nbytes == 5


def test_close(without_gc: None) -> None:
    pool = Pool()
    held = tensor_over(pool, MIB).fill_(3)
    tensor_over(pool, MIB)
    assert pool.idle_nbytes == MIB
    pool.close()
    assert pool.idle_nbytes == 0
    assert bool((held == 3).all())
    del held
    assert (pool.num_leases, pool.idle_nbytes) == (0, 0)
    assert tensor_over(pool, MIB).numel() == MIB


def test_a_pool_may_go_before_its_tensors() -> None:
    pool = Pool()
    held = tensor_over(pool, MIB).fill_(3)
    del pool
    gc.collect()
    again = tensor_over(Pool(), MIB).fill_(4)
    assert bool((held == 3).all())
    assert bool((again == 4).all())


def test_a_closed_cache_and_its_tensors(cache: Any) -> None:
    batch = cache.read_batch([1, 2])
    loaded = cache[3]["x"].load()
    cache.close()
    assert (int(batch["x"][1, 19_999]), int(loaded[19_999])) == (2, 3)
    del batch, loaded
    assert cache._store.pool.idle_nbytes == 0


def test_leases_that_die_in_the_collector() -> None:
    """A cycle holds them, so that the collector drops them, in whatever thread and moment it runs."""
    pool = Pool()
    for i in range(50):
        cycle: list[Any] = [tensor_over(pool, 70_000).fill_(i)]
        cycle.append(cycle)
        del cycle
        if i % 10 == 9:
            gc.collect()  # arrays may die before it
            assert pool.num_leases == 0


def test_a_forked_child_has_its_own(cache: Any) -> None:
    pool = cache._store.pool
    batch = cache.read_batch([1, 2])["x"]
    cache.read_batch([5, 6])
    idle = pool.idle_nbytes
    child = os.fork()
    if not child:
        status = 1
        try:
            torch.set_num_threads(1)  # as in DataLoader's workers: OpenMP's threads do not survive a fork
            batch.fill_(77)
            mine = [cache.read_batch([3, 4])["x"] for _ in range(3)]
            good = all(m[:, 5].tolist() == [3, 4] for m in mine) and bool((batch == 77).all())
            status = 0 if good else 2
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0
    assert batch[:, 5].tolist() == [1, 2]
    assert pool.idle_nbytes == idle
