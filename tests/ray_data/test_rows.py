"""Rows of Ray are the samples that they were made of, whatever these contain; no cluster is needed."""

from __future__ import annotations

import datetime
import json
import struct
from decimal import Decimal
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

import wds_tensorcache as tc
from tests.same import assert_same
from tests.strategies import samples
from wds_tensorcache.codec.sample import encode_sample

pytest.importorskip("ray", reason="ray is missing: pip install 'wds-tensorcache[ray]'")
from wds_tensorcache.ray.rows.block_samples import samples_of_block
from wds_tensorcache.ray.rows.values import is_same

pytestmark = [pytest.mark.long, pytest.mark.filterwarnings("ignore::DeprecationWarning:ray")]


@settings(max_examples=60)
@given(sample=samples())
def test_any_sample_survives(sample: Any) -> None:
    table = tc.ray.ray_table(["key"], [sample])
    (row,) = table.to_pylist()
    assert_same(sample, tc.ray.ray_sample(row))


@settings(max_examples=25)
@given(first=samples(), second=samples())
def test_samples_of_one_block_stay_apart(first: Any, second: Any) -> None:
    rows = tc.ray.ray_table(["a", "b"], [first, second]).to_pylist()
    for row, sample in zip(rows, (first, second), strict=True):
        assert_same(sample, tc.ray.ray_sample(row))


@settings(max_examples=40)
@example({"at": datetime.time(1, 2, tzinfo=datetime.timezone.utc)}, None, "numpy")
@example(None, {"a": set(), "b": [{1, "x"}, {(1, 2), (3,)}, frozenset({None})]}, "numpy")
@example({}, {"x": torch.zeros(0).bfloat16()}, "numpy")
@example({}, {"x": torch.ones(3).bfloat16()}, "numpy")
@example(None, {"a": Decimal("sNaN"), "b": Decimal("NaN")}, "numpy")
@example(None, {"b": Decimal("NaN")}, "pandas")
@example({"a": Decimal("1.5")}, {"a": Decimal("sNaN"), "b": [Decimal("sNaN")], "c": (Decimal("sNaN"), {})}, "pandas")
@example(Decimal("sNaN"), {"a": {"b": Decimal("sNaN")}}, "pandas")
@given(first=samples(), second=samples(), batch_format=st.sampled_from(["numpy", "pandas", "pyarrow"]))
def test_samples_survive_functions_of_batches(first: Any, second: Any, batch_format: str) -> None:
    """As in `ds.map_batches(lambda batch: batch, batch_format=…)`."""
    from ray.data.block import BlockAccessor

    table = tc.ray.ray_table(["a", "b"], [first, second])
    block = BlockAccessor.batch_to_block(BlockAccessor.for_block(table).to_batch_format(batch_format))
    rows = samples_of_block(block, "__key__", has_fingerprint=False)
    for (key, found, members), expected in zip(rows, (first, second), strict=True):
        assert_same(expected, found)
        assert (key in ("a", "b"), members) == (True, {})


def test_large_sets_take_few_comparisons() -> None:
    num_compared = 0

    class Item:
        def __init__(self, number: int) -> None:
            self.number = number

        def __hash__(self) -> int:
            return hash(self.number)

        def __eq__(self, other: object) -> bool:
            nonlocal num_compared
            num_compared += 1
            return isinstance(other, Item) and self.number == other.number

    old, new = {Item(i) for i in range(1000)}, [Item(i) for i in reversed(range(1000))]
    num_compared = 0
    assert is_same(old, new)
    assert not is_same(old, [*new[1:], Item(-5)])
    assert num_compared < 10_000  # half a million, if each item is compared with each


def raw(names: bytes) -> bytes:
    """Return the bytes of a row with a tensor `a`, and with these names of columns."""
    skeleton, tensors = encode_sample({"a": torch.empty(0)})
    lengths = struct.pack("<I", len(names)), struct.pack("<I", len(skeleton))
    return b"\1" + lengths[0] + names + lengths[1] + skeleton + tensors


@pytest.mark.parametrize(
    "value",
    [5, 1 << 50, "text", [1, 300], 1.5, b"", b"\1\0\0\0\0", b"\1\2\0\0\0{}", raw(b"[" * 100_000), raw(b'{"a": 5}')],
    ids=lambda value: repr(value)[:20],
)
def test_hostile_structures(value: Any) -> None:
    row = {"__tensorcache__": value, "a": np.ones(3, np.float32)}
    with pytest.raises(tc.FormatError):
        tc.ray.ray_sample(row)
    with pytest.raises(tc.FormatError):
        tc.ray.ray_to_torch({name: [each] for name, each in row.items()})


def test_a_structure_that_names_other_columns() -> None:
    row = {"b": np.ones(3, np.float32), "__tensorcache__": raw(json.dumps({"b": "tensor:float32"}).encode())}
    assert tc.ray.ray_sample(row) == {}
