"""The description of a dataset that all processes with the same shared memory must have in common."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import numpy as np
import xxhash

__all__ = ["fingerprint_of"]


def fingerprint_of(dataset: Any, text: str) -> dict[str, object]:
    """Return the fingerprint of a dataset: its type and length, what it wraps and selects, and a text of the user.

    Of a wrapper such as torch's `Subset`, `ConcatDataset` or `StackDataset`, it contains those of the datasets inside, in the
    attributes `dataset` and `datasets`, and a digest of the attribute `indices`. Of a dataset of Hugging Face's `datasets`,
    it contains the attribute `_fingerprint`. It reads no sample, and it does not depend on the code of the dataset.

    Raises:
        TypeError: The dataset has no length.
    """
    return {**_describe(dataset, ()), "length": len(dataset), "fingerprint": text}


def _describe(dataset: Any, around: tuple[int, ...]) -> dict[str, object]:
    """Describe a dataset; `around` has the ids of the wrappers that it is in."""
    kind = type(dataset)
    # spawned processes have another name for the main script
    found: dict[str, object] = {"type": f"{kind.__module__.replace('__mp_main__', '__main__')}.{kind.__qualname__}"}
    with suppress(TypeError, NotImplementedError):  # an inner dataset may have no length
        found["length"] = len(dataset)
    attributes = getattr(dataset, "__dict__", {})
    around = (*around, id(dataset))
    if isinstance(digest := attributes.get("_fingerprint"), str):
        found["digest"] = digest
    if (indices := _digest(attributes.get("indices"))) is not None:
        found["indices"] = indices
    inner = attributes.get("datasets")
    several = inner.values() if isinstance(inner, Mapping) else inner if isinstance(inner, (list, tuple)) else ()
    for name, parts in (("dataset", [attributes.get("dataset")]), ("datasets", several)):
        described = [_describe(part, around) for part in parts if part is not None and id(part) not in around]
        if described:
            found[name] = described
    return found


def _digest(indices: Any) -> str | None:
    """Return the digest of a sequence of ints, a tensor or an array; None if it is something else."""
    if indices is None:
        return None
    try:
        numbers = np.asarray(indices)
    except (TypeError, ValueError, RuntimeError):
        return None
    return xxhash.xxh3_64_hexdigest(numbers.astype(np.int64).tobytes()) if numbers.dtype.kind in "iu" else None
