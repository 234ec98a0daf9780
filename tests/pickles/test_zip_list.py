"""The fast parser of lists of zips returns what `zipfile` does, or leaves the file to it."""

from __future__ import annotations

import io
import random
import zipfile
from typing import Any

import numpy as np
import pytest
import torch

from wds_tensorcache.integrations.pickles.zip_list import ZippedFile, list_zipped, parse_zip_list


def npz(*, compressed: bool = False, count: int = 3) -> bytes:
    stream = io.BytesIO()
    arrays = {f"array {number}": np.arange(number) for number in range(count)}
    (np.savez_compressed if compressed else np.savez)(stream, **arrays)  # type: ignore[arg-type]
    return stream.getvalue()


def saved(value: Any) -> bytes:
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


def with_comment() -> bytes:
    stream = io.BytesIO(npz())
    with zipfile.ZipFile(stream, "a") as archive:
        archive.comment = b"PK\5\6" + bytes(40)
    return stream.getvalue()


def with_long_name() -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        archive.writestr("é" * 300, b"x")
        archive.writestr("a/b.npy", b"y" * 5000)
    return stream.getvalue()


ZIPS = [
    npz(),
    npz(compressed=True),
    npz(count=200),
    saved({"x": torch.ones(3)}),
    saved([]),
    with_comment(),
    with_long_name(),
]


def listed(raw: bytes) -> list[ZippedFile]:
    with zipfile.ZipFile(io.BytesIO(raw)) as archive:
        return [ZippedFile(*(getattr(file, name) for name in ZippedFile._fields)) for file in archive.infolist()]


@pytest.mark.parametrize("raw", ZIPS, ids=lambda raw: f"{len(raw)}")
def test_lists(raw: bytes) -> None:
    expected = listed(raw)
    for source in (memoryview(raw), io.BytesIO(raw)):
        found = list_zipped(source, len(raw))
        assert [ZippedFile(*(getattr(file, name) for name in ZippedFile._fields)) for file in found] == expected
    assert parse_zip_list(raw[-4096:], len(raw)) in (None, expected)


def test_not_a_zip() -> None:
    for raw in (b"", b"PK", b"hello" * 10):
        for source in (memoryview(raw), io.BytesIO(raw)):
            with pytest.raises(zipfile.BadZipFile, match="not a zip file"):
                list_zipped(source, len(raw))


def test_ordinary_zips_need_no_zipfile() -> None:
    assert all(parse_zip_list(raw, len(raw)) is not None for raw in ZIPS[:5])


def test_changed_zips() -> None:
    """A list is only returned where `zipfile` returns the same."""
    chance, num_parsed = random.Random(1), 0
    for _ in range(20_000):
        raw = bytearray(chance.choice(ZIPS))
        for _ in range(chance.randint(1, 3)):
            at = len(raw) - 1 - min(int(chance.expovariate(1 / 60)), len(raw) - 1)  # most in the list
            raw[at] = chance.choice([0, 1, 255, chance.randrange(256)])
        if chance.random() < 0.2:
            raw = raw[chance.randint(0, 9) :] if chance.random() < 0.5 else bytearray(5) + raw
        found = parse_zip_list(bytes(raw), len(raw))
        if found is None:
            continue
        num_parsed += 1
        try:
            expected = listed(bytes(raw))
        except zipfile.BadZipFile:
            pytest.fail(f"zipfile refuses {bytes(raw)[-200:]!r}")
        assert found == expected
    assert num_parsed > 1000
