"""Import a folder in a test, and compare what the cache has with what was written."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

import wds_tensorcache as tc
from tests.same import tensor_bytes
from wds_tensorcache.importers.import_cache import import_cache
from wds_tensorcache.importers.report import ImportReport


def imported(source: Path, out: Path, **options: Any) -> tuple[dict[str, Any], ImportReport]:
    """Return the imported samples by their original names, and the report; the cache is intact."""
    report = import_cache(source, out, **options)
    assert tc.verify(out).ok
    assert report.num_read == report.num_written + report.num_present + report.num_skipped
    with tc.open(out) as cache:
        return {tc.original_name(key): tc.realize(cache[key]) for key in list(cache.keys())}, report


def assert_complete(arrays: Iterable[Any], samples: Iterable[Any], copies: bool = False) -> None:
    """Assert that the samples have exactly these arrays, bit for bit, and no other; `copies`: some more than once."""
    expected = Counter(map(_identity, arrays))
    found = Counter(map(_identity, _leaves(list(samples))))
    assert expected.keys() == found.keys()
    if not copies:
        assert expected == found


def _identity(array: Any) -> tuple[str, tuple[int, ...], bytes]:
    tensor = torch.from_numpy(array) if isinstance(array, np.ndarray) else array
    return str(tensor.dtype), tuple(tensor.shape), tensor_bytes(tensor)


def _leaves(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _leaves(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _leaves(item)
