"""Training on two nodes from S3: each has its own cache on disk, both are killed, and one node resumes.

    python examples/train_on_nodes.py [--out demo_out]

1. An S3 server starts on 127.0.0.1 (moto, for tests), and a cache is written to it.
2. One process trains for two epochs with batches of 16: the sequence of keys is kept.
3. `torchrun` does the same on two processes, which stand for two nodes: each has its own `cache_dir`, and half of every batch.
   They are killed (SIGKILL) at a random step.
4. One process loads the checkpoint, and trains to the end. Bytes that its node has read before come from its disk.
5. The sequences of 2 and of 3 with 4 are compared, key by key.

On real nodes, start `torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:PORT train.py` on each.
All processes of a node pass the same `cache_dir`, on a local disk.

Needs: wds_tensorcache[remote], torch, moto[server].
"""

from __future__ import annotations

import argparse
import logging
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import wds_tensorcache as tc

COUNT, BATCH, EPOCHS = 240, 16, 2
BUCKET = "demo"
URL = f"s3://{BUCKET}/points"


@contextmanager
def s3_server() -> Iterator[str]:
    """Run an S3 server until the block ends; yield its address. The environment tells this process and its children."""
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)  # it logs every request
    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    address = f"http://{host}:{port}"
    os.environ |= {
        "AWS_ENDPOINT": address,
        "AWS_ALLOW_HTTP": "true",
        "AWS_REGION": "us-east-1",
        "AWS_ACCESS_KEY_ID": "demo",
        "AWS_SECRET_ACCESS_KEY": "demo",
    }
    try:
        yield address
    finally:
        server.stop()


def write_cache(address: str) -> None:
    """Write points, and the values that a model learns for them, to the server."""
    import boto3  # comes with moto

    boto3.client("s3", endpoint_url=address).create_bucket(Bucket=BUCKET)
    generator = torch.Generator().manual_seed(0)
    with tc.ShardWriter(f"{URL}/points-%03d.tar", max_samples=50) as sink:
        for i in range(COUNT):
            point = torch.randn(256, generator=generator)
            sink.write(f"{i:04d}", {"x": point, "y": point.sum()[None]})


def save(path: Path, checkpoint: dict[str, Any]) -> None:
    """Write a checkpoint atomically: a killed process leaves the old one or the new one."""
    torch.save(checkpoint, path.with_suffix(".new"))
    path.with_suffix(".new").replace(path)


def train(out: Path, node: Path, pause: float) -> None:
    """Train from the checkpoint in `out`, or from the beginning, on as many processes as torchrun started."""
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    rank, world_size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    (out / f"{rank}.pid").write_text(str(os.getpid()))
    torch.manual_seed(0)
    model = torch.nn.Linear(256, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    path, keys = out / "checkpoint.pt", list[str]()
    # on real nodes, the default folder of kept indexes will do
    with tc.open(URL, cache_dir=node / "cache", cache_nbytes=1 << 30, keep_indexes=node / "indexes") as cache:
        loader = tc.Loader(cache, BATCH // world_size, shuffle=True, seed=1)
        if path.exists():
            checkpoint = torch.load(path, weights_only=True)
            model.load_state_dict(checkpoint["model"])
            loader.load_state_dict(checkpoint["loader"])  # the same for one process and for two
            keys = checkpoint["keys"]
        while loader.epoch < EPOCHS:
            for batch, info in loader.with_info():
                counts = ~info.is_padding[:, None]  # false for rows that pad the epoch's last batch
                loss = ((model(batch["x"]) - batch["y"]).square() * counts).sum()
                optimizer.zero_grad()
                loss.backward()
                rows = list(zip(info.keys, info.is_padding.tolist(), strict=True))
                parts: list[Any] = [rows] * world_size
                if world_size > 1:
                    for parameter in model.parameters():
                        dist.all_reduce(parameter.grad)
                    dist.all_gather_object(parts, rows)
                for parameter in model.parameters():
                    parameter.grad /= BATCH
                optimizer.step()
                keys += [key for step in zip(*parts, strict=True) for key, is_padding in step if not is_padding]
                if rank == 0:
                    save(path, {"model": model.state_dict(), "loader": loader.state_dict(), "keys": keys})
                time.sleep(pause)
    if dist.is_initialized():
        dist.destroy_process_group()


def launch(out: Path, pause: float) -> subprocess.Popen[bytes]:
    """Start two processes, each with the cache of its node."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += [__file__, "--worker", "--out", str(out), "--pause", str(pause)]
    return subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"})


def keys_of(out: Path) -> list[str]:
    path = out / "checkpoint.pt"
    return torch.load(path, weights_only=True)["keys"] if path.exists() else []


def num_bytes(folder: Path) -> int:
    """Return the bytes that the files of a folder take on disk; a cache's files have holes."""
    return sum(path.stat().st_blocks * 512 for path in folder.rglob("*") if path.is_file())


def main(out: Path) -> None:
    shutil.rmtree(out, ignore_errors=True)
    for name in ("whole", "broken"):
        (out / name).mkdir(parents=True)
    with s3_server() as address:
        write_cache(address)
        train(out / "whole", out / "whole", pause=0)
        whole = keys_of(out / "whole")

        running = launch(out / "broken", pause=0.1)
        until = random.randrange(BATCH, COUNT * EPOCHS * 3 // 4)
        while len(keys_of(out / "broken")) < until and running.poll() is None:
            time.sleep(0.01)
        for pid in [running.pid, *(int(path.read_text()) for path in (out / "broken").glob("*.pid"))]:
            with suppress(ProcessLookupError):  # torchrun ends a process that has lost the other one
                os.kill(pid, signal.SIGKILL)
        running.wait()
        killed = len(keys_of(out / "broken"))
        filled = [num_bytes(out / "broken" / f"node{rank}" / "cache") for rank in range(2)]
        train(out / "broken", out / "broken" / "node0", pause=0)
    broken = keys_of(out / "broken")
    epochs = [whole[:COUNT], whole[COUNT:]]
    is_same = broken == whole and all(len(set(epoch)) == COUNT for epoch in epochs) and epochs[0] != epochs[1]
    print(
        f"{len(broken)} samples in {EPOCHS} epochs, killed on 2 nodes after {killed}, resumed on 1: "
        f"{'each once in each epoch, as' if is_same and all(filled) else 'NOT as'} in the run that was not killed"
    )
    if not is_same or not all(filled):
        raise SystemExit(1)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("demo_out"), help="folder for checkpoints and caches")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--pause", type=float, default=0.0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        train(options.out, options.out / f"node{os.environ['RANK']}", options.pause)
    else:
        main(options.out / "nodes")
