"""Statistics of a loader: waiting times, and the time of each stage."""

from __future__ import annotations

from dataclasses import astuple, dataclass
from time import perf_counter
from typing import NamedTuple


class Timing(NamedTuple):
    """Times, bytes and requests of one batch."""

    read_s: float
    transform_s: float
    transfer_s: float
    nbytes: int
    num_requests: int
    done_at: float  # when the batch was ready, by `perf_counter`


@dataclass(slots=True)
class LoaderStats:
    """Times and bytes of the batches that a loader has returned.

    `later - earlier` returns the times and bytes in between. With `tc.torch_loader`, all but `num_batches`, `total_s` and
    `training_waited_s` are 0, because worker processes do not report them.

    Attributes:
        num_batches: Number of batches.
        nbytes: Bytes of the batches' tensors in memory, with padding, as read. Batches that a transform reads count, too;
            tensors that it makes do not.
        total_s: Time from the request of each loop's first batch until its last batch was returned.
        training_waited_s: The part of `total_s` in which training waited for a batch. With worker processes, it includes
            their start.
        data_waited_s: The part of `total_s` in which training computed while its next batch was ready.
        read_s, transform_s, transfer_s: Time in each stage, summed over all threads, so it may exceed `total_s`. Only the
            start of a copy to a GPU counts as transfer, because the copy itself runs in the background.
    """

    num_batches: int = 0
    nbytes: int = 0
    total_s: float = 0.0
    training_waited_s: float = 0.0
    data_waited_s: float = 0.0
    read_s: float = 0.0
    transform_s: float = 0.0
    transfer_s: float = 0.0

    @property
    def nbytes_per_s(self) -> float:
        """Bytes of tensors per second of `total_s`; 0 before the first batch."""
        return self.nbytes / self.total_s if self.total_s else 0.0

    def __sub__(self, earlier: LoaderStats) -> LoaderStats:
        return LoaderStats(*(now - before for now, before in zip(astuple(self), astuple(earlier), strict=True)))

    def __str__(self) -> str:
        rate, waited = "", ""
        if self.nbytes:
            rate = f", {self.nbytes_per_s / 1e6:,.0f} MB/s"
            waited = f", data waited {self.data_waited_s:.1f} s for training"
        text = f"{self.num_batches:,} batches in {self.total_s:.1f} s{rate}"
        return f"{text}; training waited {self.training_waited_s:.1f} s for data{waited}"

    def _count(self, asked_at: float, given_before: float | None, timing: Timing | None) -> float:
        """Count a batch; return the time now, for the next `given_before`."""
        now = perf_counter()
        begin = asked_at if given_before is None else given_before
        self.num_batches += 1
        self.total_s += now - begin
        self.training_waited_s += now - asked_at
        if timing is not None:
            self.nbytes += timing.nbytes
            self.data_waited_s += max(0.0, asked_at - max(timing.done_at, begin))
            self.read_s += timing.read_s
            self.transform_s += timing.transform_s
            self.transfer_s += timing.transfer_s
        return now
