"""Weights of samples and of sources, which may change while batches are on their way."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import wds_tensorcache as tc
from tests.reading.batches import write
from tests.training.loaders import COUNT

ROWS = np.eye(COUNT)


def indices_of(loader: Any) -> list[int]:
    return [index for _, info in loader.with_info() for index in info.indices.tolist()]


def steps_of(num_epochs: int, *arguments: Any, **options: Any) -> Iterator[Any]:
    """Yield the steps of some epochs, whose batches are not read."""
    sampler = tc.StepSampler(*arguments, **options)
    return (step for _ in range(num_epochs) for step in sampler)


def test_weights(cache: Any) -> None:
    weights = np.zeros(COUNT)
    weights[[3, 7]] = 1, 3
    weights = np.flip(np.flip(weights).astype(">f8"))  # strides and a byte order that torch refuses
    drawn = Counter(index for step in steps_of(100, cache, 10, weights=weights) for index in step.indices.tolist())
    assert set(drawn) == {3, 7}
    assert 2.5 < drawn[7] / drawn[3] < 3.5
    with torch.device("meta"):
        huge = steps_of(20, cache, 23, weights=[1e308] * COUNT)
    assert {index for step in huge for index in step.indices.tolist()} == set(range(COUNT))


@pytest.mark.parametrize("ahead", [0, 2])
def test_weights_of_samples_that_change(cache: Any, ahead: int) -> None:
    """From the first step that is not scheduled; a state has the new weights at once."""
    loader, again = (tc.Loader(cache, 1, weights=ROWS[0], collate="list", prefetch_batches=n) for n in (ahead, 2))
    iterator = iter(loader.with_info())
    next(iterator)
    assert loader.set_weights(ROWS[1]) == 1 + ahead
    assert loader.set_weights(torch.eye(COUNT)[2]) == 1 + ahead
    again.load_state_dict(loader.state_dict())
    assert [info.indices.item() for _, info in iterator] == [0] * ahead + [2] * (COUNT - 1 - ahead)
    assert indices_of(again) == [2] * (COUNT - 1)
    assert loader.set_weights(ROWS[3]) == COUNT  # between two epochs, no step is scheduled
    assert set(indices_of(loader)) == {3}


def test_mix(cache: Any, more: Any) -> None:
    drawn: tuple[list[int], list[int]] = [], []
    for step in steps_of(100, None, 4, mix={"a": (cache, 0.75), "b": (more, 0.25)}):
        drawn[step.source].extend(step.indices.tolist())
    assert len(drawn[0]) + len(drawn[1]) == 100 * 32
    assert 2.3 < len(drawn[0]) / len(drawn[1]) < 3.9
    for indices, count in zip(drawn, (len(cache), len(more)), strict=True):
        for begin in range(0, len(indices) - count + 1, count):  # each cache comes in passes
            assert sorted(indices[begin : begin + count]) == list(range(count))


def test_wrong_weights_and_mixes(cache: Any) -> None:
    loader = tc.Loader(cache, 4, weights=np.ones(COUNT))
    values: list[Any] = [[value] * COUNT for value in (1j, 0, -1, float("nan"))]
    for weights in (None, "abc", {"a": 1}, [1] * 3, *values):
        with pytest.raises(ValueError, match=f"expected {COUNT} numbers"):
            loader.set_weights(weights)
    for mix in ({}, {"a": None}, {"a": (None, 0.5, 1)}, [1]):
        with pytest.raises(ValueError, match="mix=.*expected {'a': "):
            tc.Loader(mix=mix)  # type: ignore[arg-type]


def test_caches_of_a_mix_have_different_tensors(tmp_path: Path) -> None:
    for name in ("a", "b"):
        texts = [{"text": torch.ones(i % 3 + 1, 2)} if name == "a" else {} for i in range(8)]
        samples = [{"x": torch.full((3,), float(i)), **text} for i, text in enumerate(texts)]
        write(tmp_path / name, samples, max_samples=8)

    def load(**options: Any) -> Any:
        mix = {name: (tc.open(tmp_path / name), 0.5) for name in ("a", "b")}
        return tc.Loader(mix=mix, batch_size=2, **options)

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


def mixed(cache: Any, more: Any, weights: Any, num_threads: int = 2) -> tc.Loader:
    options: dict[str, Any] = {"shuffle": True, "collate": "list", "num_threads": num_threads}
    return tc.Loader(None, 4, mix={"a": (cache, 3), "b": (more, 1)}, weights=weights, **options)


@pytest.mark.parametrize("bucket_by", [None, "y"])
def test_samples_of_a_mix_are_drawn(cache: Any, more: Any, bucket_by: str | None) -> None:
    """In proportion to their weights in one cache; the other cache passes over its samples."""
    weights = np.zeros(COUNT)
    weights[[3, 7, 4]] = 1, 3, 4  # two buckets
    drawn: tuple[Counter[int], Counter[int]] = Counter(), Counter()
    mix = {"a": (cache, 3), "b": (more, 1)}
    for step in steps_of(300, None, 4, mix=mix, weights={"a": weights}, shuffle=True, bucket_by=bucket_by):
        assert bucket_by is None or len({number % 3 for number in step.indices.tolist()}) == 1
        drawn[step.source].update(step.indices.tolist())
    assert 2.6 < drawn[0].total() / drawn[1].total() < 3.5
    assert set(drawn[0]) == {3, 4, 7}
    for number, weight in ((3, 1), (7, 3), (4, 4)):
        assert abs(drawn[0][number] / drawn[0].total() - weight / 8) < 0.05
    assert len(drawn[1]) == 9
    assert max(drawn[1].values()) - min(drawn[1].values()) <= 3


def test_weights_of_samples_in_a_mix_that_change(cache: Any, more: Any) -> None:
    """Each kind changes by itself, and every state has both."""

    def make() -> tc.Loader:
        return mixed(cache, more, {"a": ROWS[1]}, num_threads=0)

    one = make()
    seen, states = [], []
    changes: list[Any] = [{"a": ROWS[2]}, {"a": 1, "b": 0}, {"a": torch.eye(COUNT)[5]}, {"a": list(ROWS[6])}]
    begun: list[int] = []
    for _ in range(2):
        for _, info in one.with_info():
            seen.append((info.step, info.source, info.indices.tolist()))
            if info.step in (1, 4, 7, 9):
                begun.append(one.set_weights(changes[len(begun)]))
            states.append(json.loads(json.dumps(one.state_dict())))
    assert begun == [2, 5, 8, 10]
    for step, source, numbers in seen:
        wanted = [1, 2, 5, 6][sum(step >= begun[number] for number in (0, 2, 3))]
        assert source == "b" or set(numbers) == {wanted}
        assert source == "a" or step < begun[1]
    for number, state in enumerate(states):
        again = make()
        again.load_state_dict(state)
        rest = [(info.step, info.source, info.indices.tolist()) for _, info in again.with_info()]
        # weights that change later are not in the state
        until = next((step for step in (1, 4, 7, 9) if step > number), len(seen))
        expected = [step for step in seen[number + 1 :] if step[0] <= until][: len(rest)]
        assert rest[: len(expected)] == expected


def test_states_of_weights_in_a_mix(cache: Any, more: Any) -> None:
    one = mixed(cache, more, {"a": ROWS[3]})
    other = mixed(cache, more, {"a": ROWS[4]})
    state = json.loads(json.dumps(one.state_dict()))
    other.load_state_dict(state)
    assert {number for _, info in other.with_info() for number in info.indices.tolist() if info.source == "a"} == {3}
    before = other.state_dict()
    plain = mixed(cache, more, None)
    for first, second in ((one, plain), (plain, one), (one, mixed(cache, more, {"b": np.ones(9)}))):
        with pytest.raises(ValueError, match="the state belongs to a loader with"):
            second.load_state_dict(first.state_dict())
    good = state["weights"]
    for weights in (
        good["caches"],
        {"caches": good["caches"]},
        good | {"samples": {}},
        good | {"samples": {"0": good["caches"]}},
        good | {"caches": None},
        good | {"caches": good["samples"]["0"]},
        None,
    ):
        with pytest.raises(ValueError, match="the state has"):
            other.load_state_dict(state | {"weights": weights})
    for wrong in ({"b": np.ones(9)}, {"a": np.ones(3)}, {"a": np.ones(COUNT), "b": 1}, {"a": 1}, np.ones(COUNT), {}):
        with pytest.raises(ValueError, match="expected (a dict with 'a', 'b', or lists of weights of samples|23)"):
            other.set_weights(wrong)
    assert other.state_dict() == before
