"""A template gives what the interpreter gives, for the same bytes and for damaged ones."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import wds_tensorcache as tc
from tests.conftest import diffusion_sample
from tests.same import assert_same
from tests.strategies import keys, plain, tensors
from wds_tensorcache.codec import header
from wds_tensorcache.codec import layout as layouts
from wds_tensorcache.codec.header import parse_header

T = torch.ones(2)
nested = st.recursive(
    plain | tensors(),
    lambda inner: st.lists(inner, max_size=4) | st.lists(inner, max_size=4).map(tuple) | st.dictionaries(keys, inner),
    max_leaves=12,
)


@pytest.fixture(autouse=True)
def no_layouts_from_other_tests() -> Iterator[None]:
    forget()
    yield
    forget()


def forget() -> None:
    header._LAYOUTS.clear()
    layouts._FORMS.clear()


def warm_up(skeleton: bytes, tensors: bytes) -> None:
    for _ in range(3):
        tc.decode_sample(skeleton, tensors)


def outcome(skeleton: bytes, tensors: bytes) -> Any:
    try:
        return tc.decode_sample(skeleton, tensors)
    except tc.TensorCacheError as error:
        return str(error)


@given(nested)
def test_the_same_sample_again(sample: Any) -> None:
    members = tc.encode_sample(sample)
    for _ in range(4):
        assert_same(sample, tc.decode_sample(*members))
    assert_same(sample, tc.decode_sample(*members, lazy=False))


def test_samples_of_one_structure_share_a_template() -> None:
    for index in range(3):
        tc.decode_sample(*tc.encode_sample(diffusion_sample(index)))
    skeleton, tensors = tc.encode_sample(diffusion_sample(3))
    template = parse_header(tensors)[0].form.template
    assert template.match(skeleton, 42) == ["photo 3", 64, 48]
    values = [None, True, 7, 300, 70_000, -1, 1 << 70, -(1 << 300), 1.5, "é" * 300, b"x", b"y" * 300]
    for value in values:
        sample = diffusion_sample(4)
        sample["cond"][0][1]["prompt"] = value
        assert_same(sample, tc.decode_sample(*tc.encode_sample(sample)))
        assert parse_header(tensors)[0].form.template is template
    for value in ("\ud800", [], {}, (), [1], {"a": 1}, {1, 2}, 1j, "photo", ("latent", "latent"), torch.float32):
        sample = diffusion_sample(4)
        sample["cond"][0][1]["prompt"] = value
        for _ in range(2):
            assert_same(sample, tc.decode_sample(*tc.encode_sample(sample)))


@pytest.mark.parametrize("sample", [{"\ud800": 1}, 5, T, [T], {}, "text"], ids=repr)
def test_samples_that_hardly_have_a_structure(sample: Any) -> None:
    members = tc.encode_sample(sample)
    for _ in range(4):
        assert_same(sample, tc.decode_sample(*members))


def test_results_share_nothing() -> None:
    members = tc.encode_sample({"a": [1], "b": {"c": (2,)}, "t": torch.ones(1)})
    warm_up(*members)
    first, second = tc.decode_sample(*members), tc.decode_sample(*members)
    first["a"].append(9)
    first["b"]["d"] = 9
    assert second == {"a": [1], "b": {"c": (2,)}, "t": second["t"]}


@pytest.mark.parametrize(
    "sample",
    [
        {"t": torch.ones(1), "x": 5, "y": [1, (2, "three")], "z": None},
        {"long": "x" * 300, "n": -70_000, "f": 2.5, "b": b"raw", "t": torch.ones(1)},
        {"same": ["ab", "ab", {"ab": "cd", "ef": "cd"}], "t": torch.ones(1)},
        {"t": torch.ones(1), "e": [[], {}, ()]},
    ],
    ids=["small", "sizes", "memo", "empty"],
)
def test_damaged_skeletons(sample: Any) -> None:
    skeleton, tensors = tc.encode_sample(sample)
    flips = [(i, flip) for i in range(42, len(skeleton)) for flip in (1, 8, 0xFF)]
    damaged = [skeleton[:i] + bytes([skeleton[i] ^ flip]) + skeleton[i + 1 :] for i, flip in flips]
    damaged += [skeleton[:i] for i in range(42, len(skeleton))] + [skeleton + b".", skeleton[:-1] + b"0."]
    for body in damaged:
        forget()
        expected = outcome(body, tensors)
        forget()
        warm_up(skeleton, tensors)
        assert repr(outcome(body, tensors)) == repr(expected)


def test_layouts_of_single_samples_learn_nothing() -> None:
    members = tc.encode_sample({"t": torch.ones(5)})
    tc.decode_sample(*members)
    assert parse_header(members[1])[0].form.template is None


def test_ragged_samples_share_a_template() -> None:
    for length in range(1, 6):
        sample = {"text": torch.ones(length, 2).bfloat16(), "length": length}
        members = tc.encode_sample(sample)
        assert_same(sample, tc.decode_sample(*members))
    layout = parse_header(members[1])[0]
    assert layout.form.num_interpreted == 2
    assert layout.resolved[0] is layout.form.template


def test_learning_stops() -> None:
    for index in range(40):
        members = tc.encode_sample({"t": torch.ones(1), "tags": ["x"] * (index % 20)})
        assert len(tc.decode_sample(*members)["tags"]) == index % 20
    assert parse_header(members[1])[0].form.num_interpreted > 8


def test_many_tensors_are_not_taken_apart() -> None:
    members = tc.encode_sample([torch.zeros(1) for _ in range(3000)])
    for _ in range(3):
        assert len(tc.decode_sample(*members)) == 3000
    assert parse_header(members[1])[0].form.template is None
