"""Many skeletons matched at once have the values that each has by itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import wds_tensorcache as tc
from tests.strategies import plain
from wds_tensorcache.codec.header import parse_header
from wds_tensorcache.codec.preamble import PREAMBLE_NBYTES
from wds_tensorcache.codec.skeleton.match_many import match_many
from wds_tensorcache.codec.skeleton.template import MISS, Template, learn

VALUES: dict[str, Callable[[int], Any]] = {
    "texts of one length": lambda i: f"item-{i:05}",
    "texts of all lengths": lambda i: "x" * i,
    "texts of two bytes a character": lambda i: "é" * (i % 3) + "e" * (i % 2),
    "texts that end with zeros": lambda i: "a" + "\0" * (i % 4),
    "long texts": lambda i: f"{i:0300}",
    "empty texts": lambda i: "",
    "bytes": lambda i: bytes([i, 255 - i]) + bytes(i % 5),
    "long bytes": lambda i: bytes([i]) * (250 + i),
    "ints around 256 and 65,536": lambda i: (250 + i, 65_530 + i, i)[i % 3],
    "negative ints": lambda i: -i * 1000,
    "ints of nine bytes": lambda i: (1 << 64) + i,
    "ints of every length": lambda i: (-1) ** i << i * 8,
    "floats": lambda i: (i / 3, float("nan"), float("-inf"), -0.0)[i % 4],
    "bools and None": lambda i: (True, False, None)[i % 3],
    "constants, ints, texts and floats in turn": lambda i: (True, i, 2.5 * i, None, "é" * i)[i % 5],
}


def written(values: list[Any]) -> tuple[list[bytes], Template]:
    """Return bodies of samples with these values, and the template of the first ones."""
    members = [tc.encode_sample({"here": torch.ones(2), "value": value, "more": [7, value]}) for value in values]
    for each in members[:3]:
        tc.decode_sample(*each)
    template = parse_header(members[0][1])[0].form.template
    assert template is not None
    return [skeleton[PREAMBLE_NBYTES:] for skeleton, _ in members], template


def assert_each(bodies: list[bytes], template: Template, before: bytes = b"", after: bytes = b"") -> None:
    """Assert that each body matches, and has the values, as if it was alone."""
    ends = np.cumsum([len(body) for body in bodies]) + len(before)
    begins = ends - [len(body) for body in bodies]
    stored = np.frombuffer(before + b"".join(bodies) + after, np.uint8)
    is_good, columns = match_many(stored, begins, ends, template)
    assert len(columns) == len(template.segments) - 1
    for i, body in enumerate(bodies):
        alone = template.match(body, 0)
        assert bool(is_good[i]) == (alone is not MISS)
        found = [column[i] for column in columns]
        wanted = [None] * len(columns) if alone is MISS else alone
        assert repr(found) == repr(wanted)
        assert list(map(type, found)) == list(map(type, wanted))


@pytest.mark.parametrize("make", VALUES.values(), ids=VALUES)
def test_the_values_of_each(make: Callable[[int], Any]) -> None:
    bodies, template = written([make(i % 100) for i in range(1200)])
    assert_each(bodies, template)
    assert_each(bodies[::-1], template, b"\x8c" * 9, b".\0")
    assert_each(bodies[:1], template)


@given(st.lists(plain, min_size=1, max_size=12), st.randoms(use_true_random=False))
def test_any_values_and_any_damage(values: list[Any], random: Any) -> None:
    bodies = [tc.encode_sample({"value": value, "more": [7, value]})[0][PREAMBLE_NBYTES:] for value in values]
    template = learn(bodies[0], 0)
    if template is None:
        return
    assert_each(bodies, template)
    damaged = [bytearray(random.choice(bodies)) for _ in range(20)]
    for body in damaged:
        body[random.randrange(len(body))] = random.randrange(256)
    assert_each([*bodies, *map(bytes, damaged)], template)


@pytest.mark.parametrize("value", ["text", "é" * 200, 300, 1.5, None, b"raw", 1 << 70], ids=repr)
def test_damaged_bodies_among_intact_ones(value: Any) -> None:
    (body, *_), template = written([value] * 4)
    changed = [body[:at] + bytes([body[at] ^ flip]) + body[at + 1 :] for at in range(len(body)) for flip in (1, 8, 255)]
    assert_each([body, *changed, body], template)
    for each in changed:
        assert_each([each, body], template)
        assert_each([each], template)


@pytest.mark.parametrize("value", ["text", 300, 1.5, None, b"raw", 1 << 70], ids=repr)
def test_bodies_of_every_length(value: Any) -> None:
    (body, *_), template = written([value] * 4)
    cut = [body[:end] for end in range(len(body))]
    assert_each([*cut, body, *(body + b"." * n for n in range(1, 9))], template)
    for each in cut:
        assert_each([body, each], template)
        assert_each([each], template)


def test_texts_that_are_not_utf_8() -> None:
    bodies, template = written([f"{i:03}" for i in range(30)])
    changed = [body.replace(b"1", b"\xff") for body in bodies]
    changed[3] = bodies[3].replace(b"003", b"\xed\xa0\x80")
    assert_each(changed, template)


def test_a_length_far_beyond_the_end() -> None:
    bodies, template = written([f"{i:0300}" for i in range(4)])
    at = bodies[0].index(b"X") + 1
    for length in (0, 1, 299, 301, 10_000, (1 << 31) + 1, (1 << 32) - 1):
        assert_each([bodies[1][:at] + length.to_bytes(4, "little") + bodies[1][at + 4 :], *bodies], template)


def test_a_template_without_values() -> None:
    bodies = [tc.encode_sample({"here": torch.ones(2)})[0][PREAMBLE_NBYTES:]] * 3
    template = learn(bodies[0], 0)
    assert template is not None
    assert_each([*bodies, bodies[0][:-1] + b"0"], template)
