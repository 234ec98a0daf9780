"""Notes of imports on what they leave out: items of one file, and files in a zip that belong to no sample."""

from __future__ import annotations

import json
from pathlib import Path

from tests.cli.command import run
from tests.importers.test_edm2 import GOOD, write_zip
from tests.importers.test_nemo import write_cache


def test_items_of_one_file(tmp_path: Path) -> None:
    """NeMo lists an image twice, with two prompts; its second file has replaced the first one."""
    write_cache(tmp_path / "in", count=2)
    listed = tmp_path / "in" / "metadata_shard_0000.json"
    items = json.loads(listed.read_text())
    listed.write_text(json.dumps([*items, {**items[0], "prompt": "another prompt"}]))
    said = run("import", tmp_path / "in", tmp_path / "out")
    assert said.stdout.splitlines()[-1] == "2 samples read, 2 written, 0 skipped"
    assert "1 items have the cache_file of an earlier item, and were not used, for example item 2 of" in said.stderr


def test_files_in_a_zip(tmp_path: Path) -> None:
    write_zip(tmp_path / "in" / "a.zip", {**GOOD, "00000/img00000000.png": b"", "notes.txt": b""})
    said = run("import", tmp_path / "in", tmp_path / "out")
    assert "2 files in a.zip were not used, for example '00000/img00000000.png', 'notes.txt'" in said.stderr
    write_zip(tmp_path / "clean" / "a.zip", GOOD)
    assert "not used" not in run("import", tmp_path / "clean", tmp_path / "clean_out").stderr
