"""Tensors that some samples of a cache lack: None is in their place, or nothing."""

from __future__ import annotations

import pickle
import sys
from collections import OrderedDict, defaultdict
from functools import partial
from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

import wds_tensorcache as tc
from tests.reading.batches import folder_of, write

COUNT = 6
LENGTHS = [2, None, 3, "no key", 1, None]  # of the mask


def sample(i: int) -> dict[str, Any]:
    made: dict[str, Any] = {"latent": torch.full((2,), float(i)), "mask": None, "name": f"n{i}", "n": (i, None)}
    if LENGTHS[i] == "no key":
        del made["mask"]
    elif LENGTHS[i] is not None:
        made["mask"] = torch.full((LENGTHS[i], 2), i)
    made["cond"] = [made["latent"] + 1 if i % 2 else None, {"array": np.full(3, i) if i < 2 else None, "text": f"t{i}"}]
    made["scalar"] = torch.tensor(i) if i else None
    return made


LISTS = {"*": "list"}  # names all tensors, so every batch has them
SAMPLES = [sample(i) for i in range(COUNT)]
folder = folder_of(SAMPLES, max_samples=COUNT)


def listed(value: Any) -> Any:
    """Return a batch with lists in place of tensors and other values."""
    if isinstance(value, dict):
        return {key: listed(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(listed, value))
    return value.tolist() if hasattr(value, "tolist") else value


def expected(numbers: list[int]) -> dict[str, Any]:
    def column(*path: Any) -> list[Any]:
        found = []
        for i in numbers:
            value: Any = SAMPLES[i]
            for step in path:
                value = value.get(step) if isinstance(value, dict) else value[step]
            found.append(listed(value) if hasattr(value, "tolist") else value)
        return found

    return {
        "latent": column("latent"),
        "mask": column("mask"),
        "name": column("name"),
        "n": column("n"),
        "cond": [column("cond", 0), {"array": column("cond", 1, "array"), "text": column("cond", 1, "text")}],
        "scalar": column("scalar"),
    }


@pytest.mark.parametrize("numbers", [[0, 1, 2, 3, 4, 5], [1, 0], [0, 3], [1, 3], [5, 1, 5], [3]])
def test_lists_have_none_in_its_place(cache: Any, numbers: list[int]) -> None:
    view = cache.select("*")
    for _ in range(3):  # later by template
        for order in map(list, list(permutations(numbers))[:6]):
            batch, tensors = cache.read_batch(order, collate=LISTS), cache.read_tensors(order, collate=LISTS)
            for made in (
                batch,
                pickle.loads(pickle.dumps(batch)),
                cache.nest(order, tensors),
                cache.nest(np.array(order), view.read_tensors(order, collate="auto")),
                view.read_batch(order, collate="list"),
            ):
                assert listed(made) == expected(order)
    order = [*numbers, 0, 1]  # a stream has no other samples that tell where tensors are
    tensors = cache.read_tensors(order, collate="list")
    assert listed(tc.nest([cache[i] for i in order], tensors)) == expected(order)


def test_batches_that_do_not_select_it_are_not_disturbed(cache: Any) -> None:
    view = cache.select(["latent"])
    for batch in (
        view.read_batch(range(COUNT)),
        next(iter(DataLoader(range(COUNT), batch_size=COUNT, collate_fn=view.read_batch, num_workers=1))),
        cache.nest(range(COUNT), cache.select("latent").read_tensors(range(COUNT))),
        tc.nest([cache[i] for i in range(COUNT)], view.read_tensors(range(COUNT))),
    ):
        assert listed(batch) == {
            "latent": [[i, i] for i in range(COUNT)],
            "name": [f"n{i}" for i in range(COUNT)],
            "n": [(i, None) for i in range(COUNT)],
            "cond": [[None] * COUNT, {"text": [f"t{i}" for i in range(COUNT)]}],
        }
    for order in permutations(range(4)):
        assert set(view.read_batch(order)) == {"latent", "name", "n", "cond"}


def test_stack_says_which_sample_lacks_it(cache: Any) -> None:
    view = cache.select(["latent", "mask"])
    for numbers, lacking, having in (([0, 1], "001", "000"), ([3, 0], "003", "000"), ([2, 4, 5], "005", "002")):
        message = rf"sample '{lacking}' has no tensor 'mask', but '{having}' has one; use collate='list' or 'pad'"
        for read in (view.read_batch, view.read_tensors):
            with pytest.raises(tc.BatchError, match=message):
                read(numbers, collate={"mask": "stack"})
    with pytest.raises(tc.BatchError, match="sample '001' has no tensor 'mask'; use"):
        view.read_batch([1, 3])
    assert view.read_batch([1, 3], collate="list")["mask"] == [None, None]
    assert "mask" not in cache.read_batch([3])
    with pytest.raises(
        tc.BatchError, match="sample '000' has no tensor 'scalar', but '001' has one; use collate='list' for"
    ):
        cache.select("scalar").read_batch([0, 1], collate="pad")


def test_pad_takes_it_as_of_length_0(cache: Any) -> None:
    view = cache.select(["latent", "mask"])
    for way, length, fill in (("pad", 3, 0), (tc.pad(to=4, value=-1), 4, -1)):
        for numbers in (range(COUNT), [1, 0, 2], [3, 1, 2]):
            batch, info = view.read_batch_with_info(numbers, collate={"mask": way})
            lengths = [int(found) if isinstance(found := LENGTHS[i], int) else 0 for i in numbers]
            rows = [[[i, i]] * n + [[fill, fill]] * (length - n) for i, n in zip(numbers, lengths, strict=True)]
            assert batch["mask"].tolist() == rows
            for made in (info, pickle.loads(pickle.dumps(info))):
                assert made.mask("mask").tolist() == [[at < n for at in range(length)] for n in lengths]
                assert made.shapes["mask"].tolist() == [[n, 2] if n else [0, 0] for n in lengths]


def test_joined_caches_and_shared_datasets(cache: Any, tmp_path: Path) -> None:
    joined, numbers = tc.join({"a": cache, "b": cache.select("mask")}), [3, 1, 0, 2]
    batch = joined.read_batch(numbers, collate="list")
    assert listed(batch["a"]) == expected(numbers)
    assert listed(batch["b"]["mask"]) == expected(numbers)["mask"]
    with tc.SharedDataset(SAMPLES, f"optional-{tmp_path.name}", directory=tmp_path) as shared:
        for order in [*permutations(numbers), numbers]:
            assert listed(shared.read_batch(order, collate="list")) == expected(list(order))
        assert listed(shared.nest(numbers, shared.read_tensors(numbers, collate="list"))) == expected(numbers)


def test_containers_of_tensors_are_optional_too(tmp_path: Path) -> None:
    control = [{"image": torch.tensor([i]), "scale": i / 2, "pair": (torch.tensor(-i), i)} for i in range(4)]
    samples = [{"x": torch.tensor(i), "control": control[i] if i % 2 else None} for i in range(4)]
    del samples[2]["control"]
    with tc.open(write(tmp_path, samples)) as cache:
        for order in permutations(range(4)):
            batch = cache.read_batch(order, collate="list")
            assert listed(batch) == {
                "x": list(order),
                "control": {
                    "image": [[i] if i % 2 else None for i in order],
                    "scale": [i / 2 if i % 2 else None for i in order],
                    "pair": ([-i if i % 2 else None for i in order], [i if i % 2 else None for i in order]),
                },
            }
            scales = cache.select("x").read_batch(order)["control"]["scale"]
            assert scales.tolist() == batch["control"]["scale"].tolist()


@pytest.mark.parametrize("kind", [list, tuple])
def test_a_batch_in_which_all_samples_lack_a_list_of_tensors(tmp_path: Path, kind: Any) -> None:
    regions = kind([torch.ones(3, 2), {"box": torch.ones(4)}, "left"])
    samples = [{"x": torch.ones(2), "regions": regions}, {"x": torch.ones(2), "regions": None}, {"x": torch.ones(2)}]
    with tc.open(write(tmp_path, samples)) as cache:
        for numbers in ([1], [2], [1, 2]):
            padded = cache.read_batch(numbers, collate="pad")["regions"]
            listed = cache.select("*").read_batch(numbers, collate="list")["regions"]
            assert type(padded) is type(listed) is kind
            assert [*padded[0].shape, *padded[1]["box"].shape] == [len(numbers), 0, 2, len(numbers), 0]
            assert listed[0] == listed[1]["box"] == padded[2] == listed[2] == [None] * len(numbers)


def test_samples_that_lack_each_others_tensors(tmp_path: Path) -> None:
    """Which sample has more tensors makes no difference: the other one's list has a place in the batch, too."""
    one, two = torch.tensor(1), torch.tensor(2)
    with tc.open(write(tmp_path, [{"x": one, "y": two}, {"z": [two]}, {"z": None, "x": one}])) as cache:
        for order in permutations(range(3)):
            batch = {"x": [[1, None, 1][i] for i in order], "y": [[2, None, None][i] for i in order]}
            batch["z"] = [[[None, 2, None][i] for i in order]]
            assert listed(cache.read_batch(order, collate="list")) == batch


@pytest.mark.parametrize("kind", [dict, OrderedDict, partial(defaultdict, int)])
def test_a_sample_with_more_tensors_lacks_a_dict(tmp_path: Path, kind: Any) -> None:
    """The type of the dict, and the values in it, are those of the sample that has it."""
    one = torch.tensor(1)
    cond = kind({"text": {"states": one}, "scale": 0.5, "size": {"crop": (1, 2)}})
    with tc.open(write(tmp_path, [{"x": one, "y": one}, {"cond": cond}])) as cache:
        for numbers in ([0, 1], [1, 0], [0]):
            batch = cache.read_batch(numbers, collate={"*": "list"})
            assert type(batch["cond"]) is type(kind())
            assert type(batch["cond"]["text"]) is dict
            rows = [[None, value] for value in (1, 0.5, (1, 2))]
            states, scales, crops = ([row[i] for i in numbers] for row in rows)
            assert listed(batch["cond"]) == {"text": {"states": states}, "scale": scales, "size": {"crop": crops}}
        nested = tc.nest(list(cache), {"x": 1, "cond.text.states": 2})
        assert nested == {
            "x": 1,
            "cond": kind({"text": {"states": 2}, "scale": [None, 0.5], "size": {"crop": [None, (1, 2)]}}),
        }


X, Y = torch.zeros(2), torch.ones(2)
NOT_LACKING: dict[str, list[Any]] = {
    "another value": [{"x": X, "y": Y}, {"x": X, "y": 5}],
    "another value, with the same template": [{"x": X, "y": None}, {"x": X, "y": 5}, {"x": X, "y": Y}],
    "a container": [{"x": X, "y": Y}, {"x": X, "y": [Y]}],
    "a shorter list": [{"x": [X, Y]}, {"x": [X]}],
    "a value more": [{"x": X, "y": Y}, {"x": X, "n": 5}],
}


@pytest.mark.parametrize("samples", NOT_LACKING.values(), ids=NOT_LACKING)
def test_nothing_is_lost_without_a_word(tmp_path: Path, samples: list[Any]) -> None:
    with tc.open(write(tmp_path, samples)) as cache:
        for _ in range(2):
            for order in permutations(range(len(samples))):
                with pytest.raises(tc.BatchError, match="structures differ|nor None in its place"):
                    cache.read_batch(order, collate="list")
                with pytest.raises(tc.BatchError):
                    tc.nest([cache[i] for i in order], cache.read_tensors(order, collate="list"))


@pytest.mark.parametrize(("joins", "chooses"), [(False, True), (True, False)])
def test_batches_from_shards_that_lack_it(tmp_path: Path, joins: bool, chooses: bool) -> None:
    """Whichever shards a batch is from, its padded tensors and its names are the same."""
    samples = [{"x": torch.full((2,), float(i)), "y": torch.ones(2), "mask": None} for i in range(6)]
    samples[4]["mask"] = torch.ones(3, 2)
    folder = write(tmp_path, samples, max_samples=2)
    options: dict[str, Any] = {"choose": {"z": ["x", "y"]}} if chooses else {}
    for collate, shape in (("pad", (2, 0, 2)), ({"mask": tc.pad(to=4)}, (2, 4, 2)), ({"ma*": "pad"}, (2, 0, 2))):
        with tc.join([folder]) if joins else tc.open(folder) as cache:
            batch, info = cache.read_batch_with_info([0, 1], collate=collate, **options)
            assert batch["mask"].shape == shape
            assert info.mask("mask").shape == shape[:2]
            assert not info.mask("mask").any()
            if not chooses:
                assert cache.read_tensors([2, 3], collate=collate)["mask"].shape == shape
            assert cache.read_batch([3, 4], collate=collate, **options)["mask"].shape[1] >= 3
            assert {type(batch["mask"]) for batch in tc.Loader(cache, 2, collate=collate, **options)} == {torch.Tensor}
    with tc.join([folder]) if joins else tc.open(folder) as cache:
        for view, shapes in ((cache[:4], {(2, 4, 2)}), (cache.select(["x", "y", "mask"])[:3], {(2, 4, 2), (1, 4, 2)})):
            batches = list(tc.Loader(view, 2, collate={"mask": tc.pad(to=4)}, **options))
            assert {batch["mask"].shape for batch in batches} == shapes
        assert cache.read_batch([0, 1], collate={"mask": "list"}, **options)["mask"] == [None, None]
        with pytest.raises(tc.BatchError, match="collate has an unknown tensor 'musk'"):
            cache.read_batch([0, 1], collate={"musk": "list"}, **options)


@pytest.mark.parametrize("opens", [tc.open, lambda folder: tc.join([folder])])
def test_names_of_tensors_that_a_batch_lacks(tmp_path: Path, opens: Any) -> None:
    samples = [{"x": torch.ones(2), "y": torch.ones(2)}, {"x": torch.ones(2), "mask": torch.ones(2)}]
    with opens(write(tmp_path, samples, max_samples=1)) as cache:
        for collate in ({"mask": "stack"}, {"m*": "stack", "x": "list"}):
            assert set(cache.read_batch([0], collate=collate)) == {"x", "y"}
            assert set(cache.read_batch([1], collate=collate)) == {"x", "mask"}
            with pytest.raises(tc.BatchError, match="unknown tensor 'm"):
                cache.select("x").read_batch([0], collate=collate)
    with tc.open(tmp_path) as cache, pytest.raises(tc.BatchError, match="unknown tensor 'x'; there are 'z', 'mask'$"):
        cache.read_batch([0], collate={"x": "list"}, choose={"z": ["x", "y"]})


def test_none_under_other_keys_than_text(tmp_path: Path) -> None:
    """Names have the positions of such keys. `select` drops the None of a tensor, and keeps the None of a value."""
    samples = [{"steps": {0.1: torch.ones(1), 0.5: None, 0.9: None}, "x": 0}]
    samples.append({"steps": {0.1: None, 0.5: 3, 0.9: torch.ones(1)}, "x": 1})
    with tc.open(write(tmp_path, samples)) as cache:
        view = cache.select([])
        assert list(view) == [{"steps": {0.5: None}, "x": 0}, {"steps": {0.5: 3}, "x": 1}]
        assert view.read_batch([0, 1])["steps"] == {0.5: [None, 3]}


def test_a_batch_does_not_depend_on_earlier_ones(tmp_path: Path) -> None:
    samples = [{"x": torch.ones(2)} for _ in range(4)] + [{"x": torch.ones(2), "mask": torch.ones(1)}]
    with tc.open(write(tmp_path, samples, max_samples=2)) as cache:
        for _ in range(2):
            assert set(cache.read_batch([0, 1])) == {"x"}
            assert cache[:2].read_batch([0, 1], collate="pad")["mask"].shape == (2, 0)
            tc.Loader(cache, 2, collate={"mask": "pad"})
        ways = {"*": "list", "m*": "stack"}  # the first pattern that matches counts
        assert cache.read_batch([0, 1], collate=ways)["mask"] == [None, None]
        assert set(cache.read_batch([0, 1], collate=dict(reversed(ways.items())))) == {"x"}
        _, info = next(iter(tc.Loader(cache[:2], 2, collate={"mask": tc.pad(to=3)}).with_info()))
        assert info.mask("mask").tolist() == [[False] * 3] * 2


def test_lists_of_other_tensors_differ_in_length(tmp_path: Path) -> None:
    """Samples with 1 to 4 captions do not disturb a batch that does not select the captions."""
    captions = [[torch.tensor([k]) for k in range(1 + i % 4)] for i in range(8)]
    samples = [{"x": torch.tensor([i]), "captions": captions[i], "n": i} for i in range(8)]
    with tc.open(write(tmp_path, samples)) as cache:
        view = cache.select("x")
        for numbers in ([0, 1, 2, 3], [3, 2, 1, 0], [5, 7]):
            batch = view.read_batch(numbers)
            for made in (batch, pickle.loads(pickle.dumps(batch))):
                assert made["x"].tolist() == [[i] for i in numbers]
                assert made["n"].tolist() == numbers
                assert all(list(one) == [None] * len(numbers) for one in made["captions"])


@pytest.mark.parametrize("keys", [(7, -1), ("7", "-1")])
def test_keys_that_are_numbers(tmp_path: Path, keys: tuple[Any, ...]) -> None:
    """A tensor's name does not tell whether the key is a number or a text, but another sample does."""
    first, second = keys
    ones = torch.ones(1)
    samples = [{first: ones, "x": ones}, {"x": ones, "d": {second: ones}}, {"x": ones, "y": ones, "z": ones}]
    with tc.open(write(tmp_path, samples)) as cache:
        for numbers in ([0], [1], [2], [0, 1], [1, 2], [2, 0, 1]):
            batch = cache.read_batch(numbers, collate=LISTS)
            assert set(batch) == {first, "x", "d", "y", "z"}
            assert list(batch["d"]) == [second]
            assert batch[first] == [samples[i].get(first) for i in numbers]
        one = {"x": [ones], first: [None], f"d.{second}": [None]}
        assert {first, "d"} <= set(cache.nest([2], {str(name): value for name, value in one.items()}))
        assert set(tc.nest([cache[2], cache[0]], {"x": ones, str(first): ones})) == {"x", first}


def test_work_for_the_shapes_of_a_batch(tmp_path: Path) -> None:
    """Each shape was compared with all others, which took seconds for the small values of 6,000 ragged samples."""
    samples = [{"text": torch.zeros(i), "mask": torch.zeros(1) if i % 2 else None, "label": i} for i in range(100)]
    calls = 0

    def look(_: Any, event: str, function: Any) -> None:
        nonlocal calls
        calls += event == "c_call" and function is max

    with tc.open(write(tmp_path, samples, max_samples=100)) as cache:
        for _ in range(2):  # the first batch loads modules
            calls = 0
            sys.setprofile(look)
            try:
                labels = cache.select([]).read_batch(range(100))["label"].tolist()
            finally:
                sys.setprofile(None)
    assert labels == list(range(100))
    assert calls < 20
