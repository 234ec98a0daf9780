"""EDM2's and REPA's latents, in a folder or a stored zip, as `dataset_tool.py encode` writes them."""

from __future__ import annotations

import json
import os
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import wds_tensorcache as tc
from tests.importers.folders import imported, saved
from tests.same import assert_same


def moments_of(count: int) -> list[torch.Tensor]:
    """Return means and positive deviations."""
    return [torch.cat([torch.randn(4, 6, 6), torch.rand(4, 6, 6) + 0.1]) for _ in range(count)]


def files_of(moments: list[torch.Tensor], labels: list[Any] | None) -> dict[str, bytes]:
    """Return the files that `encode` writes, in its order."""
    names = [f"{f'{number:08d}'[:5]}/img-mean-std-{number:08d}.npy" for number in range(len(moments))]
    files = {name: saved(each, numpy=True) for name, each in zip(names, moments, strict=True)}
    listed = None if labels is None else [[name, label] for name, label in zip(names, labels, strict=True)]
    return {**files, "dataset.json": json.dumps({"labels": listed}).encode()}


def write(folder: Path, files: dict[str, bytes]) -> None:
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)


def write_zip(path: Path, files: dict[str, bytes], compression: int = zipfile.ZIP_STORED) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, content in files.items():
            archive.writestr(name, content)


def name_of(number: int) -> str:
    return f"{f'{number:08d}'[:5]}/img-mean-std-{number:08d}"


@pytest.mark.parametrize("prefix", ["", "sets/imagenet/"], ids=["folder", "zip"])
def test_moments_and_labels(tmp_path: Path, prefix: str) -> None:
    moments, labels = moments_of(12), [(7 * number) % 1000 for number in range(12)]
    if prefix:
        write_zip(tmp_path / "in" / "sets" / "imagenet.zip", files_of(moments, labels))
    else:
        write(tmp_path / "in", files_of(moments, labels))
    found, report = imported(tmp_path / "in", tmp_path / "out")
    assert (report.format, report.ok, report.unused) == ("edm2", True, [])
    assert list(found) == [prefix + name_of(number) for number in range(12)]
    for number, (each, label) in enumerate(zip(moments, labels, strict=True)):
        assert_same({"moments": each, "label": torch.tensor(label)}, found[prefix + name_of(number)])


def test_labels_that_change(tmp_path: Path) -> None:
    moments = moments_of(2)
    write(tmp_path / "in", files_of(moments, None))
    tc.import_cache(tmp_path / "in", tmp_path / "out")
    write(tmp_path / "in", {"dataset.json": files_of(moments, [3, 4])["dataset.json"]})
    report = tc.import_cache(tmp_path / "in", tmp_path / "out", resume=True)
    assert (report.num_present, report.changed) == (2, [name_of(0), name_of(1)])


def test_other_labels(tmp_path: Path) -> None:
    moments = moments_of(2)
    write_zip(tmp_path / "in" / "none.zip", files_of(moments, None))
    write_zip(tmp_path / "in" / "vectors.zip", files_of(moments, [[0.5, 1.0], [2, -0.1]]))
    files = files_of(moments, None)
    del files["dataset.json"]
    write(tmp_path / "in" / "folder", files)
    found, _ = imported(tmp_path / "in", tmp_path / "out")
    assert len(found) == 6
    for number in range(2):
        for prefix in ("none", "folder"):
            assert_same({"moments": moments[number]}, found[f"{prefix}/{name_of(number)}"])
    expected = torch.from_numpy(np.array([2, -0.1]).astype(np.float32))  # as the dataset of the program does
    assert_same(expected, found[f"vectors/{name_of(1)}"]["label"])


def test_pictures_of_repa(tmp_path: Path) -> None:
    """They belong to the latents in sorted order, whatever their numbers are: the tool leaves some out."""
    moments = moments_of(3)
    write(tmp_path / "in" / "vae-sd", files_of(moments, [5, 6, 7]))
    pictures = {f"00000/img{number:08d}.png": b"png %d" % number for number in (0, 2, 3)}
    write(tmp_path / "in" / "images", {**pictures, "dataset.json": b'{"labels": null}'})
    found, report = imported(tmp_path / "in", tmp_path / "out")
    assert report.ok
    assert report.unused == ["images/dataset.json"]
    assert list(found) == [f"vae-sd/{name_of(number)}" for number in range(3)]
    with tc.open(tmp_path / "out") as cache:
        assert cache.read_members([0, 1, 2], "png") == list(pictures.values())
    os.remove(tmp_path / "in" / "images" / "00000" / "img00000002.png")
    with pytest.raises(tc.FormatError, match="2 pictures for 3 latents"):
        tc.import_cache(tmp_path / "in", tmp_path / "stopped")
    found, report = imported(tmp_path / "in", tmp_path / "without", on_error="skip")
    assert len(found) == 3
    assert [each.name for each in report.skipped] == ["images/"]


GOOD = files_of(moments_of(2), [0, 1])
FIRST = "00000/img-mean-std-00000000.npy"


def changed(name: str, content: bytes | None) -> dict[str, bytes]:
    files = {**GOOD, name: content}
    return {name: content for name, content in files.items() if content is not None}


OBJECTS = b"\x93NUMPY\x01\x00v\x00" + b"{'descr': '|O', 'fortran_order': False, 'shape': (8, 6, 6)}".ljust(117) + b"\n"
BAD: dict[str, tuple[dict[str, bytes], str, int]] = {
    "text": (changed(FIRST, b"hello, world"), "img-mean-std-00000000", 1),
    "one channel": (changed(FIRST, saved(torch.ones(1, 6, 6), numpy=True)), r"expected means and deviations", 1),
    "objects": (changed(FIRST, OBJECTS), "pickled", 1),
    "no label": (changed("dataset.json", json.dumps({"labels": [[FIRST, 3]]}).encode()), "no label", 1),
    "label without a file": (changed(FIRST, None), "labels of 1 missing files", 1),
    "no JSON": (changed("dataset.json", b"{"), "dataset.json", 2),
    "deep JSON": (changed("dataset.json", b'{"labels": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"), "dataset.json", 2),
    "a fraction": (changed("dataset.json", json.dumps({"labels": [[FIRST, 3.5]]}).encode()), "dataset.json", 2),
    "a huge label": (changed("dataset.json", json.dumps({"labels": [[FIRST, 10**30]]}).encode()), "dataset.json", 2),
}


@pytest.mark.parametrize(("files", "message", "num_found"), BAD.values(), ids=BAD)
def test_bad_files(tmp_path: Path, files: dict[str, bytes], message: str, num_found: int) -> None:
    write(tmp_path / "folder", files)
    write_zip(tmp_path / "zip" / "a.zip", files)
    for source in (tmp_path / "folder", tmp_path / "zip"):
        with pytest.raises(tc.FormatError, match=message):
            tc.import_cache(source, tmp_path / "stopped")
        found, report = imported(source, tmp_path / f"{source.name} imported", on_error="skip")
        assert (len(found), len(report.skipped)) == (num_found, 1)


def test_files_that_are_not_used(tmp_path: Path) -> None:
    write_zip(tmp_path / "in" / "a.zip", {**GOOD, "00000/img00000000.png": b"", "notes.txt": b""})
    report = tc.import_cache(tmp_path / "in", tmp_path / "out")
    assert report.notes == ["2 files in a.zip were not used, for example '00000/img00000000.png', 'notes.txt'"]


def test_bad_zips(tmp_path: Path) -> None:
    write(tmp_path / "in", GOOD)
    write_zip(tmp_path / "in" / "compressed.zip", GOOD, zipfile.ZIP_DEFLATED)
    write_zip(tmp_path / "in" / "other.zip", {"readme.txt": b"hello"})
    write_zip(tmp_path / "in" / "damaged.zip", GOOD)
    path = tmp_path / "in" / "damaged.zip"
    path.write_bytes(path.read_bytes().replace(GOOD[FIRST][-16:], bytes(16)))
    (tmp_path / "in" / "cut.zip").write_bytes(path.read_bytes()[:-30])
    with zipfile.ZipFile(tmp_path / "in" / "twice.zip", "w") as archive:
        archive.writestr(FIRST, GOOD[FIRST])
        with pytest.warns(UserWarning, match="Duplicate name"):
            archive.writestr(FIRST, GOOD[FIRST])
    found, report = imported(tmp_path / "in", tmp_path / "out", on_error="skip")
    assert set(found) == {name_of(0), name_of(1), f"damaged/{name_of(1)}"}
    skipped = {each.name: each.what for each in report.skipped}
    assert skipped.keys() == {
        "compressed/dataset.json",
        *(f"compressed/{name_of(number)}" for number in range(2)),
        "other.zip",
        "cut.zip",
        "twice.zip",
        f"damaged/{name_of(0)}",
    }
    assert "CRC" in skipped[f"damaged/{name_of(0)}"]
    assert "compressed" in skipped[f"compressed/{name_of(0)}"]
    assert "same name" in skipped["twice.zip"]


def test_a_name_that_is_empty(tmp_path: Path) -> None:
    path = tmp_path / "in" / "a.zip"
    write_zip(path, {**GOOD, "q": b""})
    raw = bytearray(path.read_bytes())
    at = raw.rindex(b"PK\x01\x02")
    raw[at + 28 : at + 32] = b"\0\0\1\0"  # the name becomes an extra field of one byte
    path.write_bytes(raw)
    with pytest.raises(tc.FormatError, match=r"a.zip: a file in the zip has no name"):
        tc.import_cache(tmp_path / "in", tmp_path / "out", format="edm2")
