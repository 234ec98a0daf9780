"""The peers: one file each, with `peers()`. A peer that is not installed is listed as missing, never dropped silently."""

from __future__ import annotations

from importlib import import_module

from benchmarks.peers.base import Peer

NAME = "tensorcache"
VIEWS = "tensorcache, views"
ONE_THREAD = "tensorcache, 1 thread"
TWO_THREADS = "tensorcache, 2 threads"
READ = "tensorcache, small values read"
DECODED = "tensorcache, 1 thread, small values read"
LOADED = "tensorcache, Loader on 2 threads"

MODULES = ("ours", "webdataset", "files", "litdata", "mds", "tensordict", "array_record", "dali", "datasets")


def load(modules: list[str]) -> tuple[list[Peer], dict[str, str]]:
    """Return the peers of some modules, and the import error of each missing module."""
    peers: list[Peer] = []
    missing: dict[str, str] = {}
    for name in modules:
        try:
            peers += import_module(f"benchmarks.peers.{name}").peers()
        except Exception as error:  # a package that is there but broken raises anything
            missing[name] = f"{type(error).__name__}: {error}".splitlines()[0]
    return peers, missing
