"""The samples of a batch from shared memory, in the form in which `reading/batch` reads samples of a shard."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from wds_tensorcache.codec.layout import Layout, make_layout
from wds_tensorcache.codec.sample import list_references
from wds_tensorcache.codec.skeleton.template import MISS, Template
from wds_tensorcache.errors import UnsafeSkeletonError
from wds_tensorcache.reading.batch.rows import Rows
from wds_tensorcache.sharing.samples import Found, Samples

__all__ = ["rows_of"]

Array = np.ndarray[Any, Any]
_BITS = 44  # an offset in a batch is `row << _BITS | offset in the member`


def rows_of(samples: Samples, numbers: Sequence[int]) -> Rows:
    """Return the samples of a batch; those that are not in shared memory are loaded first.

    Raises:
        EncodeError: A sample cannot be encoded, and so cannot be part of a batch.
    """
    count = np.arange(len(numbers))
    by_shard = ((0, slice(None), count),) if len(numbers) else ()
    members = _MembersOfBatch(samples, numbers, samples.encoded(numbers))
    return Rows([members], np.zeros_like(count), count, count << _BITS, by_shard)  # type: ignore[list-item]


class _MembersOfBatch:
    """The members of a batch's samples, with the methods of `Shard` that a batch needs; row `i` is sample `i` of the batch."""

    layout_of_all = None
    path = "shared memory"

    def __init__(self, samples: Samples, numbers: Sequence[int], found: Sequence[Found]) -> None:
        self._samples, self._numbers, self._found = samples, numbers, found
        self.checked = np.ones(len(found), np.bool_)
        self.file = self.files = _Bytes(found)

    def key(self, row: int) -> str:
        return str(self._numbers[row])

    def sample(self, row: int) -> Any:
        return self._samples.build(self._found[row])

    def layout(self, row: int) -> Layout:
        """Return the layout of a sample, with the texts of its references."""
        found = self._found[row]
        if found.named is None:
            layout = found.layout
            try:
                texts = list_references(found.skeleton, found.body, layout)
            except UnsafeSkeletonError as exc:
                if exc.needs is None:
                    raise
            else:
                dims = [dim for tensor in layout.tensors.values() for dim in tensor.shape]
                layout = make_layout(layout.form, dims, layout.data_begin, texts)
            found.named = layout
        return found.named

    def layouts_of(self, rows: Array) -> tuple[list[Layout], Array]:
        """Return the distinct layouts of `rows`, and for each row the position of its layout among them."""
        layouts = [self.layout(row) for row in rows.tolist()]
        distinct = {id(layout): layout for layout in layouts}
        numbers = {each: number for number, each in enumerate(distinct)}
        return list(distinct.values()), np.array([numbers[id(layout)] for layout in layouts])

    def template(self, row: int) -> Template | None:
        found = self._found[row]
        if found.matched is not None:
            return found.matched[0]
        template: Template | None = self.layout(row).form.template
        return None if template is None or template.match(found.skeleton, found.body) is MISS else template

    def note_template(self, rows: Any, template: Template) -> None:
        """Do nothing: the next batch has other rows."""

    def skeletons(self, rows: Array, io: str) -> tuple[list[bytes], list[int]]:
        found = [self._found[row] for row in rows.tolist()]
        return [each.skeleton for each in found], [each.body for each in found]


class _Bytes:
    """The bytes of members, with the methods of `ShardFile` and `Files` that a batch needs."""

    def __init__(self, found: Sequence[Found]) -> None:
        self._found = found

    def get(self, path: str) -> _Bytes:
        return self

    def read_resident(self, buffers: Sequence[memoryview], begin: int) -> bool:
        """Fill `buffers`, from an offset on."""
        self.read_into(buffers, begin)
        return True

    def read_into(self, buffers: Sequence[memoryview], begin: int) -> None:
        """Fill `buffers`, from an offset on."""
        source = self._found[begin >> _BITS].source
        begin &= (1 << _BITS) - 1
        for buffer in buffers:
            source.read_into(buffer, begin)
            begin += len(buffer)

    def check_unchanged(self) -> None:
        """Do nothing: the members of a sample never change."""
