"""Parquet files as FastVideo's `parquet_io.py` and `record_schema.py` write them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import wds_tensorcache as tc
from tests.importers.folders import assert_left_out, imported
from tests.same import assert_same

arrow = pytest.importorskip("pyarrow", reason="pip install pyarrow")
parquet = pytest.importorskip("pyarrow.parquet", reason="pip install pyarrow")


def schema(*tensors: str) -> Any:
    fields = [("id", arrow.string())]
    for name in tensors:
        shape = (f"{name}_shape", arrow.list_(arrow.int64()))
        fields += [(f"{name}_bytes", arrow.binary()), shape, (f"{name}_dtype", arrow.string())]
    texts = [(name, arrow.string()) for name in ("file_name", "caption", "media_type")]
    numbers = [(name, arrow.int64()) for name in ("width", "height", "num_frames")]
    return arrow.schema([*fields, *texts, *numbers, ("duration_sec", arrow.float64()), ("fps", arrow.float64())])


def record(number: int, tensors: dict[str, np.ndarray[Any, Any] | None], **changes: Any) -> dict[str, Any]:
    made: dict[str, Any] = {"id": f"video_{number}"}
    for name, array in tensors.items():
        made[f"{name}_bytes"] = b"" if array is None else array.tobytes()
        made[f"{name}_shape"] = [] if array is None else list(array.shape)
        made[f"{name}_dtype"] = "" if array is None else str(array.dtype)
    made |= {"file_name": f"video_{number}", "caption": f"a café {number}", "media_type": "video", "width": 832}
    return {**made, "height": 480, "num_frames": 77, "duration_sec": 4.8, "fps": 16.0, **changes}


def write(path: Path, records: list[dict[str, Any]], *tensors: str, **options: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    table = arrow.Table.from_pylist(records, schema=schema(*tensors))
    parquet.write_table(table, str(path), compression="zstd", **options)


def arrays(number: int) -> dict[str, np.ndarray[Any, Any] | None]:
    draw = np.random.default_rng(number)
    latent = draw.normal(size=(16, 5, 4, 6)).astype(np.float32)
    picture = draw.integers(0, 255, (4, 6, 3), np.uint8) if number % 2 else None
    return {"vae_latent": latent, "text_embedding": latent[0, 0].astype(np.float16), "pil_image": picture}


NAMES = ("vae_latent", "text_embedding", "pil_image")


def test_files_of_several_workers(tmp_path: Path) -> None:
    for worker in range(2):
        records = [record(number, arrays(number)) for number in range(4 * worker, 4 * worker + 4)]
        path = tmp_path / "in" / "rank_0" / f"worker_{worker}" / "data_chunk_0.parquet"
        write(path, records, *NAMES, row_group_size=2 + worker)
    found, report = imported(tmp_path / "in", tmp_path / "out")
    assert (report.format, report.unused) == ("fastvideo", [])
    assert report.fingerprint["tensors"] == sorted(NAMES)
    assert list(found) == [f"video_{number}" for number in range(8)]
    rest = {"file_name", "caption", "media_type", "width", "height", "num_frames", "duration_sec", "fps", "id"}
    for number, value in enumerate(found.values()):
        expected = {name: torch.from_numpy(array) for name, array in arrays(number).items() if array is not None}
        assert_same(expected, {name: value[name] for name in value if name in NAMES})
        assert set(value) - set(NAMES) == rest
        assert (value["caption"], value["fps"], value["width"]) == (f"a café {number}", 16.0, 832)


def test_lists_in_other_columns(tmp_path: Path) -> None:
    """They keep their lengths and nulls."""
    ragged = arrow.array([[[1, 2], [3], [4, 5, 6]]], arrow.list_(arrow.list_(arrow.int64())))
    holes = arrow.array([[2**53 + 1, None]], arrow.list_(arrow.int64()))
    table = arrow.Table.from_pylist([record(0, arrays(0))], schema=schema(*NAMES))
    (tmp_path / "in").mkdir()
    table = table.append_column("ragged", ragged).append_column("holes", holes)
    parquet.write_table(table, str(tmp_path / "in" / "a.parquet"))
    samples, _ = imported(tmp_path / "in", tmp_path / "out")
    (value,) = samples.values()
    assert [part.tolist() for part in value["ragged"]] == [[1, 2], [3], [4, 5, 6]]
    assert value["holes"] == [2**53 + 1, None]


def test_ids_that_repeat(tmp_path: Path) -> None:
    """A resumed import refuses a new file that repeats an id: all names would change."""
    write(tmp_path / "in" / "data_chunk_0.parquet", [record(at, arrays(at)) for at in range(2)], *NAMES)
    tc.import_cache(tmp_path / "in", tmp_path / "grown")
    write(tmp_path / "in" / "data_chunk_1.parquet", [record(0, arrays(at)) for at in range(2)], *NAMES)
    with pytest.raises(tc.StaleCacheError, match="names"):
        tc.import_cache(tmp_path / "in", tmp_path / "grown", resume=True)
    found, _ = imported(tmp_path / "in", tmp_path / "out")
    assert list(found) == [f"data_chunk_{chunk}/{row:08d}" for chunk in range(2) for row in range(2)]


def test_bfloat16_and_no_elements(tmp_path: Path) -> None:
    """The schema's comment allows bfloat16, which numpy does not have."""
    latent = torch.randn(3, 5).bfloat16()
    base = record(0, {"vae_latent": latent.view(torch.int16).numpy()}, vae_latent_dtype="bfloat16")
    empty = record(1, {"vae_latent": np.zeros((0, 4), np.float32)})
    write(tmp_path / "in" / "a.parquet", [base, empty], "vae_latent")
    found, _ = imported(tmp_path / "in", tmp_path / "out")
    assert_same(latent, found["video_0"]["vae_latent"])
    assert_same(torch.zeros(0, 4), found["video_1"]["vae_latent"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"vae_latent_dtype": "load"}, "has the dtype 'load'"),
        ({"vae_latent_dtype": None}, "has the dtype None"),
        ({"vae_latent_shape": [-1, -960]}, "the shape"),
        ({"vae_latent_shape": [1 << 40, 1 << 40]}, "7,680 bytes"),
        ({"vae_latent_bytes": None}, "has 0 bytes"),
    ],
)
def test_bad_tensors(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    records = [record(0, arrays(0)), record(1, arrays(1), **change)]
    write(tmp_path / "in" / "a.parquet", records, *NAMES)
    assert_left_out(tmp_path / "in", "video_1", message, ["video_0"])


def test_other_parquet_files(tmp_path: Path) -> None:
    """A table without tensors is not recognized, and is reported next to tables with tensors."""
    (tmp_path / "in").mkdir()
    parquet.write_table(arrow.table({"x_bytes": [b"1"], "y": [1]}), str(tmp_path / "in" / "z.parquet"))
    with pytest.raises(ValueError, match="belongs to a known format"):
        tc.import_cache(tmp_path / "in", tmp_path / "none")
    write(tmp_path / "in" / "a.parquet", [record(0, arrays(0))], *NAMES)
    found, report = imported(tmp_path / "in", tmp_path / "out", on_error="skip")
    assert (list(found), [each.name for each in report.skipped]) == (["video_0"], ["z.parquet"])
    double = arrow.table({"x_bytes": [b"1"], "x_shape": [[1]], "x_dtype": ["uint8"], "x": [7]})
    parquet.write_table(double, str(tmp_path / "in" / "double.parquet"))
    _, report = imported(tmp_path / "in", tmp_path / "again", on_error="skip")
    assert "a tensor and a column called 'x'" in report.skipped[0].what


def test_without_pyarrow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The format is recognized, so that the message says what is missing."""
    write(tmp_path / "in" / "a.parquet", [record(0, arrays(0))], *NAMES)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ImportError, match=r"pip install 'pyarrow>=14\.0\.1'"):
        tc.import_cache(tmp_path / "in", tmp_path / "out")
