"""A replacement for webdataset's stage that reads samples from shards. It uses this package's tar reader."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from webdataset.gopen import Pipe
from webdataset.handlers import reraise_exception

from wds_tensorcache.arguments import user_level
from wds_tensorcache.errors import FormatError
from wds_tensorcache.integrations.webdataset_urls import open_url, shown_url
from wds_tensorcache.shards.expansion import MAX_EXPANDED_NBYTES, check_option
from wds_tensorcache.shards.manifest import FoundShard, check_listed
from wds_tensorcache.shards.names import split_member
from wds_tensorcache.shards.tar_stream import TarStream
from wds_tensorcache.storage.remote.stream import RemoteStream

_RESERVED = frozenset({"__key__", "__url__", "__local_path__"})
_BAD = "__bad__"  # webdataset, too, drops samples in which this field is set
Handler = Callable[[Exception], bool]


def tarfile_to_samples(
    handler: Handler = reraise_exception,
    select_files: Callable[[str], bool] | None = None,
    rename_files: Callable[[str], str] | None = None,
    *,
    max_expanded_nbytes: int = MAX_EXPANDED_NBYTES,
) -> TarSamples:
    """Return a stage that replaces `wds.tarfile_to_samples`, with the same arguments and samples.

    The keys of a tar that `tar -c .` made have no `./`, as everywhere in this package; webdataset's stage keeps the `./`.
    Hidden files, such as `a/._1.jpg` from macOS, are skipped; webdataset's stage reads those in folders as samples.
    The stage takes 20% to 60% of the time of webdataset's stage, and closes each shard after reading it. A shard without an
    end-of-archive block is an error, and its last sample, which may be incomplete, is not yielded. webdataset's own stage may
    merge this sample with the first sample of the next shard. Three kinds of members are errors, too: a second member of a
    sample with the same suffix, a member with a name that webdataset reserves (`KEY.__key__`, `KEY.__url__`,
    `KEY.__local_path__`), and a GNU sparse member.

    This package's clients read the urls of `tc.open` (`s3://`, `gs://`, `az://`, `http(s)://`, `hf://`), not `curl` or `gsutil`
    as in webdataset. Your own function in webdataset's `gopen_schemes`, and its variable GOPEN_REWRITE, take precedence.
    webdataset's `gopen` opens all other urls, and runs `pipe:…` as a command, so use only urls that you trust. If a url is the
    name of an existing file, that file is read. `ResumablePipeline` never runs names from folders or manifests as commands.

    Args:
        handler: Function that is called with the exception of a shard or member. By default, it raises the exception. If it
            returns True, reading continues with the next shard or member, else it ends.
        select_files: Function of a member's name, after `rename_files`, that returns whether to read the member.
        rename_files: Function from a member's name to its new name.
        max_expanded_nbytes: Limit in bytes for the expanded length of a compressed shard (gzip, bzip2, xz); 64 MiB by default.
            A shard may always expand to 64 times the bytes that were read. In a compressed shard, a skeleton or another pickle
            may have 1/64 of this limit, or 8 times the bytes that were read, because its objects take more memory. A member of
            JSON or MessagePack may have 1/8 of this limit, or 64 times the bytes that were read. Raise the limit for shards
            that you trust.

    Raises:
        ValueError: `max_expanded_nbytes` is negative.
        TypeError: `handler` is not a function, or `max_expanded_nbytes` is not an integer.

    Raises (when iterating):
        FormatError: A shard is truncated or not a tar, expands too much, or is remote and changes while it is read. Or a member
            is an error, as above. The message has the shard's name, and the key of the sample or the byte offset.
        OSError: A shard cannot be opened or read; RemoteError, after retries, for a remote shard.
        ImportError: A remote url needs a package that is not installed; the message names the package.
    """
    if not callable(handler):
        problem = f"tc.tarfile_to_samples got {type(handler).__name__}, expected a function as handler"
        raise TypeError(f"{problem}; as a stage of a pipeline, call it: tc.tarfile_to_samples()")
    return TarSamples(handler, select_files, rename_files, check_option(max_expanded_nbytes))


@dataclass(frozen=True, slots=True)
class TarSamples:
    """The stage that `tarfile_to_samples` returns. Threads/fork/pickle: stateless; pickles if its functions do."""

    handler: Handler
    select_files: Callable[[str], bool] | None
    rename_files: Callable[[str], str] | None
    max_expanded_nbytes: int

    def __call__(self, shards: Iterable[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
        for shard in shards:
            try:
                for _, sample, _ in self.samples_of(shard):
                    if sample is not None:
                        yield sample
            except Exception as exc:  # the handler decides, as in every stage of webdataset
                # not `except Stopped`: when the interpreter closes an iterator at its end, this name is None
                if isinstance(exc, Stopped) or not self.handler(exc):
                    break

    def samples_of(
        self,
        shard: Mapping[str, Any],
        is_wanted: Callable[[int], bool] = lambda index: True,
        *,
        first: tuple[int, int] = (0, 0),
        listed: FoundShard | None = None,
    ) -> Iterator[tuple[int, dict[str, Any] | None, int | None]]:
        """Yield (index in the shard, sample, next sample's offset) for each sample.

        The sample is None if it is not wanted or is marked as bad. The offset is None for the last sample, and if no stream can
        begin at the next sample.

        Args:
            shard: Dict with `url`, and optionally an open `stream` and a `local_path`, as webdataset's stages pass them.
            is_wanted: Function of a sample's index; the bytes of unwanted samples are skipped.
            first: Index of the first sample in `stream`, and its offset in the shard.
            listed: The shard in a manifest, to check the number of samples in the tar; None for no check.
        """
        url, stream = shard["url"], shard["stream"] if "stream" in shard else open_url(shard["url"])
        if isinstance(stream, RemoteStream):
            url = str(stream.url)  # without secrets
        url = os.fspath(url) if isinstance(url, os.PathLike) else url
        common = {"__url__": url}
        if shard.get("local_path") is not None:
            common["__local_path__"] = shard["local_path"]
        is_over, is_pipe = False, isinstance(stream, Pipe)
        try:
            skip = stream.skip if isinstance(stream, RemoteStream) else None
            tar = TarStream(stream, first[1], skip, self.max_expanded_nbytes)
            yield from self._group(tar, common, is_wanted, first[0], listed)
            hidden = tar.finish()
            if hidden is not None:
                warnings.warn(str(hidden.at(shown_url(url))), stacklevel=user_level())
            is_over = True
        except Exception as exc:
            if isinstance(exc, FormatError):
                raise exc.at(shown_url(url)) from exc
            raise
        finally:
            if not is_over and is_pipe:
                # without a reader, the command would wait forever
                stream.proc.kill()
                stream.ignore_errors = True
            stream.close()

    def _group(
        self,
        tar: TarStream,
        common: Mapping[str, Any],
        is_wanted: Callable[[int], bool],
        first: int,
        listed: FoundShard | None,
    ) -> Iterator[tuple[int, dict[str, Any] | None, int | None]]:
        """Group consecutive members with equal keys; yield values as `samples_of` does."""
        sample: dict[str, Any] = {}
        index, is_kept = first - 1, False
        # the samples of the tar, also those that the caller's functions or handler drop
        num_samples, tar_key = first, None
        for name, read in tar:
            parts = None if listed is None else split_member(name)
            if parts is not None and parts[0] != tar_key:
                num_samples, tar_key = num_samples + 1, parts[0]
            try:
                parts = self._split(name)
            except Exception as exc:  # an error of one member: the handler decides, and the shard continues
                self._report(exc)
                continue
            if parts is None:
                continue
            key, suffix = parts
            if not sample or key != sample["__key__"]:
                if sample:
                    yield index, sample if is_kept and not sample.get(_BAD) else None, tar.start
                index += 1
                is_kept = is_wanted(index)
                sample = {"__key__": key, **common}
            if suffix in _RESERVED or suffix in sample:
                is_twice = suffix not in _RESERVED
                problem = (
                    f"two members {suffix!r}" if is_twice else f"a member {suffix!r}, a name that webdataset reserves"
                )
                error = FormatError(f"sample {key!r} has {problem}", kind="duplicate" if is_twice else "format")
                self._report(error.at(shown_url(common["__url__"])))
            else:
                sample[suffix] = read() if is_kept else None
        # only the end-of-archive block proves that the last sample is complete
        if sample:
            yield index, sample if is_kept and not sample.get(_BAD) else None, None
        # `first` counts only the samples that the caller's functions keep
        if listed is not None and listed.entry is not None and not (first and (self.select_files or self.rename_files)):
            check_listed(shown_url(common["__url__"]), listed.entry, listed.manifest, num_samples=num_samples)

    def _report(self, error: Exception) -> None:
        if not self.handler(error):
            raise Stopped from error

    def _split(self, name: str) -> tuple[str, str] | None:
        """Return a member's key and suffix; None for a member to skip."""
        name = self.rename_files(name) if self.rename_files is not None else name
        if self.select_files is not None and not self.select_files(name):
            return None
        parts = split_member(name)
        return None if parts is None else (parts[0], parts[1].lower())


class Stopped(Exception):
    """The decision of a handler to stop reading."""
