"""Samples that resemble earlier ones are written and read on a fast path, with the bytes, values and errors of the slow one.

`allow=` with any class turns the fast path of the writer off. Readers know no structure of tensors whose names are new.
"""

from __future__ import annotations

import itertools
import uuid
from collections import OrderedDict
from collections.abc import Callable
from datetime import datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import wds_tensorcache as tc
from tests.hostile.pickles import num_calls
from tests.reading.batches import write
from tests.same import assert_same
from tests.strategies import arrays, keys, plain, tensors
from wds_tensorcache.codec.header import parse_header

numbers = itertools.count()


class Unused:
    pass


def outcome(call: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Return what a call returns, or its error."""
    try:
        return call(*args, **options)
    except Exception as error:
        return type(error), str(error)


def assert_written_alike(sample: Any, **options: Any) -> None:
    assert outcome(tc.encode_sample, sample, **options) == outcome(tc.encode_sample, sample, allow=[Unused], **options)


def is_written_fast(sample: Any) -> bool:
    fast, slow = (num_calls(lambda allow=allow: tc.encode_sample(sample, allow=allow)) for allow in ((), [Unused]))
    return fast < 0.8 * slow


texts = st.sampled_from(["", "a", "ab", "format", "builtins", "tensor:a", "\0" + "1\0", "ab" * 200])
raws = st.sampled_from([b"", b"a", b"ab", b"format", b"ab" * 200])
# containers of strategies: samples of one family draw from the same strategy in the same place
structures: st.SearchStrategy[Any] = st.recursive(
    st.sampled_from([plain, texts, raws, tensors(), arrays()]),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(keys | texts, inner, max_size=4),
    ),
    max_leaves=8,
)


def fill(draw: st.DrawFn, structure: Any) -> Any:
    if type(structure) is dict:
        return {key: fill(draw, item) for key, item in structure.items()}
    if type(structure) in (list, tuple):
        return type(structure)(fill(draw, item) for item in structure)
    return draw(structure)


@st.composite
def families(draw: st.DrawFn) -> list[Any]:
    structure = draw(structures)
    return [fill(draw, structure) for _ in range(5)]


@given(families())
def test_samples_of_one_structure(samples: list[Any]) -> None:
    name = f"new {next(numbers)}"  # of a structure that was not met before
    for sample in [*samples, *samples]:
        assert_written_alike({name: sample})
        skeleton, tensors = tc.encode_sample({name: sample})
        assert_same({name: sample}, tc.decode_sample(skeleton, tensors))
        assert_same({name: sample}, tc.decode_sample(skeleton, tensors, lazy=False))


T = torch.arange(6.0)
ONE = np.int64(1)
PAIR = (2.5, T[:2])
LOOP: list[Any] = [1]
LOOP.append((LOOP, T))


def base(**items: Any) -> dict[str, Any]:
    return {"ab": {"cd": "text", "n": 5}, "t": T, "l": [1, (2.5, T[:2])], "i": {7: 1, "7": 2, -(1 << 70): [3]}, **items}


class Text(str):
    pass


MATCHED: dict[str, dict[str, Any]] = {
    "the same": {},
    "bytes like a key": {"ab": {"cd": b"ab", "n": "xy"}, "l": [b"cd", (b"text", T.clone())]},
    "a surrogate": {"ab": {"cd": "\ud800", "n": -0.0}},
    "a long text": {"ab": {"cd": "x" * 70_000, "n": float("nan")}},
    "another shape": {"t": torch.ones(2, 3)},
    "an empty tensor": {"t": torch.ones(0, 7)},
    "not contiguous": {"t": torch.ones(2, 3).T},
    "with gradients": {"t": torch.ones(2, requires_grad=True)},
    "views of one storage": {"t": T[1:], "l": [1, (2, T[1:])]},
    "negated": {"t": torch.ones(2, dtype=torch.complex64).conj().imag},
    "many dimensions": {"t": torch.ones([1] * 60)},
    "other values of int keys": {"i": {7: "x", "7": 8, -(1 << 70): [9]}},
}
NOT_MATCHED: dict[str, dict[str, Any]] = {
    "a text twice": {"ab": {"cd": "xy", "n": "xy"}},
    "a text like a key": {"ab": {"cd": "ab", "n": 5}},
    "a text like a reference": {"ab": {"cd": "tensor:t", "n": 5}},
    "a tensor twice": {"l": [1, (2.5, T)]},
    "a container twice": {"ab": PAIR, "l": [1, PAIR]},
    "another order within": {"ab": {"n": 5, "cd": "text"}},
    "a key of a subclass": {"ab": {Text("cd"): "text", "n": 5}},
    "a text for an int key": {"i": {"8": 1, "7": 2, -(1 << 70): [3]}},
    "a float for an int key": {"i": {7.0: 1, "7": 2, -(1 << 70): [3]}},
    "an ordered dict": {"ab": OrderedDict(cd="text", n=5)},
    "a list for a tuple": {"l": [1, [2.5, T[:2]]]},
    "a tensor for an atom": {"ab": {"cd": T[:1], "n": 5}},
    "an atom for a tensor": {"t": 5},
    "a scalar of numpy": {"ab": {"cd": np.float64(1.5), "n": 5}},
    "a parameter": {"t": torch.nn.Parameter(T)},
    "an array": {"t": T.numpy()},
    "another dtype": {"t": T.double()},
    "a lazy tensor": {"t": tc.decode_sample(*tc.encode_sample(T))},
    "in itself": {"l": LOOP},
    "an object": {"ab": {"cd": object, "n": 5}},
    "a text of a subclass": {"ab": {"cd": Text("x"), "n": 5}},
    "a meta tensor": {"t": T.to("meta")},
    "too many dimensions": {"t": torch.ones([1] * 65)},
}


LARGE = {"many": [{"caption": f"text {i}", "i": i, "tensors": (torch.ones(1), torch.ones(i))} for i in range(60)]}
SIZES = pytest.mark.parametrize("more", [{}, LARGE], ids=["small", "large"])


@SIZES
@pytest.mark.parametrize("items", MATCHED.values(), ids=MATCHED)
def test_samples_that_resemble_earlier_ones(items: dict[str, Any], more: dict[str, Any]) -> None:
    name = f"new {next(numbers)}"
    for i in range(3):
        sample = more | base(**{name: i})
        assert_written_alike(sample)
        assert_same(sample, tc.decode_sample(*tc.encode_sample(sample)))
    assert is_written_fast(more | base(**{name: 1}))
    for align in (64, 4096, 0, 12):
        assert_written_alike(more | base(**items, **{name: 1}), align=align)


@SIZES
@pytest.mark.parametrize("items", NOT_MATCHED.values(), ids=NOT_MATCHED)
def test_samples_that_differ_from_earlier_ones(items: dict[str, Any], more: dict[str, Any]) -> None:
    name = f"new {next(numbers)}"
    for _ in range(3):
        assert_written_alike(more | base(**{name: 1}))
    assert_written_alike(more | base(**items, **{name: 1}))
    assert is_written_fast(more | base(**{name: 1}))  # one such sample changes nothing
    for _ in range(40):
        assert_written_alike(more | base(**items, **{name: 1}))
    assert_written_alike(more | base(**{name: 1}))


def test_structures_around_the_same_tensors() -> None:
    """Samples of several structures are read in turn."""
    name = f"new {next(numbers)}"
    samples = [{name: torch.ones(1), "around": around} for around in ([1], [2, 3], {"a": 4}, {"b": {"c": "d"}}, 5)]
    encoded = [tc.encode_sample(sample) for sample in samples]
    for _ in range(9):
        for sample, both in zip(samples, encoded, strict=True):
            assert_same(sample, tc.decode_sample(*both))
    calls = [num_calls(lambda both=both: tc.decode_sample(*both)) for both in encoded]
    assert max(calls) < 1.3 * min(calls)  # all of them on the fast path


def test_tensors_without_memory_are_refused() -> None:
    for _ in range(3):
        tc.encode_sample(base())

    def encode(tensor: torch.Tensor) -> torch.Tensor:
        for sample in (base(t=tensor), {"other": [tensor]}, {"other": [tensor.bfloat16()]}):
            with pytest.raises(tc.EncodeError, match="no memory"):
                tc.encode_sample(sample)
        return tensor

    torch.func.functionalize(encode)(torch.arange(3.0))


def test_results_share_nothing() -> None:
    members = tc.encode_sample({"a": [1], "b": {"c": (2,)}, "t": torch.ones(1)})
    first, second = [tc.decode_sample(*members) for _ in range(5)][-2:]
    first["a"].append(9)
    first["b"]["d"] = 9
    assert second == {"a": [1], "b": {"c": (2,)}, "t": second["t"]}


@pytest.mark.parametrize(
    "items",
    [
        {"x": 5, "y": [1, (2, "three")], "z": None},
        {"long": "x" * 300, "n": -70_000, "f": 2.5, "b": b"raw"},
        {"same": ["ab", "ab", {"gh": "cd", "ef": "cd"}]},
        {"e": [[], {}, ()]},
        {"x": np.float32(1.5), "size": torch.Size([3, 400]), "made": [datetime(2020, 1, 2), np.datetime64(5, "25s")]},
        {"layers": {0: 1, 500: {-1: (2, "two")}}, 1: 3},
        {"device": torch.device("cuda"), "i": 1},
        {"twice": [ONE, ONE], "ids": (uuid.UUID(int=1 << 90), Decimal("0.1"), slice(None, 5), 1j), "text": "0.2"},
    ],
    ids=["small", "sizes", "memo", "empty", "calls", "int keys", "a device", "calls with shared parts"],
)
def test_damaged_skeletons(items: dict[str, Any]) -> None:
    """A template reads what the interpreter reads, and leaves the rest to it."""
    skeleton, tensors = tc.encode_sample({f"new {next(numbers)}": torch.ones(1), **items})
    places = range(42, len(skeleton))
    damaged = [skeleton[:i] + bytes([skeleton[i] ^ flip]) + skeleton[i + 1 :] for i in places for flip in (1, 8, 0xFF)]
    damaged += [skeleton[:i] for i in places] + [skeleton + b".", skeleton[:-1] + b"0."]
    form = parse_header(tensors)[0].form
    for _ in range(3):
        tc.decode_sample(skeleton, tensors)
    templates, form.num_interpreted = form.templates, 99  # from now on, nothing more is learned
    assert templates
    for one in damaged:
        form.templates = templates
        read = outcome(lambda one=one: repr(tc.decode_sample(one, tensors)))
        form.templates = []
        assert read == outcome(lambda one=one: repr(tc.decode_sample(one, tensors)))


@pytest.mark.parametrize("inner", [lambda key: {key: 1}, lambda key: [{"ab": key}, {key: key}]])
def test_keys_that_equal_an_earlier_value(inner: Callable[[str], Any]) -> None:
    """A skeleton fetches such a key from the value, so samples with other keys have the same opcodes."""
    name = f"new {next(numbers)}"
    for key in ("first", "other", "third", "last"):
        sample = {name: torch.ones(1), "value": key, "inner": inner(key)}
        assert_same(sample, tc.decode_sample(*tc.encode_sample(sample)))


COUNTS = (2_000, 8_000)


def of_dict(tensors: list[torch.Tensor]) -> Any:
    return {f"tensor {number}": tensor for number, tensor in enumerate(tensors)}


def of_shapes(tensors: list[torch.Tensor]) -> Any:
    return [tensor.new_empty(0, number) for number, tensor in enumerate(tensors)]


def of_set(tensors: list[torch.Tensor]) -> Any:
    return {"set": set(tensors)}


STEPS: dict[str, Callable[[Path], Any]] = {
    "open": lambda path: tc.open(path)[0],
    "read_batch": lambda path: tc.open(path).read_batch([0, 0]),
    "select": lambda path: tc.open(path).select("tensor 1*")[0],
    "read_batch of one": lambda path: tc.open(path).select("tensor 7").read_batch([0]),
    "write_index": tc.write_index,
}


@pytest.mark.parametrize("make", [of_dict, list, of_shapes, of_set])
@pytest.mark.long
def test_costs_of_a_tensor(tmp_path: Path, make: Any) -> None:
    """What a tensor costs, from file to value, does not grow with the number of tensors in a sample."""
    costs: dict[str, list[float]] = {}
    for count in COUNTS:
        path, samples = tmp_path / f"{count}.tar", [make([torch.full((2,), float(i)) for i in range(count)])]
        steps = {"write": lambda path, samples=samples: write(path, samples, manifest=False)} | STEPS
        for name in steps if make is of_dict else ("write", "open"):
            costs.setdefault(name, []).append(num_calls(lambda path=path, step=steps[name]: step(path)) / count)
    for name, found in costs.items():
        assert found[-1] < 1.2 * found[-2], name
        assert found[-1] < 300, name
