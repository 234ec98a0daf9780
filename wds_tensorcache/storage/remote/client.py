"""The protocol of readers of a server or an object store: the length and tag of an object, its end, and ranges of its bytes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

# In flight, in this process. Measured, for 1,000 ranges of 2.5 KB at 20 ms of latency: 64 take 0.52 s, 128 take 0.34 s, and 192
# take no less.
MAX_REQUESTS = 128


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """The state of an object.

    Attributes:
        nbytes: Length of the object.
        tag: Strong ETag, as the server sends it; else another text that changes with the object, such as its date of
            modification; None if unknown.
    """

    nbytes: int
    tag: str | None


class Client(Protocol):
    """Reads the objects of one server or bucket. Every method retries errors that pass, within a time limit.

    Raises (all methods):
        FileNotFoundError: The object does not exist.
        FormatError: The object has changed since `expected` was learned.
        RemoteError: The request failed for another reason.

    Threads/fork/pickle: any thread may call; a forked child opens its own connections; not pickled.
    """

    def stat(self, url: str, /) -> ObjectInfo:
        """Return the state of an object."""
        ...

    def read_tail(self, url: str, nbytes: int, /) -> tuple[ObjectInfo, bytes]:
        """Return the state of an object and its last `nbytes` bytes, or the whole object if it is shorter, by one request."""
        ...

    def read_into(self, url: str, buffers: Sequence[memoryview], begin: int, expected: ObjectInfo, /) -> ObjectInfo:
        """Fill the 1-D byte buffers, in order, from offset `begin` on, by one request, with `If-Match` if there is a tag.

        Args:
            expected: State of the object; a tag of None accepts any.

        Returns:
            The state found, with its tag.
        """
        ...

    def read_whole(self, url: str, max_nbytes: int, /) -> tuple[ObjectInfo, bytes]:
        """Return the state of an object and all its bytes; raise RemoteError if there are more than `max_nbytes`."""
        ...

    def list_objects(self, folder: str, /) -> Iterator[tuple[str, ObjectInfo]]:
        """Yield the url and state of each object directly in a folder, in the order of names.

        Raises:
            RemoteError: The server has no listings, as HTTP servers in general.
        """
        ...


def read_tail_by_stat(client: Client, url: str, nbytes: int) -> tuple[ObjectInfo, bytes]:
    """Read a tail as `Client.read_tail` does, by two requests: for servers without ranges that count from the end."""
    state = client.stat(url)
    begin = max(0, state.nbytes - max(0, nbytes))
    content = bytearray(state.nbytes - begin)
    state = client.read_into(url, [memoryview(content)], begin, state)
    return state, bytes(content)


def fill_buffers(buffers: Sequence[memoryview], content: memoryview) -> None:
    """Copy bytes into buffers of the same total length, in order."""
    for buffer in buffers:
        buffer[:] = content[: len(buffer)]
        content = content[len(buffer) :]
