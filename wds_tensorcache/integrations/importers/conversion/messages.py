"""Messages between the process that writes shards and its workers. The bytes of samples are in none of them."""

from __future__ import annotations

import copyreg
import io
import pickle
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

from wds_tensorcache.codec.header import Layout, form_of, make_layout
from wds_tensorcache.integrations.importers.conversion.convert import Converted, Item

Place = tuple[int, int]  # number of a shard, and offset in its file


@dataclass(frozen=True, slots=True)
class Todo:
    """Samples that a worker shall convert."""

    items: Sequence[Item]


@dataclass(frozen=True, slots=True)
class Target:
    """An unfinished shard: the path of its file, and the device and inode, by which a worker knows that it opened this file."""

    path: str
    identity: tuple[int, int]


@dataclass(frozen=True, slots=True)
class Places:
    """Where a worker writes the samples that it reported first among those without a place.

    Attributes:
        places: Place of each sample; None for a sample that is not written.
        targets: Shards that were not in earlier messages to this worker, by their numbers.
    """

    places: Sequence[Place | None]
    targets: dict[int, Target]


@dataclass(slots=True)
class Report:
    """Work that a worker has done since its last report.

    Attributes:
        results: Converted samples without their parts, or errors, in the order in which the worker got the items.
        written: Number of bytes that it has written, by number of the shard.
        failure: Error of a write: the number of the shard, and the error.
        fault: Error that ends the worker.
    """

    results: list[Converted | Exception] = field(default_factory=list)
    written: dict[int, int] = field(default_factory=dict)
    failure: tuple[int, OSError] | None = None
    fault: Exception | None = None


def send(connection: Connection, message: Todo | Places | Report) -> None:
    """Send a message; raise OSError if the other process has ended."""
    buffer = io.BytesIO()
    pickler = pickle.Pickler(buffer, 5)
    pickler.dispatch_table = _REDUCERS
    pickler.dump(message)
    connection.send_bytes(buffer.getbuffer())


def receive(connection: Connection) -> Any:
    """Return the next message; raise EOFError or OSError if the other process has ended."""
    # The sender is a forked copy of this process, so the pickle is as safe as the process itself.
    return pickle.loads(connection.recv_bytes())  # noqa: S301


def _reduce_layout(layout: Layout) -> tuple[Any, ...]:
    """Leave out what other samples taught the layout and its form, such as templates."""
    dims = [dim for tensor in layout.tensors.values() for dim in tensor.shape]
    return _layout, (layout.form.entries, dims, layout.data_begin, layout.texts, layout.further)


def _layout(entries: Any, dims: Any, data_begin: Any, texts: Any, further: Any) -> Layout:
    return make_layout(form_of(entries), dims, data_begin, texts, further)


_REDUCERS = {**copyreg.dispatch_table, Layout: _reduce_layout}
