"""Errors carry what code may look at: reason, offset and kind stay, wherever an error goes."""

from __future__ import annotations

import copy
import gzip
import io
import pickle
import tarfile
from pathlib import Path
from typing import Any

import pytest

import wds_tensorcache as tc
from tests.shards.damage import write


def fields(error: tc.FormatError) -> tuple[Any, ...]:
    return type(error), error.reason, error.offset, error.kind, str(error)


@pytest.mark.parametrize("cls", [tc.FormatError, tc.TarFormatError, tc.UnsafeSkeletonError])
def test_fields(cls: type[tc.FormatError]) -> None:
    plain = cls("bad")
    assert (plain.reason, plain.offset, str(plain)) == ("bad", None, "bad")
    assert plain.kind == ("unsafe" if cls is tc.UnsafeSkeletonError else "format")
    error = cls("bad", offset=512, kind="checksum")
    assert fields(error) == (cls, "bad", 512, "checksum", "byte 512: bad")
    located = error.at("sample 'a'").at("x.tar")
    assert fields(located) == (cls, "bad", 512, "checksum", "x.tar: sample 'a': byte 512: bad")
    assert str(error) == "byte 512: bad"
    assert str(cls("bad", offset=0)) == "byte 0: bad"
    for made in (pickle.loads(pickle.dumps(located)), copy.copy(located), copy.deepcopy(located)):
        assert fields(made) == fields(located)
        assert fields(made.at("y")) == (cls, "bad", 512, "checksum", f"y: {located}")


def test_needs_stay() -> None:
    error = tc.UnsafeSkeletonError("needs os.system")
    error.needs = "os.system"
    made = pickle.loads(pickle.dumps(error.at("x.tar")))
    assert (made.needs, str(made)) == ("os.system", "x.tar: needs os.system")


def test_a_cut_tar_is_tarfiles_error(tmp_path: Path) -> None:
    """Wherever one is found: pipelines of webdataset catch `tarfile.ReadError`."""
    path = write(tmp_path, 4, footer=False, dali_index=False, manifest=False)
    content = path.read_bytes()
    for nbytes in (0, 100, 512, 700, 5000, len(content) - 1200):
        path.write_bytes(content[:nbytes])
        for read in (
            lambda: list(tc.open(path)),
            lambda: tc.write_index(path),
            lambda: list(tc.tarfile_to_samples()([{"url": str(path)}])),
        ):
            with pytest.raises(tarfile.ReadError) as caught:
                read()
            assert isinstance(caught.value, tc.FormatError)
            assert caught.value.kind == "truncated"
            assert caught.value.offset is not None


def test_kinds_of_tars(tmp_path: Path) -> None:
    content = write(tmp_path, 4, footer=False, dali_index=False, manifest=False).read_bytes()
    flipped = bytearray(content)
    flipped[100] ^= 1
    packed = gzip.compress(content)
    for kind, made in (
        ("checksum", bytes(flipped)),
        ("truncated", packed[:-20]),
        ("compressed", packed[:-8] + bytes(8)),
    ):
        shards = [{"url": "x.tar", "stream": io.BytesIO(made)}]
        with pytest.raises(tarfile.ReadError, match=r"^x\.tar: byte \d+: ") as caught:
            list(tc.tarfile_to_samples()(shards))
        assert isinstance(caught.value, tc.TarFormatError)
        assert caught.value.kind == kind
