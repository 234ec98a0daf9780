"""Compressed tars in a folder of a store, which has no manifest: readers leave them out and say so."""

from __future__ import annotations

from pathlib import Path

import pytest

import wds_tensorcache as tc
from tests.reading.test_packed_shards import ONE, pack, write
from tests.remote.servers.s3 import S3Server


def test_a_folder_in_a_store(tmp_path: Path, s3_server: S3Server) -> None:
    for path in write(tmp_path / "a").iterdir():
        s3_server.put("data", f"a/{path.name}", path.read_bytes())
    with pytest.warns(UserWarning, match=ONE) as found:
        cache = tc.open("s3://data/a")
    assert len(cache) == 20
    with pytest.raises(tc.FormatError, match=ONE):
        tc.export_cache(cache, tmp_path / "out", "pt")
    assert [each.filename for each in found] == [__file__]
    with pytest.warns(UserWarning, match=ONE):
        stream = tc.ResumablePipeline("s3://data/a")
    assert len(list(stream)) == 20


def test_a_folder_of_nothing_else(tmp_path: Path, s3_server: S3Server) -> None:
    folder = write(tmp_path / "a")
    for name in ("a-000000.tar", "a-000001.tar"):
        pack(folder / name)
    for path in folder.iterdir():
        s3_server.put("data", f"a/{path.name}", path.read_bytes())
    with pytest.raises(FileNotFoundError, match=r"neither manifest.json nor any \*\.tar.*; 3 other tars are left out"):
        tc.open("s3://data/a")
