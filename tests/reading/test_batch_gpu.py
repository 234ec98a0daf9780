"""Batches that are moved to a CUDA device, and pinned batches."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import wds_tensorcache as tc
from tests.reading.batches import assert_batch, folder_of
from tests.stalls import GPU, no_hidden_waits, stall
from wds_tensorcache.reading.transfer import copying_stream

pytestmark = GPU
COUNT = 24


def nested(i: int) -> dict[str, Any]:
    return {
        "large": torch.full((3, 50_000), float(i)),
        "half": [torch.full((7,), i).bfloat16(), f"p{i}"],
        "ragged": torch.full((1 + i % 3, 5), i),
        "empty": torch.zeros(0, 2),
        "scalar": torch.tensor(i > 3),
        "array": np.full(3, i),
    }


SAMPLES = [nested(i) for i in range(COUNT)]
folder = folder_of(SAMPLES, max_samples=7)


def on_cpu(batch: Any) -> Any:
    """Return a batch with its tensors, which must all be on the GPU, in host memory."""
    if isinstance(batch, torch.Tensor):
        assert batch.is_cuda
        return batch.cpu()
    if isinstance(batch, dict):
        return {key: on_cpu(item) for key, item in batch.items()}
    return [on_cpu(item) for item in batch] if type(batch) is list else batch


@pytest.mark.parametrize("device", ["cuda", "cuda:0", torch.device("cuda", 0)], ids=repr)
@pytest.mark.parametrize("pin", [False, True])
@pytest.mark.parametrize("io", ["auto", "pread"])
def test_the_same_as_on_the_cpu(folder: str, device: Any, pin: bool, io: str) -> None:
    numbers = [3, 17, 3, 9]
    expected = [SAMPLES[i] for i in numbers]
    with tc.open(folder, io=io) as cache:
        for view in (cache, cache.select(["half.*", "scalar", "empty", "array", "large"])):
            for _ in range(3):
                alike = [3, 3, 9, 0]  # whose ragged tensors are alike
                batch = view.read_batch(alike, device=device, pin_memory=pin)
                found = on_cpu(batch)
                assert batch["large"].device.index == 0
                assert isinstance(batch["array"], np.ndarray)
                if view is cache:
                    assert_batch([SAMPLES[i] for i in alike], found)
                assert found["half"][1] == ["p3", "p3", "p9", "p0"]
        assert_batch(expected, on_cpu(cache.read_batch(numbers, device, pin_memory=pin, collate="list")), "list")
        on_host = cache.read_batch(numbers, pin_memory=pin, collate="pad", pad_value=-1)
        padded = on_cpu(cache.read_batch(numbers, device, pin_memory=pin, collate="pad", pad_value=-1))
        assert torch.equal(padded["ragged"], on_host["ragged"])
        assert torch.equal(padded["large"], on_host["large"])
        loaded = cache.read_batch(numbers, device, pin_memory=pin, collate=list)
        assert torch.equal(loaded[1]["large"].cpu(), SAMPLES[17]["large"])
        assert loaded[2]["ragged"].is_cuda


def test_on_the_callers_stream(cache: Any) -> None:
    """The copies are late, and nothing but the hand-over makes the caller's stream wait for them."""
    stream, view = torch.cuda.Stream(), cache.select(["large"])
    rng = np.random.default_rng(0)
    numbers = [rng.integers(0, COUNT, 8) for _ in range(12)]
    with torch.cuda.stream(stream):
        expected = [torch.from_numpy(part).to("cuda", torch.float32) for part in numbers]
        wrong = torch.zeros((), dtype=torch.int64, device="cuda")
        for part, values in zip(numbers, expected, strict=True):
            stall(copying_stream("cuda"))
            batch = view.read_batch(part, device="cuda")
            wrong += (batch["large"] != values[:, None, None]).sum()
            batch["large"].fill_(-1)  # and dropped at once: its memory is taken again
            del batch
    stream.synchronize()
    assert wrong.item() == 0


def test_no_hidden_waits(cache: Any) -> None:
    view = cache.select(["large", "half.*", "scalar", "array"])
    for _ in range(2):
        with no_hidden_waits():
            batches = [view.read_batch([i, i + 1], "cuda", collate=way) for way in ("stack", "list") for i in (1, 7)]
    assert batches[1]["scalar"].tolist() == [True, True]


def test_pinned(cache: Any) -> None:
    for collate in ("stack", "list", "pad", list):
        batch = cache.select(["large", "half.*"]).read_batch([1, 2], pin_memory=True, collate=collate)
        first = batch[0] if collate is list else batch
        for tensor in (first["large"], first["half"][0]):
            for one in tensor if isinstance(tensor, list) else [tensor]:
                assert one.is_pinned()
                assert not one.is_cuda
    assert not cache.select(["large"]).read_batch([1])["large"].is_pinned()


def test_pinned_memory_is_not_reused_while_a_transfer_is_in_flight(cache: Any) -> None:
    view = cache.select(["large"])
    busy = torch.randn(6000, 6000, device="cuda")
    for _ in range(10):
        busy = busy @ busy
        busy /= busy.norm()
    # these copies wait for the work above; their sources are dropped at once
    moved = []
    for i in range(COUNT):
        moved.append(view.read_batch([i, i], pin_memory=True)["large"].to("cuda", non_blocking=True))
    torch.cuda.synchronize()
    for i, tensor in enumerate(moved):
        assert torch.equal(tensor.cpu(), torch.full((2, 3, 50_000), float(i)))
