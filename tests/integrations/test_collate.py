"""torch's `default_collate` accepts lazy tensors, in the main process and in workers."""

from __future__ import annotations

import multiprocessing
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, default_collate

import wds_tensorcache as tc
from tests.codec.test_lazy import T, lazy_of


class Samples(torch.utils.data.Dataset):  # type: ignore[type-arg]
    def __getitem__(self, index: int) -> Any:
        return tc.decode_sample(*tc.encode_sample({"x": T + index, "y": np.arange(3), "n": index}))

    def __len__(self) -> int:
        return 4


@pytest.mark.parametrize("context", [None, "fork", "spawn"])
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")  # fork, from Python 3.12 on
def test_default_collate_in_workers(context: str | None) -> None:
    if context is not None and context not in multiprocessing.get_all_start_methods():
        pytest.skip(f"this system has no {context}")
    num_workers = {None: 0, "fork": 2, "spawn": 1}[context]  # a spawned one takes seconds to begin
    loader = DataLoader(Samples(), batch_size=2, num_workers=num_workers, multiprocessing_context=context)
    first, second = loader
    assert torch.equal(first["x"], torch.stack([T, T + 1]))
    assert torch.equal(second["x"], torch.stack([T + 2, T + 3]))
    assert torch.equal(first["y"], torch.arange(3).expand(2, 3))


def test_collating_different_shapes_is_an_error() -> None:
    with pytest.raises(RuntimeError, match=r"cannot stack LazyTensor\('@0', shape=\[3\]"):
        default_collate([lazy_of(T), lazy_of(torch.zeros(3))])
