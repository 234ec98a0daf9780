"""Streams of webdataset as sources."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import webdataset as wds

import dali_plugin
import wds_tensorcache as tc
from tests.dali.conftest import COUNT, sample
from tests.dali.pipelines import dali, pipeline, unbatched
from tests.same import assert_same


def stream_of(folder: Path, *stages: Any) -> Any:
    urls = [str(path) for path in sorted(folder.glob("*.tar"))]
    return wds.DataPipeline(wds.SimpleShardList(urls), wds.tarfile_to_samples(), tc.decode(), *stages)


@pytest.mark.parametrize("last_batch", ["short", "drop"])
def test_every_dtype_comes_back(folder: Path, last_batch: str) -> None:
    stream = stream_of(folder, wds.shuffle(10))
    made = pipeline(lambda: dali_plugin.fn.tensorcache(stream, members=["bin"], last_batch=last_batch))
    iterator = dali_plugin.TensorCacheIterator(made)
    for _ in range(2):
        seen = []
        for batch, others in iterator:
            for at, i in enumerate(batch["id"]):
                assert_same(sample(i), unbatched(batch, at))
                assert bytes(others["bin"][at].numpy()) == b"member %d" % i
                seen.append(i)
        assert len(seen) == len(set(seen)) == {"short": COUNT, "drop": 18}[last_batch]


@pytest.mark.parametrize(
    ("stream", "options", "error", "message"),
    [
        (stream_of, {"tensors": ["scalr"]}, KeyError, "unknown tensor 'scalr'; there are 'scalar'"),
        (stream_of, {"members": ["jpg"]}, KeyError, "unknown member 'jpg'; there are 'bin'"),
        (stream_of, {"last_batch": "pad"}, ValueError, "a stream cannot fill its last batch"),
        (stream_of, {"batch_size": 0}, ValueError, "batch_size=0"),
        ([{"__key__": "a", "jpg": b""}], {}, ValueError, r"the fields '__key__', 'jpg', expected .* in 'tensorcache'"),
        ([{"__key__": "a", "tensorcache": {"x": torch.ones(2)}}], {}, ValueError, "with lazy tensors in 'tensorcache'"),
        ([], {}, ValueError, "the stream begins with nothing"),
        (iter([{"__key__": "a"}]), {}, ValueError, "can be iterated over only once"),
        ([[{"__key__": "a"}]], {}, ValueError, r"the stream begins with \[{'__key__': 'a'}\], expected samples"),
    ],
)
def test_streams_that_are_refused(folder: Path, stream: Any, options: dict[str, Any], error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        dali_plugin.TensorCacheStream(stream(folder) if stream is stream_of else stream, **{"batch_size": 4, **options})


def test_mistakes(folder: Path) -> None:
    def made() -> Any:
        return pipeline(lambda: dali_plugin.fn.tensorcache(stream_of(folder)))

    with pytest.raises(RuntimeError, match="a stream cannot resume in the middle"):
        dali_plugin.TensorCacheIterator(made()).state_dict()
    with pytest.raises(ValueError, match="batches differ, or are unknown"):
        dali_plugin.TensorCacheIterator([made(), made()])
    with pytest.raises(ValueError, match="parallel=True needs a cache"):
        pipeline(lambda: dali_plugin.fn.tensorcache(stream_of(folder), parallel=True))
    source = dali_plugin.TensorCacheStream(stream_of(folder), batch_size=4, keep=1)
    first, second = source(0), source(1)
    with pytest.raises(RuntimeError, match="expected iteration 2, got 5"):
        source(5)
    assert source.nest({"number": second[-1]})[0]["id"] == [4, 5, 6, 7]
    with pytest.raises(RuntimeError, match="keep=1: this batch is older than .*; use a larger keep"):
        source.nest({"number": first[-1]})
    with pytest.raises(TypeError, match="not known in advance"):
        len(source)


X = torch.ones(2)


@pytest.mark.parametrize(
    ("later", "message"),
    [
        ({"x": X}, "the structures of samples 0 and 1"),
        ({"x": X.char(), "n": 1}, "tensor 'x' is torch.float32 at first, but torch.int8 in sample '1' of the stream"),
        (
            {"n": 1},
            "sample '1' of the stream has no tensor 'x'; drop such samples, .* name only tensors= and members= ",
        ),
        (
            {"x": X, "y": X, "n": 1},
            "sample '1' of the stream has tensor 'y', which the first sample lacks; .* name only tensors= ",
        ),
        (None, "sample '1' of the stream has no field 'tensorcache'; drop such samples"),
        ({"x": X, "n": 1}, "sample '1' of the stream has no member 'bin'; drop such samples"),
    ],
)
def test_samples_that_differ(tmp_path: Path, later: Any, message: str) -> None:
    path = str(tmp_path / "0.tar")
    with wds.TarWriter(path, encoder=tc.encoder()) as sink:
        sink.write({"__key__": "0", "tensorcache": {"x": X, "n": 1}, "bin": b""})
        sink.write({"__key__": "1", **({"bin": b""} if later is None else {"tensorcache": later})})
    stream = wds.DataPipeline(wds.SimpleShardList(path), wds.tarfile_to_samples(), tc.decode())
    source = dali_plugin.TensorCacheStream(stream, members=["bin"] if "member 'bin'" in message else [], batch_size=2)
    with pytest.raises(tc.BatchError, match=message):
        source.nest({"number": source(0)[-1]})


def test_permuted_batches_of_some_tensors(folder: Path) -> None:
    def nodes() -> Any:
        made = dali_plugin.fn.tensorcache(stream_of(folder), ["scalar"])
        return tuple(dali.fn.permute_batch(node, indices=[5, 4, 3, 2, 1, 0]) for node in made)

    batch = next(dali_plugin.TensorCacheIterator(pipeline(nodes)))
    assert batch["scalar"].tolist() == batch["id"] == [5, 4, 3, 2, 1, 0]
    assert batch["tensors"] == {}
    places, values = batch["cond"][0]
    assert places == [None] * 6
    assert values == {"prompt": [f"photo {i}" for i in batch["id"]], "size": [(i, 2) for i in batch["id"]]}
