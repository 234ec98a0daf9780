"""Through real DALI pipelines on the CPU and back: bit for bit, in the structure that was written."""

from __future__ import annotations

import gc
import importlib
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import dali_plugin
import wds_tensorcache as tc
from tests.children import run_in_child
from tests.dali.conftest import COUNT, DTYPES, sample
from tests.dali.pipelines import dali, pipeline, unbatched
from tests.reading.batches import write
from tests.same import assert_same

LATENT = "tensors.float32"


@pytest.mark.parametrize("depth", [1, 2, {"cpu_size": 3, "gpu_size": 2}], ids=str)
@pytest.mark.parametrize("nodes", ["tensorcache", "native_reader"])
def test_every_dtype_comes_back_and_stays(cache: Any, nodes: str, depth: Any) -> None:
    made = pipeline(lambda: getattr(dali_plugin.fn, nodes)(cache, shuffle=depth != 2), prefetch_queue_depth=depth)
    iterator = dali_plugin.TensorCacheIterator(made, copy=depth == 2)
    assert len(iterator) == 4
    for _ in range(2):
        kept = list(iterator)
        numbers = [i for batch in kept for i in batch["id"]]
        assert (numbers if depth == 2 else sorted(numbers)) == list(range(COUNT))
        for batch in kept:
            for at, i in enumerate(batch["id"]):
                assert_same(sample(i), unbatched(batch, at))


@pytest.mark.parametrize("exec_dynamic", [False, True])
def test_empty_tensors_come_back(tmp_path: Path, exec_dynamic: bool) -> None:
    empty = {name: torch.empty(2, 0, dtype=getattr(torch, name)) for name in DTYPES}
    write(tmp_path, [empty])
    empty_pipeline = pipeline(lambda: dali_plugin.fn.tensorcache(tmp_path), exec_dynamic=exec_dynamic)
    assert_same(empty, unbatched(next(dali_plugin.TensorCacheIterator(empty_pipeline)), 0, empty))


@pytest.mark.parametrize("last_batch", ["short", "pad", "wrap", "drop"])
def test_last_batches_and_members(cache: Any, last_batch: str) -> None:
    iterator = dali_plugin.TensorCacheIterator(
        pipeline(lambda: dali_plugin.fn.tensorcache(cache, ["scalar"], ["bin"], shuffle=True, last_batch=last_batch))
    )
    orders = []
    for _ in range(2):
        sizes, seen, padding = [], [], []
        for batch, others in iterator:
            padding += iterator.is_padding.tolist()
            sizes.append(len(batch["scalar"]))
            seen += list(batch["id"])
            assert batch["scalar"].tolist() == batch["id"]
            assert list(batch) == ["tensors", "arrays", "cond", "id", "scalar"]
            assert batch["tensors"] == {}  # as with select
            assert [bytes(raw.numpy()) for raw in others["bin"]] == [b"member %d" % i for i in batch["id"]]
        orders.append(seen)
        assert sizes == {"short": [6, 6, 6, 2], "drop": [6] * 3}.get(last_batch, [6] * 4)
        assert padding == [False] * 20 + [True] * 4 if last_batch == "pad" else not any(padding)
        assert len(set(seen)) == (18 if last_batch == "drop" else COUNT)
    assert orders[0] != orders[1]


def test_augmented_tensors_take_the_place_of_the_originals(cache: Any) -> None:
    def nodes() -> Any:
        latent, flag, array, number = dali_plugin.fn.tensorcache(cache, [LATENT, "tensors.bool", "arrays.0"])
        changed = dali.fn.cast(flag, dtype=dali.types.FLOAT), dali.fn.cast(array * 255, dtype=dali.types.UINT8)
        return number, dali.fn.slice(latent, 1, 2, axes=[1]), *changed, dali.fn.cast(number, dtype=dali.types.FLOAT)

    names = ["number", LATENT, "tensors.bool", "arrays.0", "other"]
    batch, others = next(dali_plugin.TensorCacheIterator(pipeline(nodes), outputs=names))
    assert torch.equal(others["other"], torch.arange(6.0))
    expected = torch.stack([sample(i)["tensors"]["float32"][:, 1:] for i in range(6)])
    assert torch.equal(batch["tensors"]["float32"].view(torch.int32), expected.view(torch.int32))
    # bools that operators have changed to another dtype keep it; those of another number than 1 are bools
    assert torch.equal(batch["tensors"]["bool"], torch.stack([sample(i)["tensors"]["bool"] for i in range(6)]).float())
    assert int(batch["arrays"]["0"].view("u1").max()) == 1
    assert batch["arrays"]["0"].tolist() == [sample(i)["arrays"]["0"].tolist() for i in range(6)]


@pytest.mark.long
# DALI leaves the sockets that its workers are reached by to the garbage collector
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning", "ignore::ResourceWarning")
def test_worker_processes(cache: Any) -> None:
    made = pipeline(
        lambda: dali_plugin.fn.tensorcache(cache, ["cond.0.0", "scalar"], ["bin"], parallel=True),
        py_num_workers=1,
        py_start_method="spawn",
    )
    iterator = dali_plugin.TensorCacheIterator(made)
    for _ in range(2):
        seen = []
        for batch, others in iterator:
            for at, i in enumerate(batch["id"]):
                assert_same(sample(i)["cond"][0][0], batch["cond"][0][0][at])
                assert bytes(others["bin"][at].numpy()) == b"member %d" % i
                seen.append(i)
        assert sorted(set(seen)) == list(range(COUNT))
        assert len(seen) == COUNT
    del iterator, made, batch, others
    gc.collect()


def test_shards_of_other_writers_and_two_pipelines(folder: Path, tmp_path: Path) -> None:
    for path in folder.glob("*.tar"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    with tc.open(str(tmp_path / "*.tar")) as bare:
        assert not list(tmp_path.glob("*.idx"))

        def rank(number: int) -> Any:
            return pipeline(
                lambda: dali_plugin.fn.tensorcache(bare, ["scalar"], rank=number, world_size=2, last_batch="drop"), 5
            )

        seen = [n for pair in dali_plugin.TensorCacheIterator([rank(0), rank(1)]) for b in pair for n in b["id"]]
        assert sorted(seen) == list(range(COUNT))


def test_joined_caches_and_views_with_repeated_samples(cache: Any, tmp_path: Path) -> None:
    view = cache[[*range(3)] * 2]
    made = pipeline(lambda: dali_plugin.fn.tensorcache(view, ["scalar"]))
    assert [i for batch in dali_plugin.TensorCacheIterator(made) for i in batch["id"]] == [0, 1, 2] * 2
    keys = reversed(list(cache.keys()))
    texts = {key: {"caption": torch.tensor([int(key)]), "words": f"number {int(key)}"} for key in keys}
    captions = tc.open(write(tmp_path, texts))
    for joined, names in (
        (tc.join([cache, captions]), ["scalar", "caption"]),
        (tc.join({"a": cache, "b": captions}), ["a.scalar", "b.caption"]),
    ):
        batch = next(
            dali_plugin.TensorCacheIterator(pipeline(lambda j=joined, n=names: dali_plugin.fn.tensorcache(j, n)))
        )
        first, second = (batch["a"], batch["b"]) if "a" in batch else (batch, batch)
        assert first["scalar"].tolist() == second["caption"].flatten().tolist() == list(range(6))
        assert second["words"] == [f"number {i}" for i in range(6)]
    captions.close()


def test_mistakes(cache: Any) -> None:
    tensorcache, iterator = dali_plugin.fn.tensorcache, dali_plugin.TensorCacheIterator
    external = dali.fn.external_source
    source = dali_plugin.TensorCacheSource(cache, ["scalar"], batch_size=6)
    others = dali_plugin.TensorCacheSource(cache, ["scalar"], batch_size=4)
    for nodes, error, message in (
        (lambda: tensorcache(others), ValueError, "batches of 4 for a pipeline of batch_size=6"),
        (lambda: tensorcache(cache, batch_size=3), ValueError, "batches of 3 for a pipeline of batch_size=6"),
        (lambda: tensorcache(cache, device="cuda"), ValueError, "device='cuda', expected 'cpu' or 'gpu'"),
        (
            lambda: (*tensorcache(cache), *tensorcache(cache)),
            ValueError,
            "already reads a cache; to read several, join",
        ),
        (lambda: tensorcache(source, ["scalar"]), TypeError, "has its tensors, members and options already"),
        (lambda: tensorcache(source, shuffle=True), TypeError, "has its tensors, members and options already"),
        (lambda: tensorcache(cache, layouts={"y": "CHW"}), KeyError, "unknown tensor of this source 'y'"),
        (lambda: dali_plugin.fn.native_reader(cache, ["scalar"]), ValueError, "pass names of tensors as tensors="),
        (lambda: tuple(external(source, num_outputs=2)), TypeError, "int, not BatchInfo; .*batch_info=True"),
        (
            lambda: tuple(external(source, num_outputs=2, batch=False)),
            TypeError,
            "SampleInfo, not BatchInfo; .*batch=True",
        ),
    ):
        with pytest.raises(error, match=message):
            pipeline(nodes).run()
    made, other = pipeline(lambda: tensorcache(cache, ["scalar"])), pipeline(lambda: tensorcache(cache))
    foreign = pipeline(lambda: dali.fn.random.uniform())
    for pipes, options, error, message in (
        ([], {}, ValueError, "expected a pipeline"),
        ([made, made], {}, ValueError, "a list of different pipelines"),
        ([made, other], {"source": source}, ValueError, "source= is for a single pipeline"),
        (test_mistakes, {}, TypeError, "call the function that @pipeline_def decorates"),
        (foreign, {}, ValueError, r"does not use dali_plugin\.fn"),
        (made, {"outputs": "scalar"}, ValueError, "'number' among them; the pipeline must also return this node"),
    ):
        with pytest.raises(error, match=message):
            iterator(pipes, **options)
    with pytest.raises(ValueError, match="the pipeline has 2 outputs, but 3 names"):
        next(iterator(made, outputs=["scalar", "x", "number"]))
    with pytest.raises(RuntimeError, match="call it in the function that @pipeline_def decorates"):
        tensorcache(cache)
    with pytest.raises(KeyError, match="no 'number' among scalar"):
        source.nest({"scalar": torch.arange(6)})
    with pytest.raises(TypeError, match="'number' is of float32, expected the sample indices.* have the order"):
        next(iterator(pipeline(lambda: tensorcache(cache, [LATENT])), outputs=["number", LATENT]))


def test_a_misspelled_output_warns(cache: Any) -> None:
    def nodes() -> Any:
        return dali_plugin.fn.tensorcache(cache, ["scalar", LATENT])

    for typo in ("scalr", "scalars"):
        with pytest.warns(UserWarning, match=rf"has {typo!r}, .* lacks 'scalar'; is this a typo"):
            dali_plugin.TensorCacheIterator(pipeline(nodes), outputs=[typo, LATENT, "number"])
    for names in (["scalar", "scalars", "number"], ["other", LATENT, "number"]):  # each ends in an error if it warns
        dali_plugin.TensorCacheIterator(pipeline(nodes), outputs=names)


def test_bfloat16_that_operators_compute_with(tmp_path: Path) -> None:
    values = torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(4, -1).view(torch.bfloat16)  # every one there is
    with tc.open(write(tmp_path, [{"x": values[i], "i": i} for i in range(4)])) as cache:
        batch = next(
            dali_plugin.TensorCacheIterator(pipeline(lambda: dali_plugin.fn.tensorcache(cache, as_float=["x"]), 4))
        )
        assert torch.equal(batch["x"].view(torch.int32), values.view(torch.int16).int() << 16)

        def doubled() -> Any:
            x, number = dali_plugin.fn.tensorcache(cache, as_float=["x"])
            return x * 2.0, number

        batch = next(dali_plugin.TensorCacheIterator(pipeline(doubled, 4)))
        assert torch.equal(batch["x"].nan_to_num(), (values.float() * 2).nan_to_num())


@pytest.mark.parametrize("name", ["tensors.bfloat16", "tensors.float8_e4m3fn", "tensors.complex64", "arrays.12"])
def test_operators_that_compute_with_bits(cache: Any, name: str) -> None:
    def nodes() -> Any:
        bits, number = dali_plugin.fn.tensorcache(cache, [name])
        return dali.fn.cast(bits, dtype=dali.types.FLOAT), number

    with pytest.raises(TypeError, match=rf"tensor '{name}' is .*, which DALI lacks, .*float32\[6, "):
        next(dali_plugin.TensorCacheIterator(pipeline(nodes)))


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_without_dali() -> None:
    """The source works, the rest says what to install."""

    def work() -> None:
        for name in [*sys.modules]:
            if name.partition(".")[0] in ("dali_plugin", "nvidia"):
                del sys.modules[name]
        sys.modules["nvidia"] = None  # type: ignore[assignment]  # each import of it is an ImportError
        plugin = importlib.import_module("dali_plugin")
        assert plugin.TensorCacheSource is not dali_plugin.TensorCacheSource
        with pytest.raises(ImportError, match="this needs NVIDIA DALI: pip install nvidia-dali-cuda130"):
            _ = plugin.fn

    assert run_in_child(work) == 0


def test_pipelines_that_share_a_source(tmp_path: Path) -> None:
    """Each pipeline has its own layouts, dtypes and order of iterations, as if the source or stream were its own."""
    image = torch.arange(12.0).view(1, 3, 4)
    write(tmp_path, [{"image": image, "text": torch.full((3,), float(i)).bfloat16(), "i": i} for i in range(8)])

    def made(source: Any, **options: Any) -> Any:
        def nodes() -> Any:
            image, text, number = dali_plugin.fn.tensorcache(source, **options)
            return dali.fn.flip(image, horizontal=1) if "layouts" in options else image, text, number

        return dali_plugin.TensorCacheIterator(pipeline(nodes, 4), source if options else None)

    source = dali_plugin.TensorCacheSource(tmp_path, batch_size=4)
    ways: list[dict[str, Any]] = [{"layouts": {"image": "CHW"}}, {}, {"as_float": ["text"]}, {"as_float": ["text"]}]
    for begin, batches in zip((0, 4), zip(*[made(source, **way) for way in ways], strict=True), strict=True):
        texts = torch.arange(begin, begin + 4.0)[:, None].expand(4, 3)
        for batch, way in zip(batches, ways, strict=True):
            assert torch.equal(batch["image"], (image.flip(2) if "layouts" in way else image).expand(4, 1, 3, 4))
            assert_same((texts if "as_float" in way else texts.bfloat16()).contiguous(), batch["text"])
            assert batch["i"] == list(range(begin, begin + 4))
    # the caller's source is as it was, and can be used itself
    assert source.as_float == ()
    batch, _ = source.nest(dict(zip(source.outputs, source.batch(0, 1), strict=True)))
    assert (batch["text"].dtype, batch["i"]) == (torch.bfloat16, [4, 5, 6, 7])
    with tc.open(tmp_path) as cache:
        samples = [{"__key__": str(i), "tensorcache": cache[i]} for i in range(8)]
        stream = dali_plugin.TensorCacheStream(samples, batch_size=4)
        pairs = zip(made(stream), made(stream, as_float=["text"]), strict=True)
        assert [[batch["i"] for batch in pair] for pair in pairs] == [[[0, 1, 2, 3]] * 2, [[4, 5, 6, 7]] * 2]


def test_batches_that_another_process_made_or_that_came_before(cache: Any) -> None:
    source = dali_plugin.TensorCacheSource(cache, batch_size=4, keep=2, shuffle=True)
    made = [dict(zip(source.outputs, source.batch(0, at), strict=True)) for at in range(5)]
    other = dali_plugin.TensorCacheSource(cache, batch_size=4)
    for outputs in (*made, *made[::-1]):
        for filling in (source, other):
            batch, _ = filling.nest(dict(outputs))
            for at, number in enumerate(outputs["number"].tolist()):
                assert_same(sample(number), unbatched(batch, at))
