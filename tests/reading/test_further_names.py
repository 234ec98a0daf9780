"""One tensor in several places of a sample: each place is a name, and the bytes are stored once."""

from __future__ import annotations

import dataclasses
import pickle
from collections.abc import Iterator
from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import wds_tensorcache as tc
from tests.reading.batches import write
from tests.shards.footers import forge_names

COUNT = 6


@dataclasses.dataclass
class Box:
    """A class that skeletons name."""

    x: Any


def latent(i: int) -> torch.Tensor:
    return torch.tensor([i, i + 100], dtype=torch.float32)


def flipped(i: int) -> torch.Tensor:
    return latent(i) if i % 2 else latent(i).flip(-1)


def sample(i: int) -> dict[str, Any]:
    """Samples with an odd number have one tensor under two names, since flipping it would not change it."""
    x = latent(i)
    return {"latent": x, "n": i, "latent_flipped": x if i % 2 else flipped(i)}


def rows(values: Any) -> list[list[float]]:
    return [value.tolist() for value in values]


FLIPPED = [flipped(i).tolist() for i in range(COUNT)]


@pytest.fixture(params=["shards", "shared", "joined", "no footer"])
def cache(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Any]:
    samples = [sample(i) for i in range(COUNT)]
    if request.param == "shared":
        with tc.SharedDataset(samples, f"names-{tmp_path.name}", directory=tmp_path) as shared:
            list(shared)  # names of tensors are known of loaded samples
            yield shared
        return
    with tc.open(write(tmp_path / "c", samples, max_samples=4, footer=request.param != "no footer")) as opened:
        yield tc.join([opened]) if request.param == "joined" else opened


def test_batches(cache: Any) -> None:
    for numbers in ([1, 3], [0, 2], [1, 0, 5], [0, 1], range(COUNT)):
        expected = [FLIPPED[i] for i in numbers]
        for collate in ("stack", "list", "pad"):
            batch = cache.read_batch(numbers, collate=collate)
            assert rows(batch["latent_flipped"]) == expected
            assert rows(batch["latent"]) == [latent(i).tolist() for i in numbers]
            assert list(batch) == ["latent", "n", "latent_flipped"]
        view = cache.select(["latent_flipped"])
        assert rows(view.read_batch(numbers)["latent_flipped"]) == expected
        assert set(view.read_batch(numbers)) == {"latent_flipped", "n"}
        assert rows(view.read_tensors(numbers)["latent_flipped"]) == expected
        assert rows(one["latent_flipped"] for one in view.read_batch(numbers, collate=list)) == expected
        assert rows(cache.nest(numbers, view.read_tensors(numbers))["latent_flipped"]) == expected
    batch = cache.read_batch([1, 3], collate={"latent_flipped": "list"})
    assert rows(batch["latent_flipped"]) == [FLIPPED[1], FLIPPED[3]]
    assert (type(batch["latent"]), batch["n"]) == (torch.Tensor, [1, 3])


def test_samples(cache: Any) -> None:
    view = cache.select("latent_flipped")
    for i in range(COUNT):
        whole, part = tc.realize(cache[i]), tc.realize(view[i])
        assert whole["latent_flipped"].tolist() == FLIPPED[i] == part["latent_flipped"].tolist()
        assert list(part) == ["n", "latent_flipped"]
        assert (whole["latent_flipped"] is whole["latent"]) is bool(i % 2)
        assert list(tc.flatten(cache[i])) == ["latent", "latent_flipped"]
        assert list(tc.flatten(view[i])) == ["latent_flipped"]
    (one,) = cache.select("*").read_batch([3], collate=list)
    assert one["latent"] is one["latent_flipped"]


def test_schema_filter_and_shapes(cache: Any) -> None:
    schema = cache.schema["latent_flipped"]
    assert (schema.name, schema.num_samples) == ("latent_flipped", COUNT)
    assert list(cache.select("latent_flipped").schema) == ["latent_flipped"]
    assert cache.describe().tensors["latent_flipped"].num_samples == COUNT
    assert len(cache.filter(lambda entry: entry.shapes["latent_flipped"] == (2,))) == COUNT
    _, info = cache.read_batch_with_info([1, 0])
    assert info.shapes["latent_flipped"].tolist() == [[2], [2]]
    assert len(next(iter(tc.Loader(cache, 2, bucket_by="latent_flipped", shuffle=False)))["latent"]) == 2


def test_choices(cache: Any) -> None:
    choose = {"x": ["latent", "latent_flipped"]}
    for numbers in permutations(range(3)):
        batch, info = cache.read_batch_with_info(numbers, choose=choose, choices={"x": [1, 1, 0]})
        expected = [FLIPPED[numbers[0]], FLIPPED[numbers[1]], latent(numbers[2]).tolist()]
        assert rows(batch["x"]) == expected
        assert info.choices.chosen("x") == ["latent_flipped", "latent_flipped", "latent"]


def test_a_list_with_a_tensor_twice(tmp_path: Path) -> None:
    """`[a, a, b]` has three alternatives."""
    a, b = torch.zeros(1), torch.ones(1)
    with tc.open(write(tmp_path, [{"texts": [a, a, b]}, {"texts": [b, a, a]}])) as cache:
        batch = cache.read_batch([0, 0, 0, 1], choose={"text": "texts.*"}, choices={"text": [0, 1, 2, 1]})
        assert batch["text"].tolist() == [[0], [0], [1], [0]]
        (texts,) = cache.read_batch([0, 1]).values()
        assert [text.tolist() for text in texts] == [[[0], [1]], [[0], [0]], [[1], [0]]]


def test_all_samples_share(tmp_path: Path) -> None:
    """A batch has memory of its own for each place, since a transform may overwrite one of them."""
    x = [torch.full((3,), float(i)) for i in range(4)]
    samples = [{"a": x[i], "deep": [i, {"b": x[i]}], "c": np.arange(i)} for i in range(4)]
    with tc.open(write(tmp_path, samples)) as cache:
        assert set(cache.schema) == {"a", "c", "deep.1.b"}
        batch = cache.read_batch([2, 0], collate={"c": "pad"})
        batch["deep"][1]["b"].zero_()
        assert batch["a"].tolist() == [[2] * 3, [0] * 3]
        assert cache.select("deep.1.b").read_batch([2, 0])["deep"][1]["b"].tolist() == [[2] * 3, [0] * 3]
        view = pickle.loads(pickle.dumps(cache.select("deep.*")))
        assert view.read_batch([2, 0])["deep"][1]["b"].tolist() == [[2] * 3, [0] * 3]


def test_a_tensor_that_an_object_has_too(tmp_path: Path) -> None:
    """The object gives it no name, so the selected place does."""
    x = torch.ones(2)
    with tc.open(write(tmp_path, [{"a": x, "box": Box(x), "b": x}], allow=[Box]), allow=[Box]) as cache:
        view = cache.select("b")
        assert list(tc.flatten(view[0])) == list(view.read_tensors([0])) == ["b"]
        assert tc.nest([view[0]], view.read_tensors([0]))["b"].tolist() == [[1, 1]]


# --- indexes of old writers, which do not list further names, and indexes that give wrong ones ---


def write_old(folder: Path, samples: list[Any]) -> str:
    """Write a shard whose index lists no further names."""
    write(folder, samples, max_samples=len(samples), manifest=False)
    forge_names(folder / "000.tar", further=None)
    return str(folder)


def test_old_indexes(tmp_path: Path) -> None:
    folder = write_old(tmp_path / "c", [sample(i) for i in range(COUNT)])
    for numbers in ([1, 3], [0, 1], [1, 0], range(COUNT)):
        for collate in ("stack", "list"):
            with tc.open(folder) as cache:
                batch = cache.read_batch(numbers, collate=collate)
                assert rows(batch["latent_flipped"]) == [FLIPPED[i] for i in numbers]
                assert batch["n"] == list(numbers)
            with tc.open(folder) as cache:
                view = cache.select("latent_flipped")
                found = view.read_batch(numbers, collate=collate)["latent_flipped"]
                assert rows(found) == [FLIPPED[i] for i in numbers]
                assert rows(cache.nest(numbers, view.read_tensors(numbers))["latent_flipped"])
            with tc.open(folder) as cache:
                options: dict[str, Any] = {"choose": {"x": ["latent", "latent_flipped"]}, "collate": collate}
                batch = cache.read_batch(numbers, **options, choices={"x": [1] * len(numbers)})
                assert rows(batch["x"]) == [FLIPPED[i] for i in numbers]
    assert tc.verify(folder).ok


def test_names_that_are_no_further_names(tmp_path: Path) -> None:
    """A name that another tensor has, one of more than 1,000 characters, and the 1,001st."""
    a, b = torch.zeros(1), torch.ones(1)
    samples: list[Any] = [{"0": a, "1": b, 1: a}, {"x": a, "long" * 300: a, "short": a}, {"x": [a] * 1500}]
    samples += [{"s": {a}, "t": a, "u": a}]
    names = [[], ["short"], [f"x.{i}" for i in range(1, 1001)], ["u"]]
    for number, (case, further) in enumerate(zip(samples, names, strict=True)):
        with tc.open(write(tmp_path / f"{number}", [case])) as cache:
            index = tc.write_index(tmp_path / f"{number}" / "000.tar")
            assert [name for names in index.layouts.further or () for name, _ in names] == further
            assert tc.realize(cache[0]).keys() == case.keys()
            assert cache.read_batch([0, 0], collate=list)[1].keys() == case.keys()
            cache.read_batch([0, 0])


def test_forged_further_names(tmp_path: Path) -> None:
    """An index that gives other names than the skeletons is refused."""
    x, y = torch.zeros(2), torch.ones(2)
    folder = write(tmp_path, [{"x": x, "y": y, "pick": y}] * 3, manifest=False)
    for further in ([[["pick", "x"]]], [[["other", "y"]]]):
        forge_names(tmp_path / "000.tar", further=further)
        with tc.open(folder) as cache:
            with pytest.raises(tc.FormatError, match="differ from the index"):
                cache.read_batch([0, 1])
            assert cache[0]["pick"].load().tolist() == [1, 1]


def test_old_indexes_of_samples_that_all_share(tmp_path: Path) -> None:
    x = [torch.full((3,), float(i)) for i in range(4)]
    folder = write_old(tmp_path / "c", [{"a": x[i], "b": {"c": x[i]}} for i in range(4)])
    for _ in range(2):
        with tc.open(folder) as cache:
            assert cache.select("b.c").read_batch([3, 1])["b"]["c"].tolist() == [[3] * 3, [1] * 3]
            assert list(cache.schema) == ["a", "b.c"]
        with tc.open(folder) as cache, pytest.raises(KeyError, match="unknown tensor"):
            cache.select("b.d")
