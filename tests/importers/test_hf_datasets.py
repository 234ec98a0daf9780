"""Folders that `datasets` has saved."""

from __future__ import annotations

import json
import os
import struct
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import wds_tensorcache as tc
from tests.cli.command import run
from tests.importers.chunked_samples import JPEG, PNG
from tests.importers.damaged import count_errors, load_damaged
from tests.importers.folders import imported
from tests.same import assert_same
from wds_tensorcache.importers.import_cache import import_cache

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
            "mask": datasets.Sequence(value("bool")),
            "nested": datasets.Sequence(datasets.Sequence(value("float32"))),
            "ragged": datasets.Sequence(datasets.Sequence(value("uint8"))),
            "gaps": datasets.Sequence(value("int32")),
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
        "mask": torch.tensor([True] * number + [False]),
        "nested": torch.full((2, 3 + number), number / 7),  # all lists of one row are equally long
        "ragged": [torch.arange(2, dtype=torch.uint8), torch.arange(number + 1, dtype=torch.uint8)],
        "gaps": [1, None] if number == 1 else [1, 2],
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
    make(4).save_to_disk(tmp_path / "in")
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


def test_lists_have_one_form_in_all_rows(tmp_path: Path) -> None:
    """Also if the lists of some rows, or of whole files, would be tensors."""
    make(4).save_to_disk(tmp_path / "in", num_shards=4)
    found, _ = imported(tmp_path / "in", tmp_path / "out")
    assert {type(value["ragged"]) for value in found.values()} == {list}
    assert {type(value["gaps"]) for value in found.values()} == {list}
    assert {type(value["nested"]) for value in found.values()} == {torch.Tensor}


def test_splits_and_selected_rows(tmp_path: Path) -> None:
    every = make(5)
    parts = {"train": every, "test": every.select([4, 1]).rename_column("score", "points")}
    datasets.DatasetDict(parts).save_to_disk(tmp_path / "in")
    found, report = imported(tmp_path / "in", tmp_path / "out")
    assert list(found) == [*(f"test/{at:08d}" for at in range(2)), *(f"train/{at:08d}" for at in range(5))]
    assert [found[f"test/{at:08d}"]["points"] for at in range(2)] == [1.0, 0.25]
    assert report.fingerprint["features"].keys() == {"train", "test"}
    assert report.unused == ["dataset_dict.json"]


def test_latents_in_nested_lists(tmp_path: Path) -> None:
    """As `map` stores arrays if no features are given."""
    latents = np.random.default_rng(0).normal(size=(3, 4, 8, 8)).astype(np.float32)
    dataset = datasets.Dataset.from_dict({"latent": list(latents), "id": ["a", "b", "c"]})
    dataset.save_to_disk(tmp_path / "in")
    found, _ = imported(tmp_path / "in", tmp_path / "out")
    assert_same(list(torch.from_numpy(latents)), [value["latent"] for value in found.values()])


def test_files_that_pyarrow_wrote_as_datasets_does(tmp_path: Path) -> None:
    """Without the extension types of `datasets`, in many batches."""
    (tmp_path / "in").mkdir()
    table = arrow.table({"x": arrow.array([[1.0], None, [2.0, 3.0]], arrow.list_(arrow.float32())), "i": [1, 2, 3]})
    write_stream(tmp_path / "in" / "data.arrow", table)
    state = {"_data_files": [{"filename": "data.arrow"}]}
    (tmp_path / "in" / "state.json").write_text(json.dumps(state))
    (tmp_path / "in" / "dataset_info.json").write_text("{}")
    found, _ = imported(tmp_path / "in", tmp_path / "out")
    expected = [{"x": torch.tensor([1.0]), "i": 1}, {"x": None, "i": 2}, {"x": torch.tensor([2.0, 3.0]), "i": 3}]
    assert_same(expected, list(found.values()))


def write_stream(path: Path, table: Any, **options: Any) -> None:
    with arrow.ipc.new_stream(str(path), table.schema, options=arrow.ipc.IpcWriteOptions(**options)) as stream:
        for batch in table.to_batches(max_chunksize=1):
            stream.write_batch(batch)


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
        import_cache(tmp_path / "twice", tmp_path / "more")


def test_an_external_picture(tmp_path: Path) -> None:
    make(2).save_to_disk(tmp_path / "in")
    (path,) = (tmp_path / "in").glob("*.arrow")
    table = datasets.Dataset.from_file(str(path)).data.table
    pictures = arrow.array([{"bytes": None, "path": "/photos/a.jpg"}] * 2, table.schema.field("photo").type)
    table = table.set_column(table.schema.get_field_index("photo"), table.schema.field("photo"), pictures)
    write_stream(tmp_path / "new", table)
    os.replace(tmp_path / "new", path)  # the file is still mapped
    with pytest.raises(tc.FormatError, match=r"/photos/a.jpg.*embed"):
        import_cache(tmp_path / "in", tmp_path / "out")


@pytest.mark.parametrize("kind", ["compressed", "dictionary", "text", "cut"])
def test_files_that_datasets_does_not_write(tmp_path: Path, kind: str) -> None:
    make(2).save_to_disk(tmp_path / "in", num_shards=2)
    first, *_ = sorted((tmp_path / "in").glob("*.arrow"))
    table = arrow.table({"x": ["a" * 1000] * 1000})
    if kind == "compressed":
        write_stream(first, table, compression="zstd")
    elif kind == "dictionary":
        write_stream(first, arrow.table({"x": arrow.array(["a", "b"]).dictionary_encode()}))
    else:
        first.write_bytes(b"hello, world" if kind == "text" else first.read_bytes()[:300])
    found, report = imported(tmp_path / "in", tmp_path / "out", on_error="skip")
    assert len(found) == 1
    assert [each.name for each in report.skipped] == [first.name]


def test_bad_states(tmp_path: Path) -> None:
    make(1).save_to_disk(tmp_path / "in")
    state = json.loads((tmp_path / "in" / "state.json").read_text())
    for change, message in (
        ({"_data_files": [{"filename": "../data.arrow"}]}, "is missing"),
        ({"_data_files": None}, "is not a state"),
        ({"_indices_data_files": [{"filename": "indices.arrow"}]}, "old release"),
    ):
        (tmp_path / "in" / "state.json").write_text(json.dumps({**state, **change}))
        with pytest.raises(ValueError, match=message):
            import_cache(tmp_path / "in", tmp_path / "out")
    (tmp_path / "in" / "state.json").write_text("[" * 100_000)
    with pytest.raises(ValueError, match="is not JSON"):
        import_cache(tmp_path / "in", tmp_path / "out")


def test_strange_features(tmp_path: Path) -> None:
    """They become texts in the fingerprint, and describe no column."""
    make(1).save_to_disk(tmp_path / "in")
    info = tmp_path / "in" / "dataset_info.json"
    content = json.loads(info.read_text())
    for number, strange in enumerate((float("nan"), float("inf"), ["Image"], {"a": None})):
        content["features"]["size"] = {"_type": strange, "width": strange}
        info.write_text(json.dumps(content))
        found, report = imported(tmp_path / "in", tmp_path / str(number))
        assert report.ok
        assert found["00000000"]["size"]["width"] == row(0)["size"]["width"]
    info.write_text(info.read_text().replace("null", "1e999"))
    assert imported(tmp_path / "in", tmp_path / "large")[1].fingerprint["features"]["size"]["width"] == {"a": "inf"}


def test_damage_anywhere(tmp_path: Path) -> None:
    make(5).save_to_disk(tmp_path / "in")
    assert count_errors(tmp_path / "in", "hf-datasets") == (5, 0)
    assert load_damaged(tmp_path / "in", tmp_path / "copy", "hf-datasets", 150) > 20


def test_without_pyarrow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(1).save_to_disk(tmp_path / "in")
    monkeypatch.setattr(arrow, "__version__", "14.0.0")
    with pytest.raises(ImportError, match=r"pip install 'pyarrow>=14\.0\.1'"):
        import_cache(tmp_path / "in", tmp_path / "out")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ImportError, match=r"pip install 'pyarrow>=14\.0\.1'"):
        import_cache(tmp_path / "in", tmp_path / "out")


@pytest.mark.parametrize("kind", [0, 2, 3, 5, 127])
def test_a_first_message_that_is_no_schema(tmp_path: Path, kind: int) -> None:
    """pyarrow does not verify its header, so this runs in another process: a fault would end it."""
    make(1).save_to_disk(tmp_path / "in")
    (path,) = (tmp_path / "in").glob("*.arrow")
    raw = bytearray(path.read_bytes())
    root = 8 + struct.unpack_from("<I", raw, 8)[0]
    fields = root - struct.unpack_from("<i", raw, root)[0]
    type_at, header_at = (root + struct.unpack_from("<H", raw, fields + 4 + 2 * number)[0] for number in (1, 2))
    assert raw[type_at] == 1
    raw[type_at] = kind
    struct.pack_into("<i", raw, header_at + struct.unpack_from("<I", raw, header_at)[0], -0x70000000)
    path.write_bytes(raw)
    said = run("import", tmp_path / "in", tmp_path / "out", status=1)
    assert path.name in said.stderr


def test_rows_without_bytes(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    table = arrow.table({"x": arrow.nulls(10_000_000)})
    with arrow.ipc.new_stream(str(tmp_path / "in" / "a.arrow"), table.schema) as stream:
        stream.write_table(table)
    (tmp_path / "in" / "state.json").write_text('{"_data_files": [{"filename": "a.arrow"}]}')
    (tmp_path / "in" / "dataset_info.json").write_text('{"features": {}}')
    with pytest.raises(tc.FormatError, match="a batch of 10,000,000 rows"):
        import_cache(tmp_path / "in", tmp_path / "out")


def test_a_file_that_is_listed_twice(tmp_path: Path) -> None:
    make(1).save_to_disk(tmp_path / "in")
    path = tmp_path / "in" / "state.json"
    state = json.loads(path.read_text())
    path.write_text(json.dumps({**state, "_data_files": state["_data_files"] * 1000}))
    with pytest.raises(tc.FormatError, match="lists it 1,000 times"):
        import_cache(tmp_path / "in", tmp_path / "out")
