"""Measure the memory of a process and its 8 children that share samples by a `tc.SharedDataset`, as workers of a loader do.

The memory is the sum of proportional set sizes (PSS): a page that n processes have in memory counts as 1/n for each of them.
Torch alone takes more than 200 MB, so the memory of the same processes before they read a sample is printed, too.
"""

from __future__ import annotations

import os
import sys
import traceback
from typing import Any

import torch

import wds_tensorcache as tc
from benchmarks.workloads import WORKLOADS

_NUM_PROCESSES = 8


class _Samples(torch.utils.data.Dataset[Any]):
    """Samples of the workload `diffusion`; all elements of the tensors of sample `i` are `i % 2048`."""

    def __init__(self, nbytes: int) -> None:
        workload = WORKLOADS["diffusion"]
        self.tensors, self._small = workload.split(workload.sample(0))
        self._count = nbytes // sum(tensor.nbytes for tensor in self.tensors.values())

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> Any:
        tensors = {name: torch.full_like(tensor, index % 2048) for name, tensor in self.tensors.items()}
        return WORKLOADS["diffusion"].nest(tensors, {**self._small, "index": index})


def _hold(shared: tc.SharedDataset) -> None:
    """Read every byte of all samples without a copy, and raise AssertionError if a value is wrong."""
    for index in range(len(shared)):
        tensors, small = WORKLOADS["diffusion"].split(shared[index])
        for lazy in tensors.values():
            found = lazy.load(copy=False).view(-1)
            if small["index"] != index or float(found.min()) != index % 2048 or float(found.max()) != index % 2048:
                raise AssertionError(f"sample {index} has other values")


def _pss(pid: int) -> int:
    """Return the proportional set size of a process in bytes."""
    with open(f"/proc/{pid}/smaps_rollup", encoding="ascii") as rollup:
        return next(int(line.split()[1]) for line in rollup if line.startswith("Pss:")) * 1024


def main(directory: str, nbytes: str) -> None:
    """Print the memory of this process and its 8 children in megabytes, before and after each child has read all samples.

    Args:
        directory: Folder for the shared memory.
        nbytes: Total bytes of all tensors, as a decimal number.
    """
    torch.set_num_threads(1)  # a forked process would wait forever for threads of OpenMP
    with tc.SharedDataset(_Samples(int(nbytes)), f"holders-{os.getpid()}", directory=directory) as shared:
        are_done, done = os.pipe()
        begin, begun = os.pipe()
        end, ended = os.pipe()
        children = []
        for _ in range(_NUM_PROCESSES):
            children.append(os.fork())
            if not children[-1]:
                try:
                    os.close(begun)
                    os.write(done, b".")
                    os.read(begin, 1)  # until the parent has measured
                    _hold(shared)
                    os.write(done, b".")
                    os.close(ended)
                    os.read(end, 1)  # until the parent has measured, or is gone
                    os._exit(0)
                except BaseException:
                    traceback.print_exc()
                    os._exit(1)
        os.close(done)
        totals = []
        for next_step in (begun, ended):
            if sum(len(os.read(are_done, 1)) for _ in children) == len(children):  # less if one has failed
                totals.append(sum(map(_pss, [os.getpid(), *children])) / 1e6)
            os.close(next_step)
        codes = [os.waitpid(child, 0)[1] for child in children]
    if any(codes):
        sys.exit("a process that holds the samples failed")
    print(*totals)


if __name__ == "__main__":
    main(*sys.argv[1:])
