"""Scenario `import`: files of kohya, torch and safetensors into synced shards, by `tc.import_cache` on two workers."""

from __future__ import annotations

import os
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch

import wds_tensorcache as tc
from benchmarks import page_cache
from benchmarks.harness import CEILING, Context, Rows, Timed, in_new_process, require
from benchmarks.peers import NAME

_NUM_FILES = 2000
_NUM_WORKERS = 2
_PIECE_NBYTES = 1 << 18
_SHAPE = (16, 8, 1754)  # of kohya's latents: the elements of all tensors of a sample
# of each kind: the ceiling, and ours
ROWS = {kind: (f"{CEILING}, read and write {kind}", f"{NAME}, {kind}") for kind in (".npz", ".pt", ".safetensors")}


def importing(context: Context) -> Rows:
    """Measure the import of one folder of each kind, until its shards are on disk.

    The ceiling: two threads read each file whole, and write its bytes into one file each, which they sync.
    """
    count = context.workload.count if context.is_quick else _NUM_FILES
    samples = [context.workload.split(context.samples[i % len(context.samples)])[0] for i in range(count)]
    rows: Rows = {}
    for kind in ROWS:
        rows |= _rows(context.new_folder(), kind, samples)
    return rows


def _rows(folder: Path, kind: str, samples: list[dict[str, torch.Tensor]]) -> Rows:
    (plain, imported), source, out, count = ROWS[kind], folder / "source", folder / "imported", len(samples)
    source.mkdir()
    paths = [_write(source, index, kind, tensors) for index, tensors in enumerate(samples)]
    parts = [(out / f"{part}", paths[part::_NUM_WORKERS]) for part in range(_NUM_WORKERS)]

    def prepare() -> None:
        shutil.rmtree(out, ignore_errors=True)
        out.mkdir()
        page_cache.load(source)
        os.sync()  # otherwise the disk would still write what earlier rows have left

    def ours() -> dict[str, float]:
        prepare()
        return {"": in_new_process(_import, source, out / "shards", count)}

    def ceiling() -> int:
        with ThreadPoolExecutor(_NUM_WORKERS) as pool:
            return sum(pool.map(_copy, *zip(*parts, strict=True)))

    page_cache.sync(source)
    ours()
    with tc.open(out / "shards") as cache:
        for sample, tensors in zip(cache, samples, strict=True):
            read = {name: tc.realize(sample[name]) for name in (["latents"] if kind == ".npz" else tensors)}
            require(_flat(read).tobytes() == _flat(tensors).tobytes(), imported)
    ceiling()
    for target, sources in parts:
        require(target.read_bytes() == b"".join(path.read_bytes() for path in sources), plain)
    return {plain: Timed(ceiling, count, prepare), imported: ours}


def _import(source: Path, out: Path, count: int) -> float:
    """Return the microseconds per file, in a process with one thread, as that of the command, so that workers are forked."""
    import_cache = tc.import_cache  # its modules, too, are imported
    started = time.perf_counter()
    report = import_cache(source, out, num_workers=_NUM_WORKERS)
    elapsed = time.perf_counter() - started
    require(report.num_written == count, f"{source}", f"{count} files became another number of samples")
    return elapsed / count * 1e6


def _flat(tensors: dict[str, torch.Tensor]) -> np.ndarray[Any, Any]:
    return torch.cat([tensor.flatten() for tensor in tensors.values()]).numpy()


def _write(folder: Path, index: int, kind: str, tensors: dict[str, torch.Tensor]) -> Path:
    """Write a sample as a file: its tensors by name, or as the latents of kohya, which are one array."""
    path = folder / f"{index:05d}{'_1024x1024_sdxl' if kind == '.npz' else ''}{kind}"
    if kind == ".npz":
        sizes = {"original_size": np.array([1024, 1024]), "crop_ltrb": np.array([0, 0, 1024, 1024])}
        np.savez(path, latents=_flat(tensors).reshape(_SHAPE), **sizes)
    elif kind == ".pt":
        torch.save(tensors, path)
    else:
        safetensors.torch.save_file(tensors, path)
    return path


def _copy(target: Path, paths: list[Path]) -> int:
    """Copy files into one file, and wait until it is on disk; return how many were read whole."""
    memory = memoryview(bytearray(max(path.stat().st_size for path in paths)))
    count = 0
    with target.open("wb", buffering=0) as written:
        for path in paths:
            with path.open("rb", buffering=0) as file:
                nbytes = file.readinto(memory)
                count += nbytes == os.fstat(file.fileno()).st_size
            for begin in range(0, nbytes, _PIECE_NBYTES):
                written.write(memory[begin : min(begin + _PIECE_NBYTES, nbytes)])
        os.fsync(written.fileno())
    return count
