"""Seeds, choices and transforms are pure functions of seed, epoch and sample: in any batch, on any rank, after any resume."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import wds_tensorcache as tc
from tests.reading.batches import write as write_samples
from tests.training.draws import COUNT, Row, loaders, rows_of, write


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    base = tmp_path_factory.mktemp("draws")
    return write(base / "a", range(COUNT)), write(base / "b", range(100, 109))


@pytest.fixture
def cache(folders: tuple[str, str]) -> Any:
    return tc.open(folders[0])


def test_golden_seeds() -> None:
    """The same numbers on every machine and in every release: a changed number would break a resumed training."""
    info = tc.BatchInfo(np.arange(3), torch.zeros(3, dtype=torch.bool))
    assert info.seeds.tolist() == [7566806008162208080, 449455428235106963, 5805045986879929920]


def test_a_failing_transform_names_the_step(cache: Any) -> None:
    kinds: list[tuple[Any, dict[str, int]]] = [(tc.Loader, {}), (tc.torch_loader, {"num_workers": 1})]
    message = r"transform _fails_at_8 failed at step 2 of epoch 0, .*'008'.*ZeroDivision"
    for kind, options in kinds:
        loader = kind(cache.select("latent"), 4, transform=_fails_at_8, **options)
        iterator = iter(loader)
        next(iterator), next(iterator)
        with pytest.raises(RuntimeError, match=message):
            next(iterator)
        assert loader.state_dict()["position"]["step"] == 2
        loader = kind(cache.select("latent"), 4, transform=[_nothing], **options)
        with pytest.raises(RuntimeError, match="transform _nothing failed at step 0 of epoch 0, .* returned None"):
            next(iter(loader))
    for wrong in (3, [3], "x"):
        with pytest.raises(TypeError, match="expected a function"):
            tc.Loader(cache, 4, transform=wrong)


def _fails_at_8(batch: Any, info: tc.BatchInfo) -> Any:
    if "008" in info.keys:
        raise ZeroDivisionError
    return batch


def _nothing(batch: Any, info: tc.BatchInfo) -> None:
    batch["x"] = info.seeds


@pytest.mark.parametrize("last", ["short", "pad", "wrap"])
def test_rows_that_fill_the_last_step(cache: Any, last: str) -> None:
    """They are copies of rows of this epoch: the same sample with the same draws."""
    for epoch in range(2):
        ranks = loaders(3, 5, cache=cache, shuffle=True, last_batch=last)
        for loader in ranks:
            loader.set_epoch(epoch)
        rows: dict[str, set[Row]] = {}
        counts: Counter[str] = Counter()
        for loader in ranks:
            for batch, info in loader.with_info():
                for row in rows_of(batch, info, padding=True):
                    rows.setdefault(row.key, set()).add(row)
                    counts[row.key] += 1
        assert len(rows) == COUNT < sum(counts.values())
        assert all(len(each) == 1 for each in rows.values())


def test_a_view_has_its_own_sample_indices(cache: Any) -> None:
    """The sample index that determines draws is that in the loader's cache, which may be a view or a join."""

    def seeds(view: Any, **options: Any) -> list[int]:
        _, info = next(iter(loaders(1, COUNT, cache=view, **options)[0].with_info()))
        assert info.keys == list(view.keys())
        return info.seeds.tolist()

    expected = seeds(cache)
    assert seeds(cache.select(["latent*", "captions.*", "y"])) == expected
    for view in (cache[::2], cache[::-1], cache.filter(lambda entry: entry.key > "010"), cache[[5, 5, 5]]):
        assert seeds(view) == expected[: len(view)]
    joined = tc.join({"one": cache, "two": cache.select("y")})
    assert seeds(joined, choose={"one.text": "one.captions.*"}, transform=None, collate="list") == expected


def test_padded_rows_have_the_same_noise_in_any_batch(tmp_path: Path) -> None:
    """Also if a row is padded to another length, because longer ones are in the batch."""
    means = [torch.full((1 + i * i % 7, 3), i / 2) for i in range(COUNT)]
    write_samples(tmp_path, [{"mean": mean, "std": torch.full_like(mean, 0.5)} for mean in means], max_samples=COUNT)
    rows: dict[str, set[bytes]] = {}
    with tc.open(tmp_path) as cache:
        for size, collate in ((1, "pad"), (4, "pad"), (COUNT, "pad"), (3, "list"), (5, tc.pad(to=9))):
            transform = tc.sample_moments("mean", "std", to="latent")
            loader = tc.Loader(cache, size, shuffle=size > 3, collate=collate, transform=transform)
            for batch, info in loader.with_info():
                for key, row in zip(info.keys, batch["latent"], strict=True):
                    rows.setdefault(key, set()).add(row[: 1 + int(key) ** 2 % 7].numpy().tobytes())
    assert len(set.union(*rows.values())) == len(rows) == COUNT
