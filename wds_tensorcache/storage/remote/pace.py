"""The measured speed of a server: latency, and rate of bytes."""

from __future__ import annotations

import threading
import time

_LATENCY_S, _RATE = 0.03, 50e6  # assumed until something is measured
_WEIGHT = 0.1  # of a new measurement in a running mean
_LARGE = 256 * 1024  # shorter bodies arrive with the head, and show no rate
_WINDOW_S = 5.0  # of busy time; older bytes fade


class Pace:
    """Running means of the times of requests to one server.

    Attributes:
        latency_s: Seconds from a request to the head of its response.
        rate: Bytes per second within the body of one response.

    Threads/fork/pickle: any thread of one process. Cannot be pickled.
    """

    def __init__(self) -> None:
        self.latency_s, self.rate = _LATENCY_S, _RATE
        self._num_latencies = self._num_rates = 0
        self._lock = threading.Lock()
        self._num_running = 0
        self._busy_since = 0.0
        self._busy_s = self._busy_nbytes = 0.0

    @property
    def total_rate(self) -> float:
        """Bytes per second of all simultaneous requests together; at least `rate`."""
        with self._lock:
            busy_s = self._busy_s + (time.monotonic() - self._busy_since if self._num_running else 0.0)
            return max(self.rate, self._busy_nbytes / busy_s) if busy_s > self.latency_s else self.rate

    def begin(self, head_s: float) -> float:
        """Record that a head has arrived after `head_s` seconds. Return the current time, for `end`."""
        now = time.monotonic()
        with self._lock:
            self._num_latencies += 1
            self.latency_s += max(_WEIGHT, 1 / self._num_latencies) * (head_s - self.latency_s)
            if not self._num_running:
                self._busy_since = now - head_s
            self._num_running += 1
        return now

    def end(self, begun: float, nbytes: int) -> None:
        """Record that a body has ended after `nbytes` bytes. Call this once after each call of `begin`."""
        now = time.monotonic()
        with self._lock:
            if nbytes >= _LARGE:
                self._num_rates += 1
                rate = nbytes / max(now - begun, 1e-6)
                self.rate += max(_WEIGHT, 1 / self._num_rates) * (rate - self.rate)
            self._busy_nbytes += nbytes
            self._busy_s += now - self._busy_since
            self._busy_since = now
            self._num_running -= 1
            if self._busy_s > _WINDOW_S:
                fade = _WINDOW_S / self._busy_s
                self._busy_s, self._busy_nbytes = self._busy_s * fade, self._busy_nbytes * fade
