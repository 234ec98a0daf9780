"""Scenario `remote`: shards on a web server with 20 ms of latency and 100 MB/s in all, in its own process.

Three parts: one tensor of each of 1,000 random samples, with the bytes that the server sent; a shuffled epoch of whole
samples, next to as many `curl`s; and the second epoch from the node's cache, next to the same shards on a local disk.
"""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch

import wds_tensorcache as tc
from benchmarks.context import CEILING, Context, Skipped
from benchmarks.peers import NAME
from benchmarks.peers.ours import as_batch
from benchmarks.peers.over_http import WEBSHART, Pass, passes, set_credentials
from benchmarks.timing import Rounds, Variant, interleaved
from benchmarks.workloads import tensor_at
from tests.remote.servers.http_server import HttpServer

_WORKLOAD = "diffusion"
_NUM_CURLS, _PER_SHARD = 8, 64
_NUM_LOCAL = 10  # epochs in each round of those that read local files: one takes 40 ms, and varies by a third
_FOLDER = "remote"  # of our shards, next to the stores of the peers

ONE_OF_PEERS = "one tensor, "
ONE = f"{ONE_OF_PEERS}{NAME}"
ALL_BYTES = f"{CEILING}, all bytes by one curl"
EPOCH, STREAM = "epoch, Loader", "epoch, ResumablePipeline"
CURLS = f"{CEILING}, epoch, {_NUM_CURLS} curls"
CACHED, LOCAL = "second epoch, node's cache", "second epoch, local shards"


def moved(row: str) -> str:
    """Return the name of the row with the megabytes that the server sent."""
    return f"{row}, MB"


def remote(context: Context) -> Rounds:
    """Measure each row; check all that was read."""
    if context.workload.name != _WORKLOAD:
        return {}
    if shutil.which("curl") is None:
        raise Skipped("the ceiling needs curl: apt install curl")
    ours = context.stores / _FOLDER
    with tc.ShardWriter(ours / "%06d.tar", max_samples=_PER_SHARD, fsync=False) as writer:
        for index, sample in enumerate(context.samples):
            writer.write(f"{index:08d}", sample)
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, ours)
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="remote-", dir=context.scratch)))
        server = stack.enter_context(HttpServer(context.stores, latency_s=0.02, rate=100e6))
        return _Rows(context, server, scratch, stack).measure()


class _Rows:
    def __init__(self, context: Context, server: HttpServer, scratch: Path, stack: ExitStack) -> None:
        self._context, self._server, self._scratch, self._stack = context, server, scratch, stack
        self._folder = context.stores / _FOLDER
        self._url = f"{server.url}/{_FOLDER}"
        self._path = context.workload.one[1]
        self._ones = torch.stack([tensor_at(sample, self._path) for sample in context.samples])
        self._count = context.workload.timed
        self._moved: dict[str, list[float]] = {}

    def measure(self) -> Rounds:
        """Return the rounds of all rows."""
        rounds = min(3, self._context.rounds)
        found = interleaved(dict(self._of_one()), rounds)
        found |= interleaved(dict(self._of_epochs()), rounds)
        found |= interleaved(dict(self._of_second_epochs()), self._context.rounds)
        # the first pass is not counted
        return found | {moved(row): counts[1:] for row, counts in self._moved.items() if row in found}

    def _sent(self) -> int:
        """Return the bytes of bodies that the server sent since the last call."""
        return sum(request.nbytes for request in self._server.log())

    def _counted(self, row: str, run: Callable[[], int]) -> Variant:
        counts = self._moved[row] = []

        def counted() -> int:
            found = run()
            counts.append(self._sent() / 1e6)
            return found

        return Variant(counted, self._count, prepare=self._sent)

    def _of_one(self) -> Iterator[tuple[str, Variant]]:
        """Yield a row for each way to read one tensor of all samples, with opening."""
        yield ONE, self._counted(ONE, self._one)
        yield ALL_BYTES, self._counted(ALL_BYTES, partial(self._curl, 1))
        context = self._context
        names = {peer.name for peer in context.peers if not peer.name.startswith(NAME)}
        if not names:
            return
        context.missing[f"{_WORKLOAD}, remote, webshart"] = WEBSHART
        set_credentials(self._scratch)
        makes = passes(self._server.url, context.stores, self._scratch, _FOLDER, context.workload, names)
        for peer, make in makes.items():
            row = f"{ONE_OF_PEERS}{peer}"
            with context.attempt(f"remote, {peer}"):
                variant = self._counted(row, partial(self._of_peer, make()))
                variant.run()  # raises here if the peer cannot
                self._moved[row].clear()
                yield row, variant

    def _one(self) -> int:
        order = self._context.order
        with tc.open(self._url, keep_indexes=False) as cache:
            read = tensor_at(cache.select([self._path]).read_batch(order), self._path)
        if not torch.equal(read, self._ones[order]):
            raise AssertionError(f"{ONE}: what was read is not what was written")
        return len(read)

    def _of_peer(self, read: Pass) -> int:
        found = dict(read())
        for index, tensor in found.items():
            if not torch.equal(tensor, self._ones[index]):
                raise AssertionError(f"sample {index}: what was read is not what was written")
        return len(found)

    def _curl(self, count: int) -> int:
        """Fetch all shards by `count` concurrent processes."""
        urls = [f"{self._url}/{path.name}" for path in sorted(self._folder.glob("*.tar"))]
        command = ["curl", "--silent", "--fail", "--noproxy", "*"]
        parts = [[*chain(*(("--output", "/dev/null", url) for url in urls[first::count]))] for first in range(count)]
        running = [subprocess.Popen([*command, *part]) for part in parts if part]
        if [process for process in running if process.wait()]:
            raise AssertionError("a curl failed")
        return self._count

    def _of_epochs(self) -> Iterator[tuple[str, Variant]]:
        """Yield a row for each way to read whole samples, each opened before."""
        yield CURLS, self._counted(CURLS, partial(self._curl, _NUM_CURLS))
        yield EPOCH, self._counted(EPOCH, partial(self._epoch, self._loader(self._url)))
        stream = tc.ResumablePipeline(f"{self._url}/", tc.decode(lazy=False))
        yield STREAM, self._counted(STREAM, lambda: self._check(sample["tensorcache"] for sample in stream))

    def _of_second_epochs(self) -> Iterator[tuple[str, Variant]]:
        node = {"cache_dir": self._scratch / "node"}
        loaders = {CACHED: self._loader(self._url, **node), LOCAL: self._loader(self._folder)}
        for loader in loaders.values():
            self._epoch(loader)  # fills the node's cache
        self._sent()
        for row, loader in loaders.items():
            epoch = partial(self._epoch, loader, is_checked=False)
            yield row, Variant(lambda epoch=epoch: sum(epoch() for _ in range(_NUM_LOCAL)), _NUM_LOCAL * self._count)
        self._epoch(loaders[CACHED])
        if self._sent():
            raise AssertionError("the second epoch of the node's cache asked the server for bytes")

    def _loader(self, source: Any, **options: Any) -> tc.Loader:
        cache = self._stack.enter_context(tc.open(source, **options))
        return self._stack.enter_context(tc.Loader(cache, self._context.workload.batch_size, shuffle=True))

    def _epoch(self, loader: tc.Loader, *, is_checked: bool = True) -> int:
        """Read a shuffled epoch, and compare it with what was written."""
        workload = self._context.workload
        seen: list[int] = []
        for batch in loader:
            seen += workload.split(batch)[1]["index"]
            if is_checked:
                self._check(as_batch(workload, batch).samples())
        return len(set(seen))

    def _check(self, samples: Iterable[Any]) -> int:
        count = 0
        for sample in samples:
            self._context.check("remote", [sample], [self._context.workload.split(sample)[1]["index"]])
            count += 1
        return count
