"""Pipelines choose the alternatives that `tc.Loader` chooses, and nest the chosen tensors like `read_batch`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import wds_tensorcache as tc
from dali_plugin import TensorCacheIterator, TensorCacheSource
from dali_plugin import fn as tc_fn
from tests.dali.pipelines import pipeline
from tests.reading.batches import folder_of, write

COUNT = 10
CHOOSE = {"latent": ["latent", "flipped"], "text": "captions.*"}


def sample(i: int) -> dict[str, Any]:
    texts = [torch.full((1 + number, 2), 10 * i + number).bfloat16() for number in range(1 + i % 3)]
    latent = torch.full((3,), float(i))
    return {"latent": latent, "flipped": -latent, "captions": texts, "x": latent + 0.5, "id": i}


folder = folder_of([sample(i) for i in range(COUNT)], max_samples=4)


@pytest.fixture(params=["cache", "joined"])
def cache(request: pytest.FixtureRequest, folder: str) -> Iterator[Any]:
    with tc.open(folder) as opened:
        yield opened if request.param == "cache" else tc.join([opened])


def expected(cache: Any, epoch: int) -> list[Any]:
    loader = tc.Loader(cache, 4, shuffle=True, seed=2, choose=CHOOSE, collate={"text": "list"}, num_threads=0)
    loader.set_epoch(epoch)
    return list(loader.with_info())


def assert_same(found: Any, batch: Any) -> None:
    assert list(found) == list(batch)
    assert torch.equal(found["latent"], batch["latent"])
    assert [text.tolist() for text in found["text"]] == [text.tolist() for text in batch["text"]]
    assert found["text"][0].dtype == torch.bfloat16
    assert found["id"] == batch["id"]


def test_sources_and_pipelines(cache: Any) -> None:
    options: Any = {"shuffle": True, "seed": 2, "choose": CHOOSE}
    batches = TensorCacheIterator(pipeline(lambda: tc_fn.tensorcache(cache, **options), batch_size=4))
    for epoch in range(2):
        for found, (batch, _) in zip(batches, expected(cache, epoch), strict=True):
            assert_same(found, batch)
    source, other = (TensorCacheSource(cache, batch_size=4, **options) for _ in range(2))
    assert source.tensors == ["x", "latent", "text"]
    some = TensorCacheSource(cache, ["text", "x"], batch_size=4, **options)
    assert some.tensors == ["text", "x"]
    for iteration, (batch, info) in enumerate(expected(cache, 3)):
        parts = source.batch(3, iteration)
        assert parts[-1].tolist() == info.indices.tolist()
        outputs = dict(zip(source.outputs, parts, strict=True))
        for nesting in (source, other):  # the other one has not made the batch
            nested, extra = nesting.nest(outputs)
            assert_same(nested, batch)
            assert extra == {}
        text, x, _ = some.batch(3, iteration)
        assert x.tolist() == batch["x"].tolist()
        nested, _ = some.nest({"text": text, "number": parts[-1]})
        assert list(nested) == ["id", "text"]
        assert [each.tolist() for each in nested["text"]] == [each.tolist() for each in batch["text"]]


def test_unknown_names(cache: Any) -> None:
    with pytest.raises(tc.BatchError, match="unknown tensor"):
        TensorCacheSource(cache, batch_size=4, choose={"text": "caption.*"})
    with pytest.raises(KeyError, match="unknown tensor 'flipped'"):
        TensorCacheSource(cache, ["flipped"], batch_size=4, choose=CHOOSE)
    with pytest.raises(ValueError, match=r"'number'.*tensors"):
        TensorCacheSource(cache, batch_size=4, choose={"number": ["id"]})


def test_tensors_in_two_places(tmp_path: Path) -> None:
    """A tensor that two names share reaches DALI under both."""
    tensors = [torch.full((3,), float(i)) for i in range(8)]
    write(tmp_path, [{"x": x, "y": x if i % 2 else -x} for i, x in enumerate(tensors)])
    with tc.open(tmp_path) as cache:
        for names in (["y"], ["x", "y"]):

            def pipe(names: list[str] = names) -> Any:
                return tc_fn.tensorcache(cache, names, shuffle=False)

            rows = [row for batch in TensorCacheIterator(pipeline(pipe, batch_size=4)) for row in batch["y"].tolist()]
            assert rows == [[float(i if i % 2 else -i)] * 3 for i in range(8)]


def test_tensors_that_are_chosen_together(tmp_path: Path) -> None:
    """Tensors are paired by name: a list with a dict in any order."""
    samples = []
    for i in range(8):
        texts = [torch.tensor([i, n]) for n in range(12)]
        masks = {str(n): torch.tensor([-i, -n]) for n in ([11, 2, 0, 10, 1, *range(3, 10)] if i % 2 else range(12))}
        samples.append({"texts": texts, "masks": masks, "other": dict(zip("abcdefghijkl", texts, strict=True))})
    write(tmp_path, samples)
    choose: Any = {("text", "mask"): {("texts.0", "masks.0"): 2, ("texts.*", "masks.*"): 1}}
    with tc.open(tmp_path) as cache:
        options: Any = {"batch_size": 4, "shuffle": True, "seed": 5}
        source = TensorCacheSource(cache, ["text", "mask"], choose=choose, **options)
        loader = tc.Loader(cache, choose=choose, **options)
        for iteration, (batch, info) in enumerate(loader.with_info()):
            text, mask, _ = source.batch(0, iteration)
            assert (text.tolist(), mask.tolist()) == (batch["text"].tolist(), (-batch["text"]).tolist())
            assert info.choices.chosen("mask") == [f"masks.{n}" for n in text[:, 1].tolist()]
        source = TensorCacheSource(cache, choose={("text", "mask"): ("texts.*", "other.*")}, **options)
        with pytest.raises(tc.BatchError, match="sample '00[0-7]': 'text', 'mask' are chosen together, but"):
            source.batch(0, 0)
