"""One client for each bucket, and for each user of a server, made when it is first needed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from wds_tensorcache.storage.remote.client import Client
from wds_tensorcache.storage.remote.pace import Pace
from wds_tensorcache.storage.threads import per_process
from wds_tensorcache.storage.urls import SCHEMES, credentials_of, origin_of, shown


class MeasuredClient(Client, Protocol):
    """A client that measures its server."""

    @property
    def pace(self) -> Pace:
        """Measured times of its requests."""
        ...


_Credentials = tuple[str, str]

_Clients = dict[tuple[str, "_Credentials | None"], MeasuredClient]
# a forked child makes its own: connections, threads and locks are the parent's
_clients: Callable[[], _Clients] = per_process(dict)


def forget_clients() -> None:
    """Make new clients when they are next needed, for example after credentials in the environment have changed."""
    _clients().clear()


def client_for(url: str) -> MeasuredClient:
    """Return the client for an object's bucket, or for its server and the user name and password of the url.

    Do not keep it: a forked child needs another client.

    Raises:
        ValueError: The url has no scheme of `SCHEMES`.
        ImportError: A package is missing; the message says which extra to install.
        RemoteError: The store cannot be opened, for example because the url has credentials, or options are missing.
    """
    key = origin_of(url), credentials_of(url)
    clients = _clients()
    client = clients.get(key)
    return clients.setdefault(key, _make(*key, url)) if client is None else client


def _make(origin: str, credentials: _Credentials | None, url: str) -> MeasuredClient:
    scheme = origin.partition("://")[0]
    if scheme in ("http", "https"):
        from wds_tensorcache.storage.remote.http.client import HttpClient

        return HttpClient(origin, credentials)
    if scheme in ("s3", "gs", "az"):
        from wds_tensorcache.storage.remote.event_loop import was_forked
        from wds_tensorcache.storage.remote.forked.client import ForkedClient
        from wds_tensorcache.storage.remote.stores import StoreClient

        if was_forked():
            return ForkedClient(origin)

        return StoreClient(origin)
    if scheme == "hf":
        from wds_tensorcache.storage.remote.hub.client import HubClient

        return HubClient(origin)
    raise ValueError(f"{shown(url)}: unknown scheme; expected one of {', '.join(sorted(SCHEMES))}")
