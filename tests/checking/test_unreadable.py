"""A disk that cannot read some bytes: its error stays what it is, and nothing is decided without those bytes."""

from __future__ import annotations

import errno
import gzip
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import wds_tensorcache as tc
from tests.checking.broken_disk import break_disk
from tests.shards.damage import members, write
from tests.shards.tars import BLOCK, build_with_tarfile, special


def is_eio(error: BaseException) -> bool:
    return isinstance(error, OSError) and not isinstance(error, tc.FormatError) and error.errno == errno.EIO


def assert_eio(call: Callable[[], object]) -> None:
    with pytest.raises(OSError, match="Input/output") as caught:
        call()
    assert is_eio(caught.value)


@pytest.mark.parametrize("io", ["auto", "pread"])
def test_errors_name_the_shard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, io: Any) -> None:
    path = write(tmp_path, 4)
    cache = tc.open(path, io=io)
    assert cache.keys()
    break_disk(monkeypatch, "000000.tar", 0, 1 << 40)
    for read in (lambda: cache[1], lambda: cache.read_batch([1]), lambda: tc.open(path), lambda: tc.open(path)[1]):
        with pytest.raises(OSError, match=rf"Input/output error: '{path}'"):
            read()


def test_a_version_without_a_sample(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever read fails, also one of headers of members that are of no sample: nothing is left out of the version."""
    folder, link = special("d/", b"5"), special("l", b"2", linkname="d")
    content = build_with_tarfile([("0.json", b"0"), folder, link, ("1.json", b"1"), folder, link])
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "a.tar").write_bytes(content)
    tc.drop(tmp_path / "old", tmp_path / "whole", ["1"])
    whole = (tmp_path / "whole" / "a.tar").read_bytes()
    for after in range(100):
        with monkeypatch.context() as patch:
            break_disk(patch, "old/a.tar", BLOCK, len(content), after)
            try:
                tc.drop(tmp_path / "old", tmp_path / "new", ["1"])
            except OSError as exc:
                assert is_eio(exc)  # noqa: PT017
                assert not (tmp_path / "new").exists()
            else:
                break
    assert after > 6
    assert (tmp_path / "new" / "a.tar").read_bytes() == whole


@pytest.mark.parametrize("name", ["000000.tar.index", "000000.idx", "manifest.json"])
def test_signs_of_lost_samples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Zeros from the second sample on: only this file knows that there were more."""
    path = write(tmp_path, 4, footer=False)
    if name.endswith(".index"):
        tc.write_index(path)
    for other in {"000000.tar.index", "000000.idx", "manifest.json"} - {name}:
        (tmp_path / other).unlink(missing_ok=True)
    begin = members(path)["001.skel.pyd"][0] - BLOCK
    path.write_bytes(path.read_bytes()[:begin].ljust(path.stat().st_size, b"\0"))
    before = path.read_bytes()
    break_disk(monkeypatch, name, 0, 1 << 40)
    assert_eio(lambda: tc.write_index(path))
    assert path.read_bytes() == before


def test_the_fingerprint_is_not_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path, 2, footer=False, fingerprint={"model": "a"}, manifest=False)
    tc.write_index(path)
    break_disk(monkeypatch, ".index", 0, 1 << 40)
    assert_eio(lambda: tc.write_index(path))


def test_a_compressed_stream(tmp_path: Path) -> None:
    class Broken(io.BytesIO):
        def read(self, nbytes: int | None = -1) -> Any:
            if self.tell() > 1_000:
                raise OSError(errno.EIO, "Input/output error")
            return super().read(min(nbytes or 0, 600) if nbytes != -1 else 600)

    content = gzip.compress(write(tmp_path, 9, footer=False).read_bytes(), 0)
    assert_eio(lambda: list(tc.tarfile_to_samples()([{"url": "a.tar.gz", "stream": Broken(content)}])))
