"""Files that another program shortens, or replaces by links, while they are imported."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import wds_tensorcache as tc
from tests.importers.test_diffusion_pipe import write_dataset
from wds_tensorcache.importers.formats import choose_format
from wds_tensorcache.importers.source_folder import SourceFolder


def write_arrow(folder: Path) -> Path:
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_dict({"x": [[float(i)] * 10_000 for i in range(20)]}).save_to_disk(folder)
    (path,) = folder.glob("*.arrow")
    return Path(path)


def write_parquet(folder: Path) -> Path:
    pytest.importorskip("pyarrow")
    from tests.importers.test_fastvideo import NAMES, arrays, record, write

    write(folder / "data.parquet", [record(i, arrays(i)) for i in range(20)], *NAMES, row_group_size=5)
    return folder / "data.parquet"


def write_database(folder: Path) -> Path:
    write_dataset(folder)
    (path,) = folder.rglob("metadata.db")
    return path


@pytest.mark.parametrize("writer", [write_arrow, write_parquet])
def test_a_file_that_is_shortened(tmp_path: Path, writer: Callable[[Path], Path]) -> None:
    """A memory map would end the process."""
    path = writer(tmp_path / "in")
    folder = SourceFolder(str(tmp_path / "in"))
    source = choose_format(folder).open(folder)
    os.truncate(path, 200)
    for sample in (source.samples[0], source.samples[-1]):
        with pytest.raises(tc.FormatError, match=path.name):
            sample.load()


@pytest.mark.parametrize("writer", [write_arrow, write_parquet, write_database])
def test_a_file_that_becomes_a_link(tmp_path: Path, writer: Callable[[Path], Path]) -> None:
    """It is not followed out of the folder, neither when the samples are found nor when they are read."""
    path = writer(tmp_path / "in")
    folder = SourceFolder(str(tmp_path / "in"))
    chosen = choose_format(folder)
    source = chosen.open(folder)
    os.rename(path, tmp_path / "outside")
    path.symlink_to(tmp_path / "outside")
    found = chosen.open(folder)
    assert not found.samples
    assert any("link out of the folder" in what for what in found.bad.values())
    if writer is not write_database:  # whose samples are in other files
        with pytest.raises(tc.FormatError, match="link out of the folder"):
            source.samples[0].load()


def test_a_database_with_a_journal_mode(tmp_path: Path) -> None:
    """Its copy is read alone, and nothing is written next to either."""
    import sqlite3
    from contextlib import closing

    path = write_database(tmp_path / "in")
    with closing(sqlite3.connect(path)) as database:
        assert database.execute("PRAGMA journal_mode=WAL").fetchone() == ("wal",)
    before = {each: each.stat().st_mtime_ns for each in (tmp_path / "in").rglob("*")}
    report = tc.import_cache(tmp_path / "in", tmp_path / "out")
    assert (report.num_written, report.ok) == (5, True)
    assert {each: each.stat().st_mtime_ns for each in (tmp_path / "in").rglob("*")} == before
    assert torch.isfinite(tc.open(tmp_path / "out")[0]["latents"].load()).all()
