"""Pipelines whose tensors are on a CUDA device."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import webdataset as wds

import dali_plugin
import wds_tensorcache as tc
from tests.dali.conftest import COUNT, sample
from tests.dali.pipelines import dali, unbatched
from tests.same import assert_same
from tests.stalls import GPU, CopyStall, no_hidden_waits, stall

pytestmark = GPU


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


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Samples of 1 MB, and of a ragged tensor of up to 1 MB."""
    path = tmp_path_factory.mktemp("large")
    with tc.ShardWriter(path / "0.tar", fsync=False) as sink:
        for i in range(96):
            ragged = torch.full((1 << 18 - i % 2,), float(i))
            sink.write(f"{i:02d}", {"x": torch.full((1 << 18,), float(i)), "ragged": ragged, "i": i})
    return path


def assert_rows(found: list[tuple[Any, list[int]]]) -> None:
    """Check that each row of a tensor, or each tensor of a list, contains the number of its sample."""
    for rows, numbers in found:
        expected = torch.tensor(numbers, dtype=torch.float32)
        assert torch.equal(torch.stack([row.amin() for row in rows]).cpu(), expected)
        assert torch.equal(torch.stack([row.amax() for row in rows]).cpu(), expected)


@pytest.mark.parametrize("name", ["x", "ragged"])
def test_pinned_memory_is_not_reused_too_early(large: Path, name: str) -> None:
    """DALI's copies are late, because another copy occupies the copy engine; meanwhile, the next batches are read."""
    made = gpu_pipeline(lambda: dali_plugin.fn.tensorcache(large, [name], device="gpu", shuffle=True), 4)
    iterator = dali_plugin.TensorCacheIterator(made)
    late = CopyStall()
    for _ in range(2):
        found = []
        for number, batch in enumerate(iterator):
            if number % 4 == 0:
                late()
            found.append((batch[name], batch["i"].tolist()))
        assert_rows(found)


@pytest.mark.parametrize("name", ["x", "ragged"])
def test_dali_is_fed_page_locked_objects(large: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    module = sys.modules["nvidia.dali.external_source"]
    prepare, fed = module._prep_data_for_feed_input, []  # type: ignore[attr-defined]

    def recorded(data: Any, *args: Any) -> Any:
        fed.append(prepare(data, *args))
        return fed[-1]

    monkeypatch.setattr(module, "_prep_data_for_feed_input", recorded)
    made = gpu_pipeline(
        lambda: dali_plugin.fn.tensorcache(large, [name], device="gpu", layouts={name: "W"}), 4, exec_dynamic=True
    )
    assert_rows([(batch[name], batch["i"].tolist()) for batch in dali_plugin.TensorCacheIterator(made)])
    tensors = [one for part in fed[::2] for one in (part if isinstance(part, list) else [part.as_tensor()])]
    assert tensors
    assert {int(one.__dlpack_device__()[0]) for one in tensors} == {3}  # DLPack's type of page-locked memory


@pytest.mark.parametrize("copy", [False, True])
def test_outputs_on_both_devices(large: Path, copy: bool) -> None:
    """A CPU output that is also copied to the GPU is page-locked, which torch cannot take by DLPack."""

    def nodes() -> Any:
        x, number = dali_plugin.fn.tensorcache(large, ["x"], pin_memory=True)
        return x, x.gpu(), number

    iterator = dali_plugin.TensorCacheIterator(gpu_pipeline(nodes, 4), outputs=["x", "there", "number"], copy=copy)
    found = [(batch, others["there"]) for batch, others in iterator]
    assert all(not batch["x"].is_cuda and there.is_cuda for batch, there in found)
    assert_rows([(batch["x"], batch["i"].tolist()) for batch, _ in found])
    assert_rows([(there, batch["i"].tolist()) for batch, there in found])


def test_outputs_that_come_back_from_the_gpu(large: Path) -> None:
    """The host waits for DALI's copy back, although the outputs are bound to a stream."""

    def nodes() -> Any:
        x, number = dali_plugin.fn.tensorcache(large, ["x"], device="gpu")
        return (x * 2).cpu(), number

    late, found = CopyStall(), []
    iterator = dali_plugin.TensorCacheIterator(gpu_pipeline(nodes, 4))
    for _ in range(len(iterator)):
        late()
        batch = next(iterator)
        found.append((batch["x"].clone() / 2, batch["i"].tolist()))
    assert_rows(found)


@pytest.mark.parametrize("exec_dynamic", [True, False])
def test_the_gpu_is_not_synchronized(large: Path, exec_dynamic: bool) -> None:
    """Work on another stream, which takes seconds, does not delay the batches."""

    def nodes() -> Any:
        return dali_plugin.fn.tensorcache(large, ["x"], device="gpu")

    options = {} if exec_dynamic else {"exec_dynamic": False}
    iterator = dali_plugin.TensorCacheIterator(gpu_pipeline(nodes, 4, **options))
    for batch in iterator:  # allocates memory, which may wait for the GPU
        batch["x"].amax(1)
    torch.cuda.synchronize()
    other = torch.cuda.Stream()
    stall(other, 20)
    found = [(batch["x"].amax(1), batch["i"].tolist()) for batch in iterator]
    assert not other.query()
    for values, numbers in found:
        assert values.tolist() == numbers


def run_times(made: Any, count: int) -> None:
    for _ in range(count):
        made.run()


def test_a_pipeline_without_the_iterator_warns_once(large: Path) -> None:
    made = gpu_pipeline(lambda: dali_plugin.fn.tensorcache(large, ["x"], device="gpu"), 4)
    with pytest.warns(UserWarning, match="without TensorCacheIterator waits for the whole GPU") as caught:
        run_times(made, 20)
    assert len([one for one in caught if "TensorCacheIterator" in str(one.message)]) == 1


@pytest.mark.parametrize("nodes", NODES.values(), ids=NODES)
def test_no_hidden_waits(folder: Path, nodes: Any) -> None:
    """Also with bools and arrays; the arrays of a batch are on the CPU."""
    iterator = dali_plugin.TensorCacheIterator(gpu_pipeline(lambda: nodes(folder)))
    for _ in range(2):
        with no_hidden_waits():
            kept = list(iterator)
    assert [i for batch in kept for i in assert_batch(batch)] == list(range(COUNT))
    assert all(isinstance(array, np.ndarray) for batch in kept for array in batch["arrays"].values())


CAPTURE = """
import sys, time, torch, dali_plugin
from nvidia.dali import pipeline_def

@pipeline_def(batch_size=4, num_threads=1, device_id=0)
def made():
    return getattr(dali_plugin.fn, sys.argv[2])(sys.argv[1], tensors=["x"], device="gpu")

iterator = dali_plugin.TensorCacheIterator(made(), copy=True)
batches = [next(iterator) for _ in range(3)]
static, graph = torch.zeros(4, device="cuda"), torch.cuda.CUDAGraph()
time.sleep(1)  # DALI reads ahead
torch.cuda.synchronize()
with torch.cuda.graph(graph, capture_error_mode="thread_local"):
    batches.clear()
    time.sleep(0.5)
    found = static + 1
graph.replay()
batch = next(iterator)
print("captured", found.tolist(), batch["x"][:, 0].tolist())
"""


@pytest.mark.parametrize("nodes", NODES)
def test_copied_batches_are_freed_while_a_graph_is_captured(large: Path, nodes: str) -> None:
    """In a separate process: without copies, a thread of DALI aborts it."""
    command = [sys.executable, "-c", CAPTURE, str(large), nodes]
    found = subprocess.run(command, capture_output=True, text=True)
    assert found.stdout == f"captured {[1.0] * 4} {[12.0, 13.0, 14.0, 15.0]}\n", found.stderr


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("nodes", NODES.values(), ids=NODES)
def test_two_gpus_in_one_process(large: Path, nodes: Any) -> None:
    """DALI takes a default stream for that of the current GPU, which is the first one throughout."""
    made = [
        dali.pipeline_def(
            lambda rank=rank: nodes(large, tensors=["x"], rank=rank, world_size=2),
            batch_size=4,
            num_threads=2,
            device_id=rank,
        )()
        for rank in range(2)
    ]
    late, found = CopyStall(), []
    for pair in dali_plugin.TensorCacheIterator(made):
        late()
        for rank, batch in enumerate(pair):
            assert batch["x"].device.index == rank
            found.append((batch["x"] * 1, batch["i"].tolist()))
    assert_rows(found)


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


def test_streams(folder: Path) -> None:
    urls = [str(path) for path in sorted(folder.glob("*.tar"))]
    stream = wds.DataPipeline(wds.SimpleShardList(urls), wds.tarfile_to_samples(), tc.decode())
    made = gpu_pipeline(lambda: dali_plugin.fn.tensorcache(stream, device="gpu"))
    assert [i for batch in dali_plugin.TensorCacheIterator(made) for i in assert_batch(batch)] == list(range(COUNT))


def test_on_another_stream(folder: Path) -> None:
    iterator = dali_plugin.TensorCacheIterator(gpu_pipeline(lambda: NODES["tensorcache"](folder)))
    with torch.cuda.stream(torch.cuda.Stream()):
        assert len([assert_batch(batch) for batch in iterator]) == len(iterator)
