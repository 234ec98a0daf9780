"""Short summaries of a cache's keys for checkpoints, which tell how the keys have changed."""

from __future__ import annotations

import base64
from collections.abc import Iterator, Sequence
from itertools import islice, pairwise
from typing import Any

import xxhash

__all__ = ["difference", "summary_of"]

_PREFIXES = 64  # positions up to which all keys are hashed, which tell where another sequence begins to differ
_PREFIX_NBYTES = 2
_SAMPLED = 16  # keys that are also hashed alone, which tell where keys were added or removed
_SAMPLED_NBYTES = 4
_FILTER = (
    "; if keys were only added, the view cache.filter(lambda entry: entry.key in old), where old is the earlier cache, can "
    "load the state, except with shuffle='blocks'"
)
_CHUNK = 4096  # keys in memory at the same time


def summary_of(keys: Sequence[str], digest: Any) -> str:
    """Return the number of keys and hashes of them, at most 280 characters; update `digest` with all keys."""
    parts, sampled = _layout(len(keys))
    hashes, of_sampled = bytearray(), bytearray()
    prefix, remaining = xxhash.xxh3_64(), iter(keys)
    for begin, end in parts:
        ends = _hash_part(remaining, end - begin, prefix, digest)
        hashes += prefix.digest()[:_PREFIX_NBYTES]
        if begin in sampled:
            of_sampled += _hash_of(ends[0])
    return f"{len(keys)}:{base64.b64encode(hashes + of_sampled).decode()}"


def difference(saved: str, keys: Sequence[str]) -> str:
    """Return what differs between the sequence of a summary and `keys`, as far as the summary tells; empty if nothing does.

    Raises:
        ValueError: `saved` is not a summary.
    """
    try:
        number, _, text = saved.partition(":")
        count = int(number)
        parts, sampled = _layout(count)
        packed = base64.b64decode(text)
        border = len(parts) * _PREFIX_NBYTES
        if count < 0 or len(packed) != border + len(sampled) * _SAMPLED_NBYTES:
            raise ValueError(f"{len(packed)} bytes of hashes for {count} keys")
    except ValueError as exc:
        raise ValueError(f"{saved!r:.200} is not a summary of keys") from exc
    prefix, remaining = xxhash.xxh3_64(), iter(keys)
    for (begin, end), known in zip(parts, _split(packed[:border], _PREFIX_NBYTES), strict=True):
        ends = _hash_part(remaining, end - begin, prefix)
        if end > len(keys) or prefix.digest()[:_PREFIX_NBYTES] != known:
            moved = _moved(sampled, _split(packed[border:], _SAMPLED_NBYTES), count, keys)
            return f"{_first_difference(begin, end, ends)}; {moved}"
    if len(keys) == count:
        return ""
    added = f"{len(keys) - count} added after them, from {next(remaining)!r} on"
    return f"all {count} keys of the state are here first; {added}; the view cache[:{count}] can load the state"


def _hash_part(remaining: Iterator[str], count: int, *digests: Any) -> list[str]:
    """Update the digests with the next `count` keys, and return the first and the last of these; none if no keys remain."""
    ends: list[str] = []
    while count > 0 and (some := list(islice(remaining, min(count, _CHUNK)))):
        text = b"".join(map(_encoded, some))
        for digest in digests:
            digest.update(text)
        ends, count = [(ends or some)[0], some[-1]], count - len(some)
    return ends


def _first_difference(begin: int, end: int, ends: Sequence[str]) -> str:
    """Return where another sequence begins to differ: from `ends[0]` to `ends[1]`, instead of the keys `begin` to `end`."""
    same = f"the first {begin} keys are the same" if begin else "the keys differ from the start"
    if not ends:
        return f"{same}, and no more follow here"
    if end - begin == 1:
        return f"{same}; the first that differs here is {ends[0]!r}"
    return f"{same}; the first that differs here is one of {ends[0]!r} to {ends[1]!r}, or the next one"


def _moved(sampled: Sequence[int], hashes: Sequence[bytes], count: int, keys: Sequence[str]) -> str:
    """Return how many of `count` keys were removed, and how many added, from where the sampled keys are now."""
    places: dict[bytes, int] = {}
    for number, key in enumerate(keys):
        places.setdefault(_hash_of(key), number)
    found = [(before, places[each]) for before, each in zip(sampled, hashes, strict=True) if each in places]
    text = f"of {len(hashes)} keys that the state remembers, {len(found)} are here"
    if any(now[1] <= before[1] for before, now in pairwise(found)):
        return f"{text}, in another order"
    ends = pairwise([(0, 0), *found, (count, len(keys))])
    changes = [(after[1] - before[1]) - (after[0] - before[0]) for before, after in ends]
    removed, added = -sum(min(0, change) for change in changes), sum(max(0, change) for change in changes)
    if not found:
        return text
    text = f"{text}; {removed} or more keys were removed, {added} or more added"
    return text if removed else text + _FILTER


def _layout(count: int) -> tuple[list[tuple[int, int]], list[int]]:
    """Return the ranges, begin and end, of equal parts of a sequence of `count` keys, and the positions of sampled keys.

    Each sampled key is the first of a part.
    """
    num_parts = min(_PREFIXES, max(count, 0))
    edges = [count * number // num_parts for number in range(num_parts + 1)] if num_parts else [count]
    return list(pairwise(edges)), sorted(
        {edges[num_parts * number // _SAMPLED] for number in range(_SAMPLED)} - {count}
    )


def _split(packed: bytes, nbytes: int) -> list[bytes]:
    return [packed[at : at + nbytes] for at in range(0, len(packed), nbytes)]


def _encoded(key: str) -> bytes:
    return key.encode("utf-8", "surrogateescape") + b"\0"


def _hash_of(key: str) -> bytes:
    return xxhash.xxh3_64(_encoded(key)).digest()[:_SAMPLED_NBYTES]
