"""Lists of samples, of a stream say: their tensors by name, and batches of their structure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from wds_tensorcache.errors import BatchError
from wds_tensorcache.reading.batch.placement import difference, fill, project
from wds_tensorcache.reading.batch.structure import structure_of

__all__ = ["fill_samples", "named_tensors"]


def named_tensors(sample: Any) -> dict[str, Any]:
    """Return the lazy tensors and arrays of a nested sample by name, `latent.samples` say, in their order."""
    return dict(structure_of(sample, None).tensors)


def fill_samples(samples: Sequence[Any], tensors: Mapping[str, Any]) -> Any:
    """Return lazy samples as one batch, with the values of `tensors` (by name) in its tensors' places.

    What `TensorCache.fill_batch` does for samples of a cache: the structure is the first sample's, tensors that are not given
    are left out, and everything else becomes a list of B values.

    Raises:
        BatchError: The structures of two samples differ.
        KeyError: The first sample has no tensor of such a name.
    """
    kept = [project(sample, tensors.__contains__) for sample in samples]
    for number, sample in enumerate(kept):
        if found := difference(kept[0], sample):
            where, first, other = found
            raise BatchError(
                f"the structures of samples 0 and {number} of the batch differ: {where} the first has {first}, "
                f"the other {other}"
            )
    known = named_tensors(kept[0])
    for name in tensors:
        if name not in known:
            raise KeyError(f"the samples have no tensor {name!r}")
    return fill(kept[0], lambda lazy: tensors[lazy.name], lambda path: [_at(sample, path) for sample in kept])


def _at(value: Any, path: tuple[Any, ...]) -> Any:
    for step in path:
        value = value[step]
    return value
