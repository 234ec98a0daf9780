"""Send real SIGINTs at random moments to loops over everything that has threads, and look at what comes out each time."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import random
import signal
import struct
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

import wds_tensorcache as tc

COUNT = 40
HANGS_AFTER_S = 20


def sample(i: int) -> dict[str, Any]:
    return {"x": torch.full((1000,), i)}


def write(folder: Path) -> None:
    with tc.ShardWriter(folder / "%d.tar", max_samples=9, fsync=False, overwrite=True) as sink:
        for i in range(COUNT):
            sink.write(f"{i:03d}", sample(i))


def over_loader(folder: Path) -> Callable[[], None]:
    """An epoch after another, to its end."""
    loader = tc.Loader(tc.open(folder), 4)

    def loop() -> None:
        before = loader.state_dict()["position"]
        for _, info in loader.with_info():
            after = loader.state_dict()["position"]
            assert (after["epoch"], after["used"]) != (before["epoch"], before["used"])
            assert info.step in (after["step"] - 1, after["step"])
            before = after

    return loop


def left_early(folder: Path) -> Callable[[], None]:
    """Iterations that stop in the middle and are collected."""
    loader = tc.Loader(tc.open(folder), 4, prefetch_batches=4)

    def loop() -> None:
        for number, _ in enumerate(loader):
            if number == 3:
                break

    return loop


def of_caller(folder: Path) -> Callable[[], None]:
    """Batches that the caller's thread reads."""
    loader = tc.Loader(tc.open(folder), 4, num_threads=0)

    def loop() -> None:
        for _ in loader:
            pass

    return loop


def opening(folder: Path) -> Callable[[], None]:
    """Caches that are opened, read from the file and from its map, and closed or collected."""
    with tc.ShardWriter(folder / "large.tar", fsync=False, overwrite=True) as sink:
        for i in range(20):
            sink.write(f"{i:03d}", {"x": torch.full((100_000,), i), "y": torch.full((10,), i)})
    held: list[Any] = []

    def loop() -> None:
        held.clear()  # of a loop that was interrupted
        with tc.open(folder / "large.tar", num_threads=1) as cache:
            held.append(cache.select(["y"]).read_batch(range(20)))
            held.append(cache[3]["x"].load())
        tc.open(folder / "large.tar", pool_nbytes=1, max_open_files=1)[4]["x"].load()

    return loop


def read_batch(folder: Path) -> Callable[[], None]:
    """Large batches, which several threads read."""
    with tc.ShardWriter(folder / "large" / "%d.tar", max_samples=2, fsync=False, overwrite=True) as sink:
        for i in range(6):
            sink.write(f"{i:03d}", {"x": torch.full((200_000,), i)})
    cache = tc.open(folder / "large", num_threads=3, io="pread")

    def loop() -> None:
        batch = cache.read_batch(range(6))
        assert batch["x"][:, 7].tolist() == list(range(6))

    return loop


def verify(folder: Path) -> Callable[[], None]:
    """Threads that check shards, and threads that read ahead for them."""

    def loop() -> None:
        assert tc.verify(folder, num_threads=3).ok
        assert tc.verify(folder / "0.tar", num_threads=3).ok

    return loop


def writing(folder: Path) -> Callable[[], None]:
    """A writer's thread."""

    def loop() -> None:
        write(folder / "written")

    return loop


def build(folder: Path) -> Callable[[], None]:
    """The thread that writes while a function computes."""

    def loop() -> None:
        out = folder / "built"
        tc.build(range(COUNT), lambda items: list(map(sample, items)), out, fingerprint={}, fsync=False, batch_size=4)
        with tc.open(out) as cache:
            assert sorted(cache.keys()) == [f"{i:09d}" for i in range(COUNT)]
            assert tc.realize(cache[f"{COUNT // 2:09d}"])["x"][0] == COUNT // 2
        for name in os.listdir(out):
            os.remove(out / name)

    return loop


def dali(folder: Path) -> Callable[[], None]:
    """Batches of a source for DALI's pipelines."""
    import dali_plugin

    source = dali_plugin.TensorCacheSource(tc.open(folder), batch_size=4, shuffle=True)

    def loop() -> None:
        for at in range(len(source)):
            source.batch(0, at)

    return loop


def sharing(folder: Path) -> Callable[[], None]:
    """Samples that are loaded into shared memory, evicted, and loaded again."""
    directory = folder / "shared"
    directory.mkdir()
    dataset = [sample(i) for i in range(COUNT)]
    shared = tc.SharedDataset(dataset, "read", directory=directory, max_nbytes=100_000, eviction="lru")

    def loop() -> None:
        for i in range(COUNT):
            assert int(shared[i]["x"][7]) == i
        assert shared.read_batch([5, 3, 5])["x"][:, 7].tolist() == [5, 3, 5]
        assert shared.stats().nbytes <= 100_000

    return loop


def opening_shared(folder: Path) -> Callable[[], None]:
    """Shared memory that is made, and freed by its last holder."""
    directory = folder / "shared"
    directory.mkdir()
    dataset = [sample(i) for i in range(COUNT)]

    def loop() -> None:
        with tc.SharedDataset(dataset, "opened", directory=directory) as shared:
            assert int(shared[3]["x"][7]) == 3

    return loop


LOOPS = {
    loop.__name__: loop
    for loop in (
        *(over_loader, left_early, of_caller, opening, read_batch, verify, writing, build, dali),
        *(sharing, opening_shared),
    )
}


def _sender(parent: int, orders: int) -> None:
    """Send the signal after each time that was ordered; runs in its own process."""
    while order := os.read(orders, 8):
        time.sleep(*struct.unpack("d", order))
        os.kill(parent, signal.SIGINT)
    os._exit(0)


def _threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("tensorcache-")]


def interrupt(name: str, folder: Path, rounds: int, seed: int, longest_s: float = 0.03) -> Counter[str]:
    """Interrupt a loop so many times, and return what came out how often, the seconds of the slowest in `slowest`."""
    chance, found = random.Random(seed), Counter[str]()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    write(folder)
    loop = LOOPS[name](folder)
    loop()
    orders, send = os.pipe()
    parent = os.getpid()
    child = os.fork()
    if child == 0:
        os.close(send)
        _sender(parent, orders)
    unraisable: list[str] = []
    ignored_at: list[float] = []

    def hook(args: Any) -> None:
        text = "".join(traceback.format_exception(args.exc_value))
        unraisable.append(f"unraisable in {args.object!r:.60}: {args.exc_type.__name__}")
        print(unraisable[-1], text, file=sys.stderr, flush=True)
        ignored_at[:] = [time.monotonic()]

    sys.unraisablehook = hook
    signal.signal(signal.SIGINT, signal.default_int_handler)
    slowest = 0.0
    for _ in range(rounds):
        faulthandler.dump_traceback_later(HANGS_AFTER_S, exit=True)
        ignored_at.clear()
        delay = chance.uniform(0, longest_s)
        try:
            os.write(send, struct.pack("d", delay))
            begun = time.perf_counter()
            while not ignored_at or time.monotonic() - ignored_at[0] < 1:
                loop()
            found["lost"] += 1
        except KeyboardInterrupt:
            found["KeyboardInterrupt"] += 1
        except BaseException as exc:
            found[f"{type(exc).__name__}: {exc}"] += 1
            with contextlib.suppress(KeyboardInterrupt):  # which may come yet
                time.sleep(0.2)
        slowest = max(slowest, time.perf_counter() - begun - delay)
        if left := [one for one in _threads() if name != "read_batch"]:
            found[f"threads left: {left}"] += 1
    faulthandler.cancel_dump_traceback_later()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.close(send)
    os.waitpid(child, 0)
    loop()
    found.update(unraisable)
    found["slowest, ms"] = round(1000 * slowest)
    return found


def _all() -> Iterator[tuple[str, Counter[str]]]:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 1000
    warnings.simplefilter("ignore")
    for name in sys.argv[2:] or LOOPS:
        with tempfile.TemporaryDirectory() as made:
            yield name, interrupt(name, Path(made), rounds, seed=random.randrange(1 << 30))


if __name__ == "__main__":
    for one, outcome in _all():
        print(one, dict(outcome), flush=True)
