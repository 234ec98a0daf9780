"""Rows of Ray are the samples that they were made of, whatever these contain, in batches of any format."""

from __future__ import annotations

import contextlib
import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from ray.data.block import BlockAccessor

import wds_tensorcache as tc
from tests.ray_data.conftest import in_order
from tests.reading.batches import write
from tests.same import assert_same
from tests.strategies import TORCH_DTYPES, arrays, samples, tensors

pytestmark = [pytest.mark.long, pytest.mark.filterwarnings("ignore::DeprecationWarning:ray")]
FORMATS = st.sampled_from(["numpy", "pandas", "pyarrow"])


def rows_after(table: Any, batch_format: str) -> list[dict[str, Any]]:
    """Return the rows after `ds.map_batches(lambda batch: batch, batch_format=…)`."""
    block = BlockAccessor.batch_to_block(BlockAccessor.for_block(table).to_batch_format(batch_format))
    return list(BlockAccessor.for_block(block).iter_rows(public_row_format=True))


@settings(max_examples=60)
@given(first=samples(), second=samples(), batch_format=FORMATS)
def test_exact_rows_survive_functions_of_batches(first: Any, second: Any, batch_format: str) -> None:
    rows = rows_after(tc.ray.ray_table(["a", "b"], [first, second]), batch_format)
    for row, sample in zip(rows, (first, second), strict=True):
        assert_same(sample, tc.ray.ray_sample(row))


KEYS = st.text(min_size=1, max_size=3)
VALUES = st.text(max_size=3) | st.binary(max_size=3) | st.booleans() | st.floats() | st.integers(-(1 << 53), 1 << 53)
DICTS = st.dictionaries(
    KEYS,
    st.recursive(
        tensors() | arrays() | VALUES,
        lambda inner: st.dictionaries(KEYS, inner, min_size=1, max_size=2),
        max_leaves=4,
    ),
    max_size=4,
)


@settings(max_examples=40)
@given(first=DICTS | samples(), second=DICTS, batch_format=FORMATS)
@example(first={"a": torch.ones(2)}, second={"a": "text", "b": 5}, batch_format="numpy")
@example(first={"a": torch.tensor(1.5)}, second={"b": {"c": float("nan")}}, batch_format="pandas")
@example(first={"a": [torch.ones(2)], "b": (1, 2)}, second={}, batch_format="numpy")
@example(
    first={"dtypes": torch.ones(2), "ndims": torch.ones(2), "kinds": np.ones(2), "values": 1},
    second={"dtypes": torch.ones(2).bfloat16(), "ndims": torch.ones(1, 2), "kinds": torch.ones(2), "values": "é"},
    batch_format="pyarrow",
)
def test_columns_are_the_samples_or_refused(first: Any, second: Any, batch_format: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        cache = write(f"{folder}/cache", [first, second])
        (task,) = tc.ray.read_ray(cache)._logical_plan.dag.datasource.get_read_tasks(1)
        (table,) = task()
        for row, sample in zip(rows_after(table, batch_format), (first, second), strict=True):
            is_whole = type(sample) is type(first) is dict and is_nested(sample) and are_apart(first, second)
            with contextlib.nullcontext() if is_whole else contextlib.suppress(tc.EncodeError):
                assert_same(in_order(sample), in_order(tc.ray.ray_sample(row)))


def is_nested(sample: Any) -> bool:
    """Return whether a sample consists of dicts with items, tensors and plain values."""
    if type(sample) is dict:
        return all(type(key) is str and is_nested(item) for key, item in sample.items())
    return isinstance(sample, (torch.Tensor, np.ndarray, str, bytes, bool, int, float))


def are_apart(first: dict[Any, Any], second: dict[Any, Any]) -> bool:
    """Return whether no tensor of one sample has the column of a value or dict of the other."""
    tensors = [
        {key for key in sample if isinstance(sample[key], (torch.Tensor, np.ndarray))} for sample in (first, second)
    ]
    shared = first.keys() & second.keys()
    return shared & tensors[0] == shared & tensors[1] and not any(isinstance(first[key], dict) for key in shared)


def test_columns_that_are_refused(write_cache: Callable[..., Path]) -> None:
    folder = write_cache(lambda i: {"__key__": torch.ones(2)}, 1)
    with pytest.raises(tc.EncodeError, match="'__key__'.*exact=True"):
        tc.ray.read_ray(folder).take_all()
    (row,) = tc.ray.read_ray(folder, exact=True).take_all()
    assert_same({"__key__": torch.ones(2)}, tc.ray.ray_sample(row))
    for name in ("__skeleton__", "__tensors__"):
        with pytest.raises(TypeError, match="bytes"):
            tc.ray.ray_sample({**row, name: None})
    with pytest.raises(ValueError, match="2 keys for 1"):
        tc.ray.ray_table(["a", "b"], [{}])


@pytest.mark.parametrize(
    "dtype", [dtype for dtype in TORCH_DTYPES if re.match(r"torch\.(bf|.*float[48]|complex)", str(dtype))]
)
def test_dtypes_of_new_columns_are_recorded(dtype: torch.dtype) -> None:
    """Also in a batch that no cache is the source of."""
    bits = torch.arange(4 * dtype.itemsize, dtype=torch.uint8)
    tensor, batch = bits.view(dtype).view(2, 2), {"id": np.arange(2)}
    with pytest.raises(ValueError, match="pass the batch"):
        tc.ray.ray_from_torch({"x": tensor})
    tensors = {"x": tensor, "rows": [None, tensor[1]], "number": tensor[0], "numbers": [tensor[0, 0], tensor[1]]}
    columns = tc.ray.ray_from_torch({**tensors, "mixed": [tensor[0], torch.ones(2)], "text": tensor}, batch)
    columns |= tc.ray.ray_from_torch({"text": ["a", "b"]}, columns)
    table = BlockAccessor.batch_to_block({**batch, **columns})
    for result in (tc.ray.ray_to_torch({**batch, **columns}), tc.ray.ray_to_torch(table)):
        assert_same(
            in_order({"id": torch.arange(2), **tensors, "mixed": [tensor[0], torch.ones(2)], "text": ["a", "b"]}),
            in_order(result),
        )
    assert tc.ray.ray_from_torch({"x": torch.ones(2)}).keys() == {"x"}


@pytest.mark.parametrize(
    "text", [5, "text", [1], "", "[]", '[{"a": 5}, 1, 1, null]', '[{"a": "ndarray:O"}, 1, 1, null]', "[" * 100_000]
)
def test_hostile_marks(text: Any) -> None:
    row = {"__tensorcache__": text, "a": np.ones(3, np.float32)}
    with pytest.raises(tc.FormatError, match="drop the column"):
        tc.ray.ray_sample(row)
    with pytest.raises(tc.FormatError, match="drop the column"):
        tc.ray.ray_to_torch({name: [value] for name, value in row.items()})
