"""The functions that a build maps over a dataset: leave out finished keys, and compute samples with a model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import ray

from wds_tensorcache.ray.rows.block_samples import encoded_table
from wds_tensorcache.ray.rows.columns import column_values
from wds_tensorcache.ray.rows.torch_columns import to_torch
from wds_tensorcache.ray.tasks.jobs import key_digest
from wds_tensorcache.ray.tasks.parts import as_key
from wds_tensorcache.writing.build_batch import Batch

Array = np.ndarray[Any, Any]


def sorted_digests(keys: Sequence[str]) -> Array:
    """Return the hashes of keys in ascending order, uint64 `[N, 2]`."""
    found = np.frombuffer(b"".join(map(key_digest, keys)), np.uint64).reshape(-1, 2)
    return found[np.lexsort((found[:, 1], found[:, 0]))]


def key_column(table: Any, key: str) -> list[str]:
    """Return the keys of a block.

    Raises:
        KeyError: There is no column `key`.
        InvalidKeyError: A key is neither text nor an integer.
    """
    if key not in table.column_names:
        raise KeyError(f"no column {key!r} among {table.column_names!r:.300}; pass key=…")
    return [as_key(value, key) for value in column_values(table.column(key))]


class Missing:
    """A function of a block that returns the rows whose keys are not finished.

    Args:
        digests: Reference to the hashes of the finished keys, as `sorted_digests` returns them.
        key: Name of the column of keys.

    Threads/fork/pickle: immutable. The hashes stay in Ray's shared memory, once for all processes of a node.
    """

    def __init__(self, digests: Any, key: str) -> None:
        self._digests, self._key = digests, key

    def __call__(self, table: Any) -> Any:
        if not table.num_rows:
            return table
        known: Array = ray.get(self._digests)  # a view of Ray's shared memory
        wanted = np.frombuffer(b"".join(map(key_digest, key_column(table, self._key))), np.uint64).reshape(-1, 2)
        first = np.searchsorted(known[:, 0], wanted[:, 0])
        first = np.minimum(first, len(known) - 1)
        return table.filter(pa.array(~(known[first] == wanted).all(1)))


class Compute:
    """An actor with a model: a function of a block that returns the encoded samples of its rows.

    Args:
        model: Class or function whose call makes the model.
        args, kwargs: Arguments of that call.
        key: Name of the column of keys.
        allow: Classes that samples may contain.

    Threads/fork/pickle: made in its actor, whose calls Ray makes one after another; not pickled.
    """

    def __init__(
        self,
        model: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        key: str,
        allow: tuple[type, ...],
    ) -> None:
        self._model, self._key, self._allow = model(*args, **kwargs), key, allow

    def __call__(self, table: Any) -> Any:
        keys = key_column(table, self._key) if table.num_rows else []
        if not keys:
            return encoded_table([], [], self._key)
        made = self._model(to_torch(table, {}))
        return encoded_table(keys, Batch(made, len(keys), lambda i: f"key {keys[i]!r}").rows(), self._key, self._allow)
