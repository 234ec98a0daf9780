"""The values of a batch that are not tensors: one list per value, decoded from the skeletons on first use."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from wds_tensorcache.codec.lazy import LazyTensor
from wds_tensorcache.codec.preamble import PREAMBLE_NBYTES
from wds_tensorcache.codec.reference import MemorySource, Reference
from wds_tensorcache.codec.skeleton.match_many import match_many
from wds_tensorcache.codec.skeleton.template import MISS, Template
from wds_tensorcache.codec.tree import Path, difference, item_at, project
from wds_tensorcache.errors import BatchError
from wds_tensorcache.reading.batch.request import Request, Structure
from wds_tensorcache.reading.batch.rows import Rows
from wds_tensorcache.shards.shard import Shard
from wds_tensorcache.shards.tar.headers import BLOCK
from wds_tensorcache.storage.maps import LEASED_SAMPLES, MapLost, Maps

__all__ = ["Decoded", "Leaves"]

Array = np.ndarray[Any, Any]
_SHORT_NBYTES = 1024  # skeletons with bodies of up to this length are matched many at once
_BEFORE_BODY_NBYTES = BLOCK + PREAMBLE_NBYTES


class Decoded:
    """The skeletons of a batch, read once. If a skeleton matches the template of the first one, only its values are extracted.

    Args:
        request: The batch.
        structure: Structure of the batch.
        io: Method that read the batch's tensors; the skeletons are read by the same method.

    Threads: any number of threads may use it at once.
    """

    def __init__(self, request: Request, structure: Structure, io: str) -> None:
        self._request = request
        self._structure = structure
        self._io = io
        self._lock = threading.Lock()
        self._columns: list[Array] = []  # for each value of the template, an object per sample
        self._is_matched: Array | None = (
            None  # whether a sample's values are in `_columns`; None until the skeletons are read
        )
        self._samples: list[Any] | None = None

    def __len__(self) -> int:
        return len(self._request)

    def column(self, path: Path) -> list[Any]:
        """Return the value at `path` of each sample.

        Raises:
            BatchError: A sample's structure differs from that of the first sample.
        """
        with self._lock:
            is_matched, slot = self._match(), self._slot(path)
            if slot is not None and is_matched.all():
                column: list[Any] = self._columns[slot].tolist()
                return column
            if self._samples is None:
                self._samples = [self._build(i) for i in range(len(self))]
        return [item_at(sample, path) for sample in self._samples]

    def check(self) -> None:
        """Raise BatchError unless every sample has the structure of the first sample."""
        with self._lock:
            for i in np.flatnonzero(~self._match()).tolist():
                self._build(i)

    def _match(self) -> Array:
        """Return whether each sample's skeleton matches the template; the first call reads the skeletons."""
        if self._is_matched is not None:
            return self._is_matched
        template, rows = self._structure.template, self._request.rows
        is_matched = np.zeros(len(self), bool)
        if template is not None:
            self._columns = [np.empty(len(self), object) for _ in template.segments[1:]]
            for which, columns in _match_mapped(rows, template, self._io):
                is_matched[which] = True
                for column, values in zip(self._columns, columns, strict=True):
                    column[which] = values
            # cost per sample in Python: one step for its bytes, one for its values
            for i, skeleton, begin in rows.skeletons(self._io, ~is_matched):
                found = template.match(skeleton, begin)
                if found is not MISS:
                    is_matched[i] = True
                    for column, value in zip(self._columns, found, strict=True):
                        column[i] = value
            if is_matched.all():
                for number, _, some in rows.by_shard:
                    rows.shards[number].note_template(some, template)
        self._is_matched = is_matched
        return is_matched

    def _slot(self, path: Path) -> int | None:
        """Return the index of the template's value at `path`; None if there is a container at `path`."""
        template, slots = self._structure.template, self._structure.slots
        if template is None:
            return None
        if path not in slots:
            # build a sample with numbers in place of plain values, and None in place of tensors
            numbered = template.build([*range(len(template.segments) - 1), *(None for _ in template.references)])
            found = item_at(numbered, path)
            slots[path] = found if isinstance(found, int) else None
        return slots[path]

    def _build(self, i: int) -> Any:
        template, wanted = self._structure.template, self._request.structures.wanted
        if template is None or not self._match()[i]:
            sample = self._request.sample(i)
            found = difference(self._structure.sample, sample)
            if found is not None:
                where, first, other = found
                key = self._request.key
                raise BatchError(
                    f"sample {key(i)!r} has {other} {where}, but {key(0)!r} has {first}: their structures differ; "
                    "collate with a function, or use read_tensors"
                )
            return sample
        values = [column[i] for column in self._columns]
        if wanted is None:
            return template.build([*values, *(None for _ in template.references)])
        # remove tensors that are not selected
        return project(template.build([*values, *map(_stand_in, template.references)]), wanted)


class _Part(NamedTuple):
    """Samples of a batch in one shard: their positions in the batch, their rows, and the extents of their skeletons' bodies."""

    shard: Shard
    at: Array
    rows: Array
    begins: Array
    nbytes: Array


def _match_mapped(rows: Rows, template: Template, io: str) -> Iterator[tuple[Array, list[list[Any]]]]:
    """Yield what `match_many` yields, with positions in the batch, for short skeletons in memory maps.

    The skeletons that are left out are matched one after another.
    """
    parts = _short_skeletons(rows) if io != "pread" else []
    if not parts:
        return
    at, nbytes = (np.concatenate(column) for column in zip(*((part.at, part.nbytes) for part in parts), strict=True))
    begins, are_good = [], []
    try:
        with Maps([part.shard.file for part in parts], len(at), io) as maps:
            for part, base in zip(parts, maps.bases, strict=True):
                begins.append(part.begins + base)
                is_good = part.shard.have_templates(part.rows)
                new = np.flatnonzero(~is_good)
                if len(new):
                    stored = maps.gather(begins[-1][new] - _BEFORE_BODY_NBYTES, _BEFORE_BODY_NBYTES)
                    is_good[new] = part.shard.are_skeletons(stored, part.rows[new])
                are_good.append(is_good)
            bodies = maps.gather(np.concatenate(begins), int(nbytes.max()))
    except MapLost:
        return
    nbytes *= np.concatenate(are_good)
    for length in np.unique(nbytes[nbytes > 0]).tolist():
        which = np.flatnonzero(nbytes == length)
        for matched, columns in match_many(bodies[which, :length], template):
            yield at[which[matched]], columns


def _short_skeletons(rows: Rows) -> list[_Part]:
    """Return the samples of a batch with short skeletons, by shard, if the shard has enough of them for a lease."""
    positions = np.arange(len(rows))
    parts = []
    for number, at, some in rows.by_shard:
        shard = rows.shards[number]
        begins = shard.columns.skeleton_begin[some].astype(np.int64) + PREAMBLE_NBYTES
        nbytes = shard.columns.skeleton_nbytes[some].astype(np.int64) - PREAMBLE_NBYTES
        # as many bytes are copied for each body as for the longest
        fits = (nbytes > 0) & (nbytes <= _SHORT_NBYTES) & (begins + _SHORT_NBYTES <= shard.file.nbytes)
        if np.count_nonzero(fits) >= LEASED_SAMPLES:
            parts.append(_Part(shard, positions[at][fits], some[fits], begins[fits], nbytes[fits]))
    return parts


def _stand_in(text: str) -> Any:
    """Return a lazy tensor with only the name in the reference `text`."""
    name = text.partition(":")[2].partition("?")[0]
    return LazyTensor(Reference(name, "tensor", None, (), 0, 0, None), MemorySource(b""))


class Leaves:
    """A list-like object with one value per sample of a batch, decoded from the skeletons on first use.

    It pickles, prints and compares like a list. It is not registered as a `Sequence`: to move a batch to a device, trainers
    rebuild every sequence from its items, and this would decode all values.

    Raises (on first use):
        BatchError: A sample's structure differs from that of the first sample.
        FormatError: A skeleton is damaged.
    """

    __slots__ = ("_decoded", "_list", "_path")

    def __init__(self, decoded: Decoded, path: Path) -> None:
        self._decoded = decoded
        self._path = path
        self._list: list[Any] | None = None

    def tolist(self) -> list[Any]:
        """Return the values as a list; the same list each time."""
        if self._list is None:
            self._list = self._decoded.column(self._path)
        return self._list

    def __len__(self) -> int:
        return len(self._decoded)

    def __getitem__(self, index: Any) -> Any:
        return self.tolist()[index]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.tolist())

    def index(self, value: Any, *bounds: int) -> int:
        """Return the first index of `value`, like `list.index`."""
        return self.tolist().index(value, *bounds)

    def count(self, value: Any) -> int:
        """Return how often `value` occurs."""
        return self.tolist().count(value)

    def __eq__(self, other: object) -> bool:
        return self.tolist() == (other.tolist() if isinstance(other, Leaves) else other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return repr(self.tolist())

    def __reduce__(self) -> Any:
        return list, (self.tolist(),)
