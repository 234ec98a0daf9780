"""`info.mask` and `info.shapes` after `drop_text` and `sample_moments`: those of what the batch holds."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from contextlib import closing
from typing import Any

import pytest
import torch

import wds_tensorcache as tc
from tests.reading.batches import write

EMPTY = torch.full((2, 3), -1.0)
DROP = tc.drop_text(0.5, {"cond.text": EMPTY}, mark="is_dropped")
PAD = {"cond.text": tc.pad(to=8), "*": "pad"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """16 samples with texts of 3 to 6 rows; sample 7 has none."""

    def sample(i: int) -> dict[str, Any]:
        text, mean = torch.ones(3 + i % 4, 3), torch.zeros(3 + i % 4, 2)
        moments = {"moments": torch.zeros(4, 2, 2), "mean": mean, "std": mean + 1}
        return {"cond": {"text": None if i == 7 else text}, **moments}

    return write(tmp_path_factory.mktemp("masks"), [sample(i) for i in range(16)], max_samples=16)


def lengths(batch: Any) -> list[int]:
    """Return the number of rows that are not padding, which is 0, of each text in a batch."""
    return [0 if text is None else int(text.any(1).sum()) for text in batch["cond"]["text"]]


def is_right(batch: Any, info: tc.BatchInfo) -> None:
    assert 0 < int(batch["is_dropped"].sum()) < 8
    for each in (info, pickle.loads(pickle.dumps(info)), info.to("cpu")):
        mask = each.mask("cond.text")
        assert mask.sum(1).tolist() == lengths(batch)
        assert each.shapes["cond.text"][:, 0].tolist() == lengths(batch)
        text = batch["cond"]["text"]
        assert mask.shape == (text.shape[:2] if isinstance(text, torch.Tensor) else (8, max(lengths(batch))))


def pairs(how: str, cache: Any, transform: Any, collate: Any) -> list[tuple[Any, tc.BatchInfo]]:
    options = {"collate": collate, "transform": transform}
    if how == "StepDataset":
        sampler = tc.StepSampler(cache, 8)
        dataset = tc.StepDataset(sampler, with_info=True, **options)
        return [dataset[step] for step in sampler]
    if how == "Loader":
        with tc.Loader(cache, 8, **options) as loader:
            return list(loader.with_info())
    with closing(tc.torch_loader(cache, 8, num_workers=1, **options)) as workers:
        return list(workers.with_info())


@pytest.mark.parametrize("way", [PAD, "pad", "list"], ids=str)
@pytest.mark.parametrize("how", ["Loader", "StepDataset", "torch_loader"])
def test_masks_of_loaders(cache: Any, how: str, way: Any) -> None:
    batches = pairs(how, cache, [DROP], way)
    assert len(batches) == 2
    for batch, info in batches:
        is_right(batch, info)


def test_masks_in_other_transforms(cache: Any) -> None:
    """A transform before `drop_text` gets the mask of the stored texts, one after it the mask of the batch."""

    def mask_in(name: str) -> Callable[[Any, tc.BatchInfo], Any]:
        return lambda batch, info: batch | {name: info.mask("cond.text").sum(1)}

    for batch, info in pairs("Loader", cache, [mask_in("before"), DROP, mask_in("after")], PAD):
        stored = [0 if i == 7 else 3 + i % 4 for i in info.indices.tolist()]
        assert batch["before"].tolist() == stored
        dropped = zip(stored, batch["is_dropped"], strict=True)
        assert batch["after"].tolist() == [2 if drop else n for n, drop in dropped]


def test_texts_that_samples_lack(cache: Any) -> None:
    always = tc.drop_text(1, {"cond.text": EMPTY})
    for indices, collate, expected in (([7, 7], PAD, [2, 2]), ([7, 6], "list", [0, 2])):
        batch, info = cache.read_batch_with_info(indices, collate=collate)
        always(batch, info)
        assert info.mask("cond.text").sum(1).tolist() == lengths(batch) == expected


def test_moments(cache: Any) -> None:
    transforms = [tc.sample_moments("moments"), tc.sample_moments("mean", "std", to="latent")]
    for batch, info in pairs("Loader", cache, transforms, {"mean": tc.pad(to=9), "std": tc.pad(to=9), "*": "list"}):
        for each in (info, pickle.loads(pickle.dumps(info))):
            assert each.shapes["moments"].tolist() == [[2, 2, 2]] * 8
            assert each.mask("moments").shape == (8, 2)
            assert not {"mean", "std"} & set(each.shapes)
            mask = each.mask("latent")
            assert mask.sum(1).tolist() == [3 + i % 4 for i in info.indices.tolist()]
            assert mask.shape == batch["latent"].shape[:2] == (8, 9)


def test_numbers_keep_the_shapes(cache: Any) -> None:
    batch, info = cache.read_batch_with_info(range(4), collate="list")
    before = info.mask("cond.text").tolist()
    tc.drop_text(1, {"cond.text": torch.tensor(2.0)})(batch, info)
    assert info.mask("cond.text").tolist() == before
