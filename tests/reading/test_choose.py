"""Alternatives: a batch has the chosen one of each sample under one name, and nothing else of them is read."""

from __future__ import annotations

import fnmatch
import os
import pickle
from collections import OrderedDict, defaultdict
from collections.abc import Iterator
from functools import partial
from itertools import product
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

import wds_tensorcache as tc
from tests.reading.batches import damage, folder_of, write

COUNT = 20
CHOOSE = {"latent": ["latent", "latent_flipped"], "text": "captions.*"}


def value(i: int, number: int = 0, flipped: bool = False) -> float:
    return (-1.0 if flipped else 1.0) * (100 * i + number)


def nested(i: int) -> dict[str, Any]:
    """A sample with 1 to 12 captions of several lengths."""
    captions = [torch.full((1 + number % 3, 2), value(i, number)) for number in range(1 + i % 12)]
    return {
        "latent": torch.full((4,), value(i)),
        "latent_flipped": torch.full((4,), value(i, flipped=True)),
        "captions": captions,
        "cond": [torch.full((2,), i), {"prompt": f"p{i}", "size": (i, i)}],
        "id": i,
    }


folder = folder_of([nested(i) for i in range(COUNT)], max_samples=7)


@pytest.fixture(params=["shards", "shared", "joined"])
def cache(request: pytest.FixtureRequest, folder: str) -> Iterator[Any]:
    if request.param == "shared":
        with tc.SharedDataset([nested(i) for i in range(COUNT)], name=f"choose-{os.getpid()}") as shared:
            list(shared)  # names of tensors are known of loaded samples
            yield shared
        return
    with tc.open(folder) as opened:
        yield opened if request.param == "shards" else tc.join([opened])


rows = st.lists(st.tuples(st.integers(0, COUNT - 1), st.booleans(), st.integers(0, 99)), min_size=1, max_size=12)


@settings(max_examples=50)
@given(rows, st.sampled_from(["list", "pad"]))
def test_a_batch_has_the_chosen_alternatives(folder: str, wanted: list[tuple[int, bool, int]], way: str) -> None:
    indices = [i for i, _, _ in wanted]
    numbers = [number % (1 + i % 12) for i, _, number in wanted]
    choices = {"latent": np.array([flipped for _, flipped, _ in wanted], np.int64), "text": numbers}
    with tc.open(folder) as cache:
        batch, info = cache.read_batch_with_info(indices, choose=CHOOSE, choices=choices, collate={"text": way})
        assert list(batch) == ["cond", "id", "latent", "text"]
        assert batch["latent"].tolist() == [[value(i, flipped=flipped)] * 4 for i, flipped, _ in wanted]
        longest = max(1 + number % 3 for number in numbers)
        for i, number, text in zip(indices, numbers, batch["text"], strict=True):
            length = 1 + number % 3
            assert text[:length].tolist() == [[value(i, number)] * 2] * length
            assert text.shape == ((length if way == "list" else longest), 2)
            assert not text[length:].any()
        assert batch["cond"][0].tolist() == [[i, i] for i in indices]
        assert batch["cond"][1]["prompt"] == [f"p{i}" for i in indices]
        assert batch["id"] == indices
        assert info.choices.chosen("text") == [f"captions.{number}" for number in numbers]
        assert (info.choices["text"].tolist(), info.choices["text"].dtype) == (numbers, np.int64)
        assert info.shapes["text"].tolist() == [[1 + number % 3, 2] for number in numbers]


def test_every_kind_of_cache(cache: Any) -> None:
    choices = {"latent": [1, 0, 1], "text": [0, 11, 3]}
    options: dict[str, Any] = {"choose": CHOOSE, "choices": choices}
    batch, info = cache.read_batch_with_info([5, 11, 3], collate={"text": "list"}, **options)
    assert batch["latent"][:, 0].tolist() == [-500, 1100, -300]
    assert [text[0, 0].item() for text in batch["text"]] == [500, 1111, 303]
    assert "captions" not in batch
    assert info.choices.chosen("text") == ["captions.0", "captions.11", "captions.3"]
    assert len(info.choices) == 2
    assert repr(info.choices).startswith("Choices({'latent': ['latent_flipped', 'latent', 'latent_flipped'], 'text': [")
    again = cache.read_batch([5, 11, 3], collate={"text": "list"}, choose=CHOOSE, choices=info.choices)
    assert again["text"][1][0, 0] == 1111
    samples = cache.read_batch([5, 11, 3], collate=list, **options)
    assert [sample["latent"][0].item() for sample in samples] == [-500, 1100, -300]
    assert [sample["text"][0, 0].item() for sample in samples] == [500, 1111, 303]
    assert [list(sample) for sample in samples] == [["cond", "id", "latent", "text"]] * 3
    view = cache[[9, 3]].select(["captions.*", "cond.0"])
    batch = view.read_batch([1, 0], choose={"text": "captions.*"}, choices={"text": [2, 1]}, collate={"text": "list"})
    assert [text[0, 0].item() for text in batch["text"]] == [302, 901]
    assert "latent" not in batch


def test_only_the_chosen_bytes_are_read(tmp_path: Path) -> None:
    """Damaged bools are an error wherever they are read, and chosen tensors are bools here."""
    flags = [torch.ones(20_000, dtype=torch.bool) for _ in range(2)]
    folder = write(tmp_path / "c", [{"a": flags[0], "b": flags[1], "x": torch.zeros(3)}])
    path = next(Path(folder).glob("*.tar"))
    damage(str(path), path.read_bytes().index(b"\x01" * 20_000) + 25_000, b"\x07")  # in "b"
    with tc.open(folder) as cache:
        choose = {"flag": ["a", "b"]}
        assert cache.read_batch([0], choose=choose, choices={"flag": [0]})["flag"].all()
        with pytest.raises(tc.FormatError):
            cache.read_batch([0], choose=choose, choices={"flag": [1]})


def test_places_in_dicts(tmp_path: Path) -> None:
    def sample(i: int) -> dict[str, Any]:
        return {
            "cond": {"a": {"w": np.full(3, i, "<U2"), "p": i}, "b": (np.full(3, -i, "<U2"),)},
            "pair": [torch.tensor(i), torch.tensor(-i)],
            "crops": {"left": torch.full((2,), i), "right": torch.full((2,), -i), "box": (1, i)},
            "only": {"a": torch.tensor(i), "b": torch.tensor(-i)},
        }

    choose = {"cond.a.w": ["cond.a.w", "cond.b.0"], "crops.crop": ["crops.left", "crops.right"], "new.deep.x": "only.*"}
    with tc.open(write(tmp_path / "c", [sample(i) for i in range(6)])) as cache:
        choices = {"cond.a.w": [0, 1], "crops.crop": [1, 0], "new.deep.x": [1, 1]}
        batch = cache.read_batch([2, 3], choose=choose, choices=choices)
        assert list(batch["cond"]) == ["a"]
        assert batch["cond"]["a"]["w"].tolist() == [["2"] * 3, ["-3"] * 3]
        assert batch["cond"]["a"]["p"] == [2, 3]
        for wanted in (["pair.*"], ["pair.0", "crops.left"]):
            with pytest.raises(tc.BatchError, match="a container that is not a dict"):
                cache.read_batch([2], choose={"pair.0": wanted})
        assert list(batch["crops"]) == ["box", "crop"]
        assert batch["crops"]["crop"].tolist() == [[-2, -2], [3, 3]]
        assert batch["crops"]["box"] == [(1, 2), (1, 3)]
        assert "only" not in batch
        assert batch["new"]["deep"]["x"].tolist() == [-2, -3]


def test_a_chosen_key_has_the_type_of_the_other_keys(tmp_path: Path) -> None:
    samples = [
        {
            "acts": {1: torch.tensor([i]), 5: torch.tensor([-i])} if i else {5: torch.tensor([0])},
            "deep": {1: {2: torch.tensor([i]), 3: torch.tensor([-i])}},
            "names": {1: f"a{i}", 5: f"b{i}"},
            "text": {"1": torch.tensor([i]), "5": torch.tensor([-i])},
            "pairs": {(1, 2): torch.tensor([i]), (3, 4): torch.tensor([-i])},
        }
        for i in range(3)
    ]
    choose = {"acts.1": "acts.*", "deep.1.2": "deep.1.*", "names.5": "names.*", "text.1": "text.*"}
    choose |= {"deep.1.7": "pairs.*"}
    with tc.open(write(tmp_path / "c", samples)) as cache:
        for indices in ([0, 1, 2], [2, 1, 0]):
            choices = {name: [i > 0 for i in indices] for name in choose}
            choices = {name: np.array(numbers, np.int64) for name, numbers in choices.items()}
            batch = cache.read_batch(indices, choose=choose, choices=choices)
            assert set(batch) == {"acts", "deep", "names", "text"}
            assert list(batch["acts"]) == [1]
            assert batch["acts"][1].tolist() == [[-i] for i in indices]
            assert list(batch["deep"]) == [1]
            assert list(batch["deep"][1]) == [2, 7]
            assert batch["deep"][1][2].tolist() == batch["deep"][1][7].tolist() == [[-i] for i in indices]
            assert list(batch["names"]) == [5]
            assert batch["names"][5] == [f"b{i}" if i else "a0" for i in indices]
            assert list(batch["text"]) == ["1"]
            listed = cache.read_batch(indices, choose=choose, choices=choices, collate=lambda samples: samples)
            assert [set(sample["acts"]) for sample in listed] == [{1}] * 3
            assert [sample["names"][5] for sample in listed] == batch["names"][5]
        batch = cache.read_batch([1], choose={"pairs.@1": ["pairs.@0", "pairs.@1"]})
        assert batch["pairs"] == {(3, 4): torch.tensor([[1]])}


def test_joined_caches(folder: str, tmp_path: Path) -> None:
    with tc.open(folder) as cache:
        joined = tc.join({"a": cache.select(["latent*"]), "b": cache[::-1].select("captions.*")})
        choose = {"a.latent": ["a.latent", "a.latent_flipped"], "b.text": "b.captions.*"}
        options: dict[str, Any] = {"choose": choose, "choices": {"a.latent": [0, 1], "b.text": [3, 2]}}
        batch, info = joined.read_batch_with_info([5, 8], collate={"b.text": "pad"}, **options)
        assert batch["a"]["latent"][:, 0].tolist() == [500, -800]
        assert batch["b"]["text"][:, 0, 0].tolist() == [503, 802]
        assert info.choices.chosen("b.text") == ["b.captions.3", "b.captions.2"]
        assert info.shapes["b.text"].tolist() == [[1, 2], [3, 2]]
        again = tc.join({"top": joined})
        deep = {f"top.{name}": [f"top.{each}" for each in np.atleast_1d(wanted)] for name, wanted in choose.items()}
        batch = again.read_batch([5, 8], collate={"top.b.text": "pad"}, choose=deep, choices={"top.b.text": [3, 2]})
        assert batch["top"]["b"]["text"][:, 0, 0].tolist() == [503, 802]
        message = r"choose={.*}: expected names and alternatives of one of the joined caches"
        mixed = {("a.t", "b.l"): ("a.latent*", "b.captions.*")}
        for wrong in ({"text": "b.captions.*"}, {"a.x": ["a.latent", "b.captions.0"]}, mixed):
            with pytest.raises(ValueError, match=message + r", which begin with 'a\.', 'b\.'$"):
                joined.read_batch([5], choose=wrong)
        write(tmp_path / "a", [{"x": torch.tensor([i]), "y": torch.tensor([-i])} for i in range(3)])
        write(tmp_path / "b", [{"captions": [f"{i}", f"{i}!"]} for i in range(3)])
        merged = tc.join([tmp_path / "a", tmp_path / "b"])
        options = {"choose": {"z": ["x", "y"], "text": "captions.*"}, "choices": {"z": [1, 0], "text": [0, 1]}}
        batch, info = merged.read_batch_with_info([2, 1], **options)
        assert (batch["z"].tolist(), batch["text"]) == ([[-2], [1]], ["2", "1!"])
        assert (info.choices.chosen("z"), info.choices["text"].tolist()) == (["y", "x"], [0, 1])
        with pytest.raises(ValueError, match=message + "$"):
            merged.read_batch([1], choose={"z": ["x", "captions.*"]})
        with pytest.raises(tc.BatchError, match="none of the alternatives of 'z'"):
            merged.read_batch([1], choose={"z": "w.*"})


@pytest.mark.parametrize(
    ("choose", "choices", "error", "message"),
    [
        ({}, None, ValueError, "expected a dict"),
        ({"latent": 3}, None, ValueError, "captions"),
        ({"latent": [3]}, None, ValueError, "captions"),
        ({(): []}, None, ValueError, "captions"),
        (
            {("latent", "mask"): ["latent"]},
            None,
            ValueError,
            "expected a tuple of as many names or patterns as the key",
        ),
        (
            {"latent": "latent*", ("latent", "x"): ("latent*", "latent*")},
            None,
            ValueError,
            "the name 'latent' occurs twice",
        ),
        (None, {"latent": [0]}, ValueError, "choose="),
        (CHOOSE, {"text": [0], "txt": [0]}, ValueError, "'txt'"),
        (CHOOSE, {"text": [0, 0]}, ValueError, "1 integers"),
        (CHOOSE, {"text": [0.5]}, ValueError, "1 integers"),
        (CHOOSE, {"text": [6]}, IndexError, r"choices\['text'\]\[0\] = 6 out of range \[0, 6\)"),
        (CHOOSE, {"text": [-1]}, IndexError, "out of range"),
        ({"x": "nothing.*"}, None, tc.BatchError, "sample '005' has none of the alternatives of 'x': 'nothing.*'"),
        ({"id": "latent*"}, None, tc.BatchError, "another value"),
        ({"latent": "captions.*"}, None, tc.BatchError, "another tensor of this name"),
    ],
)
def test_wrong_arguments(folder: str, choose: Any, choices: Any, error: Any, message: str) -> None:
    with tc.open(folder) as cache, pytest.raises(error, match=message):
        cache.read_batch([5], choose=choose, choices=choices, collate="list")


def with_strings(i: int) -> dict[str, Any]:
    captions = [f"c{i}.{number}" for number in range(1 + i % 3)]
    tags = {"a": i, "b": -i}
    return {"latent": torch.full((2,), float(i)), "captions": captions, "long": f"l{i}", "short": f"s{i}", "tags": tags}


STRINGS = {"caption": "captions.*", "text": ["long", "short"], "meta.tag": "tags.*"}
strings = folder_of([with_strings(i) for i in range(COUNT)], max_samples=7)


def test_strings(strings: str) -> None:
    choices = {"caption": [2, 0, 1], "text": [0, 1, 1], "meta.tag": [1, 0, 1]}
    options: dict[str, Any] = {"choose": STRINGS, "choices": choices}
    with tc.open(strings) as cache:
        batch, info = cache.read_batch_with_info([2, 5, 1], **options)
        assert list(batch) == ["latent", "caption", "text", "meta"]
        assert batch["caption"] == ["c2.2", "c5.0", "c1.1"]
        assert batch["text"] == ["l2", "s5", "s1"]
        assert batch["meta"]["tag"] == [-2, 5, -1]
        assert info.choices.chosen("caption") == ["captions.2", "captions.0", "captions.1"]
        assert info.choices.chosen("text") == ["long", "short", "short"]
        assert info.choices["meta.tag"].tolist() == [1, 0, 1]
        sent, sent_info = pickle.loads(pickle.dumps((batch, info)))
        assert sent["caption"] == batch["caption"]
        assert sent_info == info
        joined = tc.join({"a": cache, "b": cache.select("latent")})
        options = {"choose": {"a.caption": "a.captions.*"}, "choices": {"a.caption": [2, 1]}}
        batch, info = joined.read_batch_with_info([2, 5], **options)
        assert batch["a"]["caption"] == ["c2.2", "c5.1"]
        assert "captions" not in batch["a"]
        assert info.choices.chosen("a.caption") == ["a.captions.2", "a.captions.1"]
        expected = "a sample has a str at 'long', expected a list"
        for choose, message in (({"long.x": "captions.*"}, "another value"), ({"x": "long.*"}, expected)):
            with pytest.raises(tc.BatchError, match=message):
                cache.read_batch([1], choose=choose)["x"].tolist()


def test_strings_are_chosen_when_they_are_looked_at(strings: str, tmp_path: Path) -> None:
    """A damaged skeleton is an error where it is decoded; here that is the first look at a caption."""
    folder = write(tmp_path / "c", [with_strings(i) for i in range(4)])
    path = next(Path(folder).glob("*.tar"))
    with tc.open(folder, io="pread") as cache:
        cache.read_batch([0, 1], choose=STRINGS)  # learns the structure
        damage(str(path), path.read_bytes().index(b"c3.0"), b"\x00\xff\x00\xff")
        batch = cache.read_batch([0, 3], choose=STRINGS)
        assert batch["latent"][:, 0].tolist() == [0, 3]
        with pytest.raises(tc.FormatError):
            batch["caption"].tolist()


def test_samples_without_an_alternative(tmp_path: Path) -> None:
    """None is no alternative, and an empty list has none."""
    samples = [
        {"x": torch.ones(2), "mask": None, "short": None, "long": "b", "captions": []},
        {"x": torch.ones(2), "mask": torch.ones(1), "short": "a", "long": "b", "captions": ["a"]},
    ]
    with tc.open(write(tmp_path, samples)) as cache:
        assert list(cache.read_batch([0], choose={"text": ["short", "long"]})["text"]) == ["b"]
        for name in ("mask", "short", "captions.*"):
            with pytest.raises(tc.BatchError, match="sample '000' has none of the alternatives of 'chosen'"):
                list(cache.read_batch([1, 0], choose={"chosen": name}, collate="list")["chosen"])
        # in a worker when the batch is read: an error during pickling would not reach the caller
        read = partial(cache.read_batch, choose={"caption": "captions.*"}, collate="list")
        with pytest.raises(tc.BatchError, match="sample '000' has none of the alternatives of 'caption'"):
            next(iter(DataLoader([1, 0], batch_size=2, num_workers=1, collate_fn=read, timeout=60)))  # type: ignore[arg-type]


@pytest.fixture
def masked(tmp_path: Path) -> Any:
    samples = []
    for i in range(8):
        latent, captions = torch.full((2,), float(i)), [f"c{i}{number}" for number in range(1 + i % 3)]
        mask, more = (None, [i, None]) if i % 4 else (torch.full((1 + i % 2, 2), i), [i, latent + 1])
        samples.append({"latent": latent, "flipped": -latent, "mask": mask, "captions": captions, "more": more})
    return tc.open(write(tmp_path, samples, max_samples=8))


CHOOSE_MASKED = {"image": ["latent", "flipped"], "caption": "captions.*"}


@pytest.mark.parametrize("rows", [[0, 1, 2], [1, 2, 3], [5]])
@pytest.mark.parametrize("joins", [False, True])
def test_other_tensors_may_be_lacking(masked: Any, rows: list[int], joins: bool) -> None:
    """Also if all samples of the batch lack one: the batch is as without `choose=`."""
    cache = tc.join([masked]) if joins else masked
    way = {"mask": tc.pad(to=3), "more.1": "list"}
    captions = [i % (1 + i % 3) for i in rows]
    options: dict[str, Any] = {"collate": way, "choose": CHOOSE_MASKED, "choices": {"caption": captions}}
    for _ in range(2):
        batch, info = cache.read_batch_with_info(rows, **options)
        plain, record = masked.select(["mask", "more.*"]).read_batch_with_info(rows, collate=way)
        assert torch.equal(batch["mask"], plain["mask"])
        assert batch["mask"].shape == (len(rows), 3, 2)
        assert torch.equal(info.mask("mask"), record.mask("mask"))
        assert [each is None for each in batch["more"][1]] == [i % 4 > 0 for i in rows]
        assert batch["more"][0].tolist() == rows
        assert batch["caption"].tolist() == [f"c{i}{number}" for i, number in zip(rows, captions, strict=True)]
        for each in (info, pickle.loads(pickle.dumps(info))):
            assert each.choices["caption"].tolist() == captions
            assert each.choices.chosen("caption") == [f"captions.{number}" for number in captions]
    names = cache.read_batch(rows, **options | {"collate": lambda samples: [list(sample) for sample in samples]})
    assert {*map(tuple, names)} == {("mask", "more", "image", "caption")}


@pytest.mark.parametrize("rows", [[0, 1], [1, 0], [1]])
@pytest.mark.parametrize("name", ["captions", "text"])
def test_a_list_with_none_among_the_alternatives(rows: list[int], name: str, tmp_path: Path) -> None:
    captions = [[torch.tensor([0])], [None, torch.tensor([1])]]
    with tc.open(write(tmp_path, [{"captions": tensors, "id": i} for i, tensors in enumerate(captions)])) as cache:
        batch = cache.read_batch(rows, choose={name: "captions.*"})
        assert set(batch) == {"id", name}
        assert batch[name].flatten().tolist() == rows
        samples = cache.read_batch(rows, choose={name: "captions.*"}, collate=lambda samples: samples)
        assert samples == [{"id": i, name: torch.tensor([i])} for i in rows]


def test_names_that_are_alternatives_of_each_other(tmp_path: Path) -> None:
    with tc.open(write(tmp_path, [{"a": torch.tensor([i]), "b": torch.tensor([-i])} for i in range(2)])) as cache:
        for batch in (
            cache.read_batch([0, 1], choose={"a": "b", "b": "a"}),
            *tc.Loader(cache, 2, choose={"a": "b", "b": "a"}),
        ):
            assert batch["a"].tolist() == [[0], [-1]]
            assert batch["b"].tolist() == [[0], [1]]


def test_a_dict_in_two_places(tmp_path: Path) -> None:
    texts = {"captions": ["a", "b"]}
    sample = {"first": texts, "second": texts, "x": torch.ones(1)}
    with tc.open(write(tmp_path, [sample] * 2)) as cache:
        batch = cache.read_batch([0, 1], choose={"text": "*.captions.*"}, choices={"text": [1, 2]})
        assert batch["text"].tolist() == ["b", "a"]
        assert set(batch) == {"first", "second", "x", "text"}


def test_optional_tensors_that_are_chosen_together(tmp_path: Path) -> None:
    """A flipped image goes with the flipped mask, or with None if the sample has no mask."""

    def sample(i: int) -> dict[str, Any]:
        image, mask = torch.full((2,), i + 1.0), torch.full((1, 2), i + 11.0) if i % 3 == 1 else None
        flipped = None if mask is None else -mask
        return {"image": image, "image_flipped": -image, "mask": mask, "mask_flipped": flipped}

    choose = {("image", "mask"): [("image", "mask"), ("image_flipped", "mask_flipped")]}
    with tc.open(write(tmp_path, [sample(i) for i in range(6)], max_samples=6)) as cache:
        renamed = {("i", "m"): choose["image", "mask"]}
        _, info = cache.read_batch_with_info([0, 2], collate="pad", choose=renamed)
        assert info.mask("m").shape == (2, 0)
        for rows, signs in product(([0, 1, 2], [0, 2], [4, 1]), ([0, 1, 0], [1, 0, 1])):
            signs = signs[: len(rows)]
            factors = [1 - 2 * sign for sign in signs]
            options: dict[str, Any] = {"choose": choose, "choices": {"image": signs}}
            batch, info = cache.read_batch_with_info(rows, collate={"mask": "list"}, **options)
            assert set(batch) == {"image", "mask"}
            assert batch["image"][:, 0].tolist() == [(i + 1.0) * by for i, by in zip(rows, factors, strict=True)]
            for i, mask, by in zip(rows, batch["mask"], factors, strict=True):
                assert mask is None if i % 3 != 1 else mask.tolist() == [[(i + 11.0) * by] * 2]
            names = ["mask_flipped" if sign else "mask" for sign in signs]
            expected = [name if i % 3 == 1 else "" for i, name in zip(rows, names, strict=True)]
            assert info.choices.chosen("mask") == expected
            padded, info = cache.read_batch_with_info(rows, collate={"mask": tc.pad(to=1)}, **options)
            assert padded["mask"].shape == (len(rows), 1, 2)
            assert info.mask("mask")[:, 0].tolist() == [i % 3 == 1 for i in rows]


def test_a_container_of_tensors_is_no_alternative(folder: str, cache: Any) -> None:
    message = r"choose={'text': 'captions'}: .* choose among them by 'captions\.\*'"
    for rows, collate in (([5], "list"), ([5, 6], "list"), ([5, 6], list)):
        with pytest.raises(ValueError, match=message):
            cache.read_batch(rows, choose={"text": "captions"}, collate=collate)
    with pytest.raises(ValueError, match=message):
        tc.Loader(cache, 2, choose={"text": "captions"})
    view = cache.select(["captions"])
    assert set(tc.flatten(view[5])) == {f"captions.{number}" for number in range(6)}
    assert set(cache.select(["cond"]).schema) == {"cond.0"}


@pytest.fixture
def paired(tmp_path: Path) -> Any:
    """Samples whose texts and captions belong together."""
    samples = []
    for i in range(COUNT):
        texts = [torch.tensor([i, number]) for number in range(2 + i % 3)]
        captions, tags = ([f"{i} {number}" for number in range(2 + i % 3)] for _ in range(2))
        samples.append({"texts": texts, "captions": captions, "tags": {"a": tags}, "more": ["one", "two"]})
    return tc.open(write(tmp_path, samples, max_samples=7))


TOGETHER = {("text", "caption", "tag"): ("texts.*", "captions.*", "tags.a.*")}


def test_tensors_and_values_that_are_chosen_together(paired: Any) -> None:
    batch, info = paired.read_batch_with_info([1, 2], choose=TOGETHER, choices={"caption": [2, 3]})
    assert batch["text"].tolist() == [[1, 2], [2, 3]]
    assert batch["caption"] == ["1 2", "2 3"] == batch["tag"].tolist()
    assert info.choices.chosen("tag") == ["tags.a.2", "tags.a.3"]
    assert pickle.loads(pickle.dumps(info)).choices == info.choices
    message = (
        "sample '001': 'text', 'x' are chosen together, but .*: one has 'texts.2', 'texts.0', 'texts.1', the other 'more.0', "
        r"'more.1'. What .* or list the pairs: {\('text', 'x'\): \[\("
    )
    with pytest.raises(tc.BatchError, match=message):
        paired.read_batch([1], choose={("text", "x"): ("texts.*", "more.*")})["x"].tolist()
    message = "sample '001': 'x', 'y' are chosen together, .* cannot be paired by name"
    for wrong in (
        [("texts.*", "texts.0"), ("texts.2", "texts.1")],
        [("texts.0", "texts.1"), ("texts.1", "texts.2"), ("texts.0", "texts.2")],  # texts.0 has two partners
    ):
        with pytest.raises(tc.BatchError, match=message):
            paired.read_batch([1], choose={("x", "y"): wrong})


@pytest.mark.parametrize("kind", ["list", "dict"])
@pytest.mark.parametrize("num_workers", [0, 1])
def test_values_in_the_containers_of_tensors(kind: str, num_workers: int, tmp_path: Path) -> None:
    """A pattern may have its wildcard before the last part of a name."""

    def sample(i: int) -> dict[str, Any]:
        count = 1 + i % 3 if kind == "list" else 3
        captions = [{"states": torch.tensor([i, k]), "text": f"{i} {k}"} for k in range(count)]
        return {"captions": captions if kind == "list" else dict(zip("abc", captions, strict=True))}

    with tc.open(write(tmp_path, [sample(i) for i in range(COUNT)], max_samples=7)) as cache:
        for weight in (1, 2):
            choose = {("states", "text"): {("captions.*.states", "captions.*.text"): weight}}
            chosen = set()
            loader = tc.torch_loader(cache, 4, choose=choose, num_workers=num_workers)
            for batch, info in loader.with_info():
                assert [" ".join(map(str, row)) for row in batch["states"].tolist()] == batch["text"]
                chosen |= set(info.choices.chosen("text"))
            assert chosen == {f"captions.{part}.text" for part in ("012" if kind == "list" else "abc")}
        with pytest.raises(tc.BatchError, match=r"unknown tensor 'captions.\*.txt'"):
            tc.Loader(cache, 4, choose={"text": "captions.*.txt"})


ESCAPED = {"x.y": "x%2Ey"}
NAMES = ["texts", "captions"]
KEYS = ["1", "2", "9", "10", "13", "31", "a", "é", "b c", "x.y"]


@pytest.mark.parametrize("kind", ["value", "tensor"])
def test_names_that_are_chosen_together_are_paired_by_name(kind: str, tmp_path: Path) -> None:
    """Dicts have any order of keys, and lists more than ten items. The model pairs keys; tensors and captions contain them."""
    random = Random(f"pairs {kind}")

    def container(keys: list[str], is_list: bool, make: Any) -> Any:
        if is_list:
            return [make(str(n)) for n in range(len(keys))]
        return {key: make(key) for key in random.sample(keys, len(keys))}

    def text(i: int, key: str) -> torch.Tensor:
        return torch.tensor([i, *map(ord, key)])

    for case in range(15):
        are_lists = case % 3 == 0, case % 4 == 0
        keys = random.sample(KEYS, random.randint(2, len(KEYS)))
        if any(are_lists):
            keys = [str(n) for n in range(random.randint(2, 14))]
        make = (lambda i, key: f"{i} {key}") if kind == "value" else text
        parts = list(zip(NAMES, are_lists, (text, make), strict=True))
        samples = [{name: container(keys, is_list, partial(of, i)) for name, is_list, of in parts} for i in range(4)]
        ordered = sorted(keys, key=lambda key: (not key.isdecimal(), int(key) if key.isdecimal() else 0, key))
        first = random.choice(keys)
        ways = [["*"], [first, "*"], random.sample(keys, len(keys)), [first, "[!0-9]*", "[0-9]*"], [first, "[13]"]]
        wanted = ways[case % 5]
        matches = [[key] if key in keys else fnmatch.filter(ordered, key) for key in wanted]
        expected = list(dict.fromkeys(key for names in matches for key in names))
        matched = [key for key, n in zip(wanted, matches, strict=True) if n]
        rows = [tuple(f"in.{name}.{ESCAPED.get(key, key)}" for name in NAMES) for key in matched]
        weighted = {row: random.randint(1, 3) for row in rows}
        folder = write(tmp_path / f"{case}", [{"in": sample, "id": 0} for sample in samples], max_samples=2)
        with tc.open(folder) as cache:
            view = random.choice([cache, tc.join([cache])])
            check_pairs(view, {("text", "new.caption"): random.choice([rows, weighted])}, expected)


def check_pairs(cache: Any, choose: Any, expected: list[str]) -> None:
    def shown(values: Any) -> list[str]:
        texts = [value.tolist() if isinstance(value, torch.Tensor) else value for value in values]
        return [text if isinstance(text, str) else f"{abs(text[0])} {''.join(map(chr, text[1:]))}" for text in texts]

    for at, key in enumerate(expected):
        options: Any = {"choose": choose, "choices": {"text": [at] * 2}}
        batch, info = cache.read_batch_with_info([3, 1], collate="list", **options)
        assert shown(batch["text"]) == [f"3 {key}", f"1 {key}"] == shown(batch["new"]["caption"])
        assert info.choices.chosen("text") == [f"in.texts.{ESCAPED.get(key, key)}"] * 2
        assert info.choices.chosen("new.caption") == [f"in.captions.{ESCAPED.get(key, key)}"] * 2
        samples = cache.read_batch([3, 1], collate=list, **options)
        pairs = [shown([sample["text"], sample["new"]["caption"]]) for sample in samples]
        assert pairs == [[f"{i} {key}"] * 2 for i in (3, 1)]
    for batch in tc.Loader(cache, 2, shuffle=True, seed=1, choose=choose, collate="list", num_threads=0):
        assert shown(batch["text"]) == shown(batch["new"]["caption"])


def test_other_names_are_not_paired(tmp_path: Path) -> None:
    """Equal counts do not help. The names of keys that are neither text nor ints depend on their order."""

    def tensors(keys: Any) -> dict[Any, Any]:
        return {key: torch.tensor(n) for n, key in enumerate(keys)}

    cases: list[Any] = [
        (tensors("ab"), {"a": "0", "c": "1"}, "'texts.b', 'texts.a', the other 'captions.c', 'captions.a'"),
        (tensors("ab"), tensors("ac"), "'texts.b', 'texts.a', the other 'captions.c', 'captions.a'"),
        ([*tensors("ab").values()], [None, "0", "1"], "'texts.0', 'texts.1', the other 'captions.2', 'captions.1'"),
        (tensors([0.5, 1.5]), {1.5: "1", 0.5: "0"}, "'texts.@0', 'texts.@1', the other 'captions.@0', 'captions.@1'"),
    ]
    for number, (texts, captions, names) in enumerate(cases):
        cache = tc.open(write(tmp_path / f"{number}", [{"texts": texts, "captions": captions}]))
        with pytest.raises(tc.BatchError, match=f"sample '000': .* cannot be paired by name: one has {names}\\. "):
            cache.read_batch([0], choose={("text", "caption"): ("texts.*", "captions.*")})["caption"].tolist()


def test_items_of_lists_of_strings(strings: str) -> None:
    """A list stays in the batch unless all of it is alternatives."""
    with tc.open(strings) as cache:
        for wanted in (["captions.1", "captions.0"], ["captions.[12]", "captions.0"]):
            options: Any = {"choose": {"caption": wanted}, "choices": {"caption": [1, 0]}}
            batch, info = cache.read_batch_with_info([1, 1], **options)
            assert batch["caption"] == ["c1.0", "c1.1"]
            assert info.choices.chosen("caption") == ["captions.0", "captions.1"]
            assert batch["captions"] == [["c1.0", "c1.1"]] * 2
        batch = cache.read_batch([4], choose={"tag": "tags.[ab]"}, choices={"tag": [1]})
        assert batch["tag"] == [-4]


def test_patterns_that_seem_to_belong_together(paired: Any, strings: str, recwarn: pytest.WarningsRecorder) -> None:
    match = r"'text' and 'caption' independently.*\('texts\.\*', 'captions\.\*'\)"
    for loader in (tc.Loader, tc.torch_loader):
        with pytest.warns(UserWarning, match=match) as warned:
            loader(paired, 4, choose={"text": "texts.*", "caption": "captions.*"})
        assert len(warned) == 1
    tc.Loader(paired, 4, choose=TOGETHER)
    tc.Loader(paired, 4, choose={"text": "texts.*", "more": "more.*"})
    tc.Loader(tc.open(strings), 4, choose=STRINGS)
    assert not recwarn.list


def test_texts_under_other_keys(tmp_path: Path) -> None:
    """Only what remains of the samples must be alike."""
    texts = [{f"t{number}": f"{i}.{number}" for number in range(i % 3, 3)} for i in range(7)]
    samples = {f"{i}": {"x": torch.tensor([i]), "texts": texts[i], "i": i, "n": {"i": i}} for i in range(7)}
    samples["8"] = {"x": torch.tensor([8]), "texts": {"t": "8"}, "i": 8, "n": {"j": 8}}
    with tc.open(write(tmp_path, samples, max_samples=8)) as cache:
        batch = cache.read_batch(range(7), choose={"text": "texts.*"})
        assert batch["i"] == batch["n"]["i"] == batch["x"].flatten().tolist() == list(range(7))
        assert batch["text"] == [f"{i}.{i % 3}" for i in range(7)]
        assert list(batch) == ["x", "i", "n", "text"]
        with pytest.raises(tc.BatchError, match=r"'8' has nothing at 'n\.i', but '0' has a value"):
            list(cache.read_batch([0, 7], choose={"text": "texts.*"})["i"])


def test_lists_of_tensors_and_other_items(tmp_path: Path) -> None:
    """The rest of a list has None in place of its tensors."""
    with tc.open(write(tmp_path, [{"t": [torch.ones(2), None, ["s"]], "y": i} for i in range(3)])) as cache:
        batch = cache.read_batch(range(3), choose={"T": "t.0"})
        assert list(batch["t"]) == [[None, None, ["s"]]] * 3
        assert batch["T"].tolist() == [[1, 1]] * 3


def test_names_with_brackets(tmp_path: Path) -> None:
    """A name in brackets is a name before it is a pattern."""
    sample = {"x[0]": torch.zeros(2), "x[1]": torch.ones(3), "c[0]": {"a": torch.ones(1)}}
    with tc.open(write(tmp_path, [sample] * 3)) as cache:
        for part in (cache, tc.join([cache])):
            assert list(part.select("x[0]")[0]) == ["x[0]", "c[0]"]
            assert list(part.select(["c[0]"]).schema) == ["c[0].a"]
            for name in ("x", "x[0]"):
                choose = {name: ["x[0]", "x[1]"]}
                batch = next(iter(tc.Loader(part, 3, choose=choose, collate="list")))
                assert set(batch) == {name, "c[0]"}
                assert set(part.read_batch([0], choose=choose)) == {name, "c[0]"}


@pytest.mark.parametrize("kind", [OrderedDict, partial(defaultdict, int)])
def test_other_dicts(kind: Any, tmp_path: Path) -> None:
    sample = kind({"x": torch.zeros(2), "y": torch.ones(2)})
    with tc.open(write(tmp_path / "a", [sample] * 2)) as cache:
        batch = cache.read_batch([0, 1], choose={"x": ["x", "y"]}, choices={"x": [1, 0]})
        assert type(batch) is type(sample)
        assert batch["x"].tolist() == [[1, 1], [0, 0]]
    sample["texts"] = kind({"a": "A", "b": "B"})
    with tc.open(write(tmp_path / "b", [sample] * 2)) as cache:
        for name in ("text", "texts"):
            batch = cache.read_batch([0, 1], choose={name: "texts.*"}, choices={name: [1, 0]})
            assert set(batch) == {"x", "y", name}
            assert batch[name].tolist() == ["B", "A"]


def test_a_misspelled_alternative(tmp_path: Path) -> None:
    with tc.open(write(tmp_path, [{"latent": torch.zeros(2), "flip": torch.ones(2)}] * 4)) as cache:
        for choose in ({"latent": ["latent", "flp"]}, {("latent",): [("latent",), ("flip",), ("no.*",)]}):
            for use in (
                lambda choose=choose: tc.Loader(cache, 2, choose=choose),
                lambda choose=choose: cache.read_batch([0], choose=choose),
                lambda choose=choose: tc.join([cache]).read_batch([0], choose=choose),
            ):
                with pytest.raises(tc.BatchError, match="no sample has a tensor '(flp|no.*)'; there are .*flip"):
                    use()


def test_views_without_some_alternatives(tmp_path: Path) -> None:
    samples = [{"latent": torch.zeros(2), "x": torch.tensor(i)} for i in range(8)]
    for sample in samples[4:]:
        sample["flip"] = torch.ones(2)
    choose, joined_choose = {"latent": ["latent", "flip"]}, {"a.latent": ["a.latent", "a.flip"]}
    with tc.open(write(tmp_path, samples)) as cache:
        for view in (cache[:4], cache.filter(lambda entry: "flip" not in entry.shapes), cache.select(["latent", "x"])):
            for loader in (tc.Loader(view, 2, choose=choose), tc.torch_loader(view, 2, choose=choose)):
                assert not next(iter(loader))["latent"].any()
            assert not view.read_batch([0, 1], choose=choose)["latent"].any()
            joined = tc.join({"a": view})
            assert not next(iter(tc.Loader(joined, 2, choose=joined_choose)))["a"]["latent"].any()
            with pytest.raises(tc.BatchError, match="no sample has a tensor 'flp'; there are .*'flip'"):
                tc.Loader(view, choose={"latent": ["latent", "flp"]})
        with pytest.raises(tc.BatchError, match="unknown tensor 'latent'; there are 'x'"):
            tc.Loader(cache.select("x"), choose=choose)


def test_members_are_no_alternatives(tmp_path: Path) -> None:
    write(tmp_path, {"000": {"x": torch.zeros(2)}}, lambda i: {"txt": b"a"})
    message = r"unknown tensor 'txt'; there are 'x'; 'txt' is a member, which a transform reads: info\.cache\.read_"
    with tc.open(tmp_path) as cache:
        for wanted in (cache, tc.join([cache])):
            with pytest.raises(tc.BatchError, match=message):
                tc.Loader(wanted, choose={"c": "txt"})
