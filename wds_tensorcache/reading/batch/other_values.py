"""The values of a batch that are not tensors: one list per value, decoded from the skeletons on first use."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

from wds_tensorcache.codec.lazy import LazyTensor
from wds_tensorcache.codec.reference import MemorySource, Reference
from wds_tensorcache.codec.skeleton.template import MISS
from wds_tensorcache.codec.tree import Path, difference, item_at, project
from wds_tensorcache.errors import BatchError
from wds_tensorcache.reading.batch.request import Request, Structure

__all__ = ["Decoded", "Leaves"]


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
        self._values: list[list[Any] | None] | None = None
        self._samples: list[Any] | None = None

    def __len__(self) -> int:
        return len(self._request)

    def column(self, path: Path) -> list[Any]:
        """Return the value at `path` of each sample.

        Raises:
            BatchError: A sample's structure differs from that of the first sample.
        """
        with self._lock:
            if self._values is None:
                self._values = self._match()
            slot = self._slot(path)
            if slot is not None and None not in self._values:
                return [values[slot] for values in self._values if values is not None]
            if self._samples is None:
                self._samples = [self._build(i, values) for i, values in enumerate(self._values)]
        return [item_at(sample, path) for sample in self._samples]

    def check(self) -> None:
        """Raise BatchError unless every sample has the structure of the first sample."""
        with self._lock:
            if self._values is None:
                self._values = self._match()
            for i, values in enumerate(self._values):
                if values is None:
                    self._build(i, None)

    def _match(self) -> list[list[Any] | None]:
        found: list[list[Any] | None] = [None] * len(self)
        template, rows = self._structure.template, self._request.rows
        if template is not None:
            # cost per sample in Python: one step for its bytes, one for its values
            for i, skeleton, begin in rows.skeletons(self._io):
                values = template.match(skeleton, begin)
                if values is not MISS:
                    found[i] = values
            if None not in found:
                for number, _, some in rows.by_shard:
                    rows.shards[number].note_template(some, template)
        return found

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

    def _build(self, i: int, values: list[Any] | None) -> Any:
        template, wanted = self._structure.template, self._request.structures.wanted
        if values is None or template is None:
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
        if wanted is None:
            return template.build([*values, *(None for _ in template.references)])
        # remove tensors that are not selected
        return project(template.build([*values, *map(_stand_in, template.references)]), wanted)


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
