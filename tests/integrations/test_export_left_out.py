"""An export says which samples and caches of the shards are not in it."""

from __future__ import annotations

from pathlib import Path

import torch

import wds_tensorcache as tc
from tests.cli.command import json_of, run


def test_samples_without_the_cache(tmp_path: Path) -> None:
    with tc.ShardWriter(tmp_path / "cache", max_samples=4) as sink:
        for i in range(6):
            sink.write(f"{i}", **({"tensorcache": {"x": torch.ones(1)}} if i % 2 else {}), jpg=b"\xff\xd8\xff")
    said = run("export", tmp_path / "cache", tmp_path / "out")
    assert said.stdout.splitlines()[-1] == "3 samples written"
    assert "3 samples in the shards have no such cache, and were not exported" in said.stderr


def test_other_caches(tmp_path: Path) -> None:
    with tc.ShardWriter(tmp_path / "cache") as sink:
        for i in range(3):
            sink.write(f"{i}", {"x": torch.ones(1)}, **{"text.tensorcache": {"e": torch.ones(1)}})
    said = run("export", tmp_path / "cache", tmp_path / "out", "--cache", "")
    assert "the samples also have the caches 'text', which were not exported: export them with --cache" in said.stderr
    assert "no such cache" not in said.stderr


def test_nothing_is_said_if_nothing_is_left_out(tmp_path: Path) -> None:
    with tc.ShardWriter(tmp_path / "cache") as sink:
        sink.write("a", {"x": torch.ones(1)}, jpg=b"\xff\xd8\xff")
    assert run("export", tmp_path / "cache", tmp_path / "out").stderr.strip() == ""
    found = json_of("export", tmp_path / "cache", tmp_path / "json")
    assert (found["num_without"], found["other_caches"]) == (0, [])
