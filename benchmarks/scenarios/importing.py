"""Scenario `import`: files of kohya, torch and safetensors into synced shards, by `tc.import_cache` on two workers."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import safetensors.torch
import torch

import wds_tensorcache as tc
from benchmarks import page_cache
from benchmarks.harness import CEILING, Context, Rows, Timed, in_new_process
from benchmarks.peers import NAME

_NUM_FILES = 2000
_NUM_WORKERS = 2
_PIECE_NBYTES = 1 << 18
_SHAPE = (16, 8, 1754)  # of kohya's latents: the elements of all tensors of a sample
KINDS = (".npz", ".pt", ".safetensors")
IMPORTED = f"{NAME}, "  # before the kind
IMPORT_CEILING = f"{CEILING}, read and write "


@contextmanager
def importing(context: Context) -> Iterator[Rows]:
    """Measure the import of one folder of each kind, until its shards are on disk.

    The ceiling: two threads read each file whole, and write its bytes into one file each, which they sync.
    """
    count = context.workload.count if context.is_quick else _NUM_FILES
    samples = [context.workload.split(context.samples[i % len(context.samples)])[0] for i in range(count)]
    with TemporaryDirectory(dir=context.scratch) as folder:
        rows = [_rows(Path(folder), kind, samples) for kind in KINDS]
        yield {name: row for of_kind in rows for name, row in of_kind.items()}


def _rows(folder: Path, kind: str, samples: list[dict[str, torch.Tensor]]) -> Rows:
    source, out, count = folder / f"import{kind}", folder / "imported", len(samples)
    source.mkdir()
    paths = [_write(source, index, kind, tensors) for index, tensors in enumerate(samples)]

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
            parts = range(_NUM_WORKERS)
            return sum(pool.map(lambda part: _copy(paths[part::_NUM_WORKERS], out / f"{part}"), parts))

    page_cache.sync(source)
    ours()
    _check(out / "shards", kind, samples)
    ceiling()
    for part in range(_NUM_WORKERS):
        if (out / f"{part}").read_bytes() != b"".join(path.read_bytes() for path in paths[part::_NUM_WORKERS]):
            raise AssertionError(f"{IMPORT_CEILING}{kind}: what was written is not what was read")
    return {IMPORT_CEILING + kind: Timed(ceiling, count, prepare), IMPORTED + kind: ours}


def _import(source: Path, out: Path, count: int) -> float:
    """Return the microseconds per file, in a process with one thread, as that of the command, so that workers are forked."""
    import_cache = tc.import_cache  # its modules, too, are imported
    started = time.perf_counter()
    report = import_cache(source, out, num_workers=_NUM_WORKERS)
    elapsed = time.perf_counter() - started
    if report.num_written != count:
        raise AssertionError(f"{source}: {count} files became another number of samples")
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


def _copy(paths: list[Path], target: Path) -> int:
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


def _check(folder: Path, kind: str, samples: list[dict[str, torch.Tensor]]) -> None:
    """Raise AssertionError unless the imported samples have the bytes of the files."""
    with tc.open(folder) as cache:
        for sample, tensors in zip(cache, samples, strict=True):
            read = {name: tc.realize(sample[name]) for name in (["latents"] if kind == ".npz" else tensors)}
            if not np.array_equal(_flat(read).view(np.uint8), _flat(tensors).view(np.uint8)):
                raise AssertionError(f"{IMPORTED}{kind}: what was imported is not what was written")
