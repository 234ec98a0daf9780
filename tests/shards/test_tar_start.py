"""A pipeline resumes in the middle of tars of every kind: it begins to read at the first header of a member."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

import pytest

import wds_tensorcache as tc


def tar_of(kind: int, *, pax_headers: dict[str, str] | None = None) -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w", format=kind, pax_headers=pax_headers) as tar:
        for i in range(12):
            info = tarfile.TarInfo(f"{'é' * (30 * (i % 3))}{'long/' * (20 * (i % 2))}{i}.txt")
            info.size = 700 * i
            tar.addfile(info, io.BytesIO(bytes([i]) * info.size))
            other = tarfile.TarInfo(f"other{i}")
            other.type, other.linkname = (tarfile.SYMTYPE, "0.txt") if i % 2 else (tarfile.DIRTYPE, "")
            tar.addfile(other)
    return stream.getvalue()


def keys_and_texts(samples: object) -> list[tuple[str, bytes]]:
    return [(sample["__key__"], sample["txt"]) for sample in samples]  # type: ignore[attr-defined]


@pytest.mark.parametrize("comment", [{}, {"comment": "of all members"}], ids=["", "with a global header"])
@pytest.mark.parametrize("kind", [tarfile.PAX_FORMAT, tarfile.GNU_FORMAT], ids=["pax", "gnu"])
def test_every_start(tmp_path: Path, kind: int, comment: dict[str, str]) -> None:
    path = tmp_path / "x.tar"
    path.write_bytes(tar_of(kind, pax_headers=comment))
    whole = keys_and_texts(tc.ResumablePipeline([path]))
    assert len(whole) == 12
    for at in range(12):
        first, second = tc.ResumablePipeline([path]), tc.ResumablePipeline([path])
        samples = iter(first)
        assert keys_and_texts(next(samples) for _ in range(at)) == whole[:at]
        second.load_state_dict(first.state_dict())
        assert keys_and_texts(second) == whole[at:]


def test_offsets_in_errors_count_from_the_beginning_of_the_tar(tmp_path: Path) -> None:
    path = tmp_path / "x.tar"
    path.write_bytes(tar_of(tarfile.GNU_FORMAT)[:20_000])
    first, second = tc.ResumablePipeline([path]), tc.ResumablePipeline([path])
    samples = iter(first)
    for _ in range(3):
        next(samples)
    second.load_state_dict(first.state_dict())
    with pytest.raises(tc.FormatError) as error:
        list(second)
    assert error.value.offset is not None
    assert error.value.offset > 10_000
