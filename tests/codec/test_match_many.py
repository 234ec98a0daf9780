"""Many skeletons matched at once have the values that each has by itself."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import wds_tensorcache as tc
from wds_tensorcache.codec.header import parse_header
from wds_tensorcache.codec.preamble import PREAMBLE_NBYTES
from wds_tensorcache.codec.skeleton.match_many import FEWEST, match_many
from wds_tensorcache.codec.skeleton.template import MISS, Template

VALUES: dict[str, Callable[[int], Any]] = {
    "texts of one length": lambda i: f"item-{i:05}",
    "texts of all lengths": lambda i: "x" * i,
    "texts of two bytes a character": lambda i: "é" * (i % 3) + "e" * (i % 2),
    "long texts": lambda i: f"{i:0300}",
    "empty texts": lambda i: "",
    "bytes": lambda i: bytes([i, 255 - i]),
    "ints around 256 and 65,536": lambda i: (250 + i, 65_530 + i, i)[i % 3],
    "negative ints": lambda i: -i * 1000,
    "ints of nine bytes": lambda i: (1 << 64) + i,
    "floats": lambda i: (i / 3, float("nan"), float("-inf"), -0.0)[i % 4],
    "bools and None": lambda i: (True, False, None)[i % 3],
    "constants, ints and floats in turn": lambda i: (True, i, 2.5 * i, None)[i % 4],
}


def written(values: list[Any]) -> tuple[list[bytes], Template]:
    """Return bodies of samples with these values, and the template of the first ones."""
    members = [tc.encode_sample({"here": torch.ones(2), "value": value, "number": 7}) for value in values]
    for each in members[:3]:
        tc.decode_sample(*each)
    template = parse_header(members[0][1])[0].form.template
    assert template is not None
    return [skeleton[PREAMBLE_NBYTES:] for skeleton, _ in members], template


def matched(bodies: list[bytes], template: Template) -> dict[int, list[Any]]:
    """Return the values of each body that is matched at once, by its number."""
    by_length = defaultdict(list)
    for number, body in enumerate(bodies):
        by_length[len(body)].append(number)
    found: dict[int, list[Any]] = {}
    for length, numbers in by_length.items():
        together = np.frombuffer(b"".join(bodies[number] for number in numbers), np.uint8).reshape(-1, length)
        for which, columns in match_many(together, template):
            for row, values in zip(which.tolist(), zip(*columns, strict=True), strict=True):
                assert numbers[row] not in found
                found[numbers[row]] = list(values)
    return found


@pytest.mark.parametrize("make", VALUES.values(), ids=VALUES)
def test_the_values_of_each(make: Callable[[int], Any]) -> None:
    bodies, template = written([make(i % 100) for i in range(2400)])
    found = matched(bodies, template)
    assert len(found) == len(bodies)
    for number, body in enumerate(bodies):
        alone = template.match(body, 0)
        assert repr(found[number]) == repr(alone)
        assert list(map(type, found[number])) == list(map(type, alone))


def test_few_are_left_to_be_matched_one_after_another() -> None:
    bodies, template = written([f"{i:03}" for i in range(FEWEST)])
    assert len(matched(bodies, template)) == FEWEST
    assert not matched(bodies[1:], template)


@pytest.mark.parametrize("value", ["text", 300, 1.5, None, b"raw", 1 << 70], ids=repr)
def test_damaged_bodies_among_intact_ones(value: Any) -> None:
    (body, *_), template = written([value] * 4)
    changed = [body[:at] + bytes([body[at] ^ flip]) + body[at + 1 :] for at in range(len(body)) for flip in (1, 8, 255)]
    for first in (True, False):
        for each in changed:
            bodies = [each, *[body] * FEWEST] if first else [*[body] * FEWEST, each]
            found = matched(bodies, template)
            number = 0 if first else FEWEST
            if number in found:
                assert repr(found[number]) == repr(template.match(each, 0))
            assert template.match(each, 0) is not MISS or number not in found
            for intact in set(range(FEWEST + 1)) - {number} & found.keys():
                assert intact not in found or found[intact] == template.match(body, 0)
