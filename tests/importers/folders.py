"""Import a folder in a test, and compare what the cache has with what was written."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import wds_tensorcache as tc
from tests.same import assert_same, tensor_bytes
from wds_tensorcache.importers.report import ImportReport


class Gadget:
    """An object whose pickle makes the file `hacked` in the current folder."""

    def __reduce__(self) -> Any:
        return os.system, ("touch hacked",)


def imported(source: Path, out: Path, **options: Any) -> tuple[dict[str, Any], ImportReport]:
    """Return the imported samples by their original names, and the report; the cache is intact."""
    report = tc.import_cache(source, out, **options)
    assert tc.verify(out).ok
    assert report.num_read == report.num_written + report.num_present + report.num_skipped
    with tc.open(out) as cache:
        return {tc.original_name(key): tc.realize(cache[key]) for key in list(cache.keys())}, report


def format_of(source: Path) -> str:
    """Return the format that an import chooses."""
    return tc.import_cache(source, f"{source} {len(list(source.parent.iterdir()))}", on_error="skip").format


def assert_samples(expected: dict[str, Any], found: dict[str, Any]) -> None:
    """Assert that samples are equal, but for the order of their entries: safetensors orders tensors by their dtypes."""
    assert found.keys() == expected.keys()
    for name, sample in expected.items():
        assert_same(_ordered(sample), _ordered(found[name]))


def assert_left_out(source: Path, bad: str, message: str, good: Iterable[str], **options: Any) -> None:
    """Assert that a file or sample stops the import, which names it, and can be left out."""
    with pytest.raises(tc.FormatError, match=message) as caught:
        tc.import_cache(source, f"{source} stopped", **options)
    assert bad in str(caught.value)
    assert len(str(caught.value)) < 2000
    found, report = imported(source, Path(f"{source} skipped"), on_error="skip", **options)
    assert sorted(found) == sorted(good)
    assert any(bad in (skipped.name, *skipped.files) for skipped in report.skipped)


def assert_complete(arrays: Iterable[Any], samples: Iterable[Any], copies: bool = False) -> None:
    """Assert that the samples have exactly these arrays, bit for bit, and no other; `copies`: some more than once."""
    expected = Counter(map(_identity, arrays))
    found = Counter(map(_identity, leaves(list(samples))))
    assert expected.keys() == found.keys()
    if not copies:
        assert expected == found


def _ordered(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _ordered(value[key]) for key in sorted(value)}
    return list(map(_ordered, value)) if isinstance(value, list) else value


def _identity(array: Any) -> tuple[str, tuple[int, ...], bytes]:
    tensor = torch.from_numpy(array) if isinstance(array, np.ndarray) else array
    return str(tensor.dtype), tuple(tensor.shape), tensor_bytes(tensor)


def leaves(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from leaves(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from leaves(item)
