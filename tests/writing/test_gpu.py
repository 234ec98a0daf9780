"""Builds on a CUDA device: a model that reuses its buffers, on its own stream."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import wds_tensorcache as tc
from tests.stalls import GPU, stall

pytestmark = GPU
COUNT, BATCH = 96, 8


def check(cache: Any) -> None:
    assert len(cache) == COUNT
    for i in range(COUNT):
        sample = tc.realize(cache[i])
        assert sample["latent"].device.type == "cpu"
        assert sample["latent"].dtype == torch.bfloat16
        assert (sample["latent"] == i).all()
        assert sample["more"]["number"].item() == i


@pytest.mark.parametrize("with_stream", [False, True])
def test_buffers_that_are_used_again(tmp_path: Path, with_stream: bool) -> None:
    out = torch.empty(BATCH, 16, 128, 128, device="cuda", dtype=torch.bfloat16)

    def fn(items: list[int]) -> dict[str, Any]:
        numbers = torch.tensor(items, device="cuda")
        stall(torch.cuda.current_stream())  # so that what follows is late
        out[: len(items)] = numbers[:, None, None, None].bfloat16()
        return {"latent": out[: len(items)], "more": {"number": numbers}}

    stream = torch.cuda.Stream() if with_stream else torch.cuda.current_stream()
    with torch.cuda.stream(stream):
        check(tc.build(range(COUNT), fn, tmp_path, fingerprint={}, batch_size=BATCH, fsync=False))


def test_a_captured_graph(tmp_path: Path) -> None:
    static = torch.zeros(BATCH, device="cuda")
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        made = static[:, None, None, None].expand(-1, 16, 64, 64) * 1
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = (static[:, None, None, None].expand(-1, 16, 64, 64) * 1).bfloat16()

    def fn(items: list[int]) -> dict[str, Any]:
        static.copy_(torch.tensor(items, dtype=torch.float32))
        graph.replay()
        return {"latent": made, "more": {"number": torch.tensor(items)}}

    check(tc.build(range(COUNT), fn, tmp_path, fingerprint={}, batch_size=BATCH, fsync=False))
