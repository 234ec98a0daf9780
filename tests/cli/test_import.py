"""`tensorcache import`: options, messages, exit statuses and JSON; merging imports of several folders."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import wds_tensorcache as tc
from tests.cli.command import json_of, run


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder of two good files and a bad one."""
    (tmp_path / "in").mkdir()
    np.save(tmp_path / "in" / "a.npy", np.arange(3.0))
    torch.save({"x": torch.ones(2)}, tmp_path / "in" / "b.pt")
    (tmp_path / "in" / "c.npy").write_bytes(b"no array")
    return tmp_path / "in"


def test_bad_files(folder: Path, tmp_path: Path) -> None:
    stopped = run("import", folder, tmp_path / "out", status=1)
    assert "c.npy" in stopped.stderr
    assert stopped.stdout == ""
    skipped = run("import", folder, tmp_path / "out", "--on-error", "skip", "--resume", status=1)
    assert "skipped c" in skipped.stderr
    assert skipped.stdout.splitlines()[-1] == "3 samples read, 2 written, 1 skipped"
    found = json_of("import", folder, tmp_path / "again", "--on-error", "skip", status=1)
    assert (found["num_read"], found["num_written"], found["num_skipped"], found["num_bad_files"]) == (3, 2, 1, 0)
    assert [each["files"] for each in found["skipped"]] == [["c.npy"]]
    assert found["out"] == str(tmp_path / "again")


def test_links_are_counted(folder: Path, tmp_path: Path) -> None:
    (folder / "c.npy").unlink()
    (folder / "d.npy").symlink_to("/etc/passwd")
    said = run("import", folder, tmp_path / "out", "--on-error", "skip", status=1).stdout
    assert said.splitlines()[-1] == "2 samples read, 2 written, 0 skipped; 1 bad file left out"


def test_formats() -> None:
    assert "kohya" in run("import", "--list-formats").stdout


def test_wrong_usage(folder: Path, tmp_path: Path) -> None:
    assert "expected a source and the folder OUT" in run("import", folder, status=2).stderr
    assert "'kohya'" in run("import", folder, tmp_path / "out", "--format", "koya", status=2).stderr
    assert "expected TENSOR=MASK" in run("import", folder, tmp_path / "out", "--trim", "x", status=2).stderr
    twice = run("import", folder, tmp_path / "out", "--fingerprint", "vae=a", "--fingerprint", "vae=b", status=2)
    assert "'vae=b', expected NAME=VALUE, once for each name" in twice.stderr
    (folder / "c.npy").unlink()
    run("import", folder, tmp_path / "out")
    assert "--resume" in run("import", folder, tmp_path / "out", status=2).stderr


def test_fingerprints_are_json_or_text(folder: Path, tmp_path: Path) -> None:
    (folder / "c.npy").unlink()
    texts = {"1.10": "1.10", "1e3": "1e3", "1.5": 1.5, "3": 3, "007": "007", "true": True, "[1, 2]": [1, 2]}
    texts |= {"NaN": "NaN", "v2": "v2"}
    options = [f"--fingerprint=_{i}={text}" for i, text in enumerate(texts)]
    run("import", folder, tmp_path / "out", *options)
    with tc.open(tmp_path / "out") as cache:
        values = [cache.fingerprint[f"_{i}"] for i in range(len(texts))]
    assert list(map(repr, values)) == list(map(repr, texts.values()))


def test_imports_of_several_folders_are_one_cache(tmp_path: Path) -> None:
    for name in ("a", "b", "c"):
        (tmp_path / name).mkdir()
        np.save(tmp_path / name / f"{name}.npy", np.zeros(3))
        run("import", tmp_path / name, tmp_path / f"in-{name}", "--fingerprint", "v=1")
    run("merge", tmp_path / "in-a", tmp_path / "in-b", tmp_path / "ab")
    run("merge", tmp_path / "ab", tmp_path / "in-c", tmp_path / "abc")
    with tc.open(tmp_path / "abc", expect={"v": 1, "format": "files"}) as cache:
        assert list(cache.keys()) == ["a", "b", "c"]
        assert cache.num_shards == 1
        assert cache.fingerprint["source"] == [str(tmp_path / name) for name in "abc"]
    run("reshard", tmp_path / "abc", tmp_path / "again", "--max-samples", "2")
    with tc.open(tmp_path / "again") as cache:
        assert len(cache.fingerprint["source"]) == 3
    run("import", tmp_path / "c", tmp_path / "other", "--fingerprint", "v=2")
    said = run("merge", tmp_path / "ab", tmp_path / "other", tmp_path / "no", status=1).stderr
    assert "expected v=1, but the cache was made with 2" in said


def test_entries_that_some_samples_lack_are_reported(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    for number in range(5):
        torch.save({"x": torch.ones(2)} | ({"y": 1} if number < 2 else {}), tmp_path / "in" / f"{number}.pt")
        if number != 4:
            (tmp_path / "in" / f"{number}.txt").write_text("a photo")
    said = run("import", tmp_path / "in", tmp_path / "out")
    missing = ["without '.txt': 1 of 5 samples, for example 4", "without 'y': 3 of 5 samples, for example 2"]
    assert said.stderr.splitlines() == missing
    assert json_of("import", tmp_path / "in", tmp_path / "again")["lacking"] == {".txt": [1, "4"], "y": [3, "2"]}


def test_a_folder_that_changes(folder: Path, tmp_path: Path) -> None:
    """Resuming adds new files; it tells about changed and deleted ones, whose old samples stay."""
    (folder / "c.npy").unlink()
    run("import", folder, tmp_path / "out")
    np.save(folder / "d.npy", np.zeros(3))
    grown = run("import", folder, tmp_path / "out", "--resume")
    assert grown.stderr == ""
    assert grown.stdout.splitlines()[-1] == "3 samples read, 1 written, 0 skipped, 2 were there"
    np.save(folder / "a.npy", np.zeros(3))
    (folder / "b.pt").unlink()
    lines = run("import", folder, tmp_path / "out", "--resume").stderr.splitlines()
    assert lines[0] == "files that have changed since their shards were written: 1 sample, for example a"
    assert lines[1] == f"no longer in {folder}: 1 sample of the shards"
    assert "new folder" in lines[2]
    found = json_of("import", folder, tmp_path / "out", "--resume")
    assert (found["changed"], found["num_gone"]) == (["a"], 1)


def test_tensors_without_memory(tmp_path: Path) -> None:
    """Trusted files may have tensors that no cache can store."""
    (tmp_path / "in").mkdir()
    torch.save({"x": torch.ones(2, device="meta")}, tmp_path / "in" / "meta.pt")
    torch.save({"x": torch.ones(2).to_sparse()}, tmp_path / "in" / "sparse.pt")
    torch.save({"x": torch.ones(2)}, tmp_path / "in" / "good.pt")
    said = run("import", tmp_path / "in", tmp_path / "out", "--on-error", "skip", "--trust", status=1)
    assert [line.split(":")[0] for line in said.stderr.splitlines()] == ["skipped meta", "skipped sparse"]
