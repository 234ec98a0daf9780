"""The fuzz targets: each takes any bytes and holds one reader to its contract.

A reader returns or raises a TensorCacheError. Its result agrees with other ways to read the same bytes: again, by a
template, eagerly, through a stream, or after writing it back. A digest or checksum would refuse most inputs at once, so the
first byte of an input may request a right one.
"""

from __future__ import annotations

import atexit
import contextlib
import io
import os
import shutil
import tempfile
import warnings
from collections.abc import Callable
from enum import Enum
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

import wds_tensorcache as tc
from tests.fuzz import known
from tests.fuzz.forge import bound, footer_of, tar_of
from tests.shards.tars import halves
from wds_tensorcache.codec import header as headers
from wds_tensorcache.codec.binding import parse_preamble
from wds_tensorcache.codec.reference import MemorySource, resolve
from wds_tensorcache.codec.sample import decode_body, open_tensor
from wds_tensorcache.codec.skeleton.reader import unpickle
from wds_tensorcache.codec.skeleton.template import learn
from wds_tensorcache.codec.skeleton.types import allow_table
from wds_tensorcache.integrations.webdataset_tar import tarfile_to_samples
from wds_tensorcache.shards import tar as tars
from wds_tensorcache.shards.footer import build_footer, parse_index
from wds_tensorcache.shards.index_builder import scan_shard
from wds_tensorcache.shards.tar_stream import TarStream

REFUSED: Any = object()
SAMPLES: list[Any] = [
    {"latent": torch.arange(4.0).half(), "size": (2, 3), "prompt": "a"},
    {"latent": torch.arange(6.0).half(), "size": (2, 3), "prompt": "bc"},
    [np.arange(3), torch.tensor([True, False]), {"x": torch.zeros(2, dtype=torch.complex32), "y": {1, 2}}],
]
_MEMBER = tc.encode_sample(SAMPLES[2])[1]
_MAX_ROWS = 16


def run(name: str, data: bytes) -> None:
    """Run a target on `data`, without state from earlier inputs."""
    for cache in (headers._LAYOUTS, headers._FORMS):
        cache.clear()
    TARGETS[name](data)


def attempt(call: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Return the result of `call`, or REFUSED if it raises a TensorCacheError; every other error is a finding."""
    try:
        return call(*args, **options)
    except tc.TensorCacheError:
        return REFUSED


def header(data: bytes) -> None:
    """The `.safetensors` member: its tensors cover it, and a header of the same entries gives the same layout."""
    parsed = attempt(headers.parse_header, data)
    assert attempt(headers.parse_header, data[:-1], len(data)) is REFUSED or parsed is not REFUSED
    if parsed is REFUSED:
        return
    layout, _ = parsed
    entries = [(t.name, t.dtype, t.shape, t.end - t.begin) for t in layout.tensors.values()]
    assert layout.nbytes == len(data) == layout.data_begin + sum(nbytes for *_, nbytes in entries)
    again, _ = headers.parse_header(headers.build_safetensors_header(entries, 8) + data[layout.data_begin :])
    assert [(t.name, t.dtype, t.shape, t.end - t.begin) for t in again.tensors.values()] == entries
    for kind in ("tensor", "ndarray"):
        for name in layout.tensors:
            reference = attempt(resolve, layout, f"{kind}:{name}")
            if reference is not REFUSED:
                attempt(open_tensor, reference, MemorySource(data), False)


class Trusted:
    """A class that skeletons may build."""

    def __init__(self, *args: Any) -> None:
        self.args = args


class Colour(Enum):
    """An enum whose members must not change."""

    RED = 1


ALLOW = [Trusted, Colour]


def skeleton(data: bytes) -> None:
    """The skeleton alone: its value can be written and read again, and the classes that it builds do not change."""
    layout, _ = headers.parse_header(_MEMBER)

    def reference(text: str) -> Any:
        return open_tensor(resolve(layout, text), MemorySource(_MEMBER), True)

    def read(allow: list[type]) -> Any:
        return unpickle(data, parse_preamble(data)[0], reference, allow_table(allow))

    _round_trip(attempt(read, []))
    before = repr([dict(vars(Trusted)), dict(vars(Colour)), vars(Colour.RED)])
    attempt(read, ALLOW)
    assert repr([dict(vars(Trusted)), dict(vars(Colour)), vars(Colour.RED)]) == before


def _round_trip(value: Any) -> Any:
    """Return a value after writing and reading it."""
    written = REFUSED if value is REFUSED else attempt(tc.encode_sample, value)
    if written is not REFUSED:
        assert tc.encode_sample(tc.decode_sample(*written)) == written
    return written


def sample(data: bytes) -> None:
    """Both members: lazy, eager and verified decoding agree, with and without a template."""
    skeleton, tensors, is_bound = bound(data)
    lazy = attempt(tc.decode_sample, skeleton, tensors)
    eager = attempt(tc.decode_sample, skeleton, tensors, lazy=False)
    verified = attempt(tc.decode_sample, skeleton, tensors, verify=True)
    loaded = REFUSED if lazy is REFUSED else attempt(tc.realize, lazy)
    assert (verified is REFUSED) == (lazy is REFUSED) or not is_bound
    assert verified is REFUSED or lazy is not REFUSED
    if eager is not REFUSED:  # otherwise an unused tensor may be bad
        assert _round_trip(loaded) == _round_trip(eager) == _round_trip(lazy)


def template(data: bytes) -> None:
    """Two skeletons: a template of the first reads the second one as the interpreter does."""
    begin, end = 2, 2 + int.from_bytes(data[:2], "little")
    first, second = b"\x80\x04" + data[begin:end], b"\x80\x04" + data[end:]
    layout, _ = headers.parse_header(_MEMBER)

    def read(skeleton: bytes) -> Any:
        return _round_trip(attempt(decode_body, skeleton, 2, layout, MemorySource(_MEMBER), True, {}))

    if read(first) is REFUSED:
        return
    layout.form.templates, layout.form.num_interpreted = [], 100  # learn nothing more
    interpreted = read(second)
    learned = learn(decode_body(first, 2, layout, MemorySource(_MEMBER), True, {}), first[2:])
    layout.form.templates = [] if learned is None else [learned]
    assert read(second) == interpreted


def index(data: bytes) -> None:
    """The index as bytes: all its entries can be read, and writing it again gives the same bytes."""
    footer, shard_nbytes = footer_of(data)
    found = attempt(parse_index, footer, shard_nbytes)
    if found is REFUSED or found is None:
        return
    assert found.nbytes <= 1000 + 40 * len(footer)
    assert len(list(found.keys)) == len(found.keys)
    for number in range(min(len(found.layouts), _MAX_ROWS)):
        assert found.layouts[number].nbytes == found.layouts.nbytes.item(number)
    for row in range(min(len(found.keys), _MAX_ROWS)):
        for member in found.members.values():
            member.find(np.array([row]))
    written = build_footer(found, shard_nbytes)
    again = parse_index(written, shard_nbytes)
    assert again is not None
    assert build_footer(again, shard_nbytes) == written


def shard() -> tuple[bytes, int]:
    """Return a shard without an index, and the offset of its end-of-archive marker."""
    members = []
    for number, sample in enumerate(SAMPLES[:2]):
        members += [*halves(str(number), sample), (f"{number}.json", b"{}")]
    parts = [tars.build_tar_header(n, len(c)) + c + bytes(tars.padding(len(c))) for n, c in members]
    return b"".join(parts) + tars.END_OF_ARCHIVE, sum(map(len, parts))


_SHARD, _SHARD_END = shard()


@lru_cache
def _folder(pid: int) -> Path:
    """Return a folder of this process, which is deleted when the process ends."""
    # in memory where that is possible: nothing here depends on the disk, on which a file that is removed takes milliseconds
    memory = Path("/dev/shm")
    folder = Path(tempfile.mkdtemp(prefix=f"fuzz-{pid}-", dir=memory if memory.exists() else None))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def footer(data: bytes) -> None:
    """An index after a shard: whatever it says, its samples are read or refused."""
    path = _folder(os.getpid()) / "shard.tar"
    path.write_bytes(_SHARD + footer_of(data, _SHARD_END)[0])
    cache = REFUSED
    with contextlib.suppress(KeyError):  # as documented, for an index without a cache, or with several
        cache = attempt(tc.open, path)
    if cache is REFUSED:
        return
    with cache as opened:
        keys = attempt(lambda: list(opened.keys()))
        attempt(lambda: opened.members)
        for row in range(0 if keys is REFUSED else min(len(keys), _MAX_ROWS)):
            attempt(lambda row=row: tc.encode_sample(opened[row]))
            for suffix in list(opened.members)[:_MAX_ROWS]:
                with contextlib.suppress(tc.TensorCacheError, KeyError):  # KeyError: another sample has it
                    opened.read_members([row], suffix)
        attempt(lambda: opened.read_batch(range(len(opened)), collate="list"))


def tar(data: bytes) -> None:
    """A tar as a file: its index can be written and read, and points to bytes in the file."""
    archive = tar_of(data)
    found = attempt(scan_shard, lambda begin, end: archive[begin:end], len(archive))
    if found is REFUSED:
        return
    shard_nbytes = max(len(archive), found.end + 1024)  # one block of zeros ends a tar, but an index needs two
    again = parse_index(build_footer(found, shard_nbytes), shard_nbytes)
    assert again is not None
    assert build_footer(again, shard_nbytes) == build_footer(found, shard_nbytes)
    assert list(again.keys) == list(found.keys)


def stream(data: bytes) -> None:
    """A tar as a stream, in pieces: it has the members that the same bytes have as a file."""
    archive, step = tar_of(data), 1 + (data[0] if data else 0) * 8

    class Pieces(io.BytesIO):
        def read(self, nbytes: int | None = -1) -> bytes:
            return super().read(min(nbytes, step) if nbytes is not None and nbytes >= 0 else step)

    def scan(found: list[tuple[str, bytes]]) -> tc.FormatError | None:
        """Append the file's members to `found` until an error, and return the error."""
        try:
            for name, begin, nbytes in tars.Scanner(lambda begin, end: archive[begin:end], len(archive)):
                found.append((name, archive[begin : begin + nbytes]))
        except tc.FormatError as exc:
            return exc
        return None

    def streamed() -> list[tuple[str, bytes]]:
        found = TarStream(Pieces(archive))
        members = [(name, read()) for name, read in found]
        found.finish()
        return members

    by_file: list[tuple[str, bytes]] = []
    by_stream, refusal = attempt(streamed), scan(by_file)
    if refusal is None:
        assert by_stream == by_file
    elif not archive.startswith((b"\x1f\x8b", b"BZh", b"\xfd7zXZ\0")):
        assert by_stream is REFUSED
    stage = tarfile_to_samples()
    with warnings.catch_warnings():
        # as documented, of what follows the archive
        warnings.filterwarnings("ignore", ".*a tar header after the end of the archive")
        attempt(lambda: list(stage([{"url": "x.tar", "stream": Pieces(archive)}])))


def verify(data: bytes) -> None:
    """A shard that may be damaged: without faults it can be read, and otherwise its repaired samples are intact.

    From 128 on, the first byte begins a program for a shard of known content, and for what is done to it.
    """
    if data[:1] >= b"\x80":
        known.judge(data, _folder(os.getpid()) / "known")
        return
    path, out = _folder(os.getpid()) / "verified.tar", _folder(os.getpid()) / "repaired"
    path.write_bytes(tar_of(data))
    report = tc.verify(path, num_threads=1)
    if not report.ok:
        shutil.rmtree(out, ignore_errors=True)
        attempt(tc.repair, path, out)
        if not out.exists():
            return
        report, path = tc.verify(out, num_threads=1), out / path.name
        assert report.ok, str(report)
    cache = REFUSED
    with contextlib.suppress(KeyError):  # the shard has no cache
        cache = tc.open(path)
    for row in range(0 if cache is REFUSED or report.num_unread else len(cache)):
        _round_trip(attempt(tc.realize, cache[row]))


TARGETS: dict[str, Callable[[bytes], None]] = {
    target.__name__: target for target in (header, skeleton, sample, template, index, footer, tar, stream, verify)
}
