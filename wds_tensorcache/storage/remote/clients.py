"""The protocol of all clients, and the client for a url."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from wds_tensorcache.storage.remote.pace import Pace
from wds_tensorcache.storage.remote.retry import ObjectInfo, Request
from wds_tensorcache.storage.threads import per_process
from wds_tensorcache.storage.urls import credentials_of, origin_of


class Client(Protocol):
    """A reader of the objects of one server or bucket. Each method is one attempt, which `Request.repeat` repeats.

    Raises (all methods):
        TransientError: A fault that may pass. The next attempt reads from `request.at` on.
        FileNotFoundError: The object does not exist.
        FormatError: The object does not have the state `request.state`.
        RemoteError: The request failed for another reason.

    Threads/fork/pickle: any thread may call. A forked child makes its own client. Cannot be pickled.
    """

    pace: Pace

    def read_head(self, request: Request, nbytes: int, /) -> tuple[ObjectInfo, bytes]:
        """Return an object's state and first `nbytes` bytes, or all if shorter."""
        ...

    def read_range(self, request: Request, buffers: Sequence[memoryview], /) -> ObjectInfo:
        """Fill 1-D byte buffers with `[request.at, request.end)`, in order; return the object's state."""
        ...

    def read_tail(self, request: Request, nbytes: int, /) -> tuple[ObjectInfo, bytes] | None:
        """Return an object's state and last `nbytes` bytes, or all if shorter.

        Return None if the server cannot read a tail without the object's length.
        """
        ...

    def list_objects(self, request: Request, /) -> list[str]:
        """Return the sorted urls of the objects directly in a folder. Raise RemoteError if the server has no listings."""
        ...


_Clients = dict[tuple[str, "tuple[str, str] | None"], Client]
# a forked child makes its own: connections, threads and locks are the parent's
_clients: Callable[[], _Clients] = per_process(dict)


def client_for(url: str) -> Client:
    """Return this process's client for a url.

    There is one for each bucket, and for each server and user. `is_url` must return True for the url. Do not keep the client: a
    forked child needs another client.

    Raises:
        ImportError: A package is missing; the message names the extra to install.
        RemoteError: The store cannot be opened, for example because options are missing, or the process was forked.
    """
    key = origin_of(url), credentials_of(url)
    clients = _clients()
    client = clients.get(key)
    return clients.setdefault(key, _make(*key)) if client is None else client


def _make(origin: str, credentials: tuple[str, str] | None) -> Client:
    scheme = origin.partition("://")[0]
    if scheme in ("http", "https"):
        from wds_tensorcache.storage.remote.http import HttpClient
        from wds_tensorcache.storage.remote.http_transport import basic_authorization

        return HttpClient(origin, basic_authorization(*credentials) if credentials else None)
    if scheme in ("s3", "gs", "az"):
        from wds_tensorcache.storage.remote.stores import StoreClient

        return StoreClient(origin)
    from wds_tensorcache.storage.remote.hub import HubClient

    return HubClient()
