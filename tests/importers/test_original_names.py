"""Names that keys cannot hold: the index keeps them, and the import prints how many there are."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

import wds_tensorcache as tc
from tests.cli.command import json_of, run
from tests.shards.test_keys import names_in

LONG = "Фотографии/" + "лето на даче " * 6 + "(2)"


def save(folder: Path, names: list[str]) -> Path:
    for number, name in enumerate(names):
        path = folder / f"{name}.npy"
        path.parent.mkdir(parents=True, exist_ok=True)
        np.save(path, np.array(number))
    return folder


def test_the_index_keeps_names(tmp_path: Path) -> None:
    names = sorted(["ф" * 14, "写" * 40, LONG, *(f"Фото {i} " + "я" * 30 for i in range(130))])
    said = run("import", save(tmp_path / "in", names), tmp_path / "out", "--workers", 2)  # several shards
    assert "132 of 133 keys have a hash in place of a name" in said.stderr
    assert "cache.original_name(key) returns the name" in said.stderr
    assert names_in(tmp_path / "out") == names
    with tc.open(tmp_path / "out") as cache:
        assert [int(cache[tc.safe_key(name)]) for name in (names[0], LONG)] == [0, names.index(LONG)]
    found = json_of("import", tmp_path / "in", tmp_path / "out", "--resume")
    assert (found["num_present"], found["num_hashed"]) == (133, 0)


def test_keys_of_earlier_versions_are_found(tmp_path: Path) -> None:
    """Earlier versions hashed names whose keys have more than 80 characters."""
    folder = save(tmp_path / "in", ["ф" * 14])
    said = run("import", folder, tmp_path / "new")
    assert "hash" not in said.stderr + said.stdout
    made = tc.open(tmp_path / "new").fingerprint
    with tc.ShardWriter(tmp_path / "out", fingerprint=made) as sink:
        sink.write("%D1%84%D1%84%D1%84%D1%84%D1%84%D1%84%D%-477429253d40702cdbd2c935c227bc5ead08eeff", torch.tensor(0))
    report = tc.import_cache(folder, tmp_path / "out", resume=True)
    assert (report.num_present, report.num_written, report.num_gone) == (1, 0, 0)


def test_long_suffixes_need_shorter_keys(tmp_path: Path) -> None:
    """A name of a member has at most 100 bytes, with the key in it."""
    (tmp_path / "in").mkdir()
    save_file({"x": torch.ones(2)}, tmp_path / "in" / f"{'a' * 88}.safetensors", {"model": "a"})
    report = tc.import_cache(tmp_path / "in", tmp_path / "out")
    assert report.num_hashed == 1
    assert names_in(tmp_path / "out") == ["a" * 88]
    assert tc.open(tmp_path / "out").members == {"metadata.json": 1}
    assert tc.import_cache(tmp_path / "in", tmp_path / "out", resume=True).num_present == 1
