"""Weights of alternatives: how often each is chosen, and that choices without weights stay what they are."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import wds_tensorcache as tc
from tests.reading.batches import folder_of, write

COUNT, NUM_EPOCHS = 120, 50


def sample(i: int) -> dict[str, Any]:
    """A sample with 5 captions, as tensors and as strings."""
    return {
        "captions": [torch.tensor([i, number]) for number in range(5)],
        "prompts": [f"{i} {number}" for number in range(5)],
        "whole": torch.tensor([i, 9]),
        "short": "s",
        "long": "l",
    }


folder = folder_of([sample(i) for i in range(COUNT)], max_samples=50)


def choices_of(cache: Any, choose: Any, num_epochs: int = NUM_EPOCHS, **options: Any) -> list[Any]:
    loader = tc.Loader(cache, **{"batch_size": COUNT, "seed": 3, "choose": choose} | options)
    return [info.choices for _ in range(num_epochs) for _, info in loader.with_info()]


def rest(share: float) -> dict[str, float]:
    """Return the shares of five captions, of which the first has `share` and the others have the rest."""
    return {f"captions.{number}": (1 - share) / 4 if number else share for number in range(5)}


@pytest.mark.parametrize(
    ("wanted", "shares"),
    [
        ({"captions.0": 2, "captions.*": 1}, rest(3 / 7)),
        (["captions.0", "captions.*"], rest(2 / 6)),
        (
            {"captions.1": 0.5, "captions.0": 0, "captions.2": np.float32(1.5)},
            {"captions.1": 1 / 4, "captions.2": 3 / 4},
        ),
        ({"captions.*": 1, "whole": 5}, rest(1 / 10) | {f"captions.{n}": 1 / 10 for n in range(5)} | {"whole": 1 / 2}),
        ({"captions.*": 1e308, "captions.0": 1e308}, rest(2 / 6)),
        ({"prompts.0": 2, "prompts.*": 1}, {f"prompts.{number}": (1 + 2 * (not number)) / 7 for number in range(5)}),
        (["long", "long", "short"], {"short": 1 / 3, "long": 2 / 3}),
    ],
    ids=str,
)
def test_frequencies(cache: Any, wanted: Any, shares: dict[str, float]) -> None:
    """Seeds are fixed, so the counts are always the same; they are within five standard deviations of the expected ones."""
    chosen = Counter(name for choices in choices_of(cache, {"text": wanted}) for name in choices.chosen("text"))
    total = COUNT * NUM_EPOCHS
    assert chosen.total() == total
    assert chosen.keys() == shares.keys()
    for name, share in shares.items():
        assert abs(chosen[name] - share * total) < 5 * (share * (1 - share) * total) ** 0.5, name


def test_names_that_are_chosen_together(cache: Any) -> None:
    choose = {("text", "prompt"): {("captions.0", "prompts.0"): 2, ("captions.*", "prompts.*"): 1}}
    for source in (cache, tc.join([cache])):
        counts = Counter[int]()
        loader = tc.Loader(source, COUNT, seed=3, choose=choose)
        for _ in range(NUM_EPOCHS):
            for batch, info in loader.with_info():
                assert batch["prompt"] == [f"{i} {number}" for i, number in batch["text"].tolist()]
                assert info.choices["text"].tolist() == batch["text"][:, 1].tolist()
                counts.update(info.choices["prompt"].tolist())
        assert abs(counts[0] / counts.total() - 3 / 7) < 0.04
    assert cache.read_batch([4], choose=choose)["text"].tolist() == [[4, 0]]  # without choices=, the first alternative
    prefixed = {"a.text": {"a.captions.0": 2, "a.captions.*": 1}}
    joined = choices_of(tc.join({"a": cache}), prefixed, num_epochs=2)
    assert any((choices["a.text"] == 0).sum() > 36 for choices in joined)


# the choices of ten samples in two epochs, by the first release with `choose=`
GOLDEN = {
    "x": ["1101101000", "1000011011"],
    "text": ["0002201004", "0101201130"],
    "y": ["1213011011", "1032000030"],
    "prompt": ["0010002100", "0003010200"],
    "len": ["1001000110", "1010010001"],
}


def test_without_weights_nothing_changes(tmp_path: Path) -> None:
    def golden(i: int) -> dict[str, Any]:
        tensors = {"a": torch.zeros(1), "b": torch.ones(1), "captions": [torch.ones(1)] * (1 + i % 5)}
        return {**tensors, "prompts": ["x"] * (1 + i % 4), "short": "s", "long": "l"}

    plain: dict[Any, Any] = {
        "x": ["a", "b"],
        ("text", "t2"): ("captions.*", "captions.*"),
        "y": ["a", "captions.*"],
        "prompt": "prompts.*",
        "len": ["short", "long"],
    }
    equal = plain | {"x": {"a": 3, "b": 3}, "y": {"a": 1, "captions.*": 1}, "prompt": {"prompts.*": 2}}
    with tc.open(write(tmp_path, [golden(i) for i in range(10)], max_samples=4)) as cache:
        for choose in (plain, equal):
            epochs = choices_of(cache, choose, 2, seed=7, batch_size=10)
            assert {name: ["".join(map(str, choices[name])) for choices in epochs] for name in GOLDEN} == GOLDEN


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        (
            {"captions.*": -1},
            r"choose={'text': …}: the weight of 'captions.\*' is -1; expected a finite number of at least",
        ),
        ({"captions.*": float("nan")}, "is nan; expected"),
        ({"captions.*": 10**400}, "is 10+; expected"),
        ({"captions.*": True}, "is True; expected"),
        ({"captions.*": "2"}, "is '2'; expected"),
        ({"captions.0": 0, "captions.1": 0.0}, "all weights are 0; give an alternative a larger weight"),
        ({}, r"expected lists of tensor names, .* or dicts with their weights: {'text': {'captions\.0': 2"),
    ],
    ids=str,
)
def test_wrong_weights(cache: Any, wanted: Any, message: str) -> None:
    choose = {"text": wanted}
    for use in (lambda: tc.Loader(cache, 2, choose=choose), lambda: cache.read_batch([0], choose=choose)):
        with pytest.raises(ValueError, match=message):
            use()


def test_samples_whose_alternatives_have_weight_0(tmp_path: Path) -> None:
    message = "sample '001' has only alternatives of 'text' with weight 0: 'b'; give one of them a larger weight"
    choose = {"text": {"a": 1, "b": 0}}
    for kind, (a, b) in {"tensors": (torch.zeros(1), torch.ones(1)), "values": ("x", "y")}.items():
        with tc.open(write(tmp_path / kind, [{"a": a, "b": b}, {"a": None, "b": b}])) as opened:
            with pytest.raises(tc.BatchError, match=message):
                next(iter(tc.Loader(opened, 2, choose=choose)))["text"].tolist()
            # the caller chooses
            assert len(opened.read_batch([0, 1], choose=choose, choices={"text": [1, 0]})["text"]) == 2


@pytest.mark.parametrize("tiny", [5e-324, 1e-30])
def test_a_tiny_weight_is_not_0(tiny: float, tmp_path: Path) -> None:
    samples = [{"a": torch.zeros(1), "b": torch.ones(1), "c": None if i else torch.ones(1)} for i in range(200)]
    with tc.open(write(tmp_path, samples, max_samples=200)) as opened:
        (choices,) = choices_of(opened, {"text": {"a": 3 * tiny, "b": tiny, "c": 1e300}}, num_epochs=1, batch_size=200)
        names = choices.chosen("text")
        assert names[0] == "c"
        assert 100 < names.count("a") < 190
        assert names.count("a") + names.count("b") == 199


def test_alternatives_of_several_dtypes(tmp_path: Path) -> None:
    """The error says which alternatives were chosen."""
    samples = [{"a": torch.zeros(2), "b": torch.zeros(2).half()}] * 2
    with tc.open(write(tmp_path, samples)) as cache:
        message = (
            "tensor 'x' is tensor of torch.float32 in sample '000', but tensor of torch.float16 in '001': choose= took 'a' "
            "and 'b'; give all alternatives of 'x' one dtype$"
        )
        for collate in ("stack", "list"):
            with pytest.raises(tc.BatchError, match=message):
                cache.read_batch([0, 1], choose={"x": ["a", "b"]}, choices={"x": [0, 1]}, collate=collate)
