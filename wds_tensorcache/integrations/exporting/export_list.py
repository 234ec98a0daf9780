"""The file `tensorcache-export.jsonl` in an exported folder: which files belong to which sample, and to which cache.

The first line is an object with the properties of the export. Each further line describes a sample, in order:

    {"format": "tensorcache-export", "version": 1, "kind": "npz", "values": "json", "cache": "9f3c…", "fingerprint": {…}}
    {"key": "dir/photo%20%281%29", "name": "dir/photo (1)", "members": ["jpg"]}

A sample whose key has a hash of its name, and whose files could not have the name, has it as `"original"`.
The list is written before the files of the samples, so that an import notices when files are missing.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from wds_tensorcache.errors import FormatError
from wds_tensorcache.reading.cache import Cache, TensorCache
from wds_tensorcache.storage.atomic import write_atomically

LIST = "tensorcache-export.jsonl"
_FORMAT, _VERSION = "tensorcache-export", 1


@dataclass(frozen=True, slots=True)
class ExportedSample:
    """The place of one sample in an export.

    Attributes:
        key: Key in the cache.
        name: Relative path of its files without suffix, with `/` as separator.
        members: Suffixes of its other members.
        original: Original name, if the key has a hash of it, and the name of the files differs.
    """

    key: str
    name: str
    members: tuple[str, ...] = ()
    original: str | None = None


@dataclass(slots=True)
class ExportList:
    """The content of the list.

    Attributes:
        kind: Kind of the files, as for `export_cache`.
        values: Suffix of the files with values that are not tensors.
        cache: The hash that `identify` returns for the exported cache.
        fingerprint: Fingerprint of the cache.
        samples: All samples, in the order of the cache.
    """

    kind: str
    values: str
    cache: str
    fingerprint: dict[str, Any]
    samples: list[ExportedSample] = field(default_factory=list)


def identify(cache: Cache) -> str:
    """Return a hash of the fingerprint, and of the keys, names, shapes and digests of all samples.

    No tensor is read. Cost: some microseconds a sample.
    """
    found = hashlib.sha256(json.dumps(cache.fingerprint, sort_keys=True, default=str).encode())
    for entry, extent in zip(cache._entries(selected=True), _extents(cache), strict=True):
        found.update(repr((entry.key, sorted(entry.shapes.items()), extent)).encode("utf-8", "surrogatepass"))
    return found.hexdigest()[:32]


def _extents(cache: Cache) -> Iterator[Any]:
    """Yield the digest of the tensors and the length of the skeleton of each sample, if the cache has one shard for each."""
    for number in range(len(cache)):
        if not isinstance(cache, TensorCache):
            yield None
            continue
        shard, row = cache._store.locate(cache._at(number))
        yield shard.columns.digest.item(row), shard.columns.skeleton_nbytes.item(row)


def write_list(path: str, listed: ExportList) -> None:
    """Write the list, or replace an existing one."""
    lines: list[dict[str, Any]] = [
        {
            "format": _FORMAT,
            "version": _VERSION,
            "kind": listed.kind,
            "values": listed.values,
            "cache": listed.cache,
            "fingerprint": listed.fingerprint,
        }
    ]
    lines += (
        {"key": each.key, "name": each.name}
        | ({"members": each.members} if each.members else {})
        | ({} if each.original is None else {"original": each.original})
        for each in listed.samples
    )
    write_atomically(path, ["".join(f"{json.dumps(line, default=str)}\n" for line in lines).encode()], fsync=False)


def parse_list(content: bytes) -> ExportList:
    """Return the list in the content of its file.

    Raises:
        FormatError: It is not such a list, a newer release has written it, or it is damaged.
    """
    lines = content.splitlines()
    try:
        first = json.loads(lines[0])
        if first["format"] != _FORMAT or first["version"] != _VERSION:
            what = f"expected {_FORMAT!r} in version {_VERSION}"
            raise FormatError(f"is {first['format']!r:.100} in version {first['version']!r:.20}, {what}")
        kind, values, cache = _texts(first, "kind", "values", "cache")
        listed = ExportList(kind, values, cache, dict(first["fingerprint"]))
        for line in lines[1:]:
            each = json.loads(line)
            members = each.get("members", [])
            if not isinstance(members, list) or not all(isinstance(suffix, str) for suffix in members):
                raise FormatError("the members of a sample are not a list of texts")
            key, name = _texts(each, "key", "name")
            original = _texts(each, "original")[0] if "original" in each else None
            listed.samples.append(ExportedSample(key, name, tuple(members), original))
    except FormatError:
        raise
    except (ValueError, KeyError, IndexError, TypeError, AttributeError, RecursionError) as exc:
        raise FormatError(f"is not a list of exported files: {exc!r:.200}") from exc
    return listed


def _texts(value: dict[str, Any], *names: str) -> list[str]:
    found = [value[name] for name in names]
    if not all(isinstance(text, str) for text in found):
        raise FormatError(f"{', '.join(names)} are not all texts")
    return found
