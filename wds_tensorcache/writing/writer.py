"""Write shards: tar members straight from the tensors' own memory, an index behind them, and nothing half done in sight."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from wds_tensorcache.codec.sample import encode_views
from wds_tensorcache.codec.skeleton.builders import allow_table
from wds_tensorcache.errors import KeyRuleError, StaleCacheError, TensorCacheError
from wds_tensorcache.shards.catalog import Catalog, Listing, dali_index_path, write_dali_index
from wds_tensorcache.shards.fingerprint import as_fingerprint, check_fingerprint
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
from wds_tensorcache.writing.members import encode_others, encode_plain
from wds_tensorcache.writing.open_shard import OpenShard
from wds_tensorcache.writing.pattern import ShardPattern
from wds_tensorcache.writing.resume import FinishedShards
from wds_tensorcache.writing.switch import Switch
from wds_tensorcache.writing.writer_lock import WriterLock

__all__ = ["ShardWriter"]


class _Nothing:
    def __repr__(self) -> str:
        return "…"


_NOTHING: Any = _Nothing()


class ShardWriter:
    """Writes samples into shards `train-000000.tar`, `train-000001.tar`, …, each with its index behind it.

    A shard appears under its name when it is complete and on disk, then its `.idx` for DALI, then its entry in
    `manifest.json`: whoever reads the manifest never sees half of anything. Leaving the `with` block by an exception drops
    the shard that was being written; the finished ones stay.

    Args:
        pattern: Path with one `%d`-style number, or without one for a single shard. Folders are made.
        max_samples: A shard takes no more samples.
        max_nbytes: A shard that has reached this many bytes is finished.
        footer: Put the index behind the shard's end-of-archive marker. Tar readers stop before it; under `set -o pipefail`,
            `cat shard | tar x` sees a broken pipe where the footer is longer than 64 KiB.
        idx: Write `NAME.idx` for DALI beside each shard.
        manifest: Write `manifest.json` beside the shards; entries of other writers' shards in the folder are kept.
        overwrite: Delete shards of this pattern that are there. Otherwise they are an error.
        resume: Go on behind those that are there: keys that they have are skipped. Written again from the start with the same
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
        max_samples: int = 10_000,
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
        self._allow, self._align, self._encoder = allow_table(allow), align, encoder or encode_plain
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
        self._switch = Switch(self._pattern, self._catalog, footer=self._footer, idx=self._idx, fsync=self._fsync)
        existing = self._pattern.existing()
        if existing and not overwrite and not resume:
            first = next(iter(existing.values()))
            raise FileExistsError(f"{first} exists; pass overwrite=True or resume=True, or write to another folder")
        self._pattern.remove_strays()
        self._switch.clear()
        existing = self._pattern.existing()
        paths = list(existing.values())
        self._number = 0
        self.finished = self._take_over(paths if resume else [])
        self.num_finished = len(self.finished)  # samples in finished shards
        self._has_found = self.num_finished > 0
        self._replaced: set[str] = set()
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
        held = [path for path in unlisted if os.path.basename(path) in listing.held]
        if held:
            for path, index in unlisted.items():
                self._switch.hold(path, index)
            for key, places in finished.shared().items():
                if any(path in held for path, _ in places):
                    self._switch.leave(key, _older(places))
            if any(os.path.basename(path) in listing.entries for path in unlisted):
                # a switch had begun, so all it needs is written: until it is finished, readers refuse the folder
                self._switch.run(self._fingerprint)
                return self._take_over(list(self._pattern.existing().values()))
        elif unlisted:
            with self._catalog.changed() as listing:
                for path, index in unlisted.items():
                    listing.add(path, index)
        return finished

    def _load(self, path: str, listing: Listing | None) -> ShardIndex:
        """Return the index of a shard that is there; write its `.idx` if that may be of another state."""
        index = load_whole(path)
        found, name = index.fingerprint, os.path.basename(path)
        if found is None and listing is not None:
            found = listing.fingerprints.get(name, listing.held.get(name))  # there is no footer
        if found != self._fingerprint:
            check_fingerprint(path, found, self._fingerprint or {})
            raise StaleCacheError(f"{path} was made with {found}, this writer has {self._fingerprint}")
        index = dataclasses.replace(index, fingerprint=found)
        is_listed = listing is None or listing.lists(path, index)
        if self._idx and not (is_listed and os.path.exists(dali_index_path(path))):
            write_dali_index(dali_index_path(path), index, self._fsync)
        return index

    def __contains__(self, key: object) -> bool:
        """Return whether a finished shard has the key, of those that `resume=True` found: `write` would skip it."""
        return isinstance(key, str) and key not in self._replaced and key in self.finished

    @property
    def is_replacing(self) -> bool:
        """Whether finished samples wait for older ones to go, at the end of this writer or of one that was broken off."""
        return self._switch.is_due

    def replace(self, key: str) -> None:
        """Let a key be written again that finished shards have: the older samples go when the writer is closed.

        Until then, the manifest lists neither the new sample nor whatever is finished behind it.
        """
        self._replaced.add(key)

    def keep_newest(self, key: str) -> None:
        """Where several finished shards have a key, let all but the newest sample go when the writer is closed."""
        self._switch.leave(key, _older(self.finished.find(key)))

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
        plain = encode_others(key, others, self._encoder) if others else {}
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
        if key in self._replaced:
            self._replaced.discard(key)
            self._switch.leave(key, [path for path, _ in self.finished.find(key)])

    def _finish(self) -> None:
        if self._shard is None:
            return
        shard = self._shard
        is_held = self._catalog is not None and self._switch.is_due
        try:
            if is_held:
                self._switch.announce(shard.path, self._fingerprint)
            index = shard.finish(self._footer, self._fsync, self._fingerprint)
        except BaseException:
            self._drop()
            raise
        self._forget()
        self.num_finished += len(index.keys)
        if self._idx:
            write_dali_index(dali_index_path(shard.path), index, self._fsync)
        if is_held:
            self._switch.hold(shard.path, index)
        elif self._catalog is not None:
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
            self._switch.run(self._fingerprint)

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


def _older(places: list[tuple[str, int]]) -> list[str]:
    """Return the shards of `places` but the newest one, which may have a key twice if another writer made it."""
    return [path for path, _ in places if path != places[-1][0]]
