"""Tests that need a CUDA device: tensors stored from it, and loaded to it."""

from __future__ import annotations

import torch
from torch.utils.data._utils.pin_memory import pin_memory

import wds_tensorcache as tc
from tests.stalls import GPU

pytestmark = GPU


def test_cuda_tensors_are_stored_by_value() -> None:
    tensor = torch.randn(2, 3, device="cuda", requires_grad=True)
    loaded = tc.decode_sample(*tc.encode_sample(tensor), lazy=False)
    assert loaded.device.type == "cpu"
    assert torch.equal(loaded, tensor.detach().cpu())


def test_loading_to_a_device() -> None:
    lazy = tc.decode_sample(*tc.encode_sample({"x": torch.arange(6.0)}))
    assert torch.equal(lazy["x"].load("cuda").cpu(), torch.arange(6.0))
    assert tc.realize(lazy, device="cuda")["x"].is_cuda
    assert (lazy["x"].to("cuda") + 1).is_cuda
    out = torch.zeros(6, device="cuda")
    assert lazy["x"].load(out=out) is out
    assert out.cpu().tolist() == list(range(6))
    with torch.device("cuda"):
        assert lazy["x"].load().device.type == "cpu"


def test_pinning() -> None:
    lazy = tc.decode_sample(*tc.encode_sample({"x": torch.arange(6.0)}))
    pinned = pin_memory(lazy)["x"]
    assert pinned.is_pinned()
    assert torch.equal(pinned, torch.arange(6.0))
