"""Joined caches give one sample from several of the same keys."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

import wds_tensorcache as tc
from tests.reading.batches import write as write_samples
from tests.same import assert_same

COUNT = 11
NUMBERS = list(range(COUNT))


def latent(i: int) -> dict[str, Any]:
    return {"latent": {"samples": torch.full((2, 3), float(i))}, "size": (i, i)}


def text(i: int) -> dict[str, Any]:
    return {"states": torch.full((1 + i % 3, 2), i, dtype=torch.int16), "pooled": torch.tensor([-i]), "prompt": f"p{i}"}


def write(folder: Path, sample: Any, numbers: list[int]) -> Path:
    write_samples(folder / "%d.tar", {f"k{i}": sample(i) for i in numbers}, max_samples=4)
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    path = tmp_path_factory.mktemp("join")
    return write(path / "latents", latent, NUMBERS), write(path / "texts", text, NUMBERS[::-1])


@pytest.fixture
def joined(folders: tuple[Path, Path]) -> Any:
    return tc.join(list(folders))


@pytest.fixture
def named(folders: tuple[Path, Path]) -> Any:
    return tc.join({"latents": folders[0], "texts": folders[1]})


def test_samples(joined: Any, named: Any) -> None:
    assert len(joined) == len(named) == COUNT
    assert list(joined.keys()) == list(named.keys()) == [f"k{i}" for i in NUMBERS]
    for i in NUMBERS:
        for index in (i, i - COUNT, f"k{i}"):
            assert_same({**latent(i), **text(i)}, joined[index])
            assert_same({"latents": latent(i), "texts": text(i)}, named[index])
    for cache in (joined, named):
        assert [sample.keys() for sample in cache] == [cache[0].keys()] * COUNT
        assert "k3" in cache
        assert "x" not in cache
        with pytest.raises(IndexError, match=r"index 11 out of range \[0, 11\)"):
            cache[COUNT]
        with pytest.raises(KeyError, match="no sample 'x'"):
            cache["x"]
    for sample, i in zip(joined.__getitems__([5, -1, 5]), (5, 10, 5), strict=True):
        assert_same({**latent(i), **text(i)}, sample)


def test_views(joined: Any, named: Any) -> None:
    view = joined[8:1:-2]
    assert isinstance(view, tc.JoinedCache)
    assert list(view.keys()) == ["k8", "k6", "k4", "k2"]
    assert_same({**latent(4), **text(4)}, view[2])
    assert_same({**latent(6), **text(6)}, view[1:]["k6"])
    kept = joined.filter(lambda entry: entry.key in ("k2", "k9"))
    assert list(kept.keys()) == ["k2", "k9"]
    assert_same({**latent(9), **text(9)}, kept[1])
    for cache, name in ((joined, "states"), (named, "texts.states")):
        assert list(cache.filter(lambda entry, name=name: entry.shapes[name][0] == 3).keys()) == ["k2", "k5", "k8"]
    assert len(joined.filter(lambda entry: entry.nbytes == 24 + 4 + 8 and len(entry.shapes) == 3)) == 4  # one row


def test_select(joined: Any, named: Any) -> None:
    assert set(joined.schema) == {"latent.samples", "states", "pooled"}
    assert named.schema["texts.states"].shape == ((1, 3), 2)
    assert [tensor.name for tensor in named.schema.values()] == list(named.schema)
    view = joined.select(["pooled"])
    assert_same({"latent": {}, "size": (3, 3), "pooled": torch.tensor([-3]), "prompt": "p3"}, view[3])
    assert list(view.schema) == ["pooled"]
    assert view.read_batch([1, 2])["pooled"].tolist() == [[-1], [-2]]
    assert list(named.select("latents.*")[0]["texts"]) == ["prompt"]
    with pytest.raises(KeyError, match="unknown tensor 'nothing'; there are 'latent.samples', "):
        joined.select(["pooled", "nothing"])
    assert len(joined[:0].select(["pooled"])) == 0


def test_batches(joined: Any, named: Any) -> None:
    for numbers in ([4, 1, 7], torch.tensor([4, 1, 7]), ["k4", "k1", "k7"], iter([4, "k1", -4])):
        batch = joined.read_batch(numbers)
        assert list(batch) == ["latent", "size", "states", "pooled", "prompt"]
        assert batch["latent"]["samples"][:, 0, 0].tolist() == [4, 1, 7]
        assert batch["states"].shape == (3, 2, 2)
        assert batch["pooled"].tolist() == [[-4], [-1], [-7]]
        assert batch["prompt"] == ["p4", "p1", "p7"]
        assert batch["size"] == [(4, 4), (1, 1), (7, 7)]
    padded, info = joined.read_batch_with_info([0, 1], collate="pad", pad_value=9)
    assert padded["states"].tolist() == [[[0, 0], [9, 9]], [[1, 1], [1, 1]]]
    assert info.shapes["states"].tolist() == [[1, 2], [2, 2]]
    assert info.shapes["latent.samples"].tolist() == [[2, 3], [2, 3]]
    padded, info = named.read_batch_with_info(["k0", 1], collate="pad", pad_value={"texts.states": 3})
    assert padded["latents"]["latent"]["samples"].shape == (2, 2, 3)
    assert padded["texts"]["prompt"] == ["p0", "p1"]
    assert padded["texts"]["states"].tolist() == [[[0, 0], [3, 3]], [[1, 1], [1, 1]]]
    assert info.shapes["texts.states"].tolist() == [[1, 2], [2, 2]]
    assert info.keys == ["k0", "k1"]
    for cache in (joined, named):
        for sample, i in zip(cache.read_batch([2, 5], collate=list), (2, 5), strict=True):
            expected = {**latent(i), **text(i)} if cache is joined else {"latents": latent(i), "texts": text(i)}
            assert_same(expected, sample)
            assert not isinstance(sample.get("pooled"), tc.LazyTensor)
        for numbers, collate, error, message in (
            ([], "stack", ValueError, "no indices"),
            ([0, 11], "stack", IndexError, r"indices\[1\] = 11 out of range"),
            ([0, 1], "stack", tc.BatchError, "tensor '(texts.)?states' is"),
        ):
            with pytest.raises(error, match=message):
                cache.read_batch(numbers, collate=collate)


def test_joins_of_joins(folders: tuple[Path, Path], tmp_path: Path) -> None:
    masks = write(tmp_path, lambda i: {"mask": torch.tensor(i > 5)}, NUMBERS)
    with tc.join([tc.join(list(folders)), masks]) as nested:
        assert_same({**latent(7), **text(7), "mask": torch.tensor(True)}, nested["k7"])
        assert nested[5:7].read_batch([1, 0], collate="list")["mask"] == [torch.tensor(True), torch.tensor(False)]


def test_keys_that_differ(folders: tuple[Path, Path], tmp_path: Path) -> None:
    fewer, other = write(tmp_path / "fewer", text, NUMBERS[:4]), write(tmp_path / "other", text, [*NUMBERS[:-1], 99])
    many = "'k4', 'k5', 'k6', 'k7', 'k8' and 2 more; "
    for sources, message in (
        ([folders[0], fewer], f"cache 0 with 11 samples and cache 1 with 4: 1 lacks 7 keys: {many}"),
        ([fewer, folders[0]], "cache 0 with 4 samples and cache 1 with 11: 0 lacks 7 keys: 'k10', 'k4', "),
        ([*folders, other], "cache 0 with 11 samples and cache 2 with 11: 2 lacks 1 key: 'k10'; .*'inner'"),
        ({"a": folders[0], "b": fewer}, "cache 'a' with 11 samples and cache 'b' with 4: 'b' lacks 7"),
    ):
        with pytest.raises(KeyError, match=message):
            tc.join(sources)  # type: ignore[arg-type]


def test_inner_keeps_what_all_have(folders: tuple[Path, Path], tmp_path: Path) -> None:
    some = write(tmp_path / "some", lambda i: {"mask": torch.tensor(i)}, [7, 2, 99, 5])
    other = write(tmp_path / "other", lambda i: {"more": i}, [5, 4, 3, 2])
    with tc.join([*folders, some, other], how="inner") as cache:
        assert list(cache.keys()) == ["k2", "k5"]  # in the first one's order
        for i in (2, 5):
            assert_same({**latent(i), **text(i), "mask": torch.tensor(i), "more": i}, cache[f"k{i}"])
        assert cache.read_batch([1, 0])["mask"].tolist() == [5, 2]
        assert "k7" not in cache
    with tc.join({"a": some, "b": folders[1]}, how="inner") as cache:
        pairs = [(sample["a"]["mask"].load(), sample["b"]["prompt"]) for sample in cache]
        assert pairs == [(7, "p7"), (2, "p2"), (5, "p5")]
    with tc.join([folders[0], write(tmp_path / "none", text, [77])], how="inner") as cache:
        assert list(cache) == list(cache.keys()) == []


@pytest.mark.parametrize("is_named", [True, False])
def test_many_samples_with_one_caption(folders: tuple[Path, Path], tmp_path: Path, is_named: bool) -> None:
    captions = write(tmp_path, lambda i: {"caption": torch.full((2,), i)}, [0, 1, 2, 3])
    of = {f"k{i}": f"k{i % 3}" for i in NUMBERS}
    keys: Any = {"text": of.__getitem__} if is_named else {1: of}
    sources: Any = {"image": folders[0], "text": captions} if is_named else [folders[0], captions]
    with tc.join(sources, keys=keys) as cache:
        assert len(cache) == COUNT
        batch = cache.read_batch([4, "k1", 2, 10])
        assert (batch["text"] if is_named else batch)["caption"][:, 0].tolist() == [1, 1, 2, 1]
        view = pickle.loads(pickle.dumps(cache[3:]))["k5"]
        assert int((view["text"] if is_named else view)["caption"][0]) == 2


def test_samples_without_a_caption(folders: tuple[Path, Path], tmp_path: Path) -> None:
    captions = write(tmp_path, lambda i: {"caption": i}, [0, 1])
    for some in ({"k3": "k0", "k5": "k1", "k6": "k77"}, {"k3": "k0", "k5": "k1"}.get):
        with pytest.raises(KeyError, match=r"'text' lacks (8|9) keys: 'k0', 'k1', 'k2', 'k4', 'k6'"):
            tc.join({"image": folders[0], "text": captions}, keys={"text": some})
        with tc.join({"image": folders[0], "text": captions}, keys={"text": some}, how="inner") as cache:
            assert list(cache.keys()) == ["k3", "k5"]
            assert [sample["text"]["caption"] for sample in cache] == [0, 1]


def test_caches_that_cannot_be_joined_are_refused(folders: tuple[Path, Path], tmp_path: Path) -> None:
    plain = write(tmp_path / "plain", lambda i: torch.tensor(i), NUMBERS)
    clashing = write(tmp_path / "clashing", lambda i: {"size": i, "pooled": i, "new": 1}, NUMBERS)
    with pytest.raises(tc.BatchError, match=r"cache 1 \(.*plain/0.tar\) has a LazyTensor, not a dict; join a dict of"):
        tc.join([folders[0], plain])
    with tc.join({"a": folders[0], "b": plain}) as cache:
        assert cache[4]["b"].load() == 4
        assert cache.read_batch([4, 2])["b"].tolist() == [4, 2]
    message = r"cache 0 \(.*latents/0.tar\) and cache 2 \(.*clashing/0.tar\) both have .*'size' .*join a dict of"
    with pytest.raises(tc.BatchError, match=message):
        tc.join([*folders, clashing])
    with tc.open(folders[0]) as cache, pytest.raises(KeyError, match="key 'k0' occurs twice in a joined cache with 3"):
        tc.join([cache, cache[[0, 0, 1]]])
    for wrong, options, error, message in (
        ([], {}, ValueError, "nothing to join"),
        ({}, {}, ValueError, "nothing to join"),
        (folders[0], {}, TypeError, r"tc\.join needs a list or a dict of caches or paths, got "),
        (tc.open(folders[0]), {}, TypeError, r"tc\.join needs a list or a dict of caches or paths, got "),
        ({None: folders[0], "None": folders[1]}, {}, TypeError, "strings as names of caches"),
        (folders, {"how": "outer"}, ValueError, "how='outer', expected 'exact' or 'inner'"),
        (folders, {"keys": {"0": "1"}.get}, TypeError, "expected a dict of functions or mappings by cache"),
    ):
        with pytest.raises(error, match=message):
            tc.join(wrong, **options)  # type: ignore[arg-type]


def test_names_of_caches_are_parts_of_tensor_names(tmp_path: Path) -> None:
    """A dot in a name is escaped, as in the key of a dict, so that no two tensors have one name."""
    one = write(tmp_path / "x", lambda i: {"b": {"c": torch.ones(2)}}, [0])
    other = write(tmp_path / "y", lambda i: {"c": torch.full((2,), 2.0)}, [0])
    with tc.join({"a": one, "a.b": other}) as joined:
        assert list(joined.schema) == ["a.b.c", "a%2Eb.c"]
        read = joined.read_tensors([0])
        assert {name: tensor[0, 0].item() for name, tensor in read.items()} == {"a.b.c": 1.0, "a%2Eb.c": 2.0}
        nested = joined.nest([0], read)
        assert (nested["a"]["b"]["c"][0, 0], nested["a.b"]["c"][0, 0]) == (1, 2)
