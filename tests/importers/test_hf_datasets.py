"""Folders that `datasets` has saved."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import wds_tensorcache as tc
from tests.importers.chunked_samples import JPEG, PNG
from tests.importers.folders import imported
from tests.same import assert_same

datasets = pytest.importorskip("datasets", reason="pip install datasets")
arrow = pytest.importorskip("pyarrow", reason="pip install pyarrow")
datasets.disable_progress_bars()


def features() -> Any:
    value = datasets.Value
    return datasets.Features(
        {
            "latent": datasets.Array3D((4, 2, 2), "float32"),
            "states": datasets.Array2D((None, 3), "float16"),
            "tokens": datasets.Sequence(value("int64")),
            "nested": datasets.Sequence(datasets.Sequence(value("float32"))),
            "ragged": datasets.Sequence(datasets.Sequence(value("uint8"))),
            "pairs": datasets.Sequence(datasets.Sequence(value("float32"), length=2)),
            "gaps": datasets.Sequence(value("int32")),
            "holes": datasets.Sequence(datasets.Sequence(value("int32"))),
            "raw": value("binary"),
            "label": datasets.ClassLabel(names=["cat", "dog"]),
            "caption": value("string"),
            "captions": datasets.Sequence(value("string")),
            "score": value("float32"),
            "size": {"width": value("int32"), "note": value("string"), "box": datasets.Sequence(value("int16"))},
            "parts": [{"name": value("string"), "at": datasets.Sequence(value("float64"))}],
            "photo": datasets.Image(),
            "frames": datasets.Sequence(datasets.Image()),
        }
    )


def row(number: int) -> dict[str, Any]:
    """Return the values of a row as they are after the import, without pictures."""
    return {
        "latent": torch.full((4, 2, 2), number / 3),
        "states": torch.full((number, 3), number).half(),
        "tokens": torch.arange(number),
        "nested": torch.full((2, 3 + number), number / 7),  # all lists of one row are equally long
        "ragged": [torch.arange(2, dtype=torch.uint8), torch.arange(number + 1, dtype=torch.uint8)],
        "pairs": torch.full((number, 2), number / 5),
        "gaps": [1, None] if number == 1 else [1, 2],
        "holes": [[1, 2], None if number == 1 else [3, 4]],
        "raw": torch.arange(number, dtype=torch.uint8),
        "label": number % 2,
        "caption": f"a café {number}" if number else None,
        "captions": ["a", "b"][:number],
        "score": number / 4,
        "size": {"width": number, "note": None, "box": torch.arange(4, dtype=torch.int16)},
        "parts": [{"name": "x", "at": torch.arange(2, dtype=torch.float64)} for _ in range(number)],
    }


def plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, dict):
        return {name: plain(item) for name, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, list) else value


def make(count: int, start: int = 0) -> Any:
    rows = []
    for number in range(start, start + count):
        pictures = [{"bytes": JPEG, "path": "a.jpeg"}, {"bytes": PNG, "path": None}]
        raw = bytes(range(number))
        rows.append({**plain(row(number)), "raw": raw, "photo": pictures[number % 2], "frames": pictures})
    return datasets.Dataset.from_list(rows, features=features())


def test_every_kind_of_column(tmp_path: Path) -> None:
    """The lists of a column have one form, also if those of some rows, or of whole files, would be tensors."""
    make(4).save_to_disk(tmp_path / "in", num_shards=4)
    found, report = imported(tmp_path / "in", tmp_path / "out")
    assert (report.format, report.unused) == ("hf-datasets", [])
    assert report.fingerprint["features"]["label"]["names"] == ["cat", "dog"]
    assert list(found) == [f"{number:08d}" for number in range(4)]
    for number, value in enumerate(found.values()):
        assert_same(row(number), value)
    with tc.open(tmp_path / "out") as cache:
        assert [bytes(cache.read_members([at], "photo.jpeg")[0]) for at in (0, 2)] == [JPEG] * 2
        assert [bytes(cache.read_members([at], "photo.png")[0]) for at in (1, 3)] == [PNG] * 2
        assert bytes(cache.read_members([3], "frames.0.jpeg")[0]) == JPEG
        assert bytes(cache.read_members([3], "frames.1.png")[0]) == PNG


def test_splits_and_selected_rows(tmp_path: Path) -> None:
    every = make(5)
    parts = {"train": every, "test": every.select([4, 1]).rename_column("score", "points")}
    datasets.DatasetDict(parts).save_to_disk(tmp_path / "in")
    found, report = imported(tmp_path / "in", tmp_path / "out")
    assert list(found) == [*(f"test/{at:08d}" for at in range(2)), *(f"train/{at:08d}" for at in range(5))]
    assert [found[f"test/{at:08d}"]["points"] for at in range(2)] == [1.0, 0.25]
    assert report.fingerprint["features"].keys() == {"train", "test"}
    assert report.unused == ["dataset_dict.json"]


def test_names_of_columns_with_pictures(tmp_path: Path) -> None:
    """They become names of members, which have fewer characters."""
    pictures = [{"bytes": PNG, "path": None}] * 2
    names = ["my photo/1", "_über"]
    columns = datasets.Features({name: datasets.Image() for name in names})
    datasets.Dataset.from_dict(dict.fromkeys(names, pictures), columns).save_to_disk(tmp_path / "in")
    found, _ = imported(tmp_path / "in", tmp_path / "out")
    assert list(found.values()) == [{}, {}]
    with tc.open(tmp_path / "out") as cache:
        assert [bytes(cache.read_members([0], suffix)[0]) for suffix in ("my_photo_1.png", "ber.png")] == [PNG] * 2
    columns = datasets.Features({name: datasets.Image() for name in ("a b", "a_b")})
    datasets.Dataset.from_dict(dict.fromkeys(columns, pictures), columns).save_to_disk(tmp_path / "twice")
    with pytest.raises(tc.FormatError, match="two media are named 'a_b.png'"):
        tc.import_cache(tmp_path / "twice", tmp_path / "more")


def test_times_that_python_cannot_hold(tmp_path: Path) -> None:
    times = arrow.array([1_000] * 5 + [1_001] + [1_000] * 4, arrow.time64("ns"))
    datasets.Dataset(arrow.table({"time": times})).save_to_disk(tmp_path / "in", num_shards=4)
    with pytest.raises(tc.FormatError, match="has the time 1001 ns, more precise than datetime.time"):
        tc.import_cache(tmp_path / "in", tmp_path / "out")
    found, report = imported(tmp_path / "in", tmp_path / "out", on_error="skip")
    assert (len(found), report.skipped[0].files) == (9, ("data-00001-of-00004.arrow", "state.json"))


def test_lists_in_structs_and_arrays_in_lists(tmp_path: Path) -> None:
    """They keep their lengths and nulls, as other lists do."""
    numbers = datasets.Sequence(datasets.Value("int64"))
    parts = [{"ids": numbers, "polygons": datasets.Sequence(numbers)}]
    columns = datasets.Features({"parts": parts, "grids": datasets.Sequence(datasets.Array2D((1, 2), "int64"))})
    sample = {
        "parts": [{"ids": [2**53 + 1, None], "polygons": [[1, 2], [3], [4, 5, 6]]}],
        "grids": [[[2**53 + 1, None]]],
    }
    datasets.Dataset.from_list([sample], columns).save_to_disk(tmp_path / "in")
    samples, _ = imported(tmp_path / "in", tmp_path / "out")
    (value,) = samples.values()
    assert plain(value) == sample


def test_pictures_that_are_null(tmp_path: Path) -> None:
    """The report names the rows without a picture, and not those with one."""
    columns = datasets.Features({"image": datasets.Image()})
    rows = [{"bytes": PNG, "path": None}, None, {"bytes": PNG, "path": None}]
    datasets.Dataset.from_dict({"image": rows}, columns).save_to_disk(tmp_path / "in")
    found, report = imported(tmp_path / "in", tmp_path / "out")
    assert list(found.values()) == [{}, {"image": None}, {}]
    assert report.lacking == {".image.png": (1, "00000001")}


def test_an_external_picture(tmp_path: Path) -> None:
    make(2).save_to_disk(tmp_path / "in")
    (path,) = (tmp_path / "in").glob("*.arrow")
    table = datasets.Dataset.from_file(str(path)).data.table
    pictures = arrow.array([{"bytes": None, "path": "/photos/a.jpg"}] * 2, table.schema.field("photo").type)
    table = table.set_column(table.schema.get_field_index("photo"), table.schema.field("photo"), pictures)
    with arrow.ipc.new_stream(str(tmp_path / "new"), table.schema) as stream:
        stream.write_table(table)
    os.replace(tmp_path / "new", path)  # the file is still mapped
    with pytest.raises(tc.FormatError, match=r"/photos/a.jpg.*embed"):
        tc.import_cache(tmp_path / "in", tmp_path / "out")


def test_folders_that_cannot_be_read(tmp_path: Path) -> None:
    """Each is reported; the others are imported."""
    folder = tmp_path / "in"
    make(2).save_to_disk(folder / "good")
    for name in "abcd":
        make(1).save_to_disk(folder / name)
    outside = {"_data_files": [{"filename": "../../good/data-00000-of-00001.arrow"}]}
    state = folder / "a" / "state.json"
    state.write_text(json.dumps({**json.loads(state.read_text()), **outside}))
    (folder / "b" / "state.json").write_text("[" * 100_000)
    (first,) = (folder / "c").glob("*.arrow")
    first.write_bytes(first.read_bytes()[:300])
    (folder / "d").rename(folder / "d::good")
    found, report = imported(folder, tmp_path / "out", on_error="skip")
    assert list(found) == ["good/00000000", "good/00000001"]
    reasons = {each.name: each.what for each in report.skipped}
    assert reasons.keys() == {f"{name}/state.json" for name in ("a", "b", "c", "d::good")}
    assert "which is missing" in reasons["a/state.json"]
    assert "nested too deeply" in reasons["b/state.json"]
    assert "a path with '::'" in reasons["d::good/state.json"]


@pytest.mark.parametrize(("name", "package"), [("datasets", "datasets"), ("pyarrow", "pyarrow>=14.0.1")])
def test_without_the_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, package: str) -> None:
    make(1).save_to_disk(tmp_path / "in")
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError, match=f"pip install '{package}'"):
        tc.import_cache(tmp_path / "in", tmp_path / "out")


def test_an_old_pyarrow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would run pickles in the files."""
    make(1).save_to_disk(tmp_path / "in")
    monkeypatch.setattr(arrow, "__version__", "14.0.0")
    with pytest.raises(ImportError, match=r"may run code in files: pip install 'pyarrow>=14\.0\.1'"):
        tc.import_cache(tmp_path / "in", tmp_path / "out")
