"""Joined caches give one sample from several of the same keys."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

import wds_tensorcache as tc
from tests.same import assert_same

COUNT = 11
NUMBERS = list(range(COUNT))


def latent(i: int) -> dict[str, Any]:
    return {"latent": {"samples": torch.full((2, 3), float(i))}, "size": (i, i)}


def text(i: int) -> dict[str, Any]:
    return {"states": torch.full((1 + i % 3, 2), i, dtype=torch.int16), "pooled": torch.tensor([-i]), "prompt": f"p{i}"}


def write(folder: Path, sample: Any, numbers: list[int], **writer: Any) -> Path:
    with tc.ShardWriter(folder / "%d.tar", max_samples=4, fsync=False, **writer) as sink:
        for i in numbers:
            sink.write(f"k{i}", sample(i))
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    path = tmp_path_factory.mktemp("join")
    return write(path / "latents", latent, NUMBERS), write(path / "texts", text, NUMBERS[::-1])


@pytest.fixture
def joined(folders: tuple[Path, Path]) -> Iterator[Any]:
    with tc.open(list(folders), join="key") as cache:
        yield cache


@pytest.fixture
def named(folders: tuple[Path, Path]) -> Iterator[Any]:
    with tc.open({"latents": folders[0], "texts": folders[1]}, join="key") as cache:
        yield cache


def test_samples(joined: Any, named: Any) -> None:
    assert len(joined) == len(named) == COUNT
    assert list(joined.keys()) == list(named.keys()) == [f"k{i}" for i in NUMBERS]
    assert repr(joined) == "JoinedCache(11 samples of 2 caches)"
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


def test_views(joined: Any) -> None:
    view = joined[8:1:-2]
    assert isinstance(view, tc.JoinedCache)
    assert list(view.keys()) == ["k8", "k6", "k4", "k2"]
    assert_same({**latent(4), **text(4)}, view[2])
    assert_same({**latent(6), **text(6)}, view[1:]["k6"])
    kept = joined.filter(lambda entry: entry.key in ("k2", "k9"))
    assert list(kept.keys()) == ["k2", "k9"]
    assert_same({**latent(9), **text(9)}, kept[1])
    assert list(kept[::-1].filter(lambda entry: entry.key == "k2").keys()) == ["k2"]


def test_filter_knows_all_caches(joined: Any, named: Any) -> None:
    assert list(joined.filter(lambda entry: entry.shapes["states"][0] == 3).keys()) == ["k2", "k5", "k8"]
    assert len(joined.filter(lambda entry: entry.nbytes == 24 + 4 + 8 and len(entry.shapes) == 3)) == 4  # one row
    assert list(named.filter(lambda entry: entry.shapes["texts.states"][0] == 3).keys()) == ["k2", "k5", "k8"]
    assert len(named.filter(lambda entry: entry.shapes["latents.latent.samples"] == (2, 3))) == COUNT


def test_select(joined: Any, named: Any) -> None:
    assert set(joined.schema) == {"latent.samples", "states", "pooled"}
    assert named.schema["texts.states"].shape == ((1, 3), 2)
    view = joined.select(["pooled"])
    assert_same({"latent": {}, "size": (3, 3), "pooled": torch.tensor([-3]), "prompt": "p3"}, view[3])
    assert list(view.schema) == ["pooled"]
    assert view.read_batch([1, 2])["pooled"].tolist() == [[-1], [-2]]
    assert list(named.select("latents.*")[0]["texts"]) == ["prompt"]
    with pytest.raises(KeyError, match="no tensor is called 'nothing'; there are 'latent.samples', "):
        joined.select(["pooled", "nothing"])


def test_batches(joined: Any, named: Any) -> None:
    for numbers in ([4, 1, 7], torch.tensor([4, 1, 7]), ["k4", "k1", "k7"], iter([4, "k1", -4])):
        batch = joined.read_batch(numbers)
        assert list(batch) == ["latent", "size", "states", "pooled", "prompt"]
        assert batch["latent"]["samples"][:, 0, 0].tolist() == [4, 1, 7]
        assert batch["states"].shape == (3, 2, 2)
        assert batch["pooled"].tolist() == [[-4], [-1], [-7]]
        assert batch["prompt"] == ["p4", "p1", "p7"]
        assert batch["size"] == [(4, 4), (1, 1), (7, 7)]
    with pytest.raises(tc.BatchError, match="tensor 'states' is"):
        joined.read_batch([0, 1])
    listed = joined.read_batch([0, 1], collate="list")
    assert [x.shape[0] for x in listed["states"]] == [1, 2]
    padded, shapes = joined.read_batch([0, 1], collate="pad", pad_value=9)
    assert padded["states"].tolist() == [[[0, 0], [9, 9]], [[1, 1], [1, 1]]]
    assert shapes["states"].tolist() == [[1, 2], [2, 2]]
    assert shapes["latent.samples"].tolist() == [[2, 3], [2, 3]]
    batch = named.read_batch(["k3", 0])
    assert batch["latents"]["latent"]["samples"].shape == (2, 2, 3)
    assert batch["texts"]["prompt"] == ["p3", "p0"]
    padded, shapes = named.read_batch([0, 1], collate="pad")
    assert (padded["texts"]["states"].shape, shapes["texts"]["states"].shape) == ((2, 2, 2), (2, 2))
    for cache in (joined, named):
        for sample, i in zip(cache.read_batch([2, 5], collate=list), (2, 5), strict=True):
            expected = {**latent(i), **text(i)} if cache is joined else {"latents": latent(i), "texts": text(i)}
            assert_same(expected, sample)
            assert not isinstance(sample.get("pooled"), tc.LazyTensor)
        assert [io.method for io in cache.io] == [cache.io[0].method] * 2
        with pytest.raises(ValueError, match="collate='cat', expected"):
            cache.read_batch([0], collate="cat")
        with pytest.raises(ValueError, match="no indices"):
            cache.read_batch([])
        with pytest.raises(IndexError, match=r"indices\[1\] = 11 out of range"):
            cache.read_batch([0, 11])


def test_pickle_and_workers(joined: Any, named: Any) -> None:
    for cache, view in ((joined, joined[2:9:3]), (named, named[2:9:3])):
        with pickle.loads(pickle.dumps(view)) as copied:
            assert list(copied.keys()) == ["k2", "k5", "k8"]
            for i in range(3):
                assert_same(tc.realize(view[i]), copied[i])
            assert copied.schema == view.schema
        loader = DataLoader(cache, batch_size=4, num_workers=1, collate_fn=list)
        read = [sample for batch in loader for sample in batch]
        for expected, sample in zip(cache, read, strict=True):
            assert_same(tc.realize(expected), sample)


def test_caches_that_are_open_and_joins_of_joins(folders: tuple[Path, Path], tmp_path: Path) -> None:
    masks = write(tmp_path, lambda i: {"mask": torch.tensor(i > 5)}, NUMBERS)
    with tc.open(folders[0])[3:6] as latents, tc.open(folders[1]) as texts:
        some = texts.filter(lambda entry: entry.key in ("k3", "k4", "k5"))
        view = tc.open([some, latents], join="key")
        assert list(view.keys()) == ["k5", "k4", "k3"]
        assert_same({**text(3), **latent(3)}, view[2])
    with tc.open([tc.open(list(folders), join="key"), masks], join="key") as nested:
        assert_same({**latent(7), **text(7), "mask": torch.tensor(True)}, nested["k7"])
        assert nested[5:7].read_batch([1, 0], collate="list")["mask"] == [torch.tensor(True), torch.tensor(False)]


def test_keys_that_differ(folders: tuple[Path, Path], tmp_path: Path) -> None:
    fewer, other = write(tmp_path / "fewer", text, NUMBERS[:4]), write(tmp_path / "other", text, [*NUMBERS[:-1], 99])
    for sources, message in (
        ([folders[0], fewer], "cache 0 with 11 samples and cache 1 with 4: sample 'k4' is not in both"),
        ([fewer, folders[0]], "cache 0 with 4 samples and cache 1 with 11: sample 'k10' is not in both"),
        ([folders[0], folders[1], other], "cache 0 with 11 samples and cache 2 with 11: sample 'k10' is not in both"),
    ):
        with pytest.raises(KeyError, match=message):
            tc.open(sources, join="key")


def test_what_cannot_be_joined(folders: tuple[Path, Path], tmp_path: Path) -> None:
    plain = write(tmp_path / "plain", lambda i: torch.tensor(i), NUMBERS)
    clashing = write(tmp_path / "clashing", lambda i: {"size": i, "pooled": i, "new": 1}, NUMBERS)
    with tc.open([folders[0], plain], join="key") as cache:
        for use in (lambda: cache[0], lambda: cache.read_batch([0]), lambda: cache.__getitems__([0])):
            with pytest.raises(
                tc.BatchError, match="cache 1 has a LazyTensor, not a dict|cache 1 has a Tensor, not a dict"
            ):
                use()
    with tc.open({"a": folders[0], "b": plain}, join="key") as cache:
        assert cache[4]["b"].load() == 4
        assert cache.read_batch([4, 2])["b"].tolist() == [4, 2]
    with tc.open([*folders, clashing], join="key") as cache:
        for use in (lambda: cache[0], lambda: cache.read_batch([0])):
            with pytest.raises(tc.BatchError, match=r"more than one cache has \['pooled', 'size'\]|has \['size'\]"):
                use()
    with pytest.raises(ValueError, match="nothing to join"):
        tc.open([], join="key")
    with pytest.raises(TypeError, match="join='key' needs a list or a dict of what is joined, got "):
        tc.open(str(folders[0]), join="key")


def test_close(folders: tuple[Path, Path]) -> None:
    with tc.open(list(folders), join="key") as cache:
        sample = cache[0]
    for use in (
        lambda: cache[0],
        lambda: cache.read_batch([0]),
        sample["pooled"].load,
        sample["latent"]["samples"].load,
    ):
        with pytest.raises(ValueError, match="the cache is closed"):
            use()
