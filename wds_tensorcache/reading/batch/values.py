"""A batch's small values: a list for each, made from the skeletons when somebody looks at it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

from wds_tensorcache.codec.lazy import LazyTensor
from wds_tensorcache.codec.reference import MemorySource, Reference
from wds_tensorcache.codec.skeleton.template import MISS, Template
from wds_tensorcache.errors import BatchError
from wds_tensorcache.reading.batch.placement import Path, difference, project
from wds_tensorcache.reading.batch.read_plan import Places

__all__ = ["Decoded", "Leaves"]


class Decoded:
    """The skeletons of a batch, read once; of samples that match the first one's template only the values are taken out.

    Threads: any number may ask at once.
    """

    def __init__(
        self,
        places: Places,
        template: Template | None,
        io: str,
        sample: Callable[[int], Any],
        key: Callable[[int], str],
        wanted: Callable[[str], bool] | None = None,
        like: Any = None,
    ) -> None:
        self._like = like  # the first sample, as the batch has it
        self._places = places
        self._template = template
        self._io = io
        self._sample = sample
        self.key = key
        self._wanted = wanted
        self._lock = threading.Lock()
        self._values: list[list[Any] | None] | None = None
        self._samples: list[Any] | None = None
        self._slots: dict[Path, int | None] = {}

    def __len__(self) -> int:
        return len(self._places)

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
        return [_walk(sample, path) for sample in self._samples]

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
        template = self._template
        if template is not None:
            # two steps in Python per sample: its bytes, its values
            for i, skeleton, begin in self._places.skeletons(self._io):
                values = template.match(skeleton, begin)
                if values is not MISS:
                    found[i] = values
        return found

    def _slot(self, path: Path) -> int | None:
        """Return which of a template's values stands alone at `path`."""
        template = self._template
        if template is None:
            return None
        if path not in self._slots:
            marks = [_Mark(number) for number in range(len(template.segments) - 1)]
            value = template.build([*marks, *(None for _ in template.references)])
            for step in path:
                value = value[step]
            self._slots[path] = value.number if isinstance(value, _Mark) else None
        return self._slots[path]

    def _build(self, i: int, values: list[Any] | None) -> Any:
        if values is None or self._template is None:
            sample = self._sample(i)
            found = difference(self._like, sample)
            if found is not None:
                where, first, other = found
                raise BatchError(
                    f"sample {self.key(i)!r} has {other} {where}, but {self.key(0)!r} has {first}: their structures differ; "
                    "use a function, or read_tensors"
                )
            return sample
        if self._wanted is None:
            return self._template.build([*values, *(None for _ in self._template.references)])
        made = self._template.build([*values, *map(_stand_in, self._template.references)])
        return project(made, self._wanted)  # tensors that were not selected are gone from dicts


def _walk(value: Any, path: Path) -> Any:
    for step in path:
        value = value[step]
    return value


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
