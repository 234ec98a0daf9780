"""The number of batches that a loader reads ahead from remote shards."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from typing import Any

from wds_tensorcache.storage.remote.clients import client_for
from wds_tensorcache.storage.urls import is_url

NUM_THREADS = 16  # a thread waits for the requests of one batch; a process has at most 128 requests in flight
_LEAST, _FIRST, _MOST = 2, 4, 32  # with local shards, more than _LEAST batches would only fill the processor's caches
_NUM_LOCAL = 8  # batches in a row without a request; not 1, because a mix may also have a local cache
_MAX_NBYTES = 1 << 30
_REQUIRED = 4  # bytes in flight, in multiples of the measured `latency * rate`; more would only take memory


class BatchesAhead:
    """The number of batches to read ahead, adapted to the server.

    The number begins with 4. It doubles when training waited for a batch while less than `4 * latency * rate` bytes were in
    flight. The maximum is 32, or what fits into 1 GiB, but at least 2. Eight batches in a row without a request, for example
    from a node's cache, reduce it to 2.

    Args:
        url: Url of a shard on the server to measure; None if all shards are local. Then the number is 2, or `fixed`.
        fixed: Number that never changes; None for a number that adapts.

    Attributes:
        count: Current number.
        most: Maximum of `count`.

    Threads: only one thread may use an object.
    """

    def __init__(self, url: str | None, fixed: int | None = None) -> None:
        if fixed is None and url is None:
            fixed = _LEAST
        self.count, self.most = (_FIRST, _MOST) if fixed is None else (fixed, fixed)
        self._num_local = 0
        self._url = None if fixed is not None else url

    def note(self, nbytes: int, *, has_waited: bool, has_requested: bool) -> None:
        """Adapt `count` to a received batch. Training may have waited for it, and it may have needed requests."""
        if self._url is None:
            return
        if not has_requested:
            self._num_local += 1
            self.count = _LEAST if self._num_local >= _NUM_LOCAL else self.count
            return
        self._num_local = 0
        if has_waited and self.count < _MOST:
            pace = client_for(self._url).pace
            if self.count * nbytes < _REQUIRED * pace.latency_s * pace.total_rate:
                self.count *= 2
        self.count = min(self.count, max(_LEAST, _MAX_NBYTES // max(1, nbytes)), _MOST)


def remote_url(caches: Iterable[Any]) -> str | None:
    """Return the url of a remote shard; None if all are local."""
    return next(filter(is_url, chain.from_iterable(cache._paths() for cache in caches)), None)
