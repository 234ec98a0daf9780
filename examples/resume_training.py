"""Training on two processes is killed and resumes on one, with the samples of an uninterrupted run.

    python examples/resume_training.py [--out demo_out]

1. One process trains with batches of 16 for two epochs: the sequence of keys is kept.
2. `torchrun` does the same on two processes, each with half of every batch, which are killed (SIGKILL) at a random step.
3. One process loads the checkpoint, and trains to the end.
4. The sequences of 1 and of 2 with 3 are compared, key by key.

Needs: wds_tensorcache, torch.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import wds_tensorcache as tc

COUNT, BATCH, EPOCHS = 500, 16, 2


def write_cache(folder: Path) -> None:
    """Write points and the values that a model learns for them."""
    generator = torch.Generator().manual_seed(0)
    with tc.ShardWriter(folder / "points-%03d.tar", max_samples=200, overwrite=True) as sink:
        for i in range(COUNT):
            point = torch.randn(8, generator=generator)
            sink.write(f"{i:04d}", {"x": point, "y": point.sum()[None]})


def save(path: Path, checkpoint: dict[str, Any]) -> None:
    """Write a checkpoint atomically: a killed process leaves the old one or the new one."""
    torch.save(checkpoint, path.with_suffix(".new"))
    path.with_suffix(".new").replace(path)


def train(data: Path, out: Path, pause: float) -> None:
    """Train from the checkpoint in `out`, or from the beginning, on as many processes as torchrun started."""
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    (out / f"{os.environ.get('RANK', 0)}.pid").write_text(str(os.getpid()))
    is_first = not dist.is_initialized() or dist.get_rank() == 0
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    path = out / "checkpoint.pt"
    keys: list[str] = []
    with tc.open(data) as cache:
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
                if is_first:
                    save(path, {"model": model.state_dict(), "loader": loader.state_dict(), "keys": keys})
                time.sleep(pause)
    if is_first:
        print(f"world size {world_size}: trained to the end: loss {loss.item() / BATCH:.4f}")
    if dist.is_initialized():
        dist.destroy_process_group()


def launch(data: Path, out: Path, num_processes: int, pause: float) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_processes)]
    command += [__file__, "--worker", str(data), "--out", str(out), "--pause", str(pause)]
    return subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"})


def keys_of(out: Path) -> list[str]:
    path = out / "checkpoint.pt"
    return torch.load(path, weights_only=True)["keys"] if path.exists() else []


def main(out: Path) -> None:
    write_cache(out / "data")
    for name in ("whole", "broken"):
        (out / name).mkdir(parents=True, exist_ok=True)
        (out / name / "checkpoint.pt").unlink(missing_ok=True)
    train(out / "data", out / "whole", pause=0)
    whole = keys_of(out / "whole")

    running = launch(out / "data", out / "broken", 2, pause=0.03)
    until = random.randrange(COUNT // 10, COUNT * EPOCHS * 3 // 4)
    while len(keys_of(out / "broken")) < until and running.poll() is None:
        time.sleep(0.01)
    for pid in [running.pid, *(int(path.read_text()) for path in (out / "broken").glob("*.pid"))]:
        os.kill(pid, signal.SIGKILL)
    running.wait()
    print(f"killed after {len(keys_of(out / 'broken'))} of {len(whole)} samples")
    train(out / "data", out / "broken", pause=0)
    broken = keys_of(out / "broken")
    is_same = broken == whole and sorted(whole[:COUNT]) == sorted(whole[COUNT:])
    print(
        f"{len(broken)} samples, {'the same as' if is_same else 'DIFFERENT from'} those of the run that was not broken"
    )
    (out / "keys.json").write_text(json.dumps({"whole": whole, "broken": broken}))
    if not is_same:
        raise SystemExit(1)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("demo_out"), help="folder for shards and checkpoints")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--pause", type=float, default=0.0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        train(options.worker, options.out, options.pause)
    else:
        main(options.out / "resume")
