"""A writer of samples into shards with indexes. It writes directly from the tensors' memory."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from math import inf
from numbers import Real
from threading import RLock
from typing import Any

from wds_tensorcache.arguments import user_level
from wds_tensorcache.codec.header import is_bound
from wds_tensorcache.codec.sample import EncodedSample, encode_views
from wds_tensorcache.codec.skeleton.types import allow_table
from wds_tensorcache.errors import EncodeError, InvalidKeyError, TensorCacheError, add_note, format_count
from wds_tensorcache.shards.dali_index import check_replaceable, write_dali_index
from wds_tensorcache.shards.fingerprint import as_fingerprint
from wds_tensorcache.shards.footer import build_footer, read_trailer
from wds_tensorcache.shards.index import ShardIndex
from wds_tensorcache.shards.index_builder import CacheEntry, IndexBuilder
from wds_tensorcache.shards.manifest import Manifest, ShardEntry, change_manifest
from wds_tensorcache.shards.names import (
    FIELD,
    SKELETON,
    TENSORS,
    NamedKey,
    cache_name,
    cache_of_field,
    check_key,
    check_suffixes,
    dali_index_path,
    is_plain_key,
    is_reserved,
    member_suffix,
    sidecar_path,
)
from wds_tensorcache.shards.tar import BLOCK, END_OF_ARCHIVE, build_tar_header
from wds_tensorcache.storage.folder import folder_of
from wds_tensorcache.storage.output import Output
from wds_tensorcache.storage.threads import Threads
from wds_tensorcache.storage.urls import shown
from wds_tensorcache.writing.pattern import ShardPattern
from wds_tensorcache.writing.pattern_lock import WriterLock
from wds_tensorcache.writing.resume import FinishedShards, take_over

MAX_SAMPLES = 4096  # limits the work that an interrupted build repeats; a lower limit makes too many small files
_MAX_FINISHING = 2  # shards at a url that a thread finishes and uploads while the next shard is written
# the last sample and the index may make a shard longer, and stores accept 5 GB in one request
_MAX_REMOTE_NBYTES = 4 << 30
_log = logging.getLogger("wds_tensorcache")
_NOTHING: Any = object()
_ZEROS = bytes(BLOCK)


def check_limits(max_samples: Any, max_nbytes: Any) -> None:
    """Check the limits of shards; raise TypeError or ValueError."""
    for name, value in (("max_samples", max_samples), ("max_nbytes", max_nbytes)):
        if not isinstance(value, Real):  # infinity is allowed
            raise TypeError(f"{name}={value!r:.100}, expected a number")
        if not float(value) >= 1:
            raise ValueError(f"{name}={value}, expected at least 1")


@dataclasses.dataclass(slots=True)
class PackedSample:
    """The members of a sample with their tar headers. The bytes do not depend on the position in the shard."""

    key: str
    parts: list[Any]  # bytes-like
    nbytes: int  # total length of the parts
    caches: list[CacheEntry]  # offsets here are relative to the first part
    members: list[tuple[str, int, int]]  # suffix, offset, length of each other member
    item_digest: int = 0  # of the item from which the sample was made; 0 if unknown


class _UnfinishedShard:
    """A shard that is being written. `nbytes` is the length of its members."""

    def __init__(self, path: str, name: str, output: Output) -> None:
        self.path, self.name = path, name
        self._output = output
        self._builder = IndexBuilder()
        self._keys: set[str] = set()
        self.num_samples = self.nbytes = 0

    def write(self, sample: PackedSample) -> None:
        key = sample.key
        if key in self._keys:
            raise InvalidKeyError(f"key {key!r} is already in {self.path}; use another key, or resume=True to skip it")
        try:
            self._output.append(sample.parts, sample.nbytes)
            self._keys.add(key)
            name = key.original if isinstance(key, NamedKey) else None
            self._builder.add(key, sample.caches, sample.members, self.nbytes, (sample.item_digest, name))
            self.nbytes += sample.nbytes
            self.num_samples += 1
        except BaseException as exc:
            # after an interrupt, the index may lack this sample, or the file a part of it
            self._output.fail(exc)
            raise

    def finish(self, footer: bool, fingerprint: Mapping[str, Any] | None) -> tuple[ShardEntry, ShardIndex]:
        """Write the end and the footer, and make the shard visible."""
        try:
            self._output.check()
            index = dataclasses.replace(self._builder.finish(self.nbytes), fingerprint=fingerprint)
            tail = END_OF_ARCHIVE + (build_footer(index) if footer else b"")
            trailer = read_trailer(lambda begin, end: tail[begin:end], len(tail))
            index = dataclasses.replace(index, digest=None if trailer is None else trailer.digest)
            self._output.append([tail], len(tail))
            self._output.finish()
        except BaseException:
            self.drop()
            raise
        return ShardEntry(self.name, self.num_samples, self.nbytes + len(tail), index.digest), index

    def drop(self) -> None:
        self._output.drop()


class ShardWriter:
    """A writer of samples into numbered shards, each with an index.

    A shard appears under its name when it is complete and on disk. Then its `.idx` for DALI appears, then its entry in
    `manifest.json`. If the `with` block raises, the unfinished shard is deleted, and the finished shards stay. A writer that is
    never closed loses its unfinished shard, and logs a warning with the number of samples to the logger `wds_tensorcache`.

    Args:
        pattern: A folder for shards `000000.tar`, `000001.tar`, …, or a path with one number such as `%06d` in its last part. A
            path that ends in `.tar` names a single shard of any length. Missing folders are made. Or a url of such a folder
            or path in an object store: `s3://`, `gs://` or `az://`.
        max_samples: Maximum number of samples in a shard. With the default, 4,096, a killed `build` in a local folder loses
            one shard and three batches at most, and a million small samples make 245 shards.
        max_nbytes: A shard with at least this many bytes accepts no more samples. The limit at a url is 4 GiB.
        footer: Write the index after the end-of-archive marker, at which tar readers stop; must be True for a url. Without it,
            the shard is scanned when it is opened, and texts of hashed keys (see `safe_key`) are lost.
        dali_index: Write `NAME.idx` for DALI next to each shard.
        manifest: Write `manifest.json` in the folder; entries of other writers in it are kept.
        overwrite: Delete existing shards of this pattern, with their indexes and entries in the manifest, when the writer is
            made. Without `overwrite` or `resume`, existing shards are an error.
        resume: Continue after the last existing shard, and skip keys that are already stored, also in shards from ranks of a
            `build` with this pattern. If you write all samples again with the same options, the shards equal the shards
            of an uninterrupted run, byte for byte. Existing indexes are trusted, so damage inside shards goes unnoticed;
            `tc.verify` finds it. A single shard that exists accepts no new keys.
        fsync: Wait until a shard is on disk before it gets its final name. Ignored for a url.
        allow: Classes to write besides the types that FORMAT.md lists.
        fingerprint: Description of how the samples are made (model, revision, dtype, crop, …), as JSON values. It is stored in
            footers and in the manifest, so that `tc.open(…, expect=…)` can check it. Without both, it is lost.
        align: Alignment of the first tensor in its member in bytes, a multiple of 8; `write` checks it.
        encoder: Function that encodes the members outside caches, for example webdataset's `make_encoder(True)`. It takes a
            dict of values by extension, and returns a dict of bytes with the same extensions. By default, a member may be
            bytes, a str (stored as UTF-8), any JSON value for `json`, or an int for `cls`.

    At a url, another thread uploads a shard from local disk while the next shard is written. An upload's error is raised by the
    next `write` or by `close`. After an error or an interrupt in the `with` block, finished shards are still uploaded; another
    interrupt cancels the uploads. Writers on any number of machines may share a folder. See docs/remote_writing.md.

    Raises:
        FileExistsError: A shard exists, or another writer has the same pattern. Or a folder or another shard has the name of an
            index to write. `write` and `close` raise it if another program has created a shard's file, or keeps the folder
            locked for a minute. `write` also raises it for a new key if a single shard was resumed.
        FormatError: The manifest or, with `resume`, an existing shard is damaged.
        OSError: A file or folder cannot be read or written.
        StaleCacheError: With `resume`, existing shards have another fingerprint.
        RemoteError: A request to an object store failed, or the store has no conditional writes.
        ImportError: The url needs a package that is not installed.
        TypeError, ValueError: The pattern has more than one number, or is a url that cannot be written. An option has a wrong
            type or value, options exclude each other, or `max_nbytes` or `footer` does not suit a url.

    Threads/fork/pickle: any thread may write, and one call waits for another. Several writers may share a folder if
        their patterns have no names in common: a shard never replaces another shard. A second writer of the same pattern is
        refused while the first writer is open and its process runs. At a url, the first upload of the second writer is refused
        instead. A forked child cannot use the writer: `write` raises RuntimeError, and `close` has no effect.
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
        check_limits(max_samples, max_nbytes)
        is_numbered = self._pattern.is_numbered
        self._max_samples: float = max_samples if is_numbered else inf  # a single shard is never full
        self._max_nbytes: float = max_nbytes if is_numbered else inf
        self._footer, self._dali_index, self._manifest = footer, dali_index, manifest
        self._fingerprint = None if fingerprint is None else as_fingerprint(fingerprint)
        self._allow, self._align, self._encoder = allow_table(allow), align, encoder or _encode_plain
        self._changing = RLock()  # held by the thread that writes a sample or closes the writer
        self._shard: _UnfinishedShard | None = None  # gets the next sample
        self._unfinished: list[_UnfinishedShard] = []  # shards without an entry in the manifest so far
        self._finishing: deque[Future[None]] = deque()  # uploads of shards
        self._has_gap = False  # True after a shard could not be finished
        self._finisher = Threads(1, "tensorcache-finish")
        self._pid = os.getpid()
        self._closed = False
        self._folder = folder_of(self._pattern.folder, fsync)
        is_remote = self._folder.is_remote
        if is_remote and not footer:
            raise ValueError("footer=False with a url: readers find the samples of remote shards by their footers")
        if is_remote and max_nbytes > _MAX_REMOTE_NBYTES:
            problem = f"max_nbytes={max_nbytes} with a url: expected at most {_MAX_REMOTE_NBYTES:,}"
            raise ValueError(f"{problem}, because stores accept at most about 5 GB in one request")
        self._folder.make()
        # There are no locks at a url. If two writers use the same names, the first upload of the second writer fails.
        self._lock = None if is_remote else WriterLock(self._pattern)
        weakref.finalize(self, _drop_forgotten, self._pattern, self._unfinished, self._pid)
        try:
            self.finished, self._number = self._begin(overwrite, resume)
        except BaseException:
            self._release()
            raise
        self.num_finished = len(self.finished)  # samples in finished shards
        self._resumes = self.num_finished > 0

    def _begin(self, overwrite: bool, resume: bool) -> tuple[FinishedShards, int]:
        """Take over or delete existing shards; return them and the next number."""
        folder, pattern = self._folder, self._pattern
        # The manifest may list shards that other ranks have stored after the folder was listed. So it is read first.
        manifest = Manifest.of(folder) if self._manifest else None
        names = folder.names()
        existing = pattern.existing(names)
        if existing and not overwrite and not resume:
            first = shown(folder.locate(next(iter(existing.values()))))
            raise FileExistsError(f"{first} exists; pass overwrite=True or resume=True, or write to another folder")
        if self._lock is not None and self._lock.is_locked:
            pattern.remove_strays()
        shards = pattern.build_shards(names) if resume else []
        finished = take_over(folder, pattern, names, shards, manifest, self._fingerprint, self._dali_index)
        if overwrite and existing:
            indexes = [name for shard in existing.values() for name in (dali_index_path(shard), sidecar_path(shard))]
            if not folder.is_remote:
                check_replaceable(*map(folder.locate, indexes))
            if self._manifest:
                change_manifest(folder, lambda manifest: manifest.remove(*existing.values()))
            # Without its shard, an index would be that of a later shard of this name. So it is deleted first.
            folder.delete(name for name in (*indexes, *existing.values()) if name in names)
        return finished, max(existing) + 1 if resume and existing else 0

    def __contains__(self, key: object) -> bool:
        """Return whether a shard taken over by `resume=True` contains the key."""
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
                in this shard. Or the call passes no member, or a member twice.
            OSError: The shard, or an earlier shard, cannot be written, for example because the disk is full.
            RuntimeError: This process is a fork of the writer's process.
            TypeError: `align` is not an int.
            ValueError: The writer is closed, or a shard could not be finished. Or `align` is not a positive multiple of 8, or
                the sample has too many tensors for the header of a safetensors file.
            Exception: `encoder` raised it; no part of the sample is written.

        Memory: this call copies or writes the bytes of the tensors, so the tensors may be changed afterwards.
        """
        if self._closed or not self._resumes or key not in self:
            self._place(self._pack(key, sample, members))

    def _pack(self, key: str, sample: Any, members: dict[str, Any]) -> PackedSample:
        """Encode a sample for `_place`, on any thread, also in forked children. Memory: aliases the tensors."""
        is_plain = type(key) is str and is_plain_key(key)
        if not is_plain:
            check_key(key)
        caches, other_members = {"": sample}, dict[str, Any]()
        if not (is_plain and not members and sample is not _NOTHING):
            caches, other_members = _sort_members(key, sample, members)
        encoded = []
        for name, value in caches.items():
            try:
                encoded.append((name, encode_views(value, self._allow, self._align)))
            except TensorCacheError as exc:
                raise exc.at(f"sample {key!r}" + (f", cache {name!r}" if name else "")) from exc
        return _pack_members(key, encoded, _encode_others(key, other_members, self._encoder) if other_members else {})

    def _place(self, packed: PackedSample) -> None:
        """Write a packed sample, whose key is not stored yet."""
        if self._pid != os.getpid():
            raise RuntimeError("a writer cannot be used in a forked child; make a writer in each process")
        with self._changing:
            if self._closed:
                raise ValueError(f"{self._pattern}: the writer is closed")
            if self._finishing:
                self._wait(_MAX_FINISHING)
            shard = self._shard
            if shard is not None and (shard.num_samples >= self._max_samples or shard.nbytes >= self._max_nbytes):
                self._finish()
            if self._shard is None:
                self._shard = self._new_shard()
            self._shard.write(packed)

    def _new_shard(self) -> _UnfinishedShard:
        if self._has_gap and not self._finishing:  # else `_wait` raises the error of the upload
            raise ValueError(
                f"{self._pattern}: a shard could not be finished; continue with a new writer and resume=True"
            )
        folder, name = self._folder, self._pattern.shard_name(self._number)
        path = folder.locate(name)
        if self._number and not self._pattern.is_numbered:
            problem = "is finished; for more shards, use a pattern with a number, such as %06d"
            raise FileExistsError(f"{shown(path)} {problem}")
        if self._number and name < self._pattern.shard_name(self._number - 1):
            problem = "the name sorts before that of the last shard, and readers sort shards by name"
            warnings.warn(f"{shown(path)}: {problem}; use a wider number, such as %06d", stacklevel=user_level())
        if self._dali_index and not folder.is_remote:
            check_replaceable(dali_index_path(path))
        # without a footer, readers would take the sidecar of a deleted shard for the index of this one
        stale = [] if self._footer else [sidecar_path(name)]
        check_replaceable(*map(folder.locate, stale))
        shard = _UnfinishedShard(path, name, folder.new_file(name))
        self._unfinished.append(shard)
        folder.delete(stale)
        self._number += 1
        return shard

    def _finish(self) -> None:
        """Finish the current shard. At a url, a thread uploads it while the next shard is written."""
        shard, self._shard = self._shard, None
        if shard is None:
            return
        if self._folder.is_remote:
            self._finishing.append(self._finisher.submit(self._commit, shard))
            self._wait(_MAX_FINISHING)
        else:
            self._commit(shard)

    def _wait(self, most: int) -> None:
        """Wait until at most `most` shards are being uploaded."""
        while self._finishing and (len(self._finishing) > most or self._finishing[0].done()):
            self._finishing[0].result()  # raises the error of an upload that failed
            self._finishing.popleft()

    def _commit(self, shard: _UnfinishedShard) -> None:
        """Make a shard visible, then its `.idx`, then its manifest entry."""
        # after a kill between two of these steps, `take_over` does the remaining steps
        try:
            if self._has_gap:
                shard.drop()
                raise CancelledError(f"{shard.path} is not finished, because an earlier shard failed")
            entry, index = shard.finish(self._footer, self._fingerprint)
            if self._dali_index:
                write_dali_index(self._folder, shard.name, index)
            if self._manifest:
                change_manifest(self._folder, lambda manifest: manifest.add(entry, index))
        except BaseException:
            self._has_gap = True
            raise
        self._unfinished.remove(shard)
        self.num_finished += entry.num_samples

    def close(self) -> None:
        """Finish the current shard, wait for uploads, and release the lock. Errors are as for `write`. No effect in a fork."""
        if self._pid != os.getpid():
            return
        with self._changing:
            self._closed = True
            try:
                self._finish()
                self._wait(0)
            except BaseException as exc:
                if not isinstance(exc, Exception):  # an interrupt of the wait
                    self._folder.cancel()
                self._abandon(exc)
                raise
            self._release()

    def _abandon(self, error: BaseException) -> None:
        """Wait for uploads, and delete all other unfinished shards."""
        # if a shard cannot be finished, `error`, which the caller raises, gets a note
        try:
            self._finisher.shutdown()
        finally:
            failure = next(filter(None, (job.exception() for job in self._finishing)), None)
            if failure not in (None, error):
                add_note(error, f"a shard could not be stored: {failure}")
            self._shard = None
            self._release()

    def _release(self) -> None:
        self._finisher.shutdown()
        for shard in self._unfinished:
            shard.drop()
        self._unfinished.clear()
        if self._lock is not None:
            self._lock.close()

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(self, kind: Any, value: Any, traceback: Any) -> None:
        if kind is None:
            self.close()
        elif self._pid == os.getpid():
            with self._changing:
                self._closed = True
                self._abandon(value)


def _pack_members(key: str, caches: Sequence[tuple[str, EncodedSample]], contents: Mapping[str, bytes]) -> PackedSample:
    """Build the members of a sample. Memory: aliases tensors and `contents`."""
    parts: list[Any] = []
    position = 0
    entries: list[CacheEntry] = []
    members: list[tuple[str, int, int]] = []
    for name, encoded in caches:
        prefix = f"{key}.{name}." if name else f"{key}."
        skeleton, nbytes = encoded.skeleton, encoded.layout.nbytes
        skeleton_header = build_tar_header(prefix + SKELETON, len(skeleton))
        tensors_header = build_tar_header(prefix + TENSORS, nbytes)
        skeleton_begin = position + len(skeleton_header)
        begin = skeleton_begin + len(skeleton) + -len(skeleton) % BLOCK + len(tensors_header)
        parts += skeleton_header, skeleton, _ZEROS[: -len(skeleton) % BLOCK]
        parts += tensors_header, encoded.header, *encoded.buffers, _ZEROS[: -nbytes % BLOCK]
        position = begin + nbytes + -nbytes % BLOCK
        names = encoded.references, encoded.further
        entries.append(CacheEntry(name, skeleton_begin, len(skeleton), begin, encoded.layout, encoded.digest, *names))
    for extension, raw in contents.items():
        header = build_tar_header(f"{key}.{extension}", len(raw))
        parts += header, raw, _ZEROS[: -len(raw) % BLOCK]
        members.append((extension.lower(), position + len(header), len(raw)))
        position += len(header) + len(raw) + -len(raw) % BLOCK
    return PackedSample(key, parts, position, entries, members)


def _sort_members(key: str, sample: Any, members: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    caches = {"": sample} if sample is not _NOTHING else {}
    other_members = {}
    for field, value in members.items():
        name = cache_of_field(field)
        if name is None:
            other_members[field] = value
        elif name in caches:
            raise InvalidKeyError(f"sample {key!r} is passed twice, also as {FIELD!r}; pass it once")
        else:
            caches[name and cache_name(name)] = value
    if not caches and not other_members:
        raise InvalidKeyError(f"sample {key!r} has no members; pass a sample or a member")
    check_suffixes(key, [*other_members, *(member_suffix(name, SKELETON) for name in caches)])
    check_suffixes(key, [member_suffix(name, TENSORS) for name in caches])
    lowered = [field.lower() for field in other_members] + [member_suffix(name, TENSORS) for name in caches]
    if len(set(lowered)) < len(lowered) or any(map(is_reserved, lowered)):
        problem = f"has members {sorted(lowered)}; a name is reserved for caches, or occurs twice"
        raise InvalidKeyError(f"sample {key!r} {problem}; rename that member")
    return caches, other_members


def _drop_forgotten(pattern: ShardPattern, unfinished: list[_UnfinishedShard], pid: int) -> None:
    if pid != os.getpid() or not unfinished:  # in a forked child, the shards are still the parent's
        return
    count = format_count(sum(shard.num_samples for shard in unfinished), "sample")
    problem = f"{shown(str(pattern))}: the writer was not closed, so unfinished shards with {count} are lost"
    # Python hides a ResourceWarning by default
    _log.warning("%s; write inside `with tc.ShardWriter(…) as writer:`, or call close()", problem)
    for shard in unfinished:
        shard.drop()


def _encode_plain(members: dict[str, Any]) -> dict[str, bytes]:
    """Encode bytes, text, JSON values for `json`, and ints for `cls`."""
    result = {}
    for extension, value in members.items():
        kind = extension.rpartition(".")[2].lower()
        is_number = kind == "cls" and isinstance(value, int)
        if isinstance(value, (bytes, bytearray, memoryview)):
            result[extension] = bytes(value)
        elif kind == "json" or is_number or isinstance(value, str):
            try:
                text = json.dumps(value) if kind == "json" else str(int(value)) if is_number else value
                result[extension] = text.encode()
            except (TypeError, ValueError, RecursionError) as exc:
                encoding = "JSON" if kind == "json" else "UTF-8"
                raise EncodeError(f"member {extension!r} cannot be represented in {encoding}: {exc}") from exc
        else:
            problem = f"member {extension!r} is a {type(value).__name__}, which is not encoded by default"
            raise EncodeError(f"{problem}; pass bytes, or encoder=webdataset.writer.make_encoder(True)")
    return result


def _encode_others(
    key: str, members: dict[str, Any], encoder: Callable[[dict[str, Any]], dict[str, Any]]
) -> dict[str, bytes]:
    try:
        plain = encoder(members)
    except TensorCacheError as exc:
        raise exc.at(f"sample {key!r}") from exc
    subject = f"sample {key!r}: the encoder returned"
    if lost := members.keys() - plain.keys():
        raise EncodeError(f"{subject} no {min(lost)!r}, expected bytes for each member that was passed to write")
    for extension, raw in plain.items():
        if extension not in members:
            raise InvalidKeyError(f"{subject} {extension!r}, which was not passed to write; pass it as a member, too")
        if not isinstance(raw, (bytes, bytearray)):
            raise EncodeError(f"{subject} a {type(raw).__name__} for {extension!r}, expected bytes")
        if extension.lower().endswith(TENSORS) and is_bound(bytes(raw[:64])):
            raise InvalidKeyError(
                f"sample {key!r}: member {extension!r} is already encoded, as one of the two members of a cache; "
                "pass the nested sample to write instead"
            )
    return plain
