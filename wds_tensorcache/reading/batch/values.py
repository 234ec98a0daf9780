"""A batch's small values: a list for each, made from the skeletons when somebody looks at it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

from wds_tensorcache.codec.lazy import LazyTensor
from wds_tensorcache.codec.reference import MemorySource, Reference
from wds_tensorcache.codec.skeleton.template import MISS
from wds_tensorcache.errors import BatchError
from wds_tensorcache.reading.batch.nest import Path, difference, item_at, project
from wds_tensorcache.reading.batch.request import Request, Structure

__all__ = ["Decoded", "Leaves"]


class Decoded:
    """The skeletons of a batch, read once; of samples that match the first one's template only the values are taken out.

    Args:
        request: The batch.
        structure: The batch's structure.
        io: How to read: the way in which its tensors were just read.

    Threads: any number may ask at once.
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
        """Return what each sample has at `path`.

        Raises:
            BatchError: A sample's structure is another than the first one's.
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
        """Raise BatchError unless every sample has the first one's structure."""
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
            # two steps in Python per sample: its bytes, its values
            for i, skeleton, begin in rows.skeletons(self._io):
                values = template.match(skeleton, begin)
                if values is not MISS:
                    found[i] = values
            if None not in found:
                for number, _, some in rows.parts:
                    rows.shards[number].note_template(some, template)
        return found

    def _slot(self, path: Path) -> int | None:
        """Return which of a template's values stands alone at `path`."""
        template, slots = self._structure.template, self._structure.slots
        if template is None:
            return None
        if path not in slots:
            marks = [_Mark(number) for number in range(len(template.segments) - 1)]
            value = template.build([*marks, *(None for _ in template.references)])
            for step in path:
                value = value[step]
            slots[path] = value.number if isinstance(value, _Mark) else None
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
                    "use a function, or read_tensors"
                )
            return sample
        if wanted is None:
            return template.build([*values, *(None for _ in template.references)])
        # tensors that were not selected are gone from dicts
        return project(template.build([*values, *map(_stand_in, template.references)]), wanted)


def _stand_in(text: str) -> Any:
    """Return a lazy tensor that has only the name in the reference `text`."""
    name = text.partition(":")[2].partition("?")[0]
    return LazyTensor(Reference(name, "tensor", None, (), 0, 0, None), MemorySource(b""))


class _Mark:
    """Stands for a template's value, to find where that goes."""

    def __init__(self, number: int) -> None:
        self.number = number


class Leaves:
    """One value for each sample of a batch: a list, but that the skeletons are decoded when it is first looked at.

    Pickles, prints and compares as the list that it stands for. It is not a registered `Sequence`: trainers rebuild a sequence
    from its items, by its constructor, and would decode every value only to move tensors to a device.

    Raises (when looked at):
        BatchError: A sample's structure is another than the first one's.
        FormatError: A skeleton is damaged.
    """

    __slots__ = ("_decoded", "_list", "_path")

    def __init__(self, decoded: Decoded, path: Path) -> None:
        self._decoded = decoded
        self._path = path
        self._list: list[Any] | None = None

    def tolist(self) -> list[Any]:
        """Return the values as a list, the same one each time."""
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
        """Return the first index of `value`, as of a list."""
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
