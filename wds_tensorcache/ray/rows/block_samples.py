"""The samples of a block that a task writes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import pyarrow as pa

from wds_tensorcache.codec.sample import decode_sample, encode_sample
from wds_tensorcache.errors import StaleCacheError, TensorCacheError
from wds_tensorcache.ray.rows.columns import values_by_column
from wds_tensorcache.ray.rows.restore import members_of_row, plain_sample, restore_sample
from wds_tensorcache.ray.rows.structure import KEY, STRUCTURE, parse_structure
from wds_tensorcache.shards.names import hashed_key

SKELETON, TENSORS = "__skeleton__", "__tensors__"  # columns of encoded samples


def encoded_table(keys: Sequence[Any], samples: Sequence[Any], key: str, allow: Iterable[type] = ()) -> Any:
    """Return a block with one encoded sample in each row, which is exact for every sample that a shard can contain.

    Raises:
        EncodeError: A value cannot be stored; the message contains the key and the value's path.
    """
    encoded = []
    for at, sample in enumerate(samples):
        try:
            encoded.append(encode_sample(sample, allow=allow))
        except TensorCacheError as exc:
            raise exc.at(f"sample {keys[at]!r}") from exc
    skeletons, tensors = ([row[at] for row in encoded] for at in range(2))
    table = {SKELETON: pa.array(skeletons, pa.large_binary()), TENSORS: pa.array(tensors, pa.large_binary())}
    return pa.table({key: pa.array(list(keys)), **table})


def samples_of_block(
    block: Any, key: str, allow: Iterable[type] = (), *, has_fingerprint: bool
) -> Iterator[tuple[Any, Any, dict[str, Any]]]:
    """Yield key, sample and members of each row of a block; tensors may alias the block, so never write into them.

    A block with the columns of `encoded_table` has encoded samples.

    Args:
        block: Rows of a dataset, with the keys in the column `key`.
        key: Name of the column with the keys.
        allow: Classes that samples may contain.
        has_fingerprint: True if the samples get a fingerprint, also an empty one.

    Raises:
        KeyError: The block has rows, but no column `key`.
        StaleCacheError: A sample comes from a cache with a fingerprint, and gets none.
    """
    columns = values_by_column(block)
    keys = columns.pop(key, None)
    if keys is None:
        if not columns or not len(next(iter(columns.values()))):
            return
        raise KeyError(f"no column {key!r} among {sorted(columns)!r:.300}; pass key=… to write_ray")
    if SKELETON in columns and TENSORS in columns:
        for key_value, skeleton, tensors in zip(keys, columns[SKELETON], columns[TENSORS], strict=True):
            yield key_value, decode_sample(skeleton, tensors, allow=allow), {}
        return
    raws = columns.pop(STRUCTURE, [None] * len(keys))
    for at in range(len(keys)):
        row = {name: values[at] for name, values in columns.items() if name != KEY}
        members = members_of_row(row)
        if raws[at] is None:
            yield keys[at], plain_sample(row), members
            continue
        structure = parse_structure(raws[at])
        if structure.is_described and not has_fingerprint:
            what = f"sample {keys[at]!r} was read from a cache that has a fingerprint, but fingerprint= is not given"
            raise StaleCacheError(
                f"{what}; if the samples are still what it describes, pass fingerprint=tc.open(source).fingerprint, else a "
                "description of how they were made, or {} to leave it out"
            )
        # the row has another key now, unless the hash agrees
        named_key = None if structure.original is None else hashed_key(structure.original)
        yield named_key if named_key == keys[at] else keys[at], restore_sample(structure, row, allow=allow), members
