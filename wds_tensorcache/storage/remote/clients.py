"""One client for each bucket, and for each user of a server, made when it is first needed."""

from __future__ import annotations

import os
import sys
import threading
from typing import Protocol

from wds_tensorcache.storage.remote.client import Client
from wds_tensorcache.storage.remote.pace import Pace
from wds_tensorcache.storage.remote.urls import SCHEMES, credentials_of, origin_of, shown

__all__ = ["MeasuredClient", "client_for", "forget_clients"]


class MeasuredClient(Client, Protocol):
    """A client that measures its server."""

    @property
    def pace(self) -> Pace:
        """Measured times of its requests."""
        ...


_Credentials = tuple[str, str]

_clients: dict[tuple[str, _Credentials | None], MeasuredClient] = {}
_lock = threading.Lock()


def forget_clients() -> None:
    """Make new clients when they are next needed, for example after credentials in the environment have changed."""
    global _clients, _lock
    _clients, _lock = {}, threading.Lock()


_parent_had_obstore = False


def _renew() -> None:
    """Forget the parent's clients in a forked child: their connections, threads and locks are the parent's."""
    global _parent_had_obstore
    _parent_had_obstore = _parent_had_obstore or "obstore" in sys.modules
    forget_clients()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew)


def client_for(url: str) -> MeasuredClient:
    """Return the client for an object's bucket, or for its server and the user name and password of the url.

    Do not keep it: a forked child needs another one.

    Raises:
        ValueError: The url has no scheme of `SCHEMES`.
        ImportError: A package is missing; the message says which extra to install.
        RemoteError: The store cannot be opened, for example because the url has credentials, or options are missing.
    """
    key = origin_of(url), credentials_of(url)
    found = _clients.get(key)
    if found is None:
        made = _make(*key, url)
        with _lock:
            found = _clients.setdefault(key, made)
    return found


def _make(origin: str, credentials: _Credentials | None, url: str) -> MeasuredClient:
    scheme = origin.partition("://")[0]
    if scheme in ("http", "https"):
        from wds_tensorcache.storage.remote.http.client import HttpClient

        return HttpClient(origin, credentials)
    if scheme in ("s3", "gs", "az") and _parent_had_obstore:
        from wds_tensorcache.storage.remote.forked.client import ForkedClient

        return ForkedClient(origin)
    if scheme in ("s3", "gs", "az"):
        from wds_tensorcache.storage.remote.stores import StoreClient

        return StoreClient(origin)
    if scheme == "hf":
        from wds_tensorcache.storage.remote.hub.client import HubClient

        return HubClient(origin)
    raise ValueError(f"{shown(url)}: unknown scheme; expected one of {', '.join(sorted(SCHEMES))}")
