"""Statistics of a loader: how long training waited for data and data for training, and the time of each stage."""

from __future__ import annotations

from dataclasses import astuple, dataclass
from time import perf_counter
from typing import NamedTuple

__all__ = ["Clock", "LoaderStats", "StageStats", "Timing", "WaitStats"]


class Timing(NamedTuple):
    """The times of one batch in seconds, on one thread.

    Attributes:
        read_s: Reading it, without the transfer.
        transform_s: Its transforms.
        transfer_s: Copying it to the device; for a GPU, starting the copy, which continues in the background.
        nbytes: Bytes of its tensors.
        num_requests: Requests to servers that were made for it.
        done_at: Time of `perf_counter` at which it was ready.
    """

    read_s: float
    transform_s: float
    transfer_s: float
    nbytes: int
    num_requests: int
    done_at: float


@dataclass(frozen=True, slots=True)
class StageStats:
    """The work of one stage of a loader.

    Attributes:
        time_s: Time in this stage, summed over all threads.
        nbytes: Bytes of the tensors that went through this stage.
    """

    time_s: float
    nbytes: int

    @property
    def nbytes_per_s(self) -> float:
        """Bytes per second of one thread in this stage; 0 if it took no time."""
        return self.nbytes / self.time_s if self.time_s else 0.0


@dataclass(frozen=True, slots=True)
class LoaderStats:
    """Times and bytes of the batches that a loader has returned so far. `later - earlier` gives those in between.

    Attributes:
        num_batches: Number of batches.
        nbytes: Bytes of their tensors in memory, with padding.
        total_s: Time from the request of each epoch's first batch until its last batch was returned.
        training_waited_s: The part of `total_s` in which training waited for a batch.
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
        """Bytes of tensors per second of `total_s`, as training received them; 0 before the first batch."""
        return self.nbytes / self.total_s if self.total_s else 0.0

    @property
    def stages(self) -> dict[str, StageStats]:
        """The stages by name: `"read"`, `"transform"` and `"transfer"`."""
        times = {"read": self.read_s, "transform": self.transform_s, "transfer": self.transfer_s}
        # a stage that took no time did not run
        return {name: StageStats(time_s, self.nbytes if time_s else 0) for name, time_s in times.items()}

    def __sub__(self, earlier: LoaderStats) -> LoaderStats:
        return LoaderStats(*(mine - other for mine, other in zip(astuple(self), astuple(earlier), strict=True)))

    def __str__(self) -> str:
        return (
            f"{self.num_batches:,} batches in {self.total_s:.1f} s, {self.nbytes_per_s / 1e6:,.0f} MB/s; training waited "
            f"{self.training_waited_s:.1f} s for data, data waited {self.data_waited_s:.1f} s for training"
        )


@dataclass(frozen=True, slots=True)
class WaitStats:
    """The waiting times of a `tc.torch_loader` so far. `later - earlier` gives those in between.

    Attributes:
        num_batches: Number of batches that the loader has returned.
        total_s: Time from the request of each epoch's first batch until its last batch was returned.
        training_waited_s: The part of `total_s` in which training waited for a batch. Without workers, it includes reading;
            with workers, also their start.
    """

    num_batches: int = 0
    total_s: float = 0.0
    training_waited_s: float = 0.0

    def __sub__(self, earlier: WaitStats) -> WaitStats:
        return WaitStats(*(mine - other for mine, other in zip(astuple(self), astuple(earlier), strict=True)))

    def __str__(self) -> str:
        return f"{self.num_batches:,} batches in {self.total_s:.1f} s; training waited {self.training_waited_s:.1f} s for data"


class Clock:
    """Sums the times of a loader's batches. Only the thread that iterates uses it; other threads send a `Timing` each."""

    def __init__(self) -> None:
        self._sums = [0, 0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]
        self._asked_at = 0.0
        self._gave_at: float | None = None  # None before the first batch of an iteration
        self._timing: Timing | None = None

    def begin(self) -> None:
        """Begin an iteration; the time since the last one does not count."""
        self._gave_at = None

    def ask(self) -> None:
        """Note that training requests its next batch."""
        self._asked_at, self._timing = perf_counter(), None

    def take(self, timing: Timing) -> None:
        """Note the times of the batch that will be given next."""
        self._timing = timing

    def give(self) -> None:
        """Note that training receives the batch."""
        asked_at, now = self._asked_at, perf_counter()
        timing = self._timing or Timing(0.0, 0.0, 0.0, 0, 0, now)  # worker processes send no times
        before = asked_at if self._gave_at is None else self._gave_at
        ready = max(0.0, asked_at - max(timing.done_at, before))
        self._gave_at = now
        added = (1, timing.nbytes, now - before, now - asked_at, ready, *timing[:3])
        self._sums = [old + new for old, new in zip(self._sums, added, strict=True)]

    def stats(self) -> LoaderStats:
        """Return the sums so far."""
        return LoaderStats(*self._sums)  # type: ignore[arg-type]

    def waits(self) -> WaitStats:
        """Return the sums that are known without the times of the batches."""
        stats = self.stats()
        return WaitStats(stats.num_batches, stats.total_s, stats.training_waited_s)
