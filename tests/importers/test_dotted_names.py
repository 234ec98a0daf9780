"""Names with dots before the suffix, such as `1.5.npy`: separate samples in folders, and one sample in tars, with a note."""

from __future__ import annotations

import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch

import wds_tensorcache as tc
from tests.cli.command import run
from tests.importers.folders import imported

NAMES = ["1.0", "1.5", "Track 2.0 (Clean)", "Track 2.0 (Dirty)", "plain"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder of arrays that contain their numbers."""
    (tmp_path / "folder").mkdir()
    for number, name in enumerate(NAMES):
        np.save(tmp_path / "folder" / f"{name}.npy", np.array(number))
    return tmp_path / "folder"


def pack(folder: Path, out: Path) -> None:
    out.parent.mkdir()
    with tarfile.open(out, "w") as archive:
        for path in sorted(folder.iterdir()):
            archive.add(path, path.name)


def test_tars_join_what_follows_the_first_dot(folder: Path, tmp_path: Path) -> None:
    """A key ends at the first dot, so files become one sample; the import says so, and how to keep them apart."""
    pack(folder, tmp_path / "tars" / "a.tar")
    said = run("import", tmp_path / "tars", tmp_path / "out")
    assert said.stdout.splitlines()[-1] == "3 samples read, 3 written, 0 skipped"
    (note,) = [line for line in said.stderr.splitlines() if "first dot" in line]
    assert note == (
        "members that look like separate samples, in 2 samples: for example '1.0.npy', '1.5.npy', "
        "'Track 2.0 (Clean).npy': in a WebDataset tar, a key ends at the first dot, so '1' has 2 of them; to keep them apart, "
        "extract the tars, and import the folder with --format files (format=)"
    )
    with tc.open(tmp_path / "out") as cache:
        assert [tc.original_name(key) for key in list(cache.keys())] == ["1", "Track 2", "plain"]
        assert list(cache["1"]) == ["0", "5"]


@pytest.mark.parametrize(
    "names", [["a.latent", "a.text", "b.latent", "b.text"], ["a", "b"], ["0001.latent", "0002.latent"]]
)
def test_members_by_name_have_no_note(tmp_path: Path, names: list[str]) -> None:
    (tmp_path / "folder").mkdir()
    for name in names:
        torch.save(torch.ones(2), tmp_path / "folder" / f"{name}.pth")
        (tmp_path / "folder" / f"{name.partition('.')[0]}.json").write_text("{}")
    pack(tmp_path / "folder", tmp_path / "tars" / "a.tar")
    _, report = imported(tmp_path / "tars", tmp_path / "out")
    assert report.num_written == 2
    assert report.notes == []
