"""Samples of 100, 1,000 and 10,000 tensors: what one costs does not depend on how many there are. Counted, not timed."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

import wds_tensorcache as tc
from tests.children import run_in_child
from wds_tensorcache.codec import header, layout
from wds_tensorcache.codec.gc_pause import collector_paused
from wds_tensorcache.codec.reference import reference_text
from wds_tensorcache.codec.skeleton.tensor_names import short_component

COUNTS = (100, 1_000, 10_000)


def samples(make: Callable[[list[torch.Tensor]], Any]) -> list[Any]:
    return [make([torch.full((2,), float(i)) for i in range(count)]) for count in COUNTS]


def of_dicts(tensors: list[torch.Tensor]) -> Any:
    return {f"tensor {number}": tensor for number, tensor in enumerate(tensors)}


def nested(tensors: list[torch.Tensor]) -> Any:
    return [{"x": tensor, "number": number} for number, tensor in enumerate(tensors)]


def num_calls(call: Callable[[], Any]) -> int:
    """Return how many functions, of Python and of C, are called."""
    count = 0

    def profile(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(profile)
    try:
        call()
    finally:
        sys.setprofile(None)
    return count


def num_full_collections(call: Callable[[], Any]) -> int:
    found = []

    def collected(phase: str, info: dict[str, int]) -> None:
        found.append(phase == "start" and info["generation"] == 2)

    gc.collect()
    gc.callbacks.append(collected)
    try:
        call()
    finally:
        gc.callbacks.remove(collected)
    return sum(found)


@pytest.mark.parametrize("make", [of_dicts, list, nested])
def test_what_a_tensor_costs(make: Any) -> None:
    written, read = [], []
    for count, sample in zip(COUNTS, samples(make), strict=True):
        members = tc.encode_sample(sample)
        for cache in (layout._MADE, layout._FORMS):  # which only small samples fill
            cache.clear()
        for function in (reference_text, short_component):
            function.cache_clear()
        written.append(num_calls(lambda sample=sample: tc.encode_sample(sample)) / count)
        header._LAYOUTS.clear()
        read.append(num_calls(lambda members=members: tc.decode_sample(*members)) / count)
    assert max(written) < 1.1 * min(written)
    assert max(read) < 1.1 * min(read)
    assert max(written) < 150
    assert max(read) < 100


@pytest.mark.parametrize("make", [of_dicts, list])
def test_the_collector_does_not_search_the_whole_process(make: Any) -> None:
    ballast = [[number] for number in range(200_000)]  # a full collection begins when a quarter as many are new
    sample = samples(make)[-1]
    members = tc.encode_sample(sample)
    assert num_full_collections(lambda: tc.encode_sample(sample)) <= 1
    assert num_full_collections(lambda: tc.decode_sample(*members)) <= 1
    assert gc.isenabled()
    assert len(ballast) == 200_000


def test_the_collector_stays_as_it_was() -> None:
    members = tc.encode_sample(samples(list)[-1])
    gc.disable()
    try:
        tc.decode_sample(*members)
        assert not gc.isenabled()
    finally:
        gc.enable()
    with pytest.raises(tc.FormatError):
        tc.decode_sample(members[0][:-2], members[1])
    assert gc.isenabled()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")  # of Python 3.12, beside threads
def test_a_child_that_is_forked_meanwhile_collects() -> None:
    def is_collecting() -> None:
        assert gc.isenabled()

    with collector_paused(True):
        assert not gc.isenabled()
        assert run_in_child(is_collecting) == 0
    assert gc.isenabled()
