"""Files that another program shortens, or replaces by links, while they are imported."""

from __future__ import annotations

import os
from pathlib import Path

import torch

import wds_tensorcache as tc
from tests.importers.test_diffusion_pipe import write_dataset
from wds_tensorcache.importers.formats import choose_format
from wds_tensorcache.importers.source_folder import SourceFolder


def write_database(folder: Path) -> Path:
    write_dataset(folder)
    (path,) = folder.rglob("metadata.db")
    return path


def test_a_database_that_becomes_a_link(tmp_path: Path) -> None:
    """It is not followed out of the folder."""
    path = write_database(tmp_path / "in")
    folder = SourceFolder(str(tmp_path / "in"))
    chosen = choose_format(folder)
    os.rename(path, tmp_path / "outside")
    path.symlink_to(tmp_path / "outside")
    found = chosen.open(folder)
    assert not found.samples
    assert any("link out of the folder" in what for what in found.bad.values())


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
