"""Transforms on a GPU: the bits of the CPU, complete on the stream that uses the batch, and without hidden waits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import wds_tensorcache as tc
from tests.reading.batches import write
from tests.stalls import GPU, no_hidden_waits, stall
from wds_tensorcache.reading.transfer import copying_stream
from wds_tensorcache.training import normal as normal_module
from wds_tensorcache.training.normal import normal

pytestmark = GPU
DEVICE = "cuda"
COUNT = 26  # a last batch with padding


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    samples = []
    for i in range(COUNT):
        moments = torch.linspace(i, i + 1, 8 * 64 * 64).reshape(8, 64, 64)
        captions = [torch.full((1 + (i + k) % 5, 3), float(10 * i + k)) for k in range(1 + i % 3)]
        samples.append({"latent": moments, "flipped": moments.flip(-1), "captions": captions, "n": i})
    return write(tmp_path_factory.mktemp("transforms_gpu"), samples, max_samples=10)


def to_host(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        assert value.device.type == DEVICE
        return value.cpu()
    if isinstance(value, dict):
        return {key: to_host(one) for key, one in value.items()}
    return [to_host(one) for one in value] if isinstance(value, list) else value


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors have the same bits."""
    return one.dtype == other.dtype and torch.equal(one.cpu().view(torch.uint8), other.cpu().view(torch.uint8))


@pytest.mark.parametrize("shape", [(1,), (3, 5), (4, 128, 128), (2 * normal_module._CHUNK + 7,)], ids=str)
def test_noise_has_the_bits_of_the_cpu(shape: tuple[int, ...]) -> None:
    seeds = torch.from_numpy(np.random.default_rng(0).integers(0, 1 << 63, 40))
    expected = normal(seeds, shape, "x")
    assert same(normal(seeds.to(DEVICE), shape, "x"), expected)
    assert same(normal(seeds[7:8].to(DEVICE), shape, "x"), expected[7:8])


def test_every_integer_gives_the_quantile_of_the_cpu() -> None:
    """All pieces of the table, all places in a piece at its ends, and integers that float32 rounds."""
    steps = torch.cat([torch.arange(-300, 300), torch.arange(-(1 << 31), 1 << 31, 9973)])
    powers = ((1 << torch.arange(31))[:, None] + torch.arange(-3, 4)).flatten()
    bits = torch.cat([steps, powers, -powers]).clamp(-(1 << 31), (1 << 31) - 1).to(torch.int32)
    found = []
    for device in ("cpu", DEVICE):
        table, out = normal_module._table(torch.device(device), None), torch.empty(len(bits), device=device)
        normal_module._write_quantiles(bits.to(device), table, out)
        found.append(out)
    assert same(*found)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("is_list", [False, True])
def test_latents_have_the_bits_of_the_cpu(dtype: Any, is_list: bool) -> None:
    moments = torch.randn(6, 8, 33, 31, generator=torch.Generator().manual_seed(0)).to(dtype)
    info = tc.BatchInfo(np.arange(6), torch.zeros(6, dtype=torch.bool), 3, 0, None, None)
    found = []
    for device in ("cpu", DEVICE):
        whole = moments.to(device)
        found.append(tc.sample_moments("x")({"x": list(whole) if is_list else whole}, info)["x"])
    for one, other in zip(*found, strict=True):
        assert other.device.type == DEVICE
        assert same(one, other)
    both = [tc.sample_moments("x", logvar=True)({"x": moments.to(device)}, info)["x"] for device in ("cpu", DEVICE)]
    torch.testing.assert_close(both[0].float(), both[1].cpu().float())  # it computes in float32


def masked(batch: Any, info: tc.BatchInfo) -> Any:
    batch["mask"] = info.mask("text")
    batch["text"] = batch["text"] + 1 * batch["mask"][:, :, None]
    return batch


def loader_of(cache: Any, device: str, **options: Any) -> tc.Loader:
    drop = tc.drop_text(0.4, {"text": torch.full((1, 3), 7.0), "n": -1}, mark="is_dropped")
    transforms = [masked, tc.sample_moments("latent"), drop]
    choose = {"latent": ["latent", "flipped"], "text": "captions.*"}
    collate = {"text": tc.pad(to=5)}
    options = {"transform": transforms, "last_batch": "pad", "shuffle": True, "seed": 3} | options
    return tc.Loader(cache, 4, device=device, choose=choose, collate=collate, **options)


def plain(found: Any) -> list[tuple[Any, ...]]:
    """Return batches with their records, in values that can be compared."""
    result = []
    for batch, info in found:
        assert set(batch) == {"latent", "text", "n", "mask", "is_dropped"}
        result.append((batch, batch["n"].tolist(), info.keys, info.choices, info.seeds.tolist()))
    return result


@pytest.mark.parametrize("num_threads", [0, 2])
def test_the_same_batches_as_on_the_cpu(cache: Any, num_threads: int) -> None:
    """Choices, masks, latents and dropped texts, while the copies are late and the stream changes between batches."""
    expected = plain(loader_of(cache, "cpu").with_info())
    batches = iter(loader_of(cache, DEVICE, num_threads=num_threads).with_info())
    streams = [torch.cuda.Stream() for _ in range(2)]
    found: list[Any] = []
    for number in range(len(expected)):
        stall(copying_stream(DEVICE))
        with torch.cuda.stream(streams[number % 2]):
            batch, info = next(batches)
            mask = info.mask("text")
            kept = {name: tensor * 1 for name, tensor in batch.items() if isinstance(tensor, torch.Tensor)}
            found.append((kept | {"n": batch["n"], "again": mask * 1}, info))
            del batch
    torch.cuda.synchronize()
    for (batch, info), (like, numbers, keys, choices, seeds) in zip(found, expected, strict=True):
        assert (info.keys, info.choices, info.seeds.tolist()) == (keys, choices, seeds)
        assert batch["n"].tolist() == numbers
        on_host = to_host({name: tensor for name, tensor in batch.items() if isinstance(tensor, torch.Tensor)})
        assert torch.equal(on_host.pop("again").bool(), like["mask"])
        for name, tensor in on_host.items():
            assert same(tensor.to(like[name].dtype), like[name]), name
    assert any(batch["is_dropped"].any() for batch, _ in found)


def test_no_hidden_waits(cache: Any) -> None:
    """Not even for the first batch, for which tables and replacements are copied."""
    replaced = {"text": torch.full((1, 3), 7.0), "latent": torch.tensor(2.0)}
    transforms = [masked, tc.sample_moments("latent"), tc.drop_text(0.5, replaced, mark="is_dropped")]
    normal_module._table.cache_clear()
    with no_hidden_waits():
        batches = list(loader_of(cache, DEVICE, transform=transforms).with_info())
        for _, info in batches:
            info.mask("text")
    with no_hidden_waits():
        listed = {"x": [torch.ones(3, device=DEVICE)] * 4}
        info = tc.BatchInfo(np.arange(4), batches[0][1].is_padding, 0, 0, None, None)
        dropped = tc.drop_text(1, {"x": torch.tensor(2.0)})(listed, info)["x"]
    assert [row.tolist() for row in dropped] == [[2.0] * 3] * 4


def test_replacements_are_complete_on_every_stream() -> None:
    """The copy of a replacement is late, and a second stream uses the same transform at once."""
    streams = [torch.cuda.Stream() for _ in range(2)]
    info = tc.BatchInfo(np.arange(1), torch.zeros(1, dtype=torch.bool, device=DEVICE), 0, 0, None, None)
    for times in (0, 2):  # the first time allocates memory, which may wait for the GPU
        transform = tc.drop_text(1, {"x": torch.full((1 << 20,), 5.0 + times)})
        batches = [{"x": torch.zeros(1, 1 << 20, device=DEVICE)} for _ in streams]
        torch.cuda.synchronize()
        stall(copying_stream(DEVICE), times)
        for stream, batch in zip(streams, batches, strict=True):
            with torch.cuda.stream(stream):
                transform(batch, info)
        torch.cuda.synchronize()
        for batch in batches:
            assert batch["x"].unique().tolist() == [5.0 + times]
