"""Find tensors that are stored several times, in bounded memory."""

from __future__ import annotations

from dataclasses import dataclass

_MAX_KNOWN = 1 << 18  # distinct tensors to remember
_NUM_LISTED = 20


@dataclass(frozen=True, slots=True)
class Repeat:
    """One tensor that several samples have.

    Attributes:
        name: Name of the tensor in the first of these samples.
        key: Key of that sample.
        nbytes: Bytes of the tensor.
        count: Number of times that it is stored.
    """

    name: str
    key: str
    nbytes: int
    count: int

    @property
    def nbytes_saved(self) -> int:
        """Bytes that storing the tensor once would save."""
        return self.nbytes * (self.count - 1)


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

    Memory: at most 262,144 tensors are remembered, about 100 MB. Beyond that, only tensors whose digests end in zeros are, and
        their counts are multiplied.
    """

    def __init__(self, max_known: int = _MAX_KNOWN) -> None:
        self._max_known = max_known
        self._mask = 0  # bits that are 0 in the digests to remember
        self._known: dict[int, Repeat | tuple[str, str, int]] = {}

    def add(self, digest: int, name: str, key: str, nbytes: int) -> None:
        """Count a tensor by the digest of its dtype, shape and bytes."""
        if digest & self._mask or not nbytes:
            return
        found = self._known.get(digest)
        if found is None:
            self._known[digest] = name, key, nbytes
            if len(self._known) > self._max_known:
                self._mask = 2 * self._mask + 1
                self._known = {each: found for each, found in self._known.items() if not each & self._mask}
        elif isinstance(found, Repeat):
            self._known[digest] = Repeat(found.name, found.key, found.nbytes, found.count + 1)
        else:
            self._known[digest] = Repeat(*found, 2)

    def result(self) -> Repeats:
        """Return the repeated tensors, those with the most copied bytes first."""
        found = [each for each in self._known.values() if isinstance(each, Repeat)]
        found.sort(key=lambda each: -each.nbytes_saved)
        share = self._mask + 1
        return Repeats(
            share * sum(each.count - 1 for each in found),
            share * sum(each.nbytes_saved for each in found),
            self._mask > 0,
            tuple(found[:_NUM_LISTED]),
        )
