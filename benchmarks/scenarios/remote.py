"""Scenario `remote`: shards on a web server with 20 ms of latency and 100 MB/s in all, in its own process.

Three parts: one tensor of each of 1,000 random samples, with the bytes that the server sent; a shuffled epoch of whole
samples, next to as many `curl`s; and the second epoch from the node's cache, next to the same shards on a local disk.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch

import wds_tensorcache as tc
from benchmarks.harness import CEILING, Context, Row, Rows, Skipped, Timed
from benchmarks.peers import NAME
from benchmarks.peers.base import Peer
from benchmarks.peers.ours import as_batch
from benchmarks.workloads import tensor_at
from tests.remote.servers.http_server import HttpServer

_WORKLOAD = "diffusion"
_NUM_CURLS, _PER_SHARD = 8, 64
_NUM_LOCAL = 10  # epochs in each round of those that read local files: one takes 40 ms, and varies by a third
_MOVED = ", MB"  # ending of the rows with the megabytes that the server sent

ONE_OF_PEERS = "one tensor, "
ONE = f"{ONE_OF_PEERS}{NAME}"
ALL_BYTES = f"{CEILING}, all bytes by one curl"
EPOCH, STREAM = "epoch, Loader", "epoch, ResumablePipeline"
CURLS = f"{CEILING}, epoch, {_NUM_CURLS} curls"
CACHED, LOCAL = "second epoch, node's cache", "second epoch, local shards"


def moved(row: str) -> str:
    """Return the name of the row with the megabytes that the server sent."""
    return row + _MOVED


@contextmanager
def remote(context: Context) -> Iterator[Rows]:
    """Measure each row; check all that was read."""
    if context.workload.name != _WORKLOAD:
        yield {}
        return
    if shutil.which("curl") is None:
        raise Skipped("the ceiling needs curl: apt install curl")
    folder = context.stores / "remote"  # next to the stores of the peers
    with tc.ShardWriter(folder / "%06d.tar", max_samples=_PER_SHARD, fsync=False) as writer:
        for index, sample in enumerate(context.samples):
            writer.write(f"{index:08d}", sample)
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, folder)
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="remote-", dir=context.scratch)))
        server = stack.enter_context(HttpServer(context.stores, latency_s=0.02, rate=100e6))
        yield _Remote(context, server, folder, scratch, stack).rows()


class _Remote:
    def __init__(self, context: Context, server: HttpServer, folder: Path, scratch: Path, stack: ExitStack) -> None:
        self._context, self._server, self._scratch, self._stack = context, server, scratch, stack
        self._folder, self._url = folder, f"{server.url}/{folder.name}"
        self._count, self._path = context.workload.timed, context.workload.one[1]
        self._ones = torch.stack([tensor_at(sample, self._path) for sample in context.samples])

    def rows(self) -> Rows:
        """Return the rows: one tensor of all samples, with opening; epochs of whole samples, opened before; second epochs."""
        stream = tc.ResumablePipeline(f"{self._url}/", tc.decode(lazy=False))
        rows: Rows = {
            ONE: self._counted(self._one),
            ALL_BYTES: self._counted(partial(self._curl, 1)),
            CURLS: self._counted(partial(self._curl, _NUM_CURLS)),
            EPOCH: self._counted(partial(self._epoch, self._loader(self._url))),
            STREAM: self._counted(lambda: self._check(sample["tensorcache"] for sample in stream)),
        }
        return rows | self._of_peers() | self._of_second_epochs()

    def _sent(self) -> int:
        """Return the bytes of bodies that the server sent since the last call."""
        return sum(request.nbytes for request in self._server.log())

    def _counted(self, run: Callable[[], int], prepare: Callable[[], object] = lambda: None) -> Row:
        """Return a row of the microseconds, and of the megabytes that the server sent."""
        timed = Timed(run, self._count, lambda: (prepare(), self._sent()))
        return lambda: {**timed(), _MOVED: self._sent() / 1e6}

    def _one(self) -> int:
        order = self._context.order
        with tc.open(self._url, keep_indexes=False) as cache:
            read = tensor_at(cache.select([self._path]).read_batch(order), self._path)
        if not torch.equal(read, self._ones[order]):
            raise AssertionError(f"{ONE}: what was read is not what was written")
        return len(read)

    def _of_peers(self) -> Rows:
        context, cache = self._context, self._scratch / "peer"
        # clients of S3 use any key, and folders for buckets
        config = self._scratch / "aws"
        config.write_text("[default]\nregion = us-east-1\ns3 =\n  addressing_style = path\n")
        os.environ |= {"AWS_CONFIG_FILE": str(config), "AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b"}

        def prepare() -> None:
            shutil.rmtree(cache, ignore_errors=True)
            cache.mkdir()

        def run(peer: Peer) -> int:
            tensors = dict(peer.over_http(self._server.url, context.store(peer), cache, context.workload))
            for index, tensor in tensors.items():
                if not torch.equal(tensor, self._ones[index]):
                    raise AssertionError(f"{peer.name}, sample {index}: what was read is not what was written")
            return len(tensors)

        rows: Rows = {}
        for peer in context.peers:
            if peer.over_http:
                row = self._counted(partial(run, peer), prepare)
                with context.attempt(f"remote, {peer.name}"):
                    row()  # raises here if the peer cannot
                    rows[ONE_OF_PEERS + peer.name] = row
        return rows

    def _curl(self, count: int) -> int:
        """Fetch all shards by `count` concurrent processes."""
        urls = [f"{self._url}/{path.name}" for path in sorted(self._folder.glob("*.tar"))]
        command = ["curl", "--silent", "--fail", "--noproxy", "*"]
        parts = [[*chain(*(("--output", "/dev/null", url) for url in urls[first::count]))] for first in range(count)]
        running = [subprocess.Popen([*command, *part]) for part in parts if part]
        if [process for process in running if process.wait()]:
            raise AssertionError("a curl failed")
        return self._count

    def _of_second_epochs(self) -> Rows:
        node = {"cache_dir": self._scratch / "node"}
        loaders = {CACHED: self._loader(self._url, **node), LOCAL: self._loader(self._folder)}
        for loader in loaders.values():
            self._epoch(loader)  # fills the node's cache
        self._sent()
        self._epoch(loaders[CACHED])
        if self._sent():
            raise AssertionError("the second epoch of the node's cache asked the server for bytes")

        def run(loader: tc.Loader) -> int:
            return sum(self._epoch(loader, is_checked=False) for _ in range(_NUM_LOCAL))

        return {row: Timed(partial(run, loader), _NUM_LOCAL * self._count) for row, loader in loaders.items()}

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
        return len(self._context.check_any("remote", samples))
