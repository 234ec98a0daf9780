"""Write shards: tar members straight from the memory of the tensors, an index after them, and nothing half done in sight."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from wds_tensorcache.codec.header import is_bound
from wds_tensorcache.codec.sample import encode_views
from wds_tensorcache.codec.skeleton.builders import allow_table
from wds_tensorcache.errors import EncodeError, KeyRuleError, TensorCacheError
from wds_tensorcache.shards.catalog import Catalog, Listing, dali_index_path, write_dali_index
from wds_tensorcache.shards.fingerprint import as_fingerprint, check_same
from wds_tensorcache.shards.index import ShardIndex
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
from wds_tensorcache.shards.remainder import load_whole
from wds_tensorcache.shards.sidecar import check_replaceable
from wds_tensorcache.writing.finished import FinishedShards
from wds_tensorcache.writing.open_shard import OpenShard
from wds_tensorcache.writing.pattern import ShardPattern
from wds_tensorcache.writing.writer_lock import WriterLock

__all__ = ["MAX_SAMPLES", "ShardWriter"]


MAX_SAMPLES = 4096  # of a shard, where the caller does not say


class _Nothing:
    def __repr__(self) -> str:
        return "…"


_NOTHING: Any = _Nothing()


class ShardWriter:
    """Writes samples into shards `train-000000.tar`, `train-000001.tar`, …, each with its index after it.

    A shard appears under its name when it is complete and on disk, then its `.idx` for DALI, then its entry in
    `manifest.json`: readers of the manifest never see half of anything. Leaving the `with` block by an exception drops
    the shard that was being written; the finished ones stay.

    Args:
        pattern: A folder, for shards `000000.tar`, `000001.tar`, …; or a path with one `%d`-style number in its last part; or
            a path without one that ends in `.tar`, for a single shard. Folders are made.
        max_samples: A shard takes no more samples.
        max_nbytes: A shard that has reached this many bytes is finished.
        footer: Put the index after the end-of-archive marker of the shard. Tar readers stop before it; under `set -o pipefail`,
            `cat shard | tar x` sees a broken pipe where the footer is longer than 64 KiB.
        idx: Write `NAME.idx` for DALI beside each shard.
        manifest: Write `manifest.json` beside the shards; entries of other writers' shards in the folder are kept.
        overwrite: Delete shards of this pattern that are there. Otherwise they are an error.
        resume: Resume after those that are there: keys that they have are skipped. Written again from the start with the same
            options, the shards are those of a run that was never broken, byte for byte. Their indexes are trusted: damage
            between a shard's ends is found by `tc.verify`, or when samples are read.
        fsync: Wait for the disk before a shard gets its name.
        fingerprint: How the samples are made (model, revision, dtype, crop, …), in what JSON holds. It is kept in the footers
            and the manifest, for `tc.open(…, expect=…)`.
        allow: Classes to write besides the listed types of FORMAT.md.
        align: The tensors' bytes begin at a multiple of this many bytes of the member; itself a multiple of 8.
        encoder: Makes bytes of a sample's other members, a dict by extension, as webdataset's encoders do
            (`webdataset.writer.make_encoder(True)`). By default bytes, text, `json` and `cls` are taken.

    Raises:
        FileExistsError: A shard of that name is there, another writer writes shards of the same names, or another process
            keeps the folder locked for more than 10 s; `write` and `close` raise it, too.
        StaleCacheError: `resume=True` finds shards that were made otherwise.
        ValueError: The pattern has more than one number.

    Threads/fork/pickle: one thread. Several writers may share a folder if their patterns have no names in common; a second
        one of the same is refused at once, as long as the first is not closed and its process lives.
    """

    def __init__(
        self,
        pattern: str | os.PathLike[str],
        *,
        max_samples: int = MAX_SAMPLES,
        max_nbytes: int = 1 << 30,
        footer: bool = True,
        idx: bool = True,
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
            raise ValueError("overwrite=True begins again, resume=True goes on: not both")
        if max_samples < 1 or max_nbytes < 1:
            raise ValueError(f"max_samples={max_samples}, max_nbytes={max_nbytes}, expected at least 1")
        self._max_samples, self._max_nbytes = max_samples, max_nbytes
        self._footer, self._idx, self._fsync = footer, idx, fsync
        self._fingerprint = None if fingerprint is None else as_fingerprint(fingerprint)
        self._allow, self._align, self._encoder = allow_table(allow), align, encoder or _encode_plain
        folder = self._pattern.folder or "."
        os.makedirs(folder, exist_ok=True)
        self._lock = WriterLock(self._pattern)
        try:
            self._begin(folder, manifest, overwrite, resume)
        except BaseException:
            self._lock.close()
            raise

    def _begin(self, folder: str, manifest: bool, overwrite: bool, resume: bool) -> None:
        """Look at what is in the folder."""
        self._catalog = Catalog(folder, self._fsync) if manifest else None
        existing = self._pattern.existing()
        if existing and not overwrite and not resume:
            first = next(iter(existing.values()))
            raise FileExistsError(f"{first} exists; pass overwrite=True or resume=True, or write to another folder")
        self._pattern.remove_strays()
        paths = list(existing.values())
        self._number = 0
        self.finished = self._take_over(paths if resume else [])
        self.num_finished = len(self.finished)  # samples in finished shards
        self._has_found = self.num_finished > 0
        if resume and existing:
            self._number = max(existing) + 1
        elif existing:
            self._pattern.check_removable(paths)
            if self._catalog is not None:
                self._catalog.remove(*map(os.path.basename, paths))  # before the shards themselves go
            self._pattern.remove(paths)
        self._shard: OpenShard | None = None
        self._net: Any = None
        self._closed = False

    def _take_over(self, paths: list[str]) -> FinishedShards:
        """Make up for what a writer that was killed had not written beside its shards."""
        listing = self._catalog.read() if self._catalog is not None else None
        indexes = {path: self._load(path, listing) for path in paths}
        finished = FinishedShards(indexes)
        if self._catalog is None or listing is None:
            return finished
        lost = [
            url
            for url in listing.entries
            if self._pattern.covers(url) and not os.path.exists(self._pattern.locate(url))
        ]
        if lost:
            what = f"{self._pattern.locate(lost[0])} is not there any more"
            warnings.warn(f"{what}, nor are {len(lost) - 1} others" if lost[1:] else what, stacklevel=4)
            self._catalog.remove(*lost)
        unlisted = {path: index for path, index in indexes.items() if not listing.lists(path, index)}
        if unlisted:
            with self._catalog.changed() as listing:
                for path, index in unlisted.items():
                    listing.add(path, index)
        return finished

    def _load(self, path: str, listing: Listing | None) -> ShardIndex:
        """Return the index of a shard that is there; write its `.idx` if that may be of another state."""
        index = load_whole(path)
        found, name = index.fingerprint, os.path.basename(path)
        if found is None and listing is not None:
            found = listing.fingerprints.get(name)  # there is no footer
        check_same(path, found, self._fingerprint)
        index = dataclasses.replace(index, fingerprint=found)
        is_listed = listing is None or listing.lists(path, index)
        if self._idx and not (is_listed and os.path.exists(dali_index_path(path))):
            write_dali_index(dali_index_path(path), index, self._fsync)
        return index

    def __contains__(self, key: object) -> bool:
        """Return whether a finished shard has the key, of those that `resume=True` found: `write` would skip it."""
        return isinstance(key, str) and key in self.finished

    def write(self, key: str, sample: Any = _NOTHING, /, **members: Any) -> None:
        """Write one sample.

        Args:
            key: Names it, once in a shard.
            sample: The nested structure; leave it out for a sample without, or with named caches only.
            members: By extension: `json=…`, `jpg=…`; and `**{"NAME.tensorcache": …}` for several caches in one sample.

        A key that finished shards have is skipped with `resume=True`; `key in writer` says so beforehand.

        Raises:
            EncodeError: A value cannot be represented; the message gives key and path. Nothing of the sample is written.
            KeyRuleError: A key, cache name or extension that some reader gets wrong, or a key that is there already.

        Memory: the tensors may be changed as soon as this returns.
        """
        if self._closed:
            raise ValueError(f"{self._pattern}: the writer is closed")
        if isinstance(key, dict):
            raise TypeError("write(key, sample, **members); a dict is what webdataset's writers take")
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
        if (
            self._shard is not None
            and self._shard.is_full(self._max_samples, self._max_nbytes)
            and self._pattern.is_numbered
        ):
            self._finish()
        if self._shard is None:
            path = self._pattern.path(self._number)
            if os.path.exists(path):
                if not self._pattern.is_numbered and self._number:
                    raise FileExistsError(f"{path} is finished; only a pattern with a number goes on")
                raise FileExistsError(f"{path} exists; it was not there when this writer began")
            if self._idx:
                check_replaceable(dali_index_path(path))
            self._shard = OpenShard(path)
            self._net = weakref.finalize(self, _drop_forgotten, str(self._pattern), self._shard, os.getpid())
            self._number += 1
        self._shard.write(key, encoded, plain)

    def _finish(self) -> None:
        if self._shard is None:
            return
        shard = self._shard
        try:
            index = shard.finish(self._footer, self._fsync, self._fingerprint)
        except BaseException:
            self._drop()
            raise
        self._forget()
        self.num_finished += len(index.keys)
        if self._idx:
            write_dali_index(dali_index_path(shard.path), index, self._fsync)
        if self._catalog is not None:
            self._catalog.add(shard.path, index)

    def _drop(self) -> None:
        """Delete the shard that is being written."""
        if self._shard is not None:
            self._shard.drop()
            self._forget()

    def _forget(self) -> None:
        self._shard = None
        if self._net is not None:
            self._net.detach()

    def close(self) -> None:
        """Finish the shard that is being written, write no more, and let other writers begin."""
        self._closed = True
        with contextlib.closing(self._lock):
            self._finish()

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(self, kind: Any, value: Any, traceback: Any) -> None:
        self._closed = True
        if kind is None:
            self.close()
        else:
            with contextlib.closing(self._lock):
                self._drop()


def _sort_members(key: str, sample: Any, members: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the caches of a sample by name, and its other members by extension.

    Raises:
        KeyRuleError: A name that some reader gets wrong, that is there twice, or that only caches have.
    """
    caches = {"": sample} if sample is not _NOTHING else {}
    others = {}
    for field, value in members.items():
        if field != FIELD and not field.endswith("." + FIELD):
            others[field] = value
        elif field == FIELD and "" in caches:
            raise KeyRuleError(f"sample {key!r} is given twice, also as {FIELD!r}; give it once")
        else:
            caches[cache_name(field[: -len(FIELD) - 1]) if field != FIELD else ""] = value
    if not caches and not others:
        raise KeyRuleError(f"sample {key!r} has no members; give it a sample or a member")
    check_suffixes(key, [*others, *(member_suffix(name, SKELETON) for name in caches)])
    check_suffixes(key, [member_suffix(name, TENSORS) for name in caches])
    lowered = [field.lower() for field in others] + [member_suffix(name, TENSORS) for name in caches]
    if len(set(lowered)) < len(lowered) or any(field.endswith((SKELETON, FIELD)) for field in lowered):
        raise KeyRuleError(
            f"sample {key!r} has members {sorted(lowered)}: names that only caches have, or one twice; call them otherwise"
        )
    return caches, others


def _drop_forgotten(pattern: str, shard: OpenShard, pid: int) -> None:
    if pid == os.getpid():  # in a forked child it is a copy
        what = f"{pattern}: the writer was not closed; what it had not finished is lost"
        warnings.warn(what, ResourceWarning, stacklevel=2)
        shard.drop()


def _encode_plain(members: dict[str, Any]) -> dict[str, bytes]:
    """Return the bytes of members, by extension: bytes, text, `json` and `cls` are taken.

    Raises:
        EncodeError: A member is something else, or JSON or UTF-8 cannot hold it.
    """
    result = {}
    for extension, value in members.items():
        kind = extension.rpartition(".")[2].lower()
        if isinstance(value, (bytes, bytearray, memoryview)):
            result[extension] = bytes(value)
        elif isinstance(value, str) and kind != "json":
            try:
                result[extension] = value.encode()
            except UnicodeEncodeError as exc:
                raise EncodeError(f"member {extension!r} is text that UTF-8 cannot hold: {exc}") from exc
        elif kind == "cls" and isinstance(value, int):
            result[extension] = b"%d" % value
        elif kind != "json":
            raise EncodeError(
                f"member {extension!r} is a {type(value).__name__}; pass bytes, or encoder=webdataset.writer.make_encoder(True)"
            )
        else:
            try:
                result[extension] = json.dumps(value).encode()
            except (TypeError, ValueError, RecursionError) as exc:
                raise EncodeError(f"member {extension!r} is not what JSON can hold: {exc}") from exc
    return result


def _encode_others(
    key: str, others: dict[str, Any], encoder: Callable[[dict[str, Any]], dict[str, Any]]
) -> dict[str, bytes]:
    """Return what an encoder makes of a sample's other members, if that is right.

    Raises:
        EncodeError: It is not all bytes.
        KeyRuleError: It has other names, or one half of a cache.
    """
    try:
        plain = encoder(others)
    except TensorCacheError as exc:
        raise exc.at(f"sample {key!r}") from exc
    for extension, raw in plain.items():
        if extension not in others:
            raise KeyRuleError(
                f"sample {key!r}: the encoder made {extension!r}, which is not among its members; add it to these"
            )
        if not isinstance(raw, (bytes, bytearray)):
            raise EncodeError(
                f"sample {key!r}: the encoder made a {type(raw).__name__} of {extension!r}, expected bytes"
            )
        if extension.lower().endswith(TENSORS) and is_bound(bytes(raw[:64])):
            raise KeyRuleError(f"sample {key!r}: {extension!r} is one half of a cache; pass what it was made of")
    return plain
