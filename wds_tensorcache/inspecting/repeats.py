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
    """Tensors that several samples have: equal dtypes, shapes and bytes.

    Attributes:
        num_tensors: Number of copies beyond the first one of each tensor.
        nbytes: Bytes that storing each tensor once would save.
        is_estimate: True if there were too many tensors to remember; the numbers are then an unbiased estimate.
        most: Tensors whose copies take the most bytes, at most 20.
    """

    num_tensors: int
    nbytes: int
    is_estimate: bool
    most: tuple[Repeat, ...]


class RepeatCounter:
    """A count of equal tensors by digest.

    Memory: at most 262,144 tensors are remembered, about 100 MB. Beyond that, it remembers only tensors whose digests end in
        zeros, and multiplies their counts.
    """

    def __init__(self, max_kept: int = _MAX_KEPT) -> None:
        self._max_kept = max_kept
        self._mask = 0  # bits that are 0 in the digests to remember
        self._kept: dict[int, tuple[str, str, int, int]] = {}

    def add(self, digest: int, name: str, key: str, nbytes: int) -> None:
        """Count a tensor by the digest of its dtype, shape and bytes."""
        if digest & self._mask or not nbytes:
            return
        name, key, nbytes, count = self._kept.get(digest, (name, key, nbytes, 0))
        self._kept[digest] = name, key, nbytes, count + 1
        if len(self._kept) > self._max_kept:
            self._mask = 2 * self._mask + 1
            self._kept = {kept: record for kept, record in self._kept.items() if not kept & self._mask}

    def result(self) -> Repeats:
        """Return the repeated tensors, those with the most copied bytes first."""
        repeats = [Repeat(*record) for record in self._kept.values() if record[-1] > 1]
        repeats.sort(key=lambda repeat: -repeat.nbytes * (repeat.count - 1))
        share = self._mask + 1
        num_copies = sum(repeat.count - 1 for repeat in repeats)
        nbytes = sum(repeat.nbytes * (repeat.count - 1) for repeat in repeats)
        return Repeats(share * num_copies, share * nbytes, self._mask > 0, tuple(repeats[:_NUM_LISTED]))
