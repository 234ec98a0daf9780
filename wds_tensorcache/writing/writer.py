"""Write samples into shards with indexes, directly from the tensors' memory; unfinished shards have hidden names."""

from __future__ import annotations

import contextlib
import json
import os
import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping
from numbers import Real
from typing import Any

from wds_tensorcache.codec.header import is_bound
from wds_tensorcache.codec.sample import encode_views
from wds_tensorcache.codec.skeleton.types import allow_table
from wds_tensorcache.errors import EncodeError, InvalidKeyError, TensorCacheError
from wds_tensorcache.shards.dali_index import write_dali_index
from wds_tensorcache.shards.fingerprint import as_fingerprint
from wds_tensorcache.shards.index_paths import check_replaceable, dali_index_path
from wds_tensorcache.shards.manifest import Catalog
from wds_tensorcache.shards.names import (
    FIELD,
    SKELETON,
    TENSORS,
    cache_name,
    check_key,
    check_suffixes,
    is_plain_key,
    member_suffix,
)
from wds_tensorcache.writing.pattern import ShardPattern
from wds_tensorcache.writing.pattern_lock import WriterLock
from wds_tensorcache.writing.resume import take_over
from wds_tensorcache.writing.unfinished_shard import UnfinishedShard

__all__ = ["MAX_SAMPLES", "ShardWriter"]


MAX_SAMPLES = 4096  # limits what an interrupted build computes again; a lower limit makes too many small files


class _Nothing:
    def __repr__(self) -> str:
        return "…"


_NOTHING: Any = _Nothing()


class ShardWriter:
    """A writer of samples into shards `train-000000.tar`, `train-000001.tar`, …, each with an index.

    A shard appears under its name when it is complete and on disk. Then its `.idx` for DALI appears, then its entry in
    `manifest.json`. If the `with` block raises, the unfinished shard is deleted, and the finished shards stay.

    Args:
        pattern: A folder, for shards `000000.tar`, `000001.tar`, …; a path with one number such as `%06d` in its last part; or
            a path that ends in `.tar`, for a single shard. Missing folders are made.
        max_samples: Maximum number of samples in a shard. With the default, 4,096, an interrupted `build` loses at most that
            many samples, and a million small samples make 245 shards.
        max_nbytes: A shard with at least this many bytes accepts no more samples.
        footer: Write the index after the end-of-archive marker, at which tar readers stop. If the footer is longer than
            64 KiB, `cat shard | tar x` fails under `set -o pipefail`, because tar closes the pipe early.
        dali_index: Write `NAME.idx` for DALI next to each shard.
        manifest: Write `manifest.json` in the folder; entries of other writers in it are kept.
        overwrite: Delete existing shards of this pattern. Without `overwrite` or `resume`, existing shards are an error.
        resume: Continue after the last existing shard, and skip keys that are already stored, also those in shards that ranks
            of a `build` with this pattern have written. If you write all samples again with the same options, the shards equal
            those of an uninterrupted run, byte for byte. Existing indexes are trusted, so damage inside shards goes unnoticed;
            `tc.verify` finds it.
        fsync: Wait until a shard is on disk before it gets its final name.
        allow: Classes to write besides the types that FORMAT.md lists.
        fingerprint: Description of how the samples are made (model, revision, dtype, crop, …), as JSON values; stored in
            footers and in the manifest, so that `tc.open(…, expect=…)` can check it.
        align: Alignment of tensors in their member in bytes, a multiple of 8.
        encoder: Function that encodes the members outside caches, for example webdataset's `make_encoder(True)`. It takes a
            dict of values by extension, and returns a dict of bytes. By default, bytes, text, `json` and `cls` are accepted.

    Raises:
        FileExistsError: A shard exists, another writer writes shards with the same names, or another process keeps the
            folder locked for more than 10 s. `write` and `close` raise it if another program has created a shard's file.
        StaleCacheError: With `resume`, existing shards have another fingerprint.
        ValueError: The pattern has more than one number.

    Threads/fork/pickle: used by one thread. Several writers may share a folder if their patterns have no names in common; a
        second writer of the same names is refused while the first one is open and its process runs.
    """

    def __init__(
        self,
        pattern: str | os.PathLike[str],
        *,
        max_samples: int = MAX_SAMPLES,
        max_nbytes: int = 1 << 30,
        footer: bool = True,
        dali_index: bool = True,
        manifest: bool = True,
        overwrite: bool = False,
        resume: bool = False,
        fsync: bool = True,
        allow: Iterable[type] = (),
        fingerprint: Mapping[str, Any] | None = None,
        align: int = 64,
        encoder: Callable[[dict[str, Any]], dict[str, Any]] | None = None,
    ) -> None:
        self._pattern = ShardPattern(os.fsdecode(pattern))
        if overwrite and resume:
            raise ValueError("overwrite=True deletes the shards that resume=True would continue; pass only one of them")
        for name, value in (("max_samples", max_samples), ("max_nbytes", max_nbytes)):
            if not isinstance(value, Real):  # infinity is allowed
                raise TypeError(f"{name}={value!r:.100}, expected a number")
        if max_samples < 1 or max_nbytes < 1:
            raise ValueError(f"max_samples={max_samples}, max_nbytes={max_nbytes}: both expected at least 1")
        self._max_samples, self._max_nbytes = max_samples, max_nbytes
        self._footer, self._dali_index, self._fsync = footer, dali_index, fsync
        self._fingerprint = None if fingerprint is None else as_fingerprint(fingerprint)
        self._allow, self._align, self._encoder = allow_table(allow), align, encoder or _encode_plain
        folder = self._pattern.folder or "."
        os.makedirs(folder, exist_ok=True)
        self._catalog = Catalog(folder, fsync) if manifest else None
        self._shard: UnfinishedShard | None = None
        self._net: Any = None
        self._closed = False
        self._lock = WriterLock(self._pattern)
        try:
            self._begin(overwrite, resume)
        except BaseException:
            self._lock.close()
            raise

    def _begin(self, overwrite: bool, resume: bool) -> None:
        """Take over or delete existing shards."""
        existing = self._pattern.existing()
        if existing and not overwrite and not resume:
            first = next(iter(existing.values()))
            raise FileExistsError(f"{first} exists; pass overwrite=True or resume=True, or write to another folder")
        self._pattern.remove_strays()
        paths = list(existing.values())
        self._number = max(existing) + 1 if resume and existing else 0
        options = (self._catalog, self._fingerprint, self._dali_index, self._fsync)
        self.finished = take_over(self._pattern, self._pattern.build_shards() if resume else [], *options)
        self.num_finished = len(self.finished)  # samples in finished shards
        self._has_found = self.num_finished > 0
        if paths and not resume:
            self._pattern.check_removable(paths)
            if self._catalog is not None:
                self._catalog.remove(*map(os.path.basename, paths))  # before the shards themselves are deleted
            self._pattern.remove(paths)

    def __contains__(self, key: object) -> bool:
        """Return whether a shard that `resume=True` found contains the key, so that `write` skips it."""
        return isinstance(key, str) and key in self.finished

    def write(self, key: str, sample: Any = _NOTHING, /, **members: Any) -> None:
        """Write one sample; with `resume=True`, skip a key that is already stored.

        Args:
            key: Key of the sample, unique in its shard.
            sample: Nested structure of tensors and other values; omit it if the sample has no cache, or only named caches.
            members: Other members by extension, `json=…`, `jpg=…`, and named caches: `**{"NAME.tensorcache": …}`.

        Raises:
            EncodeError: A value cannot be stored; the message contains the sample's key and the value's path. No part of the
                sample is written.
            InvalidKeyError: Some reader of shards would misread the key, a cache name or an extension; or the key is already
                in this shard.

        Memory: this call copies or writes the bytes of the tensors, so the tensors may be changed afterwards.
        """
        if self._closed:
            raise ValueError(f"{self._pattern}: the writer is closed")
        if isinstance(key, dict):
            raise TypeError("expected write(key, sample, **members), got the dict that webdataset's own writers expect")
        is_plain = type(key) is str and is_plain_key(key)
        if not is_plain:
            check_key(key)
        if self._has_found and key in self:
            return
        caches: dict[str, Any]
        others: dict[str, Any]
        if is_plain and not members and sample is not _NOTHING:
            caches, others = {"": sample}, {}
        else:
            caches, others = _sort_members(key, sample, members)
        encoded = []
        for name, value in caches.items():
            try:
                encoded.append((name, encode_views(value, self._allow, self._align)))
            except TensorCacheError as exc:
                raise exc.at(f"sample {key!r}" + (f", cache {name!r}" if name else "")) from exc
        plain = _encode_others(key, others, self._encoder) if others else {}
        shard, is_numbered = self._shard, self._pattern.is_numbered
        if shard is not None and is_numbered and shard.is_full(self._max_samples, self._max_nbytes):
            self._finish()
        if self._shard is None:
            if self._closed:  # by an interrupt in another thread, during this call
                raise ValueError(f"{self._pattern}: the writer is closed")
            path = self._pattern.path(self._number)
            if os.path.exists(path):
                if not is_numbered and self._number:
                    raise FileExistsError(
                        f"{path} is finished; for more shards, use a pattern with a number, such as %06d"
                    )
                raise FileExistsError(f"{path} was created after this writer started; write to another folder")
            if self._dali_index:
                check_replaceable(dali_index_path(path))
            self._shard = UnfinishedShard(path, self._fsync)
            self._net = weakref.finalize(self, _drop_forgotten, str(self._pattern), self._shard, os.getpid())
            self._number += 1
        self._shard.write(key, encoded, plain)

    def _finish(self) -> None:
        """Give the current shard its final name, and write its sidecars."""
        shard = self._shard
        if shard is None:
            return
        try:
            index = shard.finish(self._footer, self._fingerprint)
        finally:  # if this fails, the shard deletes itself
            self._forget()
        self.num_finished += len(index.keys)
        if self._dali_index:
            write_dali_index(dali_index_path(shard.path), index, self._fsync)
        if self._catalog is not None:
            self._catalog.add(shard.path, index)

    def _forget(self) -> None:
        self._shard = None
        if self._net is not None:
            self._net.detach()

    def close(self) -> None:
        """Finish the current shard, and release the lock on the pattern."""
        self._closed = True
        with contextlib.closing(self._lock):
            self._finish()

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(self, kind: Any, value: Any, traceback: Any) -> None:
        if kind is None:
            self.close()
            return
        self._closed = True
        with contextlib.closing(self._lock):
            if self._shard is not None:
                self._shard.drop()
                self._forget()


def _sort_members(key: str, sample: Any, members: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the caches of a sample by name, and its other members by extension; raise InvalidKeyError for a bad name."""
    caches = {"": sample} if sample is not _NOTHING else {}
    others = {}
    for field, value in members.items():
        if field != FIELD and not field.endswith("." + FIELD):
            others[field] = value
        elif field == FIELD and "" in caches:
            raise InvalidKeyError(f"sample {key!r} is passed twice, also as {FIELD!r}; pass it once")
        else:
            caches[cache_name(field[: -len(FIELD) - 1]) if field != FIELD else ""] = value
    if not caches and not others:
        raise InvalidKeyError(f"sample {key!r} has no members; pass a sample or a member")
    check_suffixes(key, [*others, *(member_suffix(name, SKELETON) for name in caches)])
    check_suffixes(key, [member_suffix(name, TENSORS) for name in caches])
    lowered = [field.lower() for field in others] + [member_suffix(name, TENSORS) for name in caches]
    if len(set(lowered)) < len(lowered) or any(field.endswith((SKELETON, FIELD)) for field in lowered):
        what = f"has members {sorted(lowered)}; a name is reserved for caches, or occurs twice"
        raise InvalidKeyError(f"sample {key!r} {what}; rename that member")
    return caches, others


def _drop_forgotten(pattern: str, shard: UnfinishedShard, pid: int) -> None:
    if pid == os.getpid():  # in a forked child, the shard is still the parent's
        what = f"{pattern}: the writer was not closed, so its unfinished shard is lost; use `with`, or call close()"
        warnings.warn(what, ResourceWarning, stacklevel=2)
        shard.drop()


def _encode_plain(members: dict[str, Any]) -> dict[str, bytes]:
    """Encode members by extension: bytes and text as they are, any JSON value for `json`, an int for `cls`."""
    result = {}
    for extension, value in members.items():
        kind, where = extension.rpartition(".")[2].lower(), f"member {extension!r}"
        is_number = kind == "cls" and isinstance(value, int)
        if isinstance(value, (bytes, bytearray, memoryview)):
            result[extension] = bytes(value)
            continue
        if kind != "json" and not is_number and not isinstance(value, str):
            remedy = "pass bytes, or encoder=webdataset.writer.make_encoder(True)"
            raise EncodeError(f"{where} is a {type(value).__name__}, which is not encoded by default; {remedy}")
        try:
            text = json.dumps(value) if kind == "json" else str(int(value)) if is_number else value
            result[extension] = text.encode()
        except UnicodeEncodeError as exc:
            raise EncodeError(f"{where} cannot be represented in UTF-8: {exc}") from exc
        except (TypeError, ValueError, RecursionError) as exc:
            raise EncodeError(f"{where} cannot be represented in JSON: {exc}") from exc
    return result


def _encode_others(
    key: str, others: dict[str, Any], encoder: Callable[[dict[str, Any]], dict[str, Any]]
) -> dict[str, bytes]:
    """Encode a sample's other members, and check what the encoder returned."""
    try:
        plain = encoder(others)
    except TensorCacheError as exc:
        raise exc.at(f"sample {key!r}") from exc
    for extension, raw in plain.items():
        made = f"sample {key!r}: the encoder returned"
        if extension not in others:
            raise InvalidKeyError(f"{made} {extension!r}, which was not passed to write; pass it as a member, too")
        if not isinstance(raw, (bytes, bytearray)):
            raise EncodeError(f"{made} a {type(raw).__name__} for {extension!r}, expected bytes")
        if extension.lower().endswith(TENSORS) and is_bound(bytes(raw[:64])):
            raise InvalidKeyError(
                f"sample {key!r}: member {extension!r} is already encoded, as one of the two members of a cache; "
                "pass the nested sample to write instead"
            )
    return plain
