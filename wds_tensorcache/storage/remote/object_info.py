"""The state of a remote object: its length and its tag."""

from __future__ import annotations

from dataclasses import dataclass


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
