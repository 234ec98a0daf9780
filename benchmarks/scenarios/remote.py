"""Scenario `remote`: shards on a web server with 20 ms of latency and 100 MB/s in all, in its own process.

Three parts: one tensor of each of 1,000 random samples, with the bytes that the server sent; a shuffled epoch of whole
samples, next to as many `curl`s; and the second epoch from the node's cache, next to the same shards on a local disk.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch

import wds_tensorcache as tc
from benchmarks.harness import CEILING, Context, Row, Rows, Skipped, Timed, require
from benchmarks.peers import NAME, Peer
from benchmarks.peers.ours import as_batch, write
from benchmarks.workloads import tensor_at
from tests.remote.servers.http_server import HttpServer

_NUM_CURLS, _PER_SHARD = 8, 64
_NUM_LOCAL = 10  # epochs in each round of those that read local files: one takes 40 ms, and varies by a third
_MOVED = ", MB"  # ending of the rows with the megabytes that the server sent

ONE_OF_PEERS = "one tensor, "
ONE = f"{ONE_OF_PEERS}{NAME}"
ALL_BYTES = f"{CEILING}, all bytes by one curl"
ONE_MB, ALL_MB = ONE + _MOVED, ALL_BYTES + _MOVED
EPOCH, STREAM = "epoch, Loader", "epoch, ResumablePipeline"
CURLS = f"{CEILING}, epoch, {_NUM_CURLS} curls"
CACHED, LOCAL = "second epoch, node's cache", "second epoch, local shards"


def remote(context: Context) -> Rows:
    """Measure each row; check all that was read. Caches and loaders of whole epochs are opened before the clock starts."""
    if shutil.which("curl") is None:
        raise Skipped("the ceiling needs curl: apt install curl")
    path, order = context.workload.one[1], context.order
    ones = torch.stack([tensor_at(sample, path) for sample in context.samples])
    folder, scratch = context.new_folder(context.stores), context.new_folder()
    write(folder, context.workload, context.samples, max_samples=_PER_SHARD)
    server = context.enter(HttpServer(context.stores, latency_s=0.02, rate=100e6))
    url = f"{server.url}/{folder.name}"
    urls = [f"{url}/{shard.name}" for shard in sorted(folder.glob("*.tar"))]
    stream = tc.ResumablePipeline(f"{url}/", tc.decode(lazy=False))

    def loader(source: Any, **options: Any) -> tc.Loader:
        cache = context.enter(tc.open(source, **options))
        return context.enter(tc.Loader(cache, context.workload.batch_size, shuffle=True))

    def one() -> int:
        with tc.open(url, keep_indexes=False) as cache:
            read = tensor_at(cache.select([path]).read_batch(order), path)
        require(torch.equal(read, ones[order]), ONE)
        return len(read)

    runs = {
        ONE: one,
        ALL_BYTES: partial(_curl, urls, 1, len(order)),
        CURLS: partial(_curl, urls, _NUM_CURLS, len(order)),
        EPOCH: partial(_epoch, context, loader(url)),
        STREAM: lambda: len(context.check_any(STREAM, (sample["tensorcache"] for sample in stream))),
    }
    rows = {name: _counted(server, Timed(run, len(order))) for name, run in runs.items()}
    rows |= _of_peers(context, server, scratch, ones)
    local = {CACHED: loader(url, cache_dir=scratch / "node"), LOCAL: loader(folder)}
    for epochs in local.values():
        _epoch(context, epochs)  # fills the node's cache
    _sent(server)
    _epoch(context, local[CACHED])
    require(_sent(server) == 0, CACHED, "the server was asked for bytes")
    count = _NUM_LOCAL * len(order)
    return rows | {name: Timed(partial(_unchecked, context, epochs), count) for name, epochs in local.items()}


def _sent(server: HttpServer) -> int:
    """Return the bytes of bodies that the server sent since the last call."""
    return sum(request.nbytes for request in server.log())


def _counted(server: HttpServer, timed: Timed) -> Row:
    """Return a row of the microseconds, and of the megabytes that the server sent."""

    def row() -> dict[str, float]:
        _sent(server)
        return {**timed(), _MOVED: _sent(server) / 1e6}

    return row


def _curl(urls: list[str], num_processes: int, count: int) -> int:
    """Fetch all shards by concurrent processes; return the number of samples in them."""
    command = ["curl", "--silent", "--fail", "--noproxy", "*"]
    parts = [urls[first::num_processes] for first in range(min(num_processes, len(urls)))]
    outputs = [chain.from_iterable(("--output", "/dev/null", url) for url in part) for part in parts]
    running = [subprocess.Popen([*command, *output]) for output in outputs]
    require(not [process for process in running if process.wait()], CURLS, "a curl failed")
    return count


def _epoch(context: Context, loader: tc.Loader) -> int:
    batches = (as_batch(context.workload, batch).samples() for batch in loader)
    return len(set(context.check_any(EPOCH, chain.from_iterable(batches))))


def _unchecked(context: Context, loader: tc.Loader) -> int:
    """Read some epochs; return how many samples these had."""
    small = (context.workload.split(batch)[1] for _ in range(_NUM_LOCAL) for batch in loader)
    return sum(len(set(values["index"])) for values in small)


def _of_peers(context: Context, server: HttpServer, scratch: Path, ones: torch.Tensor) -> Rows:
    cache, config = scratch / "peer", scratch / "aws"
    # clients of S3 use any key, and folders for buckets
    config.write_text("[default]\nregion = us-east-1\ns3 =\n  addressing_style = path\n")
    os.environ |= {"AWS_CONFIG_FILE": str(config), "AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b"}

    def prepare() -> None:
        shutil.rmtree(cache, ignore_errors=True)
        cache.mkdir()

    def run(peer: Peer) -> int:
        tensors = dict(peer.over_http(server.url, context.store(peer), cache, context.workload))
        for index, tensor in tensors.items():
            require(torch.equal(tensor, ones[index]), f"{peer.name}, sample {index}")
        return len(tensors)

    rows: Rows = {}
    for peer in context.peers:
        if peer.over_http:
            row = _counted(server, Timed(partial(run, peer), context.workload.timed, prepare))
            with context.attempt(f"remote, {peer.name}"):
                row()  # raises here if the peer cannot
                rows[ONE_OF_PEERS + peer.name] = row
    return rows
