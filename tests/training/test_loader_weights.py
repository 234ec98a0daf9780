"""Weights of samples and of sources, which may change while batches are on their way."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import wds_tensorcache as tc
from tests.training.loaders import COUNT


def test_weights(cache: Any) -> None:
    weights = np.zeros(COUNT)
    weights[[3, 7]] = 1, 3
    loader = tc.Loader(cache, 10, weights=weights, collate="list")
    found = Counter(number for _ in range(100) for _, info in loader.with_info() for number in info.indices.tolist())
    assert set(found) == {3, 7}
    assert 2.5 < found[7] / found[3] < 3.5


def test_weights_of_any_size(cache: Any) -> None:
    loader = tc.Loader(cache, 23, weights=[1e308] * COUNT, collate="list")
    assert (
        len({number for _ in range(20) for _, info in loader.with_info() for number in info.indices.tolist()}) == COUNT
    )


def test_weights_of_samples_that_change(cache: Any) -> None:
    loader = tc.Loader(cache, 5, weights=np.eye(COUNT)[1], collate="list")
    seen = []
    for number, (_, info) in enumerate(loader.with_info()):
        seen.append(set(info.indices.tolist()))
        if number == 1:
            assert loader.set_weights(torch.eye(COUNT)[2], strict=True) == 2
    assert seen == [{1}, {1}, {2}, {2}, {2}]


def test_weights_that_change_twice(cache: Any) -> None:
    each = np.eye(COUNT)
    loader = tc.Loader(cache, 1, weights=each[0], collate="list")
    iterator = iter(loader.with_info())
    next(iterator)
    assert loader.set_weights(each[1], strict=True) == 1
    changed = loader.set_weights(each[2])
    again = tc.Loader(cache, 1, weights=each[0], collate="list")
    again.load_state_dict(loader.state_dict())
    seen = [info.indices.item() for _, info in iterator]
    assert seen == [info.indices.item() for _, info in again.with_info()]
    assert seen[: changed - 1] == [1] * (changed - 1)
    assert set(seen[changed - 1 :]) == {2}


def test_mix(cache: Any, more: Any) -> None:
    loader = tc.Loader(None, 4, mix={"a": (cache, 0.75), "b": (more, 0.25)}, collate="list")
    assert len(loader) == 8  # of 32 samples
    found: Counter[str] = Counter()
    keys: dict[str, list[str]] = {"a": [], "b": []}
    for _ in range(100):
        for _, info in loader.with_info():
            found[info.source] += 1
            keys[info.source] += info.keys
    assert 2.3 < found["a"] / found["b"] < 3.9
    for name, each in (("a", cache), ("b", more)):
        count = len(each)
        for begin in range(0, len(keys[name]) - count + 1, count):  # each goes through its own epochs
            assert sorted(keys[name][begin : begin + count]) == sorted(each.keys())


@pytest.mark.parametrize("strict", [True, False])
def test_weights_that_change(cache: Any, more: Any, strict: bool) -> None:
    def loader() -> tc.Loader:
        return tc.Loader(None, 2, mix={"a": (cache, 1), "b": (more, 0)}, collate="list", prefetch_batches=3)

    one = loader()
    sources, states = [], []
    for number, (_, info) in enumerate(one.with_info()):
        sources.append(info.source)
        if number == 4:
            at = one.set_weights({"a": 0, "b": 1}, strict=strict)
        states.append(json.loads(json.dumps(one.state_dict())))
    assert at == (5 if strict else 8)
    assert sources == ["a"] * at + ["b"] * (len(one) - at)
    for number, state in enumerate(states[:-1]):
        again = loader()
        again.load_state_dict(state)
        expected = sources[number + 1 :] if number >= 4 else ["a"] * (len(one) - number - 1)
        assert [info.source for _, info in again.with_info()] == expected


def test_old_weights_are_forgotten(cache: Any) -> None:
    loader = tc.Loader(cache, 1, weights=np.ones(COUNT), collate="list")
    for number, _ in enumerate(loader):
        loader.set_weights(np.full(COUNT, number + 1), strict=number % 2 == 0)
        assert len(loader._plan._weights._changes) <= 8  # of what was read ahead, at most


def test_states_have_the_weights(cache: Any) -> None:
    first = tc.Loader(cache, 4, weights=np.eye(COUNT)[3])
    second = tc.Loader(cache, 4, weights=np.eye(COUNT)[4], collate="list")
    second.load_state_dict(first.state_dict())
    assert {number for _, info in second.with_info() for number in info.indices.tolist()} == {3}
    second.set_weights(np.eye(COUNT)[4])
    assert {number for _, info in second.with_info() for number in info.indices.tolist()} == {4}


@pytest.mark.parametrize(
    "weights",
    [None, "abc", {"a": 1}, [1j] * COUNT, [1] * 3, [0] * COUNT, [-1] * COUNT, [float("nan")] * COUNT],
    ids=str,
)
def test_what_are_no_weights(cache: Any, weights: Any) -> None:
    loader = tc.Loader(cache, 4, weights=np.ones(COUNT))
    with pytest.raises(ValueError, match=f"expected {COUNT} numbers"):
        loader.set_weights(weights)


@pytest.mark.parametrize("mix", [{}, {"a": None}, {"a": (None, 0.5, 1)}, [1]], ids=str)
def test_what_is_no_mix(mix: Any) -> None:
    with pytest.raises(ValueError, match="mix=.*expected {'a': "):
        tc.Loader(mix=mix)


@pytest.mark.parametrize("kind", ["loader", "torch_loader"])
def test_caches_of_a_mix_have_different_tensors(tmp_path: Path, kind: str) -> None:
    for name in ("a", "b"):
        with tc.ShardWriter(tmp_path / name) as sink:
            for i in range(8):
                text = {"text": torch.ones(i % 3 + 1, 2)} if name == "a" else {}
                sink.write(f"{i}", {"x": torch.full((3,), float(i)), **text})

    def load(**options: Any) -> Any:
        mix = {name: (tc.open(tmp_path / name), 0.5) for name in ("a", "b")}
        if kind == "loader":
            return tc.Loader(mix=mix, batch_size=2, **options)
        return tc.torch_loader(mix=mix, batch_size=2, num_workers=1, **options)

    for options in ({"collate": {"text": tc.pad(to=4, value=-1)}}, {"collate": "pad", "pad_value": {"text": -1}}):
        batches = list(load(**options))
        shapes = {tuple(batch["text"].shape)[2:] for batch in batches if "text" in batch}
        assert len(batches) == 8
        assert shapes == {(2,)}
        assert any((batch["text"] == -1).any() for batch in batches if "text" in batch)
        assert any("text" not in batch for batch in batches)
    with pytest.raises(tc.BatchError, match=r"collate has an unknown tensor 'texts'; there are .*'text'"):
        load(collate={"texts": "pad"})
    with pytest.raises(tc.BatchError, match="pad_value has an unknown tensor 'y'"):
        load(collate="pad", pad_value={"y": 0})
