"""The description of a dataset that all processes with the same shared memory must have in common."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import numpy as np
import torch.utils.data
import xxhash

_NAMES = ("Subset", "ConcatDataset", "StackDataset")  # the last one is missing in older releases of torch
_WRAPPERS = tuple(getattr(torch.utils.data, name) for name in _NAMES if hasattr(torch.utils.data, name))


def fingerprint_of(dataset: Any, text: str) -> dict[str, object]:
    """Return the fingerprint of a dataset: its type and length, what it wraps and selects, and a text of the user.

    Of torch's `Subset`, `ConcatDataset` and `StackDataset`, it contains the fingerprints of the datasets inside, and a digest
    of the indices. Of any dataset, it contains the attribute `_fingerprint`, if that is a string, as in Hugging Face's
    `datasets`. It reads no sample, and it does not depend on the code of the dataset.

    Raises:
        TypeError: The dataset has no length.
    """
    return {**_describe(dataset, ()), "length": len(dataset), "fingerprint": text}


def _describe(dataset: Any, around: tuple[int, ...]) -> dict[str, object]:
    """Describe a dataset; `around` has the ids of the wrappers that it is in."""
    kind = type(dataset)
    # in spawned processes, the module of the main script has another name
    found: dict[str, object] = {"type": f"{kind.__module__.replace('__mp_main__', '__main__')}.{kind.__qualname__}"}
    with suppress(Exception):  # an inner dataset may have no length, or not know it yet
        found["length"] = len(dataset)
    attributes = getattr(dataset, "__dict__", {})
    if isinstance(digest := attributes.get("_fingerprint"), str):
        found["digest"] = digest
    if isinstance(dataset, _WRAPPERS):
        if (indices := _digest(attributes.get("indices"))) is not None:
            found["indices"] = indices
        inner = attributes.get("datasets", [attributes.get("dataset")])
        parts = inner.values() if isinstance(inner, Mapping) else inner
        found["datasets"] = [_describe(part, (*around, id(dataset))) for part in parts if id(part) not in around]
    return found


def _digest(indices: Any) -> str | None:
    """Return the digest of a sequence of ints, a tensor or an array; None if it is something else."""
    with suppress(Exception):  # anything may be in the place of indices
        numbers = np.asarray(indices)
        if numbers.dtype.kind in "iu":
            return str(xxhash.xxh3_64_hexdigest(numbers.astype(np.int64).tobytes()))
    return None
