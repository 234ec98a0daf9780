"""The state of a remote object, by which its changes are noticed."""

from __future__ import annotations

from dataclasses import dataclass

# In flight, in this process. Measured, for 1,000 ranges of 2.5 KB at 20 ms of latency: 64 take 0.52 s, 128 take 0.34 s, and 192
# take no less.
MAX_REQUESTS = 128


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """The state of an object.

    Attributes:
        nbytes: Length of the object.
        tag: Strong ETag as the server sends it, or else another text that changes with the object, such as its date of
            modification; None if unknown.
    """

    nbytes: int
    tag: str | None
