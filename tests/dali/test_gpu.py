"""Pipelines whose tensors are on a CUDA device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import webdataset as wds

import dali_plugin
import wds_tensorcache as tc
from tests.dali.conftest import COUNT, sample
from tests.dali.pipelines import dali, unbatched
from tests.same import assert_same

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason=f"torch {torch.__version__} sees no CUDA device"),
]


def gpu_pipeline(function: Any, batch_size: int = 6, **options: Any) -> Any:
    return dali.pipeline_def(function, batch_size=batch_size, num_threads=2, device_id=0, **options)()


def tensors_of(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    values = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return [tensor for one in values for tensor in tensors_of(one)]


def assert_batch(batch: Any) -> list[int]:
    """Check that a batch's tensors are on the GPU and what was written; return which samples it has."""
    assert tensors_of(batch)
    assert all(tensor.is_cuda for tensor in tensors_of(batch))
    on_host = _to_host(batch)
    for at, i in enumerate(batch["id"]):
        assert_same(sample(i), unbatched(on_host, at))
    return list(batch["id"])


def _to_host(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.cpu()
    if isinstance(value, dict):
        return {key: _to_host(one) for key, one in value.items()}
    return type(value)(map(_to_host, value)) if type(value) in (list, tuple) else value


NODES = {
    "tensorcache": lambda folder, **options: dali_plugin.fn.tensorcache(folder, device="gpu", **options),
    "native_reader": lambda folder, **options: dali_plugin.fn.native_reader(folder, device="gpu", **options),
}


@pytest.mark.parametrize("nodes", NODES.values(), ids=NODES)
@pytest.mark.parametrize("depth", [1, 2, 5])
def test_every_dtype_comes_back_and_stays(folder: Path, nodes: Any, depth: int) -> None:
    made = gpu_pipeline(lambda: nodes(folder, shuffle=True, last_batch="short"), prefetch_queue_depth=depth)
    iterator = dali_plugin.TensorCacheIterator(made)
    for _ in range(3):
        kept = list(iterator)
        assert sorted(i for batch in kept for i in assert_batch(batch)) == list(range(COUNT))


def test_pinned_memory_is_not_reused_too_early(tmp_path: Path) -> None:
    """Large batches, read while earlier ones are on their way; a slow consumer on the GPU."""
    with tc.ShardWriter(tmp_path / "0.tar", fsync=False) as sink:
        for i in range(64):
            sink.write(f"{i:02d}", {"x": torch.full((1 << 18,), float(i)), "i": i})
    made = gpu_pipeline(lambda: dali_plugin.fn.tensorcache(tmp_path, device="gpu", shuffle=True), 8)
    iterator = dali_plugin.TensorCacheIterator(made)
    busy = torch.randn(2048, 2048, device="cuda")
    for _ in range(6):
        kept = []
        for batch in iterator:
            busy = torch.nn.functional.normalize(busy @ busy)
            kept.append((batch["x"], list(batch["i"])))
        for x, numbers in kept:
            expected = torch.tensor(numbers, dtype=torch.float32)
            assert torch.equal(x.amin(1).cpu(), expected)
            assert torch.equal(x.amax(1).cpu(), expected)


def test_augmented_and_computed(folder: Path) -> None:
    def nodes() -> Any:
        latent, text, number = dali_plugin.fn.tensorcache(
            folder, ["tensors.float16", "tensors.bfloat16"], device="gpu", as_float=["tensors.bfloat16"]
        )
        return dali.fn.slice(latent, 1, 2, axes=[1]), text, number

    iterator = dali_plugin.TensorCacheIterator(
        gpu_pipeline(nodes), outputs=["tensors.float16", "tensors.bfloat16", "number"]
    )
    tensors = next(iterator)["tensors"]
    originals = [sample(i)["tensors"] for i in range(6)]
    half = torch.stack([one["float16"][:, 1:] for one in originals])
    assert torch.equal(tensors["float16"].cpu().view(torch.int16), half.view(torch.int16))
    text = torch.stack([one["bfloat16"] for one in originals]).float()
    assert torch.equal(tensors["bfloat16"].cpu().view(torch.int32), text.view(torch.int32))


@pytest.mark.parametrize("nodes", NODES.values(), ids=NODES)
def test_resumed(folder: Path, nodes: Any) -> None:
    def begun() -> Any:
        made = gpu_pipeline(lambda: nodes(folder, tensors=["scalar"], shuffle=True), enable_checkpointing=True)
        return dali_plugin.TensorCacheIterator(made)

    whole = [batch["scalar"].tolist() for batch in begun()]
    for count in range(1, len(whole)):
        first, second = begun(), begun()
        head = [next(first)["scalar"].tolist() for _ in range(count)]
        second.load_state_dict(first.state_dict())
        assert head + [batch["scalar"].tolist() for batch in second] == whole


def test_streams(folder: Path) -> None:
    urls = [str(path) for path in sorted(folder.glob("*.tar"))]
    stream = wds.DataPipeline(wds.SimpleShardList(urls), wds.tarfile_to_samples(), tc.decode())
    made = gpu_pipeline(lambda: dali_plugin.fn.tensorcache(stream, device="gpu"))
    assert [i for batch in dali_plugin.TensorCacheIterator(made) for i in assert_batch(batch)] == list(range(COUNT))


def test_on_another_stream(folder: Path) -> None:
    iterator = dali_plugin.TensorCacheIterator(gpu_pipeline(lambda: NODES["tensorcache"](folder)))
    with torch.cuda.stream(torch.cuda.Stream()):
        assert len([assert_batch(batch) for batch in iterator]) == len(iterator)
