"""Loaders whose batches are on a GPU: complete on the stream that uses them, without hidden waits."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

import wds_tensorcache as tc
from tests.reading.batches import write
from tests.stalls import GPU, no_hidden_waits, stall
from wds_tensorcache.reading.batch.batch_memory import to_device
from wds_tensorcache.reading.transfer import Transfer, copying_stream

pytestmark = GPU
COUNT = 26  # a last batch with padding


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    samples: list[Any] = [{"large": torch.full((3, 50_000), float(i)), "i": i} for i in range(COUNT)]
    for i in range(1, COUNT, 2):
        samples[i]["mask"] = torch.full((1 << 20,), i)
    return write(tmp_path_factory.mktemp("loader_gpu"), samples, max_samples=10)


def stacked(samples: list[Any]) -> dict[str, Any]:
    return {"large": torch.stack([sample["large"] for sample in samples]) * 1}


def assert_values(found: list[tuple[torch.Tensor, tc.BatchInfo]]) -> None:
    """Check the smallest and the largest value of each row, and the masks of padding."""
    torch.cuda.synchronize()
    assert sum(len(info.indices) for _, info in found) == 28
    for extremes, info in found:
        assert extremes.tolist() == [[float(i), float(i)] for i in info.indices.tolist()]
        assert info.is_padding.is_cuda
        assert info.is_padding.tolist() == [info is found[-1][1] and at > 1 for at in range(len(info.indices))]


def extremes_of(batch: Any) -> torch.Tensor:
    rows = batch["large"].flatten(1)
    return torch.stack([rows.amin(1), rows.amax(1)], 1)


@pytest.mark.parametrize("num_threads", [0, 2])
@pytest.mark.parametrize("collate", ["stack", stacked])
def test_a_batch_is_complete_on_the_stream_that_uses_it(cache: Any, num_threads: int, collate: Any) -> None:
    """The copies are late, and the loop begins on another stream than the one that uses the batches."""
    view = cache.select(["large"])
    loader = tc.Loader(view, 4, device="cuda", num_threads=num_threads, collate=collate, last_batch="pad")
    found = []
    batches = iter(loader.with_info())
    stream, other = torch.cuda.Stream(), torch.cuda.Stream()
    for number in range(len(loader)):
        stall(copying_stream("cuda"))
        with torch.cuda.stream(stream if number % 2 else other):
            batch, info = next(batches)
            found.append((extremes_of(batch), info))
            del batch
    assert_values(found)


@pytest.mark.parametrize("collate", ["stack", stacked])
def test_memory_is_not_reused_while_a_stream_that_is_behind_needs_it(cache: Any, collate: Any) -> None:
    view = cache.select(["large"])
    loader = tc.Loader(view, 4, device="cuda", prefetch_batches=1, collate=collate, last_batch="pad")
    found = []
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for batch, info in loader.with_info():
            stall(stream)
            found.append((extremes_of(batch), info))
            del batch
    assert_values(found)


def test_a_batch_waits_for_its_own_copies_alone(cache: Any) -> None:
    loader = tc.Loader(cache.select(["large"]), 4, device="cuda", prefetch_batches=1)
    for batch in loader:  # allocates memory, which may wait for the GPU
        del batch
    torch.cuda.synchronize()
    batches = iter(loader)
    next(batches)
    loader.pause()
    torch.cuda.synchronize()
    stall(copying_stream("cuda"), 8)
    batch = next(batches)  # its copies ended before; those of the batch after the next wait
    loader.pause()
    assert batch["large"].amax().item() == 7
    assert not copying_stream("cuda").query()
    torch.cuda.synchronize()


@pytest.mark.parametrize("collate", ["stack", "list", "pad", stacked])
def test_no_hidden_waits(cache: Any, collate: Any) -> None:
    loader = tc.Loader(cache.select(["large"]), 4, device="cuda", shuffle=True, collate=collate, last_batch="pad")
    for _ in loader.with_info():
        pass
    with no_hidden_waits():
        infos = [info for _, info in loader.with_info()]
    assert infos[-1].is_padding.tolist() == [False, False, True, True]


def test_a_record_that_a_trainer_moves_does_not_wait(cache: Any) -> None:
    infos = [info for _, info in tc.Loader(cache.select(["large"]), 4, last_batch="pad").with_info()]
    infos[0].to("cuda")
    with no_hidden_waits():
        moved = [info.to("cuda") for info in infos]
        again = [info.to("cuda") for info in moved]
    for info, other in zip(infos, again, strict=True):
        assert other.is_padding.is_cuda
        assert info == other


def test_a_tensor_outside_the_batch_does_not_wait_for_earlier_copies() -> None:
    """As a tensor that only some samples have, which a function gets."""
    source = torch.ones(1 << 23)
    for times in (0, 4):  # the first time allocates memory, which may wait for the GPU
        torch.cuda.synchronize()
        stall(copying_stream("cuda"), times)
        transfer = Transfer("cuda")
        with transfer.copying():
            moved = to_device(source, False, "cuda")
    assert not copying_stream("cuda").query()
    transfer.hand_over()
    assert moved.sum().item() == 1 << 23


def test_a_function_runs_on_the_copying_stream_and_sees_what_was_made_before_the_loop(cache: Any) -> None:
    streams = []
    stall(torch.cuda.current_stream(), 2)
    offset = torch.full((), 5.0, device="cuda").mul(20)  # late

    def shifted(samples: list[Any]) -> torch.Tensor:
        streams.append(torch.cuda.current_stream())
        return torch.stack([sample["large"][0, 0] for sample in samples]) + offset

    found = torch.cat(list(tc.Loader(cache.select(["large"]), 13, device="cuda", collate=shifted)))
    assert found.tolist() == [100.0 + i for i in range(COUNT)]
    assert set(streams) == {copying_stream("cuda")}


def test_graphs_are_captured_while_the_threads_pause(cache: Any) -> None:
    def slow(samples: list[Any]) -> torch.Tensor:
        time.sleep(0.3)
        torch.cuda.synchronize()  # breaks a capture
        return stacked(samples)["large"]

    loader = tc.Loader(cache.select(["large"]), 4, device="cuda", collate=slow)
    batches = iter(loader)
    next(batches)
    loader.pause()
    static, graph = torch.zeros(4, device="cuda"), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        time.sleep(0.6)
        made = static + 1
    static.fill_(2)
    graph.replay()
    assert made.tolist() == [3.0] * 4
    assert [len(batch) for batch in batches] == [4] * 5 + [2]
