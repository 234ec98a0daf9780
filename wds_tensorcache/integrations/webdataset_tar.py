"""webdataset's stage from shards to samples, on a reader of our own: faster, and shards never run into each other."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, BinaryIO

from webdataset.gopen import Pipe, gopen
from webdataset.handlers import reraise_exception
from webdataset.tariterators import base_plus_ext

from wds_tensorcache.errors import FormatError
from wds_tensorcache.shards.tar.stream import TarStream
from wds_tensorcache.storage.files import ShardFile

__all__ = ["Stopped", "TarSamples", "is_named", "open_path", "tarfile_to_samples"]

_RESERVED = frozenset({"__key__", "__url__", "__local_path__"})
_BAD = "__bad__"  # samples that have it, and not empty, are left out, as webdataset does
Handler = Callable[[Exception], bool]


def tarfile_to_samples(
    handler: Handler = reraise_exception,
    select_files: Callable[[str], bool] | None = None,
    rename_files: Callable[[str], str] | None = None,
) -> TarSamples:
    """Return a stage that takes the place of `wds.tarfile_to_samples`, with its arguments and its samples.

    It differs in this: it takes 0.2 to 0.6 of the time; the shards are closed when they are read; and what is cut off is never
    half delivered. A shard that ends without its end-of-archive block is an error, whose sample that was being read is not
    delivered, as nobody can know whether it is whole. webdataset's own stage can join it with the first one of the next shard.
    A member `NAME.__local_path__` is an error in every shard, and so is a GNU sparse member that would become more than 64 MiB
    and than 64 times its bytes, or whose map is damaged.

    Urls are opened by webdataset's `gopen`, which runs `pipe:…` as a command: they must come from the caller. A url that is the
    name of an existing file is that file, whatever it begins with. `resumable` lists folders and manifests safely.

    Args:
        handler: Called with the exception of a shard, or of one of its members; re-raises by default. If it says so, the next
            shard follows, or the next member.
        select_files: Says of each member's name whether it is wanted.
        rename_files: Returns another name for each.

    Raises (when iterating):
        FormatError: A shard is cut short, or no tar; with the offset of the byte and the shard's name.
        OSError: A shard cannot be opened or read.
    """
    return TarSamples(handler, select_files, rename_files)


class TarSamples:
    """The stage that `tarfile_to_samples` returns. Threads/fork/pickle: stateless; pickles if its functions do."""

    def __init__(
        self,
        handler: Handler,
        select_files: Callable[[str], bool] | None = None,
        rename_files: Callable[[str], str] | None = None,
    ) -> None:
        self._handler = handler
        self._select = select_files
        self._rename = rename_files

    def __call__(self, shards: Iterable[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
        for shard in shards:
            try:
                for _, sample in self.samples_of(shard):
                    yield sample
            except Stopped:
                break
            except Exception as exc:  # the handler decides, as in every stage of webdataset
                if not self._handler(exc):
                    break

    def samples_of(
        self, shard: Mapping[str, Any], is_wanted: Callable[[int], bool] | None = None
    ) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yield the samples of a shard, each with its number.

        Args:
            shard: `url`, and perhaps a `stream` that is open and a `local_path`, as webdataset's stages pass on.
            is_wanted: Says of the number of a sample whether it is; the bytes of others are skipped.
        """
        url = shard["url"]
        stream = shard["stream"] if "stream" in shard else _open_url(url)
        url = os.fspath(url) if isinstance(url, os.PathLike) else url
        is_over = False
        try:
            yield from self._group(TarStream(stream), url, shard.get("local_path"), is_wanted)
            is_over = True
        finally:
            if not is_over and isinstance(stream, Pipe):  # its command need not go on
                stream.proc.kill()
                stream.ignore_errors = True
            stream.close()

    def _group(
        self, tar: TarStream, url: Any, local_path: Any, is_wanted: Callable[[int], bool] | None
    ) -> Iterator[tuple[int, dict[str, Any]]]:
        sample: dict[str, Any] | None = None
        number, is_kept = -1, True
        members = iter(tar)
        while member := _located(url, lambda: next(members, None)):
            name, read = member
            try:
                found = self._split(name)
            except Exception as exc:  # of one member: the handler decides, and the shard goes on
                self._go_on(exc)
                continue
            if found is None:
                continue
            key, suffix = found
            if sample is None or key != sample["__key__"]:
                if sample is not None and is_kept and not sample.get(_BAD):
                    yield number, sample
                number += 1
                is_kept = is_wanted is None or is_wanted(number)
                sample = {"__key__": key, "__url__": url}
                if local_path is not None:
                    sample["__local_path__"] = local_path
            if suffix in _RESERVED:
                self._go_on(
                    FormatError(
                        f"{url}: sample {key!r} has a member {suffix!r}, which is webdataset's name for another"
                    )
                )
                continue
            if suffix in sample:
                self._go_on(FormatError(f"sample {key!r} has two members {suffix!r}", kind="duplicate").at(url))
                continue
            sample[suffix] = _located(url, read) if is_kept else None
        if sample is not None and is_kept and not sample.get(_BAD):  # after the end-of-archive block: it is whole
            yield number, sample
        _located(url, tar.finish)

    def _go_on(self, error: Exception) -> None:
        """Go on with the next member, if the handler says so."""
        if not self._handler(error):
            raise Stopped from error

    def _split(self, name: str) -> tuple[str, str] | None:
        """Return key and suffix of a member; None if it is not wanted."""
        name = self._rename(name) if self._rename is not None else name
        if self._select is not None and not self._select(name):
            return None
        # its pattern takes time quadratic in the number of slashes; the last two of the first line decide
        line = name.partition("\n")[0]
        begin = line.rfind("/", 0, max(0, line.rfind("/"))) + 1
        key, suffix = base_plus_ext(name[begin:])
        return None if key is None or suffix is None else (name[:begin] + key, suffix.lower())


def open_path(path: str) -> BinaryIO:
    """Open an ordinary file by its path. Hazard: `gopen` would run a name that begins with `pipe:` as a command.

    Raises:
        FormatError: It is a folder, a pipe or a device, which would not end.
        OSError: It cannot be opened.
    """
    file = ShardFile(path)  # closes with the last reference
    return open(os.dup(file.fd), "rb")


def is_named(url: Any) -> bool:
    """Return whether a url with a colon, which `gopen` may take for a scheme, is the name of an existing file."""
    return isinstance(url, str) and ":" in url and os.path.lexists(url)


def _open_url(url: Any) -> Any:
    return open_path(os.fspath(url)) if isinstance(url, os.PathLike) or is_named(url) else gopen(url)


class Stopped(Exception):
    """A handler said that no more is to be read."""


def _located(url: Any, call: Callable[[], Any]) -> Any:
    try:
        return call()
    except FormatError as exc:
        raise exc.at(str(url)) from exc
