"""Find tensors that are stored several times, in bounded memory."""

from __future__ import annotations

from dataclasses import dataclass

_MAX_KEPT = 1 << 18  # distinct tensors to remember
_NUM_LISTED = 20


@dataclass(frozen=True, slots=True)
class Repeat:
    """A tensor that is stored `count` times, with its name and sample at the first occurrence."""

    name: str
    key: str
    nbytes: int
    count: int


@dataclass(frozen=True, slots=True)
class Repeats:
    """Tensors that are stored several times, with equal dtypes, shapes and bytes.

    Attributes:
        num_tensors: Number of copies, without the first copy of each tensor.
        nbytes: Number of bytes of these copies.
        is_partial: True if there were too many distinct tensors to remember. More tensors may then be repeated.
        most: Up to 20 tensors whose copies take the most bytes.
    """

    num_tensors: int
    nbytes: int
    is_partial: bool
    most: tuple[Repeat, ...]


class RepeatCounter:
    """A count of equal tensors by digest. Memory: the first 262,144 distinct tensors, about 100 MB."""

    def __init__(self) -> None:
        self._kept: dict[int, tuple[str, str, int, int]] = {}
        self._is_partial = False

    def add(self, digest: int, name: str, key: str, nbytes: int) -> None:
        """Count a tensor, unless it is empty, by the digest of its dtype, shape and bytes."""
        name, key, nbytes, count = self._kept.get(digest, (name, key, nbytes, 0))
        if nbytes and (count or len(self._kept) < _MAX_KEPT):
            self._kept[digest] = name, key, nbytes, count + 1
        elif nbytes:
            self._is_partial = True

    def result(self) -> Repeats:
        """Return the repeated tensors. The tensors whose copies take the most bytes come first."""
        repeats = [Repeat(*record) for record in self._kept.values() if record[-1] > 1]
        repeats.sort(key=lambda repeat: -repeat.nbytes * (repeat.count - 1))
        num_copies = sum(repeat.count - 1 for repeat in repeats)
        nbytes = sum(repeat.nbytes * (repeat.count - 1) for repeat in repeats)
        return Repeats(num_copies, nbytes, self._is_partial, tuple(repeats[:_NUM_LISTED]))
