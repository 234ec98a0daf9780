"""Scenario `import`: files of kohya, torch and safetensors into synced shards, by the command on two workers."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch

import wds_tensorcache as tc
from benchmarks import page_cache
from benchmarks.context import CEILING, Context
from benchmarks.peers import NAME
from benchmarks.timing import Rounds, Variant, interleaved

_ROOT = Path(__file__).parent.parent.parent
_WORKLOAD = "diffusion"
_NUM_FILES = 2000
_NUM_WORKERS = 2
_PIECE_NBYTES = 1 << 18
_SHAPE = (16, 8, 1754)  # of kohya's latents: the elements of all tensors of a sample
KINDS = (".npz", ".pt", ".safetensors")
IMPORTED = f"{NAME}, "  # before the kind
IMPORT_CEILING = f"{CEILING}, read and write "


def importing(context: Context) -> Rounds:
    """Measure the import of one folder of each kind, until its shards are on disk.

    The ceiling: two threads read each file whole, and write its bytes into one file each, which they sync.
    """
    if context.workload.name != _WORKLOAD:
        return {}
    count = context.workload.count if context.is_quick else _NUM_FILES
    found: Rounds = {}
    with _command() as run_command:
        for kind in KINDS:
            found |= _import(context, kind, count, run_command)
    return found


def _import(context: Context, kind: str, count: int, run_command: Callable[[list[str]], None]) -> Rounds:
    source, out = context.scratch / "files", context.scratch / "imported"
    source.mkdir()
    samples = [context.samples[number % len(context.samples)] for number in range(count)]
    paths = [_write(source, number, kind, context.workload.split(sample)[0]) for number, sample in enumerate(samples)]

    def anew() -> None:
        shutil.rmtree(out, ignore_errors=True)
        out.mkdir()
        page_cache.load(source)
        os.sync()  # otherwise the disk would still write what earlier rows have left

    def ours() -> int:
        run_command(["import", str(source), str(out / "shards"), "--workers", str(_NUM_WORKERS)])
        manifest = json.loads((out / "shards" / "manifest.json").read_text())
        return sum(shard["nsamples"] for shard in manifest["shardlist"])

    def ceiling() -> int:
        with ThreadPoolExecutor(_NUM_WORKERS) as pool:
            parts = range(_NUM_WORKERS)
            return sum(pool.map(lambda part: _copy(paths[part::_NUM_WORKERS], out / f"{part}"), parts))

    try:
        page_cache.sync(source)
        anew()
        if ours() != count:
            raise AssertionError(f"{kind}: {count} files became another number of samples")
        _check(out / "shards", kind, [context.workload.split(sample)[0] for sample in samples])
        ceiling()
        for part in range(_NUM_WORKERS):
            if (out / f"{part}").read_bytes() != b"".join(path.read_bytes() for path in paths[part::_NUM_WORKERS]):
                raise AssertionError(f"{IMPORT_CEILING}{kind}: what was written is not what was read")
        variants = {IMPORT_CEILING + kind: Variant(ceiling, count, anew), IMPORTED + kind: Variant(ours, count, anew)}
        return interleaved(variants, context.rounds)
    finally:
        shutil.rmtree(source)
        shutil.rmtree(out)


def _flat(tensors: dict[str, torch.Tensor]) -> np.ndarray[Any, Any]:
    return torch.cat([tensor.flatten() for tensor in tensors.values()]).numpy()


def _write(folder: Path, number: int, kind: str, tensors: dict[str, torch.Tensor]) -> Path:
    """Write a sample as a file: its tensors by name, or as the latents of kohya, which are one array."""
    if kind == ".npz":
        path = folder / f"{number:05d}_1024x1024_sdxl.npz"
        sizes = {"original_size": np.array([1024, 1024]), "crop_ltrb": np.array([0, 0, 1024, 1024])}
        np.savez(path, latents=_flat(tensors).reshape(_SHAPE), **sizes)
        return path
    path = folder / f"{number:05d}{kind}"
    if kind == ".pt":
        torch.save(tensors, path)
    else:
        safetensors.torch.save_file(tensors, path)
    return path


def _copy(paths: list[Path], target: Path) -> int:
    """Copy files into one file, and wait until it is on disk; return how many were read whole."""
    memory = memoryview(bytearray(max(path.stat().st_size for path in paths)))
    count = 0
    written = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for path in paths:
        file = os.open(path, os.O_RDONLY)
        nbytes = os.readv(file, [memory])
        count += nbytes == os.fstat(file).st_size
        os.close(file)
        for begin in range(0, nbytes, _PIECE_NBYTES):
            os.write(written, memory[begin : min(begin + _PIECE_NBYTES, nbytes)])
    os.fsync(written)
    os.close(written)
    return count


def _check(folder: Path, kind: str, samples: list[dict[str, torch.Tensor]]) -> None:
    """Raise AssertionError unless the imported samples have the bytes of the files."""
    with tc.open(folder) as cache:
        for found, tensors in zip(cache, samples, strict=True):
            read = {name: tc.realize(found[name]) for name in (["latents"] if kind == ".npz" else tensors)}
            if not np.array_equal(_flat(read).view(np.uint8), _flat(tensors).view(np.uint8)):
                raise AssertionError(f"{IMPORTED}{kind}: what was imported is not what was written")


@contextmanager
def _command() -> Iterator[Callable[[list[str]], None]]:
    """Yield a function that runs `tensorcache` in a new process, which has imported its modules already."""
    arguments = [sys.executable, "-m", "benchmarks.scenarios.importing"]
    with subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=_ROOT) as child:
        stdin, stdout = child.stdin, child.stdout
        assert stdin
        assert stdout

        def run(arguments: list[str]) -> None:
            print(json.dumps(arguments), file=stdin, flush=True)
            status = stdout.readline().strip()
            if status != "0":
                raise AssertionError(f"tensorcache {' '.join(arguments)}: status {status or 'of a process that died'}")

        yield run
        stdin.close()


def _serve() -> None:
    """Run a command of `tensorcache` for each line of stdin, its arguments as JSON, and print its status.

    A process forked from this one has one thread and no CUDA, as the console script.
    """
    from wds_tensorcache.cli.app import run

    for line in sys.stdin:
        child = os.fork()
        if not child:
            status = 1
            try:
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
                status = run(json.loads(line))
            finally:
                os._exit(status)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


if __name__ == "__main__":
    _serve()
