"""The samples of a batch, for `reading/batch`, as rows of one shard."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from wds_tensorcache.codec.header import Layout, make_layout
from wds_tensorcache.codec.sample import list_references
from wds_tensorcache.codec.skeleton.template import Template, find_match
from wds_tensorcache.errors import UnsafeSkeletonError
from wds_tensorcache.reading.batch.rows import Rows
from wds_tensorcache.sharing.samples import ParsedSample, Samples

Array = np.ndarray[Any, Any]


def rows_of(samples: Samples, indices: Sequence[int]) -> Rows:
    """Load the missing samples of a batch; return the rows of all.

    Raises:
        EncodeError: A sample cannot be encoded, so it cannot be part of a batch.
    """
    rows = np.arange(len(indices), dtype=np.int64)
    by_shard = ((0, slice(None), rows),) if len(indices) else ()
    parsed = samples.get_parsed(indices)
    # A byte offset in the batch is `row << bits | offset in the member`. It fits int64 while rows times the longest member is
    # below 2^62.
    bits = max((len(sample.source.member) for sample in parsed), default=0).bit_length()
    shard = _BatchAsShard(samples, indices, parsed, bits)
    return Rows([shard], np.zeros_like(rows), rows, rows << bits, by_shard)


class _BatchAsShard:
    """The samples of a batch as a shard. Row `i` is sample `i` of the batch."""

    is_remote = False
    layout_of_all = None

    def __init__(self, samples: Samples, indices: Sequence[int], parsed: Sequence[ParsedSample], bits: int) -> None:
        self._samples, self._indices, self._parsed = samples, indices, parsed
        self.file = _BatchAsFile(parsed, bits)

    def key(self, row: int) -> str:
        return str(self._indices[row])

    def sample(self, row: int) -> Any:
        return self._parsed[row].build(self._samples.allow)

    def layout(self, row: int) -> Layout:
        """Return a sample's layout, with the strings of its references."""
        parsed = self._parsed[row]
        if parsed.named_layout is None:
            layout = parsed.layout
            try:
                names = list_references(parsed.skeleton, parsed.body, layout)
            except UnsafeSkeletonError as exc:
                if exc.needs is None:
                    raise
                # no strings, because the skeleton needs `allow=`
            else:
                dims = [dim for tensor in layout.tensors.values() for dim in tensor.shape]
                layout = make_layout(layout.form, dims, layout.data_begin, *names)
            parsed.named_layout = layout
        return parsed.named_layout

    def layouts_of(self, rows: Array) -> tuple[list[Layout], Array]:
        """Return the distinct layouts, and the position of each row's layout."""
        layouts = [self.layout(row) for row in rows.tolist()]
        distinct = {id(layout): layout for layout in layouts}
        positions = {layout: at for at, layout in enumerate(distinct)}
        return list(distinct.values()), np.array([positions[id(layout)] for layout in layouts])

    def template(self, row: int) -> Template | None:
        parsed = self._parsed[row]
        if parsed.matched is not None:
            return parsed.matched[0]
        return find_match(self.layout(row).form.templates, parsed.skeleton, parsed.body)[0]

    def note_template(self, rows: Any, template: Template) -> None:
        """Do nothing, since the rows of the next batch are different samples."""

    def skeletons(self, rows: Array) -> tuple[list[bytes], list[int]]:
        parsed = [self._parsed[row] for row in rows.tolist()]
        return [sample.skeleton for sample in parsed], [sample.body for sample in parsed]


class _BatchAsFile:
    """The `.safetensors` members of a batch's samples as a `RangeFile`."""

    shows_pages = True

    def __init__(self, parsed: Sequence[ParsedSample], bits: int) -> None:
        self._parsed, self._bits = parsed, bits

    def address(self) -> int:
        return 0  # no common address of all members, so they must be read

    def is_resident(self, begin: int) -> bool:
        return True

    def read_into(self, buffers: Sequence[memoryview], begin: int) -> None:
        source = self._parsed[begin >> self._bits].source
        source.read_into(buffers, begin & ((1 << self._bits) - 1))

    def will_need(self, begin: int, end: int) -> None:
        """Do nothing, since all bytes are in memory."""

    def check_unchanged(self) -> None:
        """Do nothing, since the members of a sample never change."""
