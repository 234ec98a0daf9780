"""Loaders with a device, as far as they need no GPU: the thread that copies, the cost of a mask, and paused threads."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import wds_tensorcache as tc
from wds_tensorcache.reading.transfer import tensors_in


@pytest.fixture
def view(cache: Any) -> Any:
    return cache.select(["x"])


class Operations(TorchDispatchMode):
    """The operations of torch in this thread."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("collate", ["stack", "list"])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_the_mask_of_padding_is_copied_with_the_batch(view: Any, collate: str, device: str) -> None:
    """The thread that trains calls no operation of torch: one would wait for a GPU."""
    loader = tc.Loader(view, 4, device=device, collate=collate, last_batch="pad")
    with Operations() as operations:
        infos = [info for _, info in loader.with_info()]
    assert all(info.is_padding.device.type == device for info in infos)
    assert [len(info.is_padding) for info in infos] == [4] * len(loader)
    assert operations.names == []


def test_pause_ends_when_all_batches_ahead_are_read(view: Any) -> None:
    read = []

    def slow(samples: list[Any]) -> int:
        time.sleep(0.05)
        read.append(len(samples))
        return len(read)

    loader = tc.Loader(view, 2, collate=slow, prefetch_batches=3)
    loader.pause()  # nothing is read yet
    batches = iter(loader)
    for number in range(3):
        next(batches)
        loader.pause()
        assert len(read) == 4 + number
    loader.close()
    loader.pause()


@dataclasses.dataclass(slots=True)
class Slotted:
    value: Any
    more: Any = None


@pytest.mark.filterwarnings("ignore:.*(beta state|prototype stage):UserWarning")
def test_all_tensors_that_a_function_returns_are_handed_over() -> None:
    """Also those that a sparse or nested tensor consists of, because torch hands over nothing that has no storage."""
    one, two, eye = torch.ones(3), torch.full((2,), 2.0), torch.eye(3)
    cyclic = Slotted([one])
    cyclic.more = cyclic
    compressed = [[1.0] * 3, [0, 1, 2], [0, 1, 2, 3]]
    blocks = [eye.flatten().tolist(), [0], [0, 1]]
    for value, expected in (
        ({"a": [one], "b": (two, one)}, [[1.0] * 3, [2.0] * 2]),
        (cyclic, [[1.0] * 3]),
        (torch.nested.nested_tensor([one, two], layout=torch.jagged), [[1.0] * 3 + [2.0] * 2, [0, 3, 5]]),
        (torch.nested.nested_tensor([one, two], layout=torch.strided), [[1.0] * 3 + [2.0] * 2]),
        (eye.to_sparse(), [[1.0] * 3, [0, 1, 2, 0, 1, 2]]),
        (eye.to_sparse_csr(), compressed),
        (eye.to_sparse_csc(), compressed),
        (eye.to_sparse_bsr((3, 3)), blocks),
        (eye.to_sparse_bsc((3, 3)), blocks),
    ):
        found = [tensor for tensor in tensors_in(value) if tensor.numel()]
        assert all(tensor.untyped_storage().data_ptr() for tensor in found)
        assert sorted(repr(tensor.flatten().tolist()) for tensor in found) == sorted(map(repr, expected))
